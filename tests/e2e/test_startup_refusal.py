# SPDX-License-Identifier: Apache-2.0
"""An engine with pipeline stages refuses a connector that does not know about them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tools.pdstack.engine import EngineSpec, KVTransfer, ServedModel
from tools.pdstack.errors import ProcessDiedError, StartupTimeoutError
from tools.pdstack.layout import Layout
from tools.pdstack.stack import PDStack

pytestmark = [pytest.mark.e2e, pytest.mark.faults]

UPSTREAMS = KVTransfer(module_path="vllm.distributed.kv_transfer.kv_connector.v1.nixl")


def test_upstreams_connector_is_refused_with_pipeline_stages(
    model: ServedModel, tmp_path: Path, survivors: Callable[[], list[psutil.Process]]
) -> None:
    """Upstream's connector, chosen by its module, ends `vllm serve` at once, which says why."""
    stack = PDStack(model, tmp_path)
    with pytest.raises(ProcessDiedError) as caught, stack:
        stack.start_engines(EngineSpec("prefill", Layout(tp_size=1, pp_size=2), UPSTREAMS))
    assert not isinstance(caught.value, StartupTimeoutError)
    assert caught.value.cause.startswith("ValueError")
    assert "NixlConnector" in caught.value.cause
    assert "pp_rank" in caught.value.cause
    assert survivors() == []
