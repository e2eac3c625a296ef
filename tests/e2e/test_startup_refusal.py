# SPDX-License-Identifier: Apache-2.0
"""Engines with pipeline stages refuse what does not work with them when they start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.bases import RELEASE
from tools.pdstack.engine import EngineSpec, KVTransfer, ServedModel, Speculation
from tools.pdstack.errors import ProcessDiedError, StartupTimeoutError
from tools.pdstack.layout import Layout
from tools.pdstack.stack import PDStack

# `test_refusals` and `test_handshake_pp_aggregation` decide; real engines take minutes to refuse.
pytestmark = pytest.mark.e2e

# Since 0.32.0, upstream's refuses stages of a decode engine only. One that prefills starts, and is
# read from by nobody.
UPSTREAMS = KVTransfer(
    module_path="vllm.distributed.kv_transfer.kv_connector.v1.nixl", role="kv_consumer"
)
SAYS = ("ValueError", "pp_rank") if RELEASE == "0.22.1" else ("NotImplementedError", "pipeline_")


def test_upstreams_connector_is_refused_with_pipeline_stages(
    model: ServedModel, tmp_path: Path, survivors: Callable[[], list[psutil.Process]]
) -> None:
    """Upstream's connector, chosen by its module, ends `vllm serve` at once, which says why."""
    stack = PDStack(model, tmp_path)
    with pytest.raises(ProcessDiedError) as caught, stack:
        stack.start_engines(EngineSpec("prefill", Layout(tp_size=1, pp_size=2), UPSTREAMS))
    assert not isinstance(caught.value, StartupTimeoutError)
    error, word = SAYS
    assert caught.value.cause.startswith(error)
    assert "Nixl" in caught.value.cause
    assert word in caught.value.cause
    assert survivors() == []


def test_drafts_are_refused_with_pipeline_stages(
    model: ServedModel, tmp_path: Path, survivors: Callable[[], list[psutil.Process]]
) -> None:
    """The model runner for CPU has a drafter on one stage only: that is said, not died of."""
    stack = PDStack(model, tmp_path)
    spec = EngineSpec("prefill", Layout(tp_size=1, pp_size=2), speculation=Speculation("ngram", 2))
    with pytest.raises(ProcessDiedError) as caught, stack:
        stack.start_engines(spec)
    assert not isinstance(caught.value, StartupTimeoutError)
    assert "method ngram needs one pipeline stage" in caught.value.cause
    assert "--pipeline-parallel-size 1 instead of 2" in caught.value.cause
    assert survivors() == []
