# SPDX-License-Identifier: Apache-2.0
"""Limits on incoming ZeroMQ messages, which ZeroMQ itself does not offer.

ZeroMQ limits the size of a frame (`maxmsgsize`), but not of a message: it buffers a message's
frames until the last one arrives. So this module owns the TCP connections, and relays each one,
frame by frame, to a ZeroMQ socket of this process:

    peer <--TCP--> relay <--Unix socket--> ZeroMQ

The relay parses only the parts of ZMTP 3 (ZeroMQ RFC 37) that are the same with and without keys:
the 64-byte greeting, and the length of each frame. ZeroMQ does handshakes, keys and messages.
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
"""Allowed difference between a frame on the wire and its payload: CURVE adds 33 bytes."""

_GREETING_BYTES = 64
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


def bind_privately(zmq_socket: zmq.Socket[Any]) -> str:
    """Bind a ZeroMQ socket to which only this process can connect.

    Returns:
        The name of its Unix socket, in Linux's abstract namespace: no file is left behind.

    Raises:
        ZMQError: No file descriptors are left.
    """
    name = f"reshard-{uuid.uuid4()}"
    zmq_socket.setsockopt(zmq.IPC_FILTER_PID, os.getpid())
    zmq_socket.bind(f"ipc://@{name}")
    return name


async def relay(peer: socket.socket, name: str, allowance: Allowance) -> NoReturn:
    """Relay between a connected TCP socket and a ZeroMQ socket until either closes.

    Args:
        peer: The TCP socket, in non-blocking mode.
        name: Name from `bind_privately` of the ZeroMQ socket.
        allowance: Limits on what the peer may send.

    Raises:
        ProtocolError: The peer does not speak ZMTP 3, or sent more than its allowance.
        OSError: One side closed, or no file descriptors are left.
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
    """Relay each incoming TCP connection to a ZeroMQ socket, until cancelled.

    Args:
        listener: The listening TCP socket.
        name: Name from `bind_privately` of the ZeroMQ socket.
        allowance: Limits on what each connection may receive.
        max_connections: Maximum open connections; a further one closes the oldest.
        max_age_s: Maximum lifetime of a connection, in seconds.
    """
    relays: dict[asyncio.Task[None], None] = {}
    listener.setblocking(False)
    try:
        while True:
            try:
                peer, _ = await asyncio.get_running_loop().sock_accept(listener)
            except OSError:
                # No file descriptors are left until a connection ends.
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
        await cancel_all(list(relays))


async def _relay_one(
    peer: socket.socket, name: str, allowance: Allowance, max_age_s: float
) -> None:
    """Relay one connection until it ends."""
    # Any such error concerns only this connection's peer.
    with peer, suppress(OSError, ProtocolError, asyncio.TimeoutError):
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.wait_for(relay(peer, name, allowance), max_age_s)


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
    source: socket.socket, target: socket.socket, allowance: Allowance
) -> NoReturn:
    """Pass on the greeting, then frames within the allowance."""
    greeting = b""
    # Each side sends the next part of its greeting only after it has seen the other's.
    while len(greeting) < _GREETING_BYTES:
        part = await _receive(source, _GREETING_BYTES - len(greeting))
        greeting += part
        # ZeroMQ also accepts older versions, which have other frames.
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
