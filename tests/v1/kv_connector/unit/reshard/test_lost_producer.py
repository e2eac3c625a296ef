# SPDX-License-Identifier: Apache-2.0
"""A reader whose peer is gone: killed in the middle of a read, or not to be connected."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
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
from tests.v1.kv_connector.unit.reshard.producer_process import (
    BLOCKS,
    Producer,
    outliving_process,
    reading_process,
    serving_producer,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine import connector_thread
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.reading import consumer
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.transfer_engine import (
    TransferEngine,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import TransferError
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.leg import Selection
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    Pack,
    RemoteEngineAddress,
    RemoteRequest,
    decode_notification,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport import transfers
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.agent import (
    NixlAgent,
    Transfer,
    TransferState,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.budget import Budget
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.connection import PeerConnection
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.parts import Part

SMALL, LARGE = 8, 16384
"""Head sizes: that a block fits into what the kernel buffers, and that it does not."""


@pytest.fixture
def producer(request) -> Iterator[Producer]:
    """A process that holds blocks."""
    with serving_producer(getattr(request, "param", SMALL)) as started:
        yield started


def send(process: BaseProcess, number: int) -> None:
    """Send a signal to a process, unless it has ended."""
    with suppress(ProcessLookupError):
        os.kill(process.pid, number)


def test_killed_producer_costs_its_request_and_is_told_once(
    engines, producer, monkeypatch, caplog_vllm
):
    """The read in flight fails, and it cannot be asked again: one line says why."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    process, address = producer.process, producer.address
    reader = engines("decode")
    progress = Progress(reader)
    reader.start(receive={"d-a": receive(address, [3, 4, 1], BLOCKS, remote_request_id="p-a")})
    progress.until(reader, received="d-a")
    (worker,) = reader.workers.values()
    assert not worker.report.take_failed()

    send(process, signal.SIGSTOP)
    reader.start(receive={"d-b": receive(address, [6, 7, 8], BLOCKS, remote_request_id="p-b")})
    for _ in range(100):
        progress.step()
    assert not any("d-b" in seen for seen in progress.received.values())
    process.kill()
    progress.until(reader, received="d-b")
    assert lost_blocks(worker) == {6, 7, 8}
    (line,) = (each.getMessage() for each in caplog_vllm.records if each.levelno > 20)
    assert line.startswith("Handshake with engine prefill at 127.0.0.1:")
    assert " failed, and with it request d-b: " in line and "nothing listens there" in line


def test_killed_producer_of_several_workers_is_no_end_of_a_reader_on_its_host():
    """UCX aborted processes that closed an agent whose endpoints of shared memory had failed."""
    with (
        serving_producer(SMALL, transports="all", pp=2, num_threads=4) as producer,
        outliving_process(producer.address, SMALL) as reader,
    ):
        producer.process.kill()
        producer.process.join()
        reader.read_again()
        assert reader.process.exitcode == 0


@pytest.mark.parametrize("way", ["cut", "restarted", "every read fails"])
def test_connection_that_died_while_it_was_idle_costs_no_request(
    engines, producer, monkeypatch, caplog_vllm, way
):
    """Nothing of the next request was read: it is read over a new connection."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    reader = engines("decode")
    progress = Progress(reader)
    (worker,) = reader.workers.values()
    whole = fill(engines("twin"), BLOCKS)
    # A read for each plane, of which a poll looks at one.
    look = transfers._look
    monkeypatch.setattr(consumer, "cut", cut_into_planes)
    monkeypatch.setattr(transfers, "_look", lambda *each: look(*each[:2], Budget(0.0)))

    def read(name: str, address: RemoteEngineAddress) -> None:
        wanted = receive(address, [3, 4, 1], BLOCKS, remote_request_id=f"p-{name}")
        reader.start(receive={f"d-{name}": wanted})
        progress.until(reader, received=f"d-{name}")
        assert not worker.report.take_failed()
        assert_received(reader, [3, 4, 1], whole)

    with ExitStack() as stack:
        read("a", producer.address)
        if way == "restarted":
            producer.process.kill()
            producer.process.join()
            again = serving_producer(SMALL, producer.address.port)
            producer = stack.enter_context(again)
        elif way == "cut":
            shut_connections(producer.process.pid)
        else:
            fail_reads(reader, monkeypatch)
        read("b", producer.address)
        producer.until_released("p-b")
    assert "d-b is read from engine prefill over a new connection: NIXL" in caplog_vllm.text


def fail_reads(reader: Engine, monkeypatch) -> None:
    """Have NIXL say of all reads over the connections there are that they have failed."""
    poll, agents = NixlAgent.poll, [each.lane.agent for each in reader.connections]

    def poll_or_fail(agent: NixlAgent, transfer: Transfer) -> TransferState:
        return TransferState.FAILED if agent in agents else poll(agent, transfer)

    monkeypatch.setattr(NixlAgent, "poll", poll_or_fail)


def cut_into_planes(leg, selections, *_) -> list[Part]:
    """A direct read of each plane of a leg."""
    return [
        Part(leg, [Selection(each.overlap, each.planes[plane : plane + 1])])
        for each in selections
        for plane in range(len(each.planes))
    ]


def shut_connections(pid: int) -> None:
    """Have the kernel end all TCP connections with another process of this host."""
    others = {each.laddr for each in psutil.Process(pid).net_connections("tcp")}
    ours = [each for each in psutil.Process().net_connections("tcp") if each.raddr in others]
    assert ours
    for each in ours:
        with socket.socket(fileno=os.dup(each.fd)) as shut:
            shut.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("is_held", [False, True])
def test_first_word_reaches_a_producer_that_stands_still(engines, producer, monkeypatch, is_held):
    """However long it does: what it is told leaves once it has answered a look."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    clock = [time.monotonic()]
    reader = engines("decode", clock=lambda: clock[0])
    (transfer_engine,) = reader.transfer_engines.values()
    connect_next = PeerConnection.connect_next

    def stop_before(connection: PeerConnection) -> bool:
        if is_held:
            send(producer.process, signal.SIGSTOP)
        return connect_next(connection)

    monkeypatch.setattr(PeerConnection, "connect_next", stop_before)
    reader.start(receive={"d-a": receive(producer.address, (), BLOCKS, remote_request_id="p-a")})
    wait_until(lambda: reader.is_connected_with(producer.address))
    if is_held:
        wait_until(lambda: transfer_engine.is_moving)
        # A second goes by, and the reader's thread has seen that.
        clock[0] += 1.0
        polls: list[float] = []
        poll = TransferEngine.poll
        monkeypatch.setattr(
            TransferEngine, "poll", lambda *step: polls.append(step[2]) or poll(*step)
        )
        wait_until(lambda: polls and polls[-1] == clock[0])
        send(producer.process, signal.SIGCONT)
    producer.until_released("p-a")


def test_release_that_cannot_be_sent_is_sent_over_the_next_connection(
    engines, producer, monkeypatch
):
    """Its blocks are not held for the rest of a lease."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    reader = engines("decode")
    notify, refused = NixlAgent.notify, []

    def refuse_once(agent: NixlAgent, name: str, message: bytes) -> None:
        if not refused:
            refused.append(name)
            raise TransferError("NIXL_ERR_REMOTE_DISCONNECT")
        notify(agent, name, message)

    monkeypatch.setattr(NixlAgent, "notify", refuse_once)
    wanted = receive(producer.address, [3, 4, 1], BLOCKS, remote_request_id="p-a")
    reader.start(receive={"d-a": wanted})
    Progress(reader).until(reader, received="d-a")
    producer.until_released("p-a")
    assert refused


@pytest.mark.parametrize("engines", ["packed"], indirect=True)
@pytest.mark.parametrize("goes_on", [True, False])
def test_producer_that_stops_while_it_packs(engines, producer, monkeypatch, goes_on):
    """What it has not packed is read direct: once it goes on, all has arrived, or else nothing."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    reader = engines("decode")
    whole = fill(engines("twin"), BLOCKS)
    progress = Progress(reader)
    (worker,) = reader.workers.values()
    (transfer_engine,) = reader.transfer_engines.values()
    told: list[bytes] = []
    notify = NixlAgent.notify

    def stop_before(agent: NixlAgent, name: str, message: bytes) -> None:
        if not told:
            send(producer.process, signal.SIGSTOP)
        told.append(message)
        notify(agent, name, message)

    monkeypatch.setattr(NixlAgent, "notify", stop_before)
    wanted = receive(producer.address, [3, 4, 1], BLOCKS, remote_request_id="p-a")
    reader.start(receive={"d-a": wanted})
    transfers = transfer_engine.transfers
    wait_until(lambda: told and not transfers._asked and transfers._posted, progress.step)
    assert isinstance(decode_notification(told[0]), Pack)
    if goes_on:
        send(producer.process, signal.SIGCONT)
        progress.until(reader, received="d-a")
        assert not worker.report.take_failed()
        assert_received(reader, [3, 4, 1], whole)
        producer.until_released("p-a")
    else:
        producer.process.kill()
        assert failures(worker, progress) == {"d-a": {3, 4, 1}}
        progress.until(reader, received="d-a")


@pytest.fixture
def hung_read(engines, producer, monkeypatch):
    """A read of 48 MiB that the producer, which has been stopped, does not answer.

    Returns its process, the engine that reads into blocks 6 to 8, how to step it, and its clock.
    """
    monkeypatch.setenv("UCX_TLS", "tcp")
    process, address = producer.process, producer.address
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
def test_no_byte_lands_in_what_was_given_away(hung_read, monkeypatch, caplog_vllm):
    """NIXL says of a read that it has failed, and its bytes are on their way.

    They would land after its handle is released and after its peer is removed. Its blocks are given
    back when the agent that posted it has ended, and not before.
    """
    process, reader, progress, clock = hung_read
    (worker,), (transfer_engine,) = reader.workers.values(), reader.transfer_engines.values()
    with monkeypatch.context() as patch:
        # Each poll looks at one of several windows.
        patch.setattr(transfer_engine, "_budget", lambda: Budget(0.0))
        patch.setattr(NixlAgent, "poll", lambda *_: TransferState.FAILED)
        wait_until(lambda: "over a new connection" in caplog_vllm.text, progress.step)
        reader.start(failed={"d-b"})
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
    assert worker.report.take_stats().data["read_failures"] == ["deadline"]
    assert not any("d-b" in seen for seen in progress.received.values())
    send(process, signal.SIGCONT)
    progress.until(reader, received="d-b")
    assert process.is_alive()
    own(reader, -1.0)
    clock[0] += 1.0
    wait_until(lambda: not transfer_engine.peers.retired, progress.step)
    assert landed(reader, -1.0) == 0


@pytest.mark.parametrize("producer", [LARGE], indirect=True)
@pytest.mark.parametrize("goes_on", [False, True])
def test_engine_that_ends_waits_for_its_reads(hung_read, monkeypatch, goes_on):
    """For a while: over TCP, the worker that is read from may end with a reader that leaves."""
    process, reader, _, _ = hung_read
    drain, close, drained, left = TransferEngine.drain, TransferEngine.close, [], []

    def note_drain(transfer_engine: TransferEngine, now_s: float) -> bool:
        drained.append(not drain(transfer_engine, now_s))
        return not drained[-1]

    def note_close(transfer_engine: TransferEngine, now_s: float) -> None:
        left.append(transfer_engine.transfers.is_lingering)
        close(transfer_engine, now_s)

    monkeypatch.setattr(TransferEngine, "drain", note_drain)
    monkeypatch.setattr(TransferEngine, "close", note_close)
    monkeypatch.setattr(connector_thread, "_DRAIN_LIMIT_S", DEADLINE_S if goes_on else 0.1)
    with ThreadPoolExecutor() as pool:
        closing = pool.submit(reader.close)
        wait_until(lambda: drained)
        if goes_on:
            send(process, signal.SIGCONT)
        closing.result(DEADLINE_S)
    assert left == [not goes_on] and drained[-1] is goes_on
    assert not goes_on or process.is_alive()


@pytest.mark.nightly
def test_no_producer_ends_with_readers_that_end(monkeypatch):
    """Twenty readers over TCP are told to end while their read hangs for a moment."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    with serving_producer(LARGE) as producer:
        for _ in range(20):
            with reading_process(producer.address, LARGE) as reader:
                send(producer.process, signal.SIGSTOP)
                reader.until_it_reads()
                reader.end()
                send(producer.process, signal.SIGCONT)
                reader.process.join(DEADLINE_S)
                assert reader.process.exitcode == 0
            assert producer.process.is_alive()
        # Whoever comes next is served.
        with reading_process(producer.address, LARGE) as reader:
            reader.until_it_has_read()


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
        if (stats := worker.report.take_stats()) is not None:
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
    assert not worker.report.take_failed()
    assert_received(reader, [3, 4, 1], whole)
    assert "ERROR" not in {each.levelname for each in caplog_vllm.records}
