# SPDX-License-Identifier: Apache-2.0
"""Connections that are relayed to a ZeroMQ socket, and what may come over them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq

from tests.v1.kv_connector.unit.reshard.transport.channels import (
    DEADLINE_S,
    HOST,
    greet,
    num_descriptors,
    open_socket,
    wait_until,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.zmtp import (
    Allowance,
    bind_privately,
    first_of,
    relay_all,
)

ALLOWANCE = Allowance(8, 1000)


@contextlib.contextmanager
def relaying(
    allowance: Allowance = ALLOWANCE, max_connections: int = 9, max_age_s: float = DEADLINE_S
) -> Iterator[tuple[zmq.Socket, int]]:
    """A ZeroMQ socket that others reach over TCP, and the port."""
    with open_socket(zmq.ROUTER) as router:
        listener = socket.create_server((HOST, 0))
        port = listener.getsockname()[1]
        loop = asyncio.new_event_loop()
        with listener, ThreadPoolExecutor(1) as pool:
            relays = relay_all(
                listener, bind_privately(router), allowance, max_connections, max_age_s
            )
            task = loop.create_task(relays)
            pool.submit(loop.run_until_complete, asyncio.wait([task]))
            try:
                yield router, port
            finally:
                loop.call_soon_threadsafe(task.cancel)
        loop.close()


def is_closed(peer: socket.socket) -> bool:
    """Whether the other end closes a connection, within the deadline."""
    peer.settimeout(DEADLINE_S)
    with contextlib.suppress(ConnectionError):
        while peer.recv(4096):
            pass
    return True


def test_messages_get_through():
    """Both ways, whole, and from several at once."""
    with (
        relaying() as (router, port),
        open_socket(zmq.REQ, port) as one,
        open_socket(zmq.REQ, port) as other,
    ):
        for peer in (one, other):
            peer.send(b"question")
            sender, *question = router.recv_multipart()
            assert question == [b"", b"question"]
            router.send_multipart([sender, b"", bytes(1 << 20), b"more"])
            assert peer.recv_multipart() == [bytes(1 << 20), b"more"]


@pytest.mark.parametrize(
    ("frame", "num_taken"),
    [(b"\x01\x00", 7), (b"\x01\xff" + bytes(255), 5), (b"\x03" + b"\xff" * 8, 0)],
    ids=["many frames", "many bytes", "no end of a frame"],
)
def test_frames_beyond_the_allowance_end_the_connection(frame, num_taken):
    """Whichever bound it is; what came before has got through, and others are served."""
    with relaying() as (router, port):
        with socket.create_connection((HOST, port)) as peer:
            greet(peer, "REQ")
            with contextlib.suppress(ConnectionError):
                # With the greeting's, as many as are allowed, and one more.
                peer.sendall(frame * num_taken)
                peer.sendall(frame)
            assert is_closed(peer)
        with open_socket(zmq.REQ, port) as other:
            other.send(b"question")
            assert router.recv_multipart()[1:] == [b"", b"question"]


def test_oldest_connection_makes_room():
    """A stranger that keeps lines open keeps nobody out."""
    with relaying(max_connections=2) as (router, port), contextlib.ExitStack() as kept:
        first, second = (
            kept.enter_context(socket.create_connection((HOST, port))) for _ in range(2)
        )
        for peer in (first, second):
            greet(peer, "REQ")
        with open_socket(zmq.REQ, port) as other:
            other.send(b"question")
            assert router.recv_multipart()[1:] == [b"", b"question"]
            assert is_closed(first)
            second.sendall(b"\x01\x00\x00\x01x")
            assert router.recv_multipart()[1:] == [b"", b"x"]


def test_connections_have_an_end():
    """Whoever never says anything is not kept for ever."""
    with relaying(max_age_s=0.1) as (_, port), socket.create_connection((HOST, port)) as peer:
        assert is_closed(peer)


def test_no_more_descriptors(monkeypatch):
    """Connections wait until there are some, and are then taken in."""
    accept, failed = socket.socket.accept, threading.Event()

    def fail_once(listener: socket.socket) -> object:
        if not failed.is_set():
            failed.set()
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", fail_once)
    with relaying() as (router, port), open_socket(zmq.REQ, port) as peer:
        peer.send(b"question")
        assert router.recv_multipart()[1:] == [b"", b"question"]
    assert failed.is_set()


def test_close_gives_all_back():
    """All descriptors, with connections in any state."""
    before = num_descriptors()
    with relaying() as (_, port), socket.create_connection((HOST, port)) as peer:
        greet(peer, "REQ")
    wait_until(lambda: num_descriptors() <= before)


def test_no_other_process_gets_between():
    """The way from the relay to ZeroMQ is closed to all but this process."""
    program = (
        "import socket, sys\n"
        "s = socket.socket(socket.AF_UNIX)\n"
        "s.connect(chr(0) + sys.argv[1])\n"
        "s.settimeout(20)\n"
        "sys.exit(len(s.recv(64)))"
    )
    with open_socket(zmq.ROUTER) as router:
        name = bind_privately(router)
        assert f"@{name}" in Path("/proc/net/unix").read_text()
        command = [sys.executable, "-c", program, name]
        assert subprocess.run(command, check=False, timeout=60).returncode == 0
        with socket.socket(socket.AF_UNIX) as ours:
            ours.settimeout(DEADLINE_S)
            ours.connect(f"\0{name}")
            assert ours.recv(1) == b"\xff"


class TestFirstOf:
    """What is done at once, of which one is enough."""

    def test_result_of_the_first(self):
        """The others have ended when it returns."""
        ended = []

        async def never() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(True)

        async def soon() -> int:
            return 7

        assert asyncio.run(first_of(never(), soon(), never())) == 7
        assert ended == [True] * 2

    def test_error_of_the_first(self):
        """It is raised as it is."""

        async def fail() -> None:
            raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            asyncio.run(first_of(asyncio.sleep(DEADLINE_S), fail()))
