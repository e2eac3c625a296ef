# SPDX-License-Identifier: Apache-2.0
"""A process that is an engine which holds two requests: a test may stop and kill it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.v1.kv_connector.unit.reshard.engine.workers import DEADLINE_S, Engine, Progress, fill
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    RemoteEngineAddress,
)

ROOT = Path(__file__).parents[5]
BLOCKS = [5, 2, 9]


@contextmanager
def serving_producer(
    head_size: int,
) -> Iterator[tuple[subprocess.Popen[str], RemoteEngineAddress]]:
    """Start a process that holds `BLOCKS` as `p-a` and as `p-b`; gives it, and where it serves."""
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, str(head_size)],
        cwd=ROOT,
        # A read of a process that has been stopped does not get on, whatever memory is shared.
        env={**os.environ, "UCX_TLS": "tcp"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        said = next(line for line in process.stdout if line.startswith("serving "))
        yield process, RemoteEngineAddress(*json.loads(said.removeprefix("serving ")))
    finally:
        process.kill()
        process.communicate()


def _serve(head_size: int) -> None:
    """Hold the requests until the process is ended."""
    engine = Engine("prefill", head_size=head_size)
    address = engine.serve()
    fill(engine, BLOCKS)
    engine.offer("p-a", "p-b", lease_s=DEADLINE_S)
    print("\nserving", json.dumps([address.engine_id, address.host, address.port]), flush=True)
    progress = Progress(engine)
    while True:
        progress.step()
        time.sleep(1e-3)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
