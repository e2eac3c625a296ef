# SPDX-License-Identifier: Apache-2.0
"""Bounds for what comes over a ZeroMQ connection, which ZeroMQ itself does not have.

ZeroMQ bounds a frame (`maxmsgsize`), not a message: it keeps the frames of one until the last has
come, and hands over none before that. So TCP connections are sockets of ours, and what comes over
one is relayed, frame by frame, to a ZeroMQ socket of this process:

    peer <--TCP--> relay <--Unix socket--> ZeroMQ

The relay reads of ZMTP 3 (ZeroMQ RFC 37) what is the same with keys and without: that a greeting of
64 bytes comes first, and how long each frame is. Handshakes, keys and messages are ZeroMQ's.
"""

from __future__ import annotations

import asyncio
import os
import socket
import uuid
from collections.abc import Collection, Coroutine
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import zmq

FRAME_OVERHEAD_BYTES = 64
"""By which a frame may be longer on the wire than what it carries: CURVE adds 33 bytes."""

_GREETING_BYTES = 64
_CHUNK_BYTES = 64 << 10
_FRAMES_PER_TURN = 16
_LONG = 0x02
_ACCEPT_PAUSE_S = 0.1

_Result = TypeVar("_Result")


class ProtocolError(Exception):
    """The peer does not speak ZMTP 3, or says more than it may."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """What may come over one connection.

    Attributes:
        max_frames: Frames, those of ZeroMQ's own among them.
        max_bytes: Bytes in all frames.
        turns: What a connection must have for more than `free_bytes`, and keeps to its end; None
            where there are none to be had.
        free_bytes: See `turns`.
    """

    max_frames: int
    max_bytes: int
    turns: asyncio.Semaphore | None = None
    free_bytes: int = 0


def bind_privately(zmq_socket: zmq.Socket[Any]) -> str:
    """Bind a ZeroMQ socket where this process alone can connect to it.

    Returns:
        The name of its Unix socket, in Linux's abstract namespace: no file is left behind.

    Raises:
        ZMQError: There are no more descriptors.
    """
    name = f"reshard-{uuid.uuid4()}"
    zmq_socket.setsockopt(zmq.IPC_FILTER_PID, os.getpid())
    zmq_socket.bind(f"ipc://@{name}")
    return name


async def relay(peer: socket.socket, name: str, allowance: Allowance) -> NoReturn:
    """Relay between a connected TCP socket and a ZeroMQ socket, until either closes.

    Args:
        peer: The TCP socket; not blocking.
        name: Where the ZeroMQ socket is bound.
        allowance: What may come from the peer.

    Raises:
        ProtocolError: The peer does not speak ZMTP 3, or says more than it may.
        OSError: A side has closed, or there are no more descriptors.
    """
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX) as local:
        local.setblocking(False)
        await loop.sock_connect(local, "\0" + name)
        await first_of(_pass_all(local, peer), _pass_frames(peer, local, allowance))
    raise AssertionError


async def relay_all(
    listener: socket.socket,
    name: str,
    allowance: Allowance,
    max_connections: int,
    max_age_s: float,
) -> NoReturn:
    """Relay all that connects over TCP to a ZeroMQ socket, until cancelled.

    Args:
        listener: The TCP socket that listens.
        name: Where the ZeroMQ socket is bound.
        allowance: What may come over each connection.
        max_connections: Connections at once; the oldest is closed for one more.
        max_age_s: How long one is kept.
    """
    relays: dict[asyncio.Task[None], None] = {}
    listener.setblocking(False)
    try:
        while True:
            try:
                peer, _ = await asyncio.get_running_loop().sock_accept(listener)
            except OSError:
                # There are no more descriptors, until a connection ends.
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            if len(relays) >= max_connections:
                oldest = next(iter(relays))
                oldest.cancel()
                await asyncio.wait([oldest])
            task = asyncio.create_task(_relay_one(peer, name, allowance, max_age_s))
            relays[task] = None
            task.add_done_callback(relays.pop)
    finally:
        await end(list(relays))


async def _relay_one(
    peer: socket.socket, name: str, allowance: Allowance, max_age_s: float
) -> None:
    """Relay one connection to its end."""
    # Whatever it is that ends one, it is its peer's.
    with peer, suppress(OSError, ProtocolError, asyncio.TimeoutError):
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.wait_for(relay(peer, name, allowance), max_age_s)


async def end(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Cancel tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def first_of(*work: Coroutine[Any, Any, _Result]) -> _Result:
    """What the first to end returns or raises; the others are cancelled, and have then ended."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task.done()).result()
    finally:
        await end(tasks)


async def _pass_all(source: socket.socket, target: socket.socket) -> NoReturn:
    """Pass on whatever comes."""
    while True:
        await _send(target, await _receive(source, _CHUNK_BYTES))


async def _pass_frames(
    source: socket.socket, target: socket.socket, allowance: Allowance
) -> NoReturn:
    """Pass on a greeting, and frames for as long as they are allowed."""
    greeting = b""
    # Each side sends the next part of its greeting only when it has seen the other's.
    while len(greeting) < _GREETING_BYTES:
        part = await _receive(source, _GREETING_BYTES - len(greeting))
        greeting += part
        # ZeroMQ would speak older versions, too, which have other frames.
        if greeting[0] != 0xFF or greeting[9:10] not in b"\x7f" or b"\0" <= greeting[10:11] < b"\3":
            raise ProtocolError(f"what begins with {greeting[:16]!r} is no ZeroMQ")
        await _send(target, part)
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
            # Neither receiving nor sending waits where it can be done at once: others have their
            # turn here, and after a chunk.
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
