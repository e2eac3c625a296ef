# SPDX-License-Identifier: Apache-2.0
"""A process that is an engine which holds two requests: a test may stop and kill it."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import psutil

from tests.v1.kv_connector.unit.reshard.engine.workers import DEADLINE_S, Engine, Progress, fill
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    RemoteEngineAddress,
)

BLOCKS = [5, 2, 9]
_ANSWER_S = 120.0


@contextmanager
def serving_producer(head_size: int) -> Iterator[tuple[psutil.Process, RemoteEngineAddress]]:
    """Start a process that holds `BLOCKS` as `p-a` and as `p-b`; gives it, and where it serves.

    It is forked from one that has imported all, which takes seconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    pipe, child = context.Pipe()
    process = context.Process(target=_serve, args=(child, head_size), daemon=True)
    process.start()
    child.close()
    try:
        assert pipe.poll(_ANSWER_S), "the producer does not answer"
        yield psutil.Process(process.pid), pipe.recv()
    finally:
        process.kill()
        process.join()
        pipe.close()


def _serve(pipe: Connection, head_size: int) -> None:
    """Hold the requests until the process is ended."""
    # A read of a process that has been stopped does not get on, whatever memory is shared.
    os.environ["UCX_TLS"] = "tcp"
    engine = Engine("prefill", head_size=head_size)
    address = engine.serve()
    fill(engine, BLOCKS)
    engine.offer("p-a", "p-b", lease_s=DEADLINE_S)
    pipe.send(address)
    progress = Progress(engine)
    while True:
        progress.step()
        time.sleep(1e-3)
