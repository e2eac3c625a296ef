# SPDX-License-Identifier: Apache-2.0
"""A process that is read from over TCP: a stopped one answers nothing until it goes on."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import numpy as np
import psutil

from tests.v1.kv_connector.unit.reshard.forking import ANSWER_S, forking
from tests.v1.kv_connector.unit.reshard.transport.channels import wait_until
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.agent import NixlAgent

COUNT, BYTES = 64, 1 << 20
"""Descriptors of a source, and their size: more than the kernel buffers."""


@dataclass(frozen=True)
class Source:
    """A process that is read from."""

    process: BaseProcess
    address: int
    metadata: bytes

    def stop(self) -> None:
        """All of its threads stand still."""
        self._send(signal.SIGSTOP)
        status = psutil.Process(self.process.pid).status
        wait_until(lambda: status() == psutil.STATUS_STOPPED)

    def go_on(self) -> None:
        """They go on."""
        self._send(signal.SIGCONT)

    def kill(self) -> None:
        """It ends as by a crash."""
        self.process.kill()
        self.process.join()

    def _send(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


@contextmanager
def serving_sources(backend: str, tls: str, *values: int) -> Iterator[list[Source]]:
    """Start a process for each value, which is that of all of its bytes."""
    context = forking()
    started: list[tuple[BaseProcess, Connection]] = []
    try:
        for value in values:
            pipe, child = context.Pipe()
            process = context.Process(target=_serve, args=(child, value, backend, tls), daemon=True)
            process.start()
            started.append((process, pipe))
            child.close()
        sources = []
        for process, pipe in started:
            assert pipe.poll(ANSWER_S), "the source does not answer"
            sources.append(Source(process, *pipe.recv()))
        yield sources
    finally:
        for process, pipe in started:
            process.kill()
            process.join()
            pipe.close()


def _serve(pipe: Connection, value: int, backend: str, tls: str) -> None:
    """Be a source until the process is ended."""
    os.environ["UCX_TLS"] = tls
    memory = np.full((COUNT, BYTES), value, np.uint8)
    agent = NixlAgent(
        f"source-{uuid.uuid4()}", backends=[backend], num_threads=0, progress_delay_us=100
    )
    agent.register([(memory.ctypes.data, memory.nbytes, 0)])
    pipe.send((memory.ctypes.data, agent.metadata()))
    # Nothing is said to it: it waits for its end.
    pipe.poll(None)
