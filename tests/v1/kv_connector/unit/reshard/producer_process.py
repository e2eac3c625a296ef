# SPDX-License-Identifier: Apache-2.0
"""Processes that are engines, one that holds two requests and one that reads, for tests to end."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from tests.v1.kv_connector.unit.reshard.engine.workers import (
    DEADLINE_S,
    Engine,
    Progress,
    fill,
    receive,
    wait_until,
)
from tests.v1.kv_connector.unit.reshard.forking import started
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import MeshRank
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    RemoteEngineAddress,
    RemoteRequest,
)

BLOCKS = [5, 2, 9]


@dataclass
class Producer:
    """A process that holds requests.

    Attributes:
        process: The process.
        address: Where it serves.
    """

    process: BaseProcess
    address: RemoteEngineAddress
    _pipe: Connection

    def until_released(self, request_id: str) -> None:
        """Wait until it holds a request no more."""
        while True:
            assert self._pipe.poll(DEADLINE_S), f"{request_id} is held"
            if self._pipe.recv() == request_id:
                return


@contextmanager
def serving_producer(
    head_size: int, port: int = 0, *, transports: str = "tcp", **options: int
) -> Iterator[Producer]:
    """Start a process that holds `BLOCKS` as `p-a` and as `p-b`; its engine has the options."""
    with started(_serve, head_size, port, transports, options) as (process, pipe):
        yield Producer(process, pipe.recv(), pipe)


@dataclass
class Reader:
    """A process that reads `BLOCKS`, once it is told to go on after it has connected."""

    process: BaseProcess
    _pipe: Connection

    def until_it_reads(self) -> None:
        """Have it begin, and wait until its read is under way."""
        self._pipe.send("read")
        self._expect("reading")

    def until_it_has_read(self) -> None:
        """Have it begin, and wait until it has read all."""
        self.until_it_reads()
        self._expect("read")

    def read_again(self) -> None:
        """Have it ask for another request, which fails; wait until the process has ended."""
        self._pipe.send("again")
        self._expect("failed")
        self.process.join(DEADLINE_S)

    def end(self) -> None:
        """Have it close its engine, and wait until it has begun to."""
        self._pipe.send("end")
        self._expect("ending")

    def _expect(self, said: str) -> None:
        assert self._pipe.poll(DEADLINE_S), said
        assert self._pipe.recv() == said


@contextmanager
def reading_process(source: RemoteEngineAddress, head_size: int) -> Iterator[Reader]:
    """Start a process that is connected with an engine, and may read `BLOCKS` from it."""
    with started(_read, source, head_size) as (process, pipe):
        assert pipe.recv() == "connected"
        yield Reader(process, pipe)


@contextmanager
def outliving_process(source: RemoteEngineAddress, head_size: int) -> Iterator[Reader]:
    """Start a process that has read `p-a` of an engine, which may go before it asks for `p-b`."""
    with started(_outlive, source, head_size) as (process, pipe):
        assert pipe.recv() == "read"
        yield Reader(process, pipe)


def _read(pipe: Connection, source: RemoteEngineAddress, head_size: int) -> None:
    """Read what nobody offers, so that it can be read again, and close the engine when told."""
    os.environ["UCX_TLS"] = "tcp"
    engine = Engine("decode", head_size=head_size)
    progress = Progress(engine)
    (transfer_engine,) = engine.transfer_engines.values()
    engine.start(awaited={"d": RemoteRequest(source, "none")})
    wait_until(lambda: engine.is_connected_with(source))
    pipe.send("connected")
    assert pipe.recv() == "read"
    wanted = receive(source, [3, 4, 1], BLOCKS, remote_request_id="none")
    engine.start(receive={"d": wanted})
    wait_until(lambda: transfer_engine.transfers.is_lingering)
    pipe.send("reading")
    while not pipe.poll(1e-3):
        progress.step()
        if "d" in progress.received["decode", MeshRank(0, 0)]:
            pipe.send("read")
            return
    pipe.send("ending")
    engine.close()


def _outlive(pipe: Connection, source: RemoteEngineAddress, head_size: int) -> None:
    """Read a request, and ask for another when told, which fails."""
    os.environ["UCX_TLS"] = "all"
    # Threads as workers have them. With reads that verify, none was seen to abort.
    engine = Engine("decode", head_size=head_size, num_threads=4, verify_reads=0)
    progress = Progress(engine)

    def ask(name: str) -> None:
        wanted = receive(source, [3, 4, 1], BLOCKS, remote_request_id=f"p-{name}")
        engine.start(receive={f"d-{name}": wanted})
        progress.until(engine, received=f"d-{name}")

    ask("a")
    pipe.send("read")
    assert pipe.recv() == "again"
    (transfer_engine,) = engine.transfer_engines.values()
    (lane,) = transfer_engine.peers.lanes.ready
    ask("b")
    wait_until(lambda: not lane.agent.is_open)
    pipe.send("failed")
    engine.close()


def _serve(
    pipe: Connection, head_size: int, port: int, transports: str, options: dict[str, int]
) -> None:
    """Hold the requests until the process is ended."""
    # Over TCP, a read of a process that has been stopped does not get on.
    os.environ["UCX_TLS"] = transports
    engine = Engine("prefill", head_size=head_size, **options)
    address = engine.serve(port)
    fill(engine, BLOCKS)
    engine.offer("p-a", "p-b", lease_s=2 * DEADLINE_S)
    pipe.send(address)
    while True:
        for worker in engine.workers.values():
            for request_id in worker.collect().take_finished()[0]:
                pipe.send(request_id)
        time.sleep(1e-3)
