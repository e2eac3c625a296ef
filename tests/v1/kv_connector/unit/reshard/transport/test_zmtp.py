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
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import zmq

from tests.v1.kv_connector.unit.reshard.programs import run_program
from tests.v1.kv_connector.unit.reshard.transport.channels import (
    DEADLINE_S,
    HOST,
    greet,
    num_descriptors,
    open_socket,
    wait_until,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport import zmtp
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.zmtp import (
    Allowance,
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
            relays = relay_all(listener, router, allowance, max_connections, max_age_s)
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


def test_oldest_connection_of_the_crowd_makes_room():
    """A stranger that keeps lines open keeps nobody out, and pays for whoever comes."""
    with relaying(max_connections=3) as (router, port), contextlib.ExitStack() as kept:
        elsewhere = kept.enter_context(
            socket.create_connection((HOST, port), source_address=("127.0.0.2", 0))
        )
        greet(elsewhere, "REQ")
        first, second = (
            kept.enter_context(socket.create_connection((HOST, port))) for _ in range(2)
        )
        for peer in (first, second):
            greet(peer, "REQ")
        with open_socket(zmq.REQ, port) as other:
            other.send(b"question")
            assert router.recv_multipart()[1:] == [b"", b"question"]
            assert is_closed(first)
            for peer in (elsewhere, second):
                peer.sendall(b"\x01\x00\x00\x01x")
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


def test_strangers_that_only_connect_are_none_of_zeromqs():
    """Whoever has not begun as an engine does costs one descriptor, and no socket of ZeroMQ's."""
    with relaying() as (router, port), contextlib.ExitStack() as kept:
        before = num_descriptors()
        for _ in range(5):
            kept.enter_context(socket.create_connection((HOST, port)))
        with open_socket(zmq.REQ, port) as other:
            other.send(b"question")
            assert router.recv_multipart()[1:] == [b"", b"question"]
        # Both ends of each are in this process.
        wait_until(lambda: num_descriptors() <= before + 2 * 5)


_WITHOUT_DESCRIPTORS = """
import asyncio, os, resource, socket, zmq
from reshard.transport.zmtp import Allowance, relay_all

def leave(number):
    highest = max(map(int, os.listdir("/proc/self/fd")))
    while (last := os.dup(0)) < highest:
        pass
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(last, highest) + 1 + number, 4096))

async def main():
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        listener = socket.create_server(("127.0.0.1", 0))
        relays = asyncio.create_task(relay_all(listener, router, Allowance(8, 1000), 64, 60.0))
        await asyncio.sleep(0)
        for number in range(6):
            resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
            # They wait to be accepted until this task does.
            peers = [socket.create_connection(listener.getsockname()) for _ in range(3)]
            for peer in peers:
                peer.sendall(bytes([255, 0, 0, 0, 0, 0, 0, 0, 1, 127, 3, 0]))
            leave(number)
            await asyncio.sleep(0.3)
        relays.cancel()
        await asyncio.wait([relays])

asyncio.run(main())
print("lives")
"""


def test_process_without_descriptors_lives():
    """However few are left: ZeroMQ would end it where it listens, and finds none to accept with."""
    ended = run_program(_WITHOUT_DESCRIPTORS)
    assert ended.stdout == "lives\n", (ended.returncode, ended.stderr)


def test_no_other_process_gets_between():
    """The way from ZeroMQ to the relay is closed to all but this process."""
    program = (
        "import socket, sys\n"
        "s = socket.socket(socket.AF_UNIX)\n"
        "s.connect(chr(0) + sys.argv[1])\n"
        "print('connected', flush=True)\n"
        "s.settimeout(20)\n"
        "sys.exit(len(s.recv(64)))"
    )
    name = f"test-{uuid.uuid4()}"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as ours:
        listener.bind(f"\0{name}")
        listener.listen()
        listener.setblocking(False)
        command = [sys.executable, "-c", program, name]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as stranger:
            assert stranger.stdout.readline() == "connected\n"
            ours.connect(f"\0{name}")
            with asyncio.run(zmtp._accept_own(listener)) as accepted:
                accepted.sendall(b"x")
            assert ours.recv(1) == b"x"
        assert stranger.returncode == 0


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
