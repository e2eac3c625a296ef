# SPDX-License-Identifier: Apache-2.0
"""End-to-end measurements: where engines are, their client's command, and what it writes."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks import end_to_end
from benchmarks.end_to_end import (
    LINKS,
    Load,
    bench_command,
    engine_spec,
    measure_end_to_end,
    read_result,
)
from benchmarks.errors import BenchmarkError
from benchmarks.network import HERE, Site
from benchmarks.results import Metric
from benchmarks.turns import Plan
from tools.pdstack.engine import UPSTREAM_AT_REST, KVTransfer, ServedModel
from tools.pdstack.errors import NetworkError

LOAD = Load(rate=0.5, num_requests=8)
WRITTEN = {
    "completed": 8,
    "median_ttft_ms": 250.0,
    "median_itl_ms": 40.0,
    "p99_itl_ms": 90.0,
    "output_throughput": 12.5,
    "request_throughput": 0.4,
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
    assert "--max-concurrency" not in command


def test_engines_go_to_their_sites():
    """Each end of a link has its namespace and its device; on one machine, none has."""
    far = engine_spec("prefill", UPSTREAM_AT_REST, Site("198.18.51.1", "far", "tcp", "link0"))
    assert (far.host, far.namespace, far.kv_transfer) == ("198.18.51.1", "far", UPSTREAM_AT_REST)
    assert far.env == {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "link0"}
    near = engine_spec("decode", KVTransfer(), HERE)
    assert (near.host, near.namespace, near.env) == ("127.0.0.1", None, {})


def far(name: str) -> bool:
    """Whether a case has a link."""
    return "Gbit/s" in name


@pytest.mark.parametrize("num_refused", range(len(LINKS) + 1))
def test_first_link_that_can_be_had_is_measured(monkeypatch, tmp_path, num_refused):
    """Those before it are missing, with the reason; those after it are not asked for."""
    started = []

    @contextmanager
    def sites(link):
        if link in LINKS[:num_refused]:
            raise NetworkError(f"no {link}")
        yield HERE, HERE

    def measure(bench, variant, connector, link, cases):
        started.append((variant, link))
        for _, result in cases:
            result.add(variant, {Metric.TTFT_S: 1.0})

    monkeypatch.setattr(end_to_end, "sites", sites)
    monkeypatch.setattr(end_to_end, "prepare_default_model", lambda *_: None)
    monkeypatch.setattr(end_to_end, "why_no_first_tokens", lambda: "")
    monkeypatch.setattr(end_to_end._Bench, "measure", measure)
    plan = Plan([], 1, tmp_path, print)
    results = {result.case: result for result in measure_end_to_end([LOAD], 1, plan)}
    refused, used = LINKS[:num_refused], LINKS[num_refused : num_refused + 1]
    assert list(results) == [LOAD.result(link).case for link in (*refused, None, *used)]
    compared = ["ours", "upstream at rest"]
    early = ["ours, early", "ours, early, seeded"]
    everything = [*compared, *early, "upstream", "one engine"]
    for link in refused:
        result = results[LOAD.result(link).case]
        assert (result.samples, result.missing) == ({}, dict.fromkeys(compared, f"no {link}"))
    assert list(results[LOAD.name].samples) == everything
    over = [(variant, link) for link in used for variant in compared]
    assert started == [(variant, None) for variant in everything] + over
    started.clear()
    assert all("Gbit" in result.case for result in measure_end_to_end([LOAD], 1, plan, far))
    assert started == over


def test_seeded_answers_are_missing_where_vllm_has_none(monkeypatch, tmp_path):
    """With the reason, and without engines for them; all else is measured."""
    started = {}

    def measure(bench, variant, connector, link, cases):
        started[variant] = connector

    monkeypatch.setattr(end_to_end, "_links", lambda: ([None], {}))
    monkeypatch.setattr(end_to_end, "prepare_default_model", lambda *_: None)
    monkeypatch.setattr(end_to_end, "why_no_first_tokens", lambda: "it has none")
    monkeypatch.setattr(end_to_end._Bench, "measure", measure)
    (result,) = measure_end_to_end([LOAD], 1, Plan([], 1, tmp_path, print))
    assert result.missing == {"ours, early, seeded": "it has none"}
    assert "ours, early, seeded" not in started
    assert started["ours, early"].extra_config["early_dispatch"] is True
    assert "early_dispatch" not in started["ours"].extra_config


def test_result_is_in_seconds():
    """What the client writes in milliseconds is in seconds here."""
    assert read_result(WRITTEN, LOAD) == {
        Metric.TTFT_S: 0.25,
        Metric.ITL_S: 0.04,
        Metric.ITL_P99_S: 0.09,
        Metric.TOKENS_PER_S: 12.5,
        Metric.REQUESTS_PER_S: 0.4,
    }


def test_unanswered_requests_are_an_error():
    """Medians of those that were answered say nothing where others were not."""
    with pytest.raises(BenchmarkError, match="only 7 of 8"):
        read_result({**WRITTEN, "completed": 7}, LOAD)
