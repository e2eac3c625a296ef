# SPDX-License-Identifier: Apache-2.0
"""A process that is read from over TCP: a stopped one answers nothing until it goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from tests.v1.kv_connector.unit.reshard.transport.channels import wait_until
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.agent import NixlAgent

ROOT = Path(__file__).parents[6]
COUNT, BYTES = 64, 1 << 20
"""Descriptors of a source, and their size: more than the kernel buffers."""


@dataclass(frozen=True)
class Source:
    """A process that is read from."""

    process: subprocess.Popen[str]
    address: int
    metadata: bytes

    def stop(self) -> None:
        """All of its threads stand still."""
        self.process.send_signal(signal.SIGSTOP)
        status = psutil.Process(self.process.pid).status
        wait_until(lambda: status() == psutil.STATUS_STOPPED)

    def go_on(self) -> None:
        """They go on."""
        self.process.send_signal(signal.SIGCONT)


@contextmanager
def serving_sources(backend: str, *values: int) -> Iterator[list[Source]]:
    """Start a process for each value, which is that of all of its bytes."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", __name__, str(value), backend],
            cwd=ROOT,
            env=dict(os.environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for value in values
    ]
    try:
        started = []
        for process in processes:
            assert process.stdout is not None
            said = next(line for line in process.stdout if line.startswith("serving "))
            address, metadata = json.loads(said.removeprefix("serving "))
            started.append(Source(process, address, bytes.fromhex(metadata)))
        yield started
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _serve(value: int, backend: str) -> None:
    """Be a source until the process is ended."""
    memory = np.full((COUNT, BYTES), value, np.uint8)
    agent = NixlAgent(
        f"source-{uuid.uuid4()}", backends=[backend], num_threads=0, progress_delay_us=100
    )
    agent.register([(memory.ctypes.data, memory.nbytes, 0)])
    print("\nserving", json.dumps([memory.ctypes.data, agent.metadata().hex()]), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    _serve(int(sys.argv[1]), sys.argv[2])
