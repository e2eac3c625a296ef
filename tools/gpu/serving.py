# SPDX-License-Identifier: Apache-2.0
"""Where the process begins that holds prefill engines: it stands in for vLLM before all else."""

from __future__ import annotations

from multiprocessing.connection import Connection

from . import alone


def serve(pipe: Connection, device: str) -> None:
    """Be prefill engines until nobody asks."""
    alone.install()
    from .lane import hold

    hold(pipe, device)
