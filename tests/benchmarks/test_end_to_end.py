# SPDX-License-Identifier: Apache-2.0
"""The client of end-to-end measurements: its command, and what it writes."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.end_to_end import Load, bench_command, read_result
from benchmarks.errors import BenchmarkError
from benchmarks.results import Metric
from tools.pdstack.engine import ServedModel

LOAD = Load(rate=0.5, num_requests=8)
WRITTEN = {
    "completed": 8,
    "median_ttft_ms": 250.0,
    "median_itl_ms": 40.0,
    "p99_itl_ms": 90.0,
    "output_throughput": 12.5,
}


def test_command_names_server_load_and_result():
    """The client is told where, how fast and how much to ask, and where to write."""
    model = ServedModel(Path("models/tiny"), "tiny")
    command = bench_command("vllm", "http://127.0.0.1:1", model, LOAD, 7, Path("logs"), "bench-7")
    options = dict(pairwise(command))
    assert command[:3] == ["vllm", "bench", "serve"]
    assert options["--base-url"] == "http://127.0.0.1:1"
    assert options["--request-rate"] == "0.5" and options["--num-prompts"] == "8"
    assert options["--tokenizer"] == "models/tiny" and options["--model"] == "tiny"
    assert options["--seed"] == "7" and options["--result-filename"] == "bench-7.json"


def test_result_is_in_seconds():
    """What the client writes in milliseconds is in seconds here."""
    assert read_result(WRITTEN, LOAD) == {
        Metric.TTFT_S: 0.25,
        Metric.ITL_S: 0.04,
        Metric.ITL_P99_S: 0.09,
        Metric.TOKENS_PER_S: 12.5,
    }


def test_unanswered_requests_are_an_error():
    """Medians of those that were answered say nothing where others were not."""
    with pytest.raises(BenchmarkError, match="only 7 of 8"):
        read_result({**WRITTEN, "completed": 7}, LOAD)
