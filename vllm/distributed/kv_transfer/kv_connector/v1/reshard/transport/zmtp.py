# SPDX-License-Identifier: Apache-2.0
"""Limits on incoming ZeroMQ messages, which ZeroMQ itself does not offer.

ZeroMQ limits the size of a frame (`maxmsgsize`), but not of a message: it buffers a message's
frames until the last one arrives. So this module owns the TCP connections, and relays each one,
frame by frame, to a ZeroMQ socket of this process:

    peer <--TCP--> relay <--Unix socket--> ZeroMQ

ZeroMQ connects to the relay, and listens nowhere: its listener on a Unix socket ends the process
where `accept` finds no file descriptor (4.3.5), and its connecter waits for one.

The relay parses only the parts of ZMTP 3 (ZeroMQ RFC 37) that are the same with and without keys:
the 64-byte greeting, and the length of each frame. ZeroMQ does handshakes, keys and messages.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import zmq

FRAME_OVERHEAD_BYTES = 64
"""Allowed difference between a frame on the wire and its payload: CURVE adds 33 bytes."""

_GREETING_BYTES = 64
_SIGNATURE_BYTES = 10
"""First part of the greeting, which each side sends without having heard of the other."""

_CREDENTIALS = struct.Struct("3i")
"""Process, user and group, of whoever has connected to a Unix socket."""

_CHUNK_BYTES = 64 << 10
_FRAMES_PER_TURN = 16
_LONG = 0x02
_ACCEPT_PAUSE_S = 0.1

_Result = TypeVar("_Result")


class ProtocolError(Exception):
    """The peer does not speak ZMTP 3, or sent more than its allowance."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """Limits on what one connection may receive.

    Attributes:
        max_frames: Number of frames, including ZeroMQ's own.
        max_bytes: Bytes in all frames.
        turns: Semaphore that a connection acquires before it receives more than `free_bytes`, and
            holds until it ends; None for no such limit.
        free_bytes: Bytes that need no turn.
    """

    max_frames: int
    max_bytes: int
    turns: asyncio.Semaphore | None = None
    free_bytes: int = 0


@asynccontextmanager
async def _joined(zmq_socket: zmq.Socket[Any]) -> AsyncIterator[socket.socket]:
    """Connect a ZeroMQ socket to a socket of this process, which no other process can get between.

    Raises:
        OSError: No file descriptors are left.
    """
    # In Linux's abstract namespace: no file is left behind.
    name = f"reshard-{uuid.uuid4()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.setblocking(False)
        listener.bind(f"\0{name}")
        listener.listen()
        # No message waits for a connection that is not made yet.
        zmq_socket.immediate = True
        zmq_socket.connect(f"ipc://@{name}")
        try:
            local = await _accept_own(listener)
            listener.close()
            with local:
                yield local
        finally:
            # Or else ZeroMQ would connect again.
            zmq_socket.disconnect(f"ipc://@{name}")


async def _accept_own(listener: socket.socket) -> socket.socket:
    """Return the first connection that is of this process."""
    while True:
        local, _ = await asyncio.get_running_loop().sock_accept(listener)
        credentials = local.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(credentials)[0] == os.getpid():
            return local
        local.close()


async def relay(
    peer: socket.socket, zmq_socket: zmq.Socket[Any], allowance: Allowance, begun: bytes = b""
) -> NoReturn:
    """Relay between a connected TCP socket and a ZeroMQ socket until either closes.

    Args:
        peer: The TCP socket, in non-blocking mode.
        zmq_socket: The ZeroMQ socket, of this thread.
        allowance: Limits on what the peer may send.
        begun: What the peer has sent already, of its greeting.

    Raises:
        ProtocolError: The peer does not speak ZMTP 3, or sent more than its allowance.
        OSError: One side closed, or no file descriptors are left.
    """
    async with _joined(zmq_socket) as local:
        await first_of(_pass_all(local, peer), _pass_frames(peer, local, allowance, begun))
    raise AssertionError


@asynccontextmanager
async def connected(
    client: zmq.Socket[Any], address: str, port: int, allowance: Allowance
) -> AsyncIterator[Coroutine[Any, Any, NoReturn]]:
    """Connect a ZeroMQ socket to one numeric address, within an allowance.

    Yields:
        The relay between both, to be run until it raises.

    Raises:
        OSError: The connection failed, or there are no more file descriptors.
    """
    infos = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    family, *_, place = infos[0]
    with socket.socket(family) as peer:
        peer.setblocking(False)
        # As ZeroMQ does, because it sends head and body separately.
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(peer, place)
        client.linger = 0
        yield relay(peer, client, allowance)


async def relay_all(
    listener: socket.socket,
    zmq_socket: zmq.Socket[Any],
    allowance: Allowance,
    max_connections: int,
    max_age_s: float,
    on_stranger: Callable[[ProtocolError], object] = lambda _: None,
    on_limit: Callable[[OSError], object] = lambda _: None,
) -> NoReturn:
    """Relay each incoming TCP connection to a ZeroMQ socket, until cancelled.

    Args:
        listener: The listening TCP socket.
        zmq_socket: The ZeroMQ socket, of this thread.
        allowance: Limits on what each connection may receive.
        max_connections: Maximum open connections. A further one closes the oldest of the address
            that has most of them.
        max_age_s: Maximum lifetime of a connection, in seconds.
        on_stranger: Called with the fault of a connection that is no engine's.
        on_limit: Called each time that no connection can be accepted, with the reason.
    """
    relays: dict[asyncio.Task[None], str] = {}

    async def relay_one(peer: socket.socket) -> None:
        # Any such error concerns only this connection's peer.
        with peer, suppress(OSError, asyncio.TimeoutError):
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                await asyncio.wait_for(_relay_engine(peer, zmq_socket, allowance), max_age_s)
            except ProtocolError as fault:
                on_stranger(fault)

    listener.setblocking(False)
    try:
        while True:
            try:
                peer, place = await asyncio.get_running_loop().sock_accept(listener)
            except OSError as error:
                # No file descriptors are left until a connection ends.
                on_limit(error)
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            if len(relays) >= max_connections:
                ((crowd, _),) = Counter(relays.values()).most_common(1)
                oldest = next(task for task, address in relays.items() if address == crowd)
                oldest.cancel()
                await asyncio.wait([oldest])
            task = asyncio.create_task(relay_one(peer))
            relays[task] = place[0]
            task.add_done_callback(relays.pop)
            # While more wait to be accepted, nothing else would be done.
            await asyncio.sleep(0)
    finally:
        await cancel_all(list(relays))


async def _relay_engine(
    peer: socket.socket, zmq_socket: zmq.Socket[Any], allowance: Allowance
) -> None:
    """Relay one connection, once what comes over it begins as an engine does.

    Until then ZeroMQ has no part in it, so that a stranger who only connects costs little.
    """
    try:
        begun = await _receive_exactly(peer, _SIGNATURE_BYTES)
    except ConnectionResetError as error:
        raise ProtocolError("it was closed before it began as ZeroMQ does") from error
    await relay(peer, zmq_socket, allowance, begun)


async def cancel_all(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Cancel tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def first_of(*work: Coroutine[Any, Any, _Result]) -> _Result:
    """Return or raise the result of the first to end, after cancelling and awaiting the others."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task.done()).result()
    finally:
        await cancel_all(tasks)


async def _pass_all(source: socket.socket, target: socket.socket) -> NoReturn:
    """Pass on all data without limits."""
    while True:
        await _send(target, await _receive(source, _CHUNK_BYTES))


async def _pass_frames(
    source: socket.socket, target: socket.socket, allowance: Allowance, begun: bytes
) -> NoReturn:
    """Pass on the greeting, of which the beginning has come, then frames within the allowance."""
    greeting = part = begun
    # Each side sends the next part of its greeting only after it has seen the other's.
    while True:
        # ZeroMQ also accepts older versions, which have other frames.
        if (
            greeting[:1] not in b"\xff"
            or greeting[9:10] not in b"\x7f"
            or b"\0" <= greeting[10:11] < b"\3"
        ):
            raise ProtocolError(f"what begins with {greeting[:16]!r} is no ZeroMQ")
        await _send(target, part)
        if len(greeting) == _GREETING_BYTES:
            break
        part = await _receive(source, _GREETING_BYTES - len(greeting))
        greeting += part
    num_frames = num_bytes = 0
    async with AsyncExitStack() as held:
        while True:
            head = await _receive_exactly(source, 2)
            if head[0] & _LONG:
                head += await _receive_exactly(source, 7)
            left_bytes = int.from_bytes(head[1:], "big")
            had_bytes = num_bytes
            num_frames, num_bytes = num_frames + 1, num_bytes + left_bytes
            max_bytes = allowance.max_bytes + num_frames * FRAME_OVERHEAD_BYTES
            if num_frames > allowance.max_frames or num_bytes > max_bytes:
                raise ProtocolError(
                    f"what comes goes on after {num_frames - 1} frames, to {num_bytes:d} bytes, "
                    f"and at most {allowance.max_frames} of {max_bytes} bytes are read"
                )
            if allowance.turns is not None and had_bytes <= allowance.free_bytes < num_bytes:
                await held.enter_async_context(allowance.turns)
            await _send(target, head)
            while left_bytes:
                part = await _receive(source, min(left_bytes, _CHUNK_BYTES))
                left_bytes -= len(part)
                await _send(target, part)
            # Receiving and sending do not yield when they can proceed at once: yield to other
            # connections here, and after each full chunk.
            if num_frames % _FRAMES_PER_TURN == 0:
                await asyncio.sleep(0)


async def _receive_exactly(source: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        data += await _receive(source, num_bytes - len(data))
    return data


async def _receive(source: socket.socket, max_bytes: int) -> bytes:
    data = await asyncio.get_running_loop().sock_recv(source, max_bytes)
    if not data:
        raise ConnectionResetError("the connection was closed")
    if len(data) == _CHUNK_BYTES:
        await asyncio.sleep(0)
    return data


async def _send(target: socket.socket, data: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(target, data)
