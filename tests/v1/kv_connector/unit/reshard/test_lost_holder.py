# SPDX-License-Identifier: Apache-2.0
"""A reader whose peer is gone: killed in the middle of a read, or not to be connected."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.v1.kv_connector.unit.reshard.engine.test_worker import (
    DEADLINE_S,
    Engine,
    Progress,
    assert_received,
    engines,
    fill,
    lost_blocks,
    receive,
    wait_until,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    Heartbeats,
    RemoteEngineAddress,
)

__all__ = ["engines"]

ROOT = Path(__file__).parents[5]
BLOCKS = [5, 2, 9]
HOLDS = f"""
from tests.v1.kv_connector.unit.reshard import test_lost_holder
test_lost_holder.hold({BLOCKS})
"""


def hold(block_ids: list[int]) -> None:
    """Be an engine that holds two requests until somebody ends it."""
    engine = Engine("prefill")
    address = engine.serve()
    fill(engine, block_ids)
    engine.offer("p-a", "p-b", lease_s=DEADLINE_S)
    print("\nserving", json.dumps([address.engine_id, address.host, address.port]), flush=True)
    progress = Progress(engine)
    while True:
        progress.step()
        time.sleep(1e-3)


@pytest.fixture
def holder() -> Iterator[tuple[subprocess.Popen[str], RemoteEngineAddress]]:
    """Start a process that holds blocks; returns it, and where it serves."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS],
        cwd=ROOT,
        # A read of a process that has been stopped does not get on, whatever memory is shared.
        env={**os.environ, "UCX_TLS": "tcp"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    said = next(line for line in process.stdout if line.startswith("serving "))
    yield process, RemoteEngineAddress(*json.loads(said.removeprefix("serving ")))
    process.kill()
    process.communicate()


def test_killed_holder_costs_its_request_and_is_told_once(
    engines, holder, monkeypatch, caplog_vllm
):
    """The read in flight fails, and one line gives the remedy."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    process, address = holder
    reader = engines("decode")
    progress = Progress(reader)
    reader.start(receive={"d-a": receive(address, [3, 4, 1], BLOCKS, remote_request_id="p-a")})
    progress.until(reader, received="d-a")
    (worker,) = reader.workers.values()
    assert not worker.take_failed()

    process.send_signal(signal.SIGSTOP)
    reader.start(receive={"d-b": receive(address, [6, 7, 8], BLOCKS, remote_request_id="p-b")})
    for _ in range(100):
        progress.step()
    assert not any("d-b" in seen for seen in progress.received.values())
    process.kill()
    progress.until(reader, received="d-b")
    assert lost_blocks(worker) == {6, 7, 8}
    (line,) = (each.getMessage() for each in caplog_vllm.records if each.levelno > 20)
    assert line.startswith("KV cache of request d-b could not be read from engine prefill: NIXL ")
    assert line.endswith(
        ": check that the engine runs and can be reached, and send the request through prefill "
        "again"
    )


def test_heartbeats_that_try_again_in_vain_are_no_errors(engines, caplog_vllm):
    """They are of requests that have just failed, which the first line has told."""
    holder, reader = engines("prefill"), engines("decode")
    gone = dataclasses.replace(holder.serve(), engine_id="gone")
    (worker,) = reader.workers.values()
    reader.start(receive={"d-a": receive(gone, [3], [5], tokens=16)})
    progress = Progress(reader)
    progress.until(reader, received="d-a")
    reader.start(heartbeats=[Heartbeats(gone, frozenset({"p-a"}))])
    failures, deadline = 0, time.monotonic() + DEADLINE_S
    while failures < 2:
        assert time.monotonic() < deadline
        progress.step()
        if (stats := worker.take_stats()) is not None:
            failures += len(stats.data["handshake_failures"])
    (line,) = (each.getMessage() for each in caplog_vllm.records if each.levelname == "ERROR")
    assert line.startswith("Handshake with engine gone")


def test_handshake_that_failed_while_nobody_waited_costs_nobody(engines, caplog_vllm):
    """A request that comes long after it, to an engine that has returned, is received."""
    other, holder, reader = engines("other"), engines("prefill"), engines("decode")
    port = other.serve().port
    address = RemoteEngineAddress("prefill", "127.0.0.1", port)
    (worker,) = reader.workers.values()
    reader.start(heartbeats=[Heartbeats(address, frozenset({"p-a"}))])
    wait_until(
        lambda: worker._exchange._stats.data["handshake_failures"] or worker._thread._reports
    )
    # No step was taken since, and meanwhile the right one is there.
    other.server.close()
    holder.serve(port)
    whole = fill(holder, BLOCKS)
    holder.offer("p-a")
    reader.start(receive={"d-a": receive(address, [3, 4, 1], BLOCKS)})
    Progress(holder, reader).until(reader, received="d-a")
    assert not worker.take_failed()
    assert_received(reader, [3, 4, 1], whole)
    assert "ERROR" not in {each.levelname for each in caplog_vllm.records}
