# SPDX-License-Identifier: Apache-2.0
"""A process that is an engine which holds two requests: a test may stop and kill it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from tests.v1.kv_connector.unit.reshard.engine.workers import DEADLINE_S, Engine, Progress, fill
from tests.v1.kv_connector.unit.reshard.forking import ANSWER_S, forking
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    RemoteEngineAddress,
)

BLOCKS = [5, 2, 9]


@contextmanager
def serving_producer(head_size: int) -> Iterator[tuple[BaseProcess, RemoteEngineAddress]]:
    """Start a process that holds `BLOCKS` as `p-a` and as `p-b`; gives it, and where it serves."""
    context = forking()
    ours, theirs = context.Pipe()
    # It has a process of its own, too.
    process = context.Process(target=_serve, args=(theirs, head_size))
    process.start()
    theirs.close()
    try:
        assert ours.poll(ANSWER_S), "the producer does not answer"
        yield process, ours.recv()
    finally:
        process.kill()
        process.join()
        ours.close()


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
