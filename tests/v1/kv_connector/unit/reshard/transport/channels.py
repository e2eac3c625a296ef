# SPDX-License-Identifier: Apache-2.0
"""Side channels on this machine: engines that answer, some that do not, and those who ask."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import zmq

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.compat import REQUEST_NUMBERS
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.cache import (
    LayerCache,
    Plane,
    RankCache,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import (
    Holding,
    MeshRank,
    Shard,
    UnitInterval,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.bounds import ReplyBounds
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.compatibility import SPOKEN
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.description import (
    WorkerDescription,
    encode_worker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.leases import LeaseTableAddress
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    RemoteEngineAddress,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.metadata import (
    WorkerHandshake,
    encode_reply,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.authentication import ChannelKey
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.handshake_client import (
    HandshakeClient,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.side_channel import (
    HandshakeServer,
)

HOST = "127.0.0.1"
FACTORS = {"dtype": "bfloat16"}
DEADLINE_S = 20
SHORT_S = 0.3


def describe(tp_rank: int, engine_id: str) -> WorkerDescription:
    """A worker with one layer."""
    plane = Plane(4096, 1024, 1024, 64, 64, 1, 16)
    return WorkerDescription(
        engine_id,
        Shard(MeshRank(0, tp_rank), {"a": Holding(UnitInterval(tp_rank, tp_rank + 1), 4)}),
        RankCache(8, 0, {"a": LayerCache((plane, plane), 0)}),
        LeaseTableAddress(1 << 20, 4),
        b"agent",
    )


WORKERS = tuple(describe(tp_rank, "engine") for tp_rank in range(2))
BOUNDS = ReplyBounds.of([worker.shard for worker in WORKERS])


def reply_of(*workers: WorkerDescription) -> list[bytes]:
    """What an engine with these workers answers."""
    return encode_reply(
        {
            (0, worker.shard.rank.tp_rank): WorkerHandshake(FACTORS, encode_worker(worker))
            for worker in workers
        }
    )


REPLY = reply_of(*WORKERS)
REPLIES = dict.fromkeys(range(SPOKEN.oldest, SPOKEN.newest + 1), REPLY)


@contextlib.contextmanager
def serving(
    reply: Sequence[bytes] = REPLY, port: int = 0, key: ChannelKey | None = None
) -> Iterator[HandshakeServer]:
    """A started server."""
    server = HandshakeServer(HOST, port, dict.fromkeys(REPLIES, reply), key)
    server.start()
    try:
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def open_socket(kind: int, port: int | None = None) -> Iterator[zmq.Socket]:
    """A bare ZeroMQ socket, connected to a port or not, that never blocks for long."""
    context = zmq.Context()
    try:
        bare = context.socket(kind)
        bare.rcvtimeo = bare.sndtimeo = DEADLINE_S * 1000
        if port is not None:
            bare.connect(f"tcp://{HOST}:{port}")
        yield bare
    finally:
        context.destroy(linger=0)


@contextlib.contextmanager
def listening() -> Iterator[tuple[socket.socket, int]]:
    """A TCP socket that listens and never accepts, and its port."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen(1024)
        yield listener, listener.getsockname()[1]


def free_port() -> int:
    """A port that nobody listens at."""
    with listening() as (_, port):
        return port


def greet(peer: socket.socket, kind: str) -> None:
    """Begin to speak ZMTP 3, as a ZeroMQ socket of a kind, without a key."""
    peer.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
    peer.recv(64, socket.MSG_WAITALL)
    values = {b"Socket-Type": kind.encode(), b"Identity": b""}
    ready = b"\x05READY" + b"".join(
        bytes([len(name)]) + name + struct.pack(">I", len(value)) + value
        for name, value in values.items()
    )
    peer.sendall(b"\x04" + bytes([len(ready)]) + ready)


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def num_descriptors() -> int:
    """Open descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def wait_until(condition: Callable[[], object]) -> None:
    """Poll until a condition holds; fail after a deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        threading.Event().wait(0.005)


def thread_named(name: str) -> threading.Thread:
    """The one thread of this process that has a name."""
    (thread,) = (each for each in threading.enumerate() if each.name == name)
    return thread


@contextlib.contextmanager
def asking(bounds: ReplyBounds = BOUNDS, **options: Any) -> Iterator[HandshakeClient]:
    """A client that is closed in the end."""
    options = {"numbers": REQUEST_NUMBERS, "timeout_s": DEADLINE_S} | options
    client = HandshakeClient(bounds, **options)
    try:
        yield client
    finally:
        client.close()


def engine_at(port: int, host: str = HOST, engine_id: str = "engine") -> RemoteEngineAddress:
    """Where an engine should answer."""
    return RemoteEngineAddress(engine_id, host, port)


def fetch(
    port: int,
    *,
    host: str = HOST,
    engine_id: str = "engine",
    factors: Mapping[str, str] | None = FACTORS,
    bounds: ReplyBounds = BOUNDS,
    **options: Any,
) -> tuple[WorkerDescription, ...]:
    """Ask one engine, and wait for it."""
    with asking(bounds, **options) as client:
        return client.request(engine_at(port, host, engine_id), factors).result(3 * DEADLINE_S)


def ask(port: int, frame: bytes) -> list[bytes]:
    """Send a frame as a request, and return the answer."""
    with open_socket(zmq.REQ, port) as bare:
        bare.send(frame)
        return bare.recv_multipart()


class ScriptedResolver:
    """Stands for this machine's resolver.

    Knows some names at once, and says of the others that it knows nothing when it is told to.
    """

    def __init__(self) -> None:
        self.known = {"engine.example": (HOST,)}
        self.answers = threading.Event()
        self.asked: list[str] = []

    def addresses_of(self, name: str) -> tuple[str, ...]:
        """As the function that it stands for."""
        self.asked.append(name)
        if name not in self.known:
            self.answers.wait()
            raise OSError(f"{name} is unknown")
        return self.known[name]


class Selector(selectors.DefaultSelector):
    """What an event loop waits with.

    Attributes:
        faults: What its next calls raise, one each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.faults: Iterator[OSError] = iter(())

    def select(self, timeout: float | None = None) -> Any:
        """Wait, or fail."""
        for fault in self.faults:
            raise fault
        return super().select(timeout)


class Loops:
    """Makes event loops in place of `asyncio`.

    Attributes:
        made: All of them, each with what it waits with, the oldest first.
    """

    def __init__(self) -> None:
        self.made: list[tuple[asyncio.AbstractEventLoop, Selector]] = []

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        """As the function that it stands for."""
        selector = Selector()
        loop = asyncio.SelectorEventLoop(selector)
        self.made.append((loop, selector))
        return loop


def no_more_threads(_: threading.Thread) -> None:
    """Instead of starting one."""
    raise RuntimeError("can't start new thread")
