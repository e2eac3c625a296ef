# SPDX-License-Identifier: Apache-2.0
"""A reader whose peer is gone: killed in the middle of a read, or not to be connected."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.process import BaseProcess

import psutil
import pytest

from tests.v1.kv_connector.unit.reshard.engine.workers import (
    DEADLINE_S,
    Engine,
    Progress,
    assert_received,
    failures,
    fill,
    lost_blocks,
    receive,
    wait_until,
)
from tests.v1.kv_connector.unit.reshard.producer_process import BLOCKS, serving_producer
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    RemoteEngineAddress,
    RemoteRequest,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.agent import (
    NixlAgent,
    TransferState,
)

SMALL, LARGE = 8, 16384
"""Head sizes: that a block fits into what the kernel buffers, and that it does not."""


@pytest.fixture
def producer(request) -> Iterator[tuple[BaseProcess, RemoteEngineAddress]]:
    """A process that holds blocks, and where it serves."""
    with serving_producer(getattr(request, "param", SMALL)) as started:
        yield started


def send(process: BaseProcess, number: int) -> None:
    """Send a signal to a process, unless it has ended."""
    with suppress(ProcessLookupError):
        os.kill(process.pid, number)


def test_killed_producer_costs_its_request_and_is_told_once(
    engines, producer, monkeypatch, caplog_vllm
):
    """The read in flight fails, and one line gives the remedy."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    process, address = producer
    reader = engines("decode")
    progress = Progress(reader)
    reader.start(receive={"d-a": receive(address, [3, 4, 1], BLOCKS, remote_request_id="p-a")})
    progress.until(reader, received="d-a")
    (worker,) = reader.workers.values()
    assert not worker.take_failed()

    send(process, signal.SIGSTOP)
    reader.start(receive={"d-b": receive(address, [6, 7, 8], BLOCKS, remote_request_id="p-b")})
    for _ in range(100):
        progress.step()
    assert not any("d-b" in seen for seen in progress.received.values())
    process.kill()
    progress.until(reader, received="d-b")
    assert lost_blocks(worker) == {6, 7, 8}
    (line,) = (each.getMessage() for each in caplog_vllm.records if each.levelno > 20)
    start = "KV cache of request d-b could not be read from engine prefill (being read for "
    assert line.startswith(start) and " s): NIXL " in line
    assert line.endswith(
        ": check that the engine runs and can be reached, and send the request through prefill "
        "again"
    )


@pytest.fixture
def hung_read(engines, producer, monkeypatch):
    """A read of 48 MiB that the producer, which has been stopped, does not answer.

    Returns its process, the engine that reads into blocks 6 to 8, how to step it, and its clock.
    """
    monkeypatch.setenv("UCX_TLS", "tcp")
    process, address = producer
    clock = [time.monotonic()]
    reader = engines("decode", head_size=LARGE, kv_read_timeout_s=60, clock=lambda: clock[0])
    progress = Progress(reader)
    reader.start(receive={"d-a": receive(address, [3, 4, 1], BLOCKS, remote_request_id="p-a")})
    progress.until(reader, received="d-a")
    send(process, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
    reader.start(receive={"d-b": receive(address, [6, 7, 8], BLOCKS, remote_request_id="p-b")})
    (transfer_engine,) = reader.transfer_engines.values()
    wait_until(lambda: len(transfer_engine.transfers), progress.step)
    yield process, reader, progress, clock
    send(process, signal.SIGCONT)


def landed(reader: Engine, owner: float) -> int:
    """How many values in blocks 6 to 8 are not their owner's any more."""
    (caches,) = reader.caches.values()
    return sum(int((cache[:, [6, 7, 8]] != owner).sum()) for cache in caches.values())


def own(reader: Engine, owner: float) -> None:
    """Let somebody write into blocks 6 to 8."""
    (caches,) = reader.caches.values()
    for cache in caches.values():
        cache[:, [6, 7, 8]] = owner


@pytest.mark.parametrize("producer", [LARGE], indirect=True)
@pytest.mark.parametrize("engines", ["direct", "staged"], indirect=True)
def test_no_byte_lands_in_what_was_given_away(hung_read, monkeypatch):
    """NIXL says of a read that it has failed, and its bytes are on their way.

    They would land after its handle is released and after its peer is removed. Its blocks are given
    back when the agent that posted it has ended, and not before.
    """
    process, reader, progress, clock = hung_read
    (worker,), (transfer_engine,) = reader.workers.values(), reader.transfer_engines.values()
    with monkeypatch.context() as patch:
        patch.setattr(NixlAgent, "poll", lambda *_: TransferState.FAILED)
        # Of several windows, a poll may look at one.
        assert failures(worker, progress) == {"d-b": frozenset({6, 7, 8})}
        wait_until(lambda: not transfer_engine.transfers.is_lingering, progress.step)
    # What its producer was told has left by then.
    clock[0] += 1.0
    progress.until(reader, received="d-b")
    area = transfer_engine.transfers.area
    assert area is None or area.spans.free_bytes == area.spans.size_bytes
    assert not transfer_engine.peers.retired
    own(reader, -1.0)
    send(process, signal.SIGCONT)
    # It answers what it was asked, or ends over a reader that is gone.
    settled_at_s = time.monotonic() + 3.0
    wait_until(lambda: time.monotonic() > settled_at_s, progress.step)
    assert landed(reader, -1.0) == 0


@pytest.mark.parametrize("producer", [LARGE], indirect=True)
def test_hung_producer_fails_its_request_and_gives_its_blocks_back_when_it_goes_on(hung_read):
    """Nobody waits longer than the deadline, and no block is missing after that."""
    process, reader, progress, clock = hung_read
    (worker,), (transfer_engine,) = reader.workers.values(), reader.transfer_engines.values()
    clock[0] += 60.0
    assert failures(worker, progress) == {"d-b": frozenset({6, 7, 8})}
    assert worker.take_stats().data["read_failures"] == ["deadline"]
    assert not any("d-b" in seen for seen in progress.received.values())
    send(process, signal.SIGCONT)
    progress.until(reader, received="d-b")
    assert process.is_alive()
    own(reader, -1.0)
    clock[0] += 1.0
    wait_until(lambda: not transfer_engine.peers.retired, progress.step)
    assert landed(reader, -1.0) == 0


def test_heartbeats_that_try_again_in_vain_are_no_errors(engines, caplog_vllm):
    """They are of requests that have just failed, which the first line has told."""
    producer, reader = engines("prefill"), engines("decode")
    gone = dataclasses.replace(producer.serve(), engine_id="gone")
    (worker,) = reader.workers.values()
    reader.start(receive={"d-a": receive(gone, [3], [5], tokens=16)})
    progress = Progress(reader)
    progress.until(reader, received="d-a")
    reader.start(awaited={"d-b": RemoteRequest(gone, "p-a")})
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
    other, producer, reader = engines("other"), engines("prefill"), engines("decode")
    port = other.serve().port
    address = RemoteEngineAddress("prefill", "127.0.0.1", port)
    (worker,) = reader.workers.values()
    reader.start(awaited={"d-b": RemoteRequest(address, "p-a")})
    wait_until(lambda: "Handshake with engine prefill" in caplog_vllm.text)
    # No step was taken since, and meanwhile the right one is there.
    other.server.close()
    producer.serve(port)
    whole = fill(producer, BLOCKS)
    producer.offer("p-a")
    reader.start(receive={"d-a": receive(address, [3, 4, 1], BLOCKS)})
    Progress(producer, reader).until(reader, received="d-a")
    assert not worker.take_failed()
    assert_received(reader, [3, 4, 1], whole)
    assert "ERROR" not in {each.levelname for each in caplog_vllm.records}
