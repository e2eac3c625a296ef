# SPDX-License-Identifier: Apache-2.0
"""Command line of vLLM's router in front of prefill and decode engines."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .ports import HOST

_TRACED = Path(__file__).with_name("traced_router.py")


@dataclass(frozen=True)
class RouterSpec:
    """One ``vllm-router``.

    Attributes:
        name: how it is called in messages and for its log.
        port: where it serves; ``None`` for a free one.
        policy: how it spreads requests over several engines.
        extra_args: appended to the command line.
        traces_endpoint: where it sends its traces; ``None`` for nowhere.
    """

    name: str = "router"
    port: int | None = None
    policy: str = "round_robin"
    extra_args: Sequence[str] = ()
    traces_endpoint: str | None = None


def router_command(
    spec: RouterSpec,
    script: str,
    *,
    port: int,
    metrics_port: int,
    prefill_urls: Sequence[str],
    decode_urls: Sequence[str],
) -> list[str]:
    """Return the command that starts the router.

    Args:
        script: path of the ``vllm-router`` script.
        port: where it serves HTTP.
        metrics_port: where it serves its own metrics.
        prefill_urls: base URLs of the prefill engines, without a path.
        decode_urls: base URLs of the decode engines, without a path.
    """
    command = [script]
    if spec.traces_endpoint is not None:
        command = [sys.executable, str(_TRACED), spec.traces_endpoint]
    command += ["--host", HOST, "--port", str(port)]
    command += ["--prometheus-host", HOST, "--prometheus-port", str(metrics_port)]
    command += ["--vllm-pd-disaggregation", "--kv-connector", "nixl", "--policy", spec.policy]
    # A second try would hide that the first one failed.
    command += ["--disable-retries"]
    for url in prefill_urls:
        command += ["--prefill", url]
    for url in decode_urls:
        command += ["--decode", url]
    return [*command, *spec.extra_args]
