# SPDX-License-Identifier: Apache-2.0
"""The router's command line."""

from __future__ import annotations

import itertools

from tools.pdstack.router import RouterSpec, router_command


def test_the_router_knows_all_engines() -> None:
    """Every engine is named once, in order, and extra arguments come last."""
    command = router_command(
        RouterSpec(policy="random", extra_args=("--log-level", "debug")),
        "/bin/vllm-router",
        port=1,
        metrics_port=2,
        prefill_urls=["http://p1", "http://p2"],
        decode_urls=["http://d1"],
    )
    assert command[0] == "/bin/vllm-router"
    pairs = list(itertools.pairwise(command))
    assert [value for option, value in pairs if option == "--prefill"] == ["http://p1", "http://p2"]
    assert [value for option, value in pairs if option == "--decode"] == ["http://d1"]
    assert ("--port", "1") in pairs
    assert ("--prometheus-port", "2") in pairs
    assert ("--policy", "random") in pairs
    assert ("--host", "127.0.0.1") in pairs
    assert command[-2:] == ["--log-level", "debug"]
