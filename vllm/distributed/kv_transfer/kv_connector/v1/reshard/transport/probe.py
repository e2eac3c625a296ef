# SPDX-License-Identifier: Apache-2.0
"""Trying other engines' NIXL metadata in a process that may end over it.

Metadata is what UCX and others say of themselves, for themselves: a wrong byte has UCX abort the
process that loads it, or read beyond its end. A client names the host that it comes from. So, where
that has not proved a key, a process of ours loads it first, and dies of it in the worker's place.

    worker --socket--> process, with NIXL imported --fork--> children, each for some answers

A child that has survived an answer tries the next one: to make an agent takes longest by far. Where
one does not survive, what it has loaded before may be why, and another one has to tell.

It tells whether a child is still there, not whether NIXL accepts what it was given: that, the
worker's own agent says. What a host's UCX does over the wire, later, no metadata tells.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from ..errors import RemoteHandshakeError
from ..protocol.quoting import one_line
from . import probe_process
from .agent_metadata import with_room
from .probe_process import ALIVE, LENGTH_BYTES

MAX_AT_ONCE = 4
"""Children that try something; the next answers wait."""

MAX_TRIED = 32
"""Answers that a child tries: NIXL gives descriptors back with the agent alone."""

_LIMIT_S = 10.0
"""A child that has not loaded what it was given after this ends; its handshake is over."""

_ENVIRONMENT = {"UCX_HANDLE_ERRORS": "none", "OPENBLAS_NUM_THREADS": "1"}
"""UCX may stop a process that it should end, to be looked at; and what forks has one thread
alone."""

_REMEDY = "check who answers there; with side_channel_key_file on both engines, only engines do"


@dataclass(slots=True)
class _Child:
    """A process that tries metadata.

    Attributes:
        socket: Where it is asked.
        has_agent: It has said so.
        num_tried: Answers that it has survived.
    """

    socket: socket.socket
    has_agent: bool = False
    num_tried: int = 0


class MetadataProbe:
    """Tries metadata.

    It belongs to the handshake client's thread; `close` may be called by another once that has
    ended.

    It tries it with UCX: other backends' agents talk to the peer while they load it, so that
    another agent is another reader there.

    Args:
        nixl: The name of NIXL's module.
    """

    def __init__(self, nixl: str) -> None:
        self._nixl = nixl
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        # Those that try nothing: one, and more while others are at it.
        self._idle: list[_Child] = []
        self._num_trying = 0

    def begin(self) -> None:
        """Have a child ready for the next answer; waits for nothing.

        Raises:
            OSError: There are no more processes or descriptors.
        """
        if not self._idle:
            self._idle.append(_Child(self._fork()))

    async def try_all(self, metadata: Sequence[bytes]) -> list[bytes]:
        """See that loading an engine's metadata ends no process.

        Args:
            metadata: That of each of its workers.

        Returns:
            What was tried of each, and is to be loaded: see `agent_metadata`.

        Raises:
            RemoteHandshakeError: It does, or it cannot be tried.
        """
        try:
            tried = [with_room(each) for each in metadata]
        except ValueError as error:
            raise RemoteHandshakeError(
                f"its NIXL metadata is not as NIXL writes it ({one_line(error)}): {_REMEDY}"
            ) from error
        message = _with_length(b"".join(map(_with_length, tried)))
        self._num_trying += 1
        try:
            child = await self._take()
            survives = await self._try(child, message)
            if not survives and child.num_tried:
                survives = await self._try(await self._take(fresh=True), message)
        except OSError as error:
            self._end_process()
            raise RemoteHandshakeError(
                f"its NIXL metadata was not tried, as no process could be started for that "
                f"({one_line(error)}): raise this machine's limits of processes and open files, "
                "or set side_channel_key_file on both engines"
            ) from error
        finally:
            self._num_trying -= 1
            while len(self._idle) > max(self._num_trying, 1):
                self._idle.pop().socket.close()
        with suppress(OSError):
            # The next answer would find out why.
            self.begin()
        if not survives:
            raise RemoteHandshakeError(
                "NIXL ends the process that loads its metadata, hangs, or refuses most of it: "
                f"{_REMEDY}"
            )
        return tried

    def close(self) -> None:
        """End all processes that do nothing; the others end when they are through."""
        while self._idle:
            self._idle.pop().socket.close()
        self._end_process()

    def _end_process(self) -> None:
        """End what forks, if it is there."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if (process := self._process) is not None:
            self._process = None
            process.kill()
            process.wait()

    async def _try(self, child: _Child, message: bytes) -> bool:
        """Have a child load a message; it may be asked again where it has survived that."""
        loop, said = asyncio.get_running_loop(), b""
        try:
            # One that has ended has closed its socket.
            with suppress(ConnectionError):
                await loop.sock_sendall(child.socket, message)
                said = await loop.sock_recv(child.socket, 1)
        finally:
            if said == ALIVE and child.num_tried + 1 < MAX_TRIED:
                child.num_tried += 1
                self._idle.append(child)
            else:
                child.socket.close()
        return said == ALIVE

    async def _take(self, *, fresh: bool = False) -> _Child:
        """A child that has its agent, and has tried nothing if it is to be fresh.

        Raises:
            OSError: There is none.
        """
        loop = asyncio.get_running_loop()
        # The first may have ended while it was not needed; what forks, too, which the next fork
        # may not see.
        for _ in range(3):
            if fresh:
                child = _Child(self._fork())
            else:
                self.begin()
                child = self._idle.pop()
            try:
                if not child.has_agent:
                    child.has_agent = await loop.sock_recv(child.socket, 1) == ALIVE
                if child.has_agent and not _has_closed(child.socket):
                    return child
            except ConnectionError:
                pass
            except BaseException:
                child.socket.close()
                raise
            child.socket.close()
        raise OSError("it has ended, or cannot make an agent")

    def _fork(self) -> socket.socket:
        """Have a child forked; returns its socket.

        Raises:
            OSError: There are no more processes or descriptors.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                ours.setblocking(False)
                try:
                    socket.send_fds(self._running(), [b"\0"], [theirs.fileno()])
                except OSError:
                    # What forks has ended, or was stopped for long.
                    self._end_process()
                    socket.send_fds(self._running(), [b"\0"], [theirs.fileno()])
        except BaseException:
            ours.close()
            raise
        return ours

    def _running(self) -> socket.socket:
        """The socket of the process that forks, which is started where there is none.

        Raises:
            OSError: There are no more processes or descriptors.
        """
        if self._control is None:
            ours, theirs = socket.socketpair()
            options = {
                "nixl": self._nixl,
                "limit_s": _LIMIT_S,
                "socket": theirs.fileno(),
            }
            with theirs:
                try:
                    self._process = subprocess.Popen(
                        [sys.executable, probe_process.__file__, json.dumps(options)],
                        stdin=subprocess.DEVNULL,
                        pass_fds=[theirs.fileno()],
                        env={**os.environ, **_ENVIRONMENT},
                    )
                except BaseException:
                    ours.close()
                    raise
            ours.setblocking(False)
            self._control = ours
        return self._control


def _with_length(data: bytes) -> bytes:
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


def _has_closed(child: socket.socket) -> bool:
    """Whether a child that is not to say anything now has ended."""
    try:
        return not child.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
