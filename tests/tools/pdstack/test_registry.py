# SPDX-License-Identifier: Apache-2.0
"""The real router hears of engines, and hears no more of them."""

from __future__ import annotations

from pathlib import Path

import httpx

from tests.tools.pdstack.fake_engines import FakeEngine, fake_engine
from tests.tools.pdstack.helpers import wait_until
from tools.pdstack.engine import Device, ServedModel
from tools.pdstack.ports import PortAllocator
from tools.pdstack.registry import FORGOTTEN_AFTER_S, Registry, Role
from tools.pdstack.router import RouterSpec
from tools.pdstack.stack import PDStack


def _ask(url: str) -> bool:
    body = {"model": "m", "prompt": "a", "max_tokens": 4}
    return httpx.post(f"{url}/v1/completions", json=body, trust_env=False).is_success


def test_the_router_sends_requests_to_those_that_are_admitted(
    model: ServedModel, run_dir: Path
) -> None:
    """From the moment on at which they are, and for a few seconds at most after they are not."""
    with (
        fake_engine() as prefill,
        fake_engine() as first,
        fake_engine() as second,
        Registry(PortAllocator().take()) as registry,
        PDStack(model, run_dir, device=Device.CPU) as stack,
    ):
        registry.admit(prefill.url, Role.PREFILL)
        registry.admit(first.url, Role.DECODE)
        spec = RouterSpec(extra_args=registry.router_args)
        url = stack.start_router([], [], spec).url

        def reaches(engine: FakeEngine) -> bool:
            before = len(engine.received)
            assert _ask(url) and _ask(url)
            return len(engine.received) > before

        assert reaches(prefill) and reaches(first)
        assert first.received[-1]["kv_transfer_params"]["remote_port"] == 1
        registry.admit(second.url, Role.DECODE)
        wait_until(lambda: reaches(second), "a request to the one that was admitted")
        registry.take_out(first.url)
        wait_until(lambda: not reaches(first), "no request to the other", FORGOTTEN_AFTER_S)
        before = len(first.received)
        # All of that: none of them has failed.
        assert reaches(second) and len(first.received) == before
