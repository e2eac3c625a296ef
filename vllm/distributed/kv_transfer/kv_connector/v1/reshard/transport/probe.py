# SPDX-License-Identifier: Apache-2.0
"""Loads other engines' NIXL metadata in a separate process first, which may crash instead.

UCX and other backends write metadata for themselves and do not validate it: a wrong byte makes UCX
abort the process that loads it, or read beyond the end of the data. A client names the host that
the metadata comes from. So unless that host has proved a key, a child process loads the metadata
before the worker does.

    worker --socket--> process, with NIXL imported --fork--> children, each for some answers

A child that has survived an answer tries the next one, because making an agent takes by far the
longest. If a child does not survive, an earlier answer may be the cause, so a fresh child repeats
the trial.

A trial shows whether the child survives, not whether NIXL accepts the metadata: the worker's own
agent decides that. It does not protect from what a host's UCX later does over the wire.
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

from ..errors import RemoteHandshakeError, one_line
from . import probe_process
from .agent_metadata import with_room
from .probe_process import ALIVE, LENGTH_BYTES

MAX_AT_ONCE = 4
"""Maximum children that try answers at once; further answers wait."""

MAX_TRIED = 32
"""Answers per child: NIXL frees file descriptors only together with the agent."""

#: limit trial: the process that loads an answer's NIXL metadata ends, and the handshake fails.
_LIMIT_S = 10.0

_ENVIRONMENT = {"UCX_HANDLE_ERRORS": "none", "OPENBLAS_NUM_THREADS": "1"}
"""UCX must abort on an error, and not stop the process for a debugger; and a process that forks
must have a single thread."""

_REMEDY = "check who answers there; with side_channel_key_file on both engines, only engines do"


@dataclass(slots=True)
class _Child:
    """A process that tries metadata.

    Attributes:
        socket: The worker's end of its socket.
        has_agent: True once it has reported that its agent is made.
        num_tried: Number of answers that it has survived.
    """

    socket: socket.socket
    has_agent: bool = False
    num_tried: int = 0


class MetadataProbe:
    """Tries metadata in child processes.

    Belongs to the handshake client's thread; another thread may call `close` once that has ended.

    It tries UCX only: agents of other backends contact the peer while they load its metadata, so
    a trial would count there as another reader.

    Args:
        nixl: Name of NIXL's module.
    """

    def __init__(self, nixl: str) -> None:
        self._nixl = nixl
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        # Children that are free: one spare, and more while other children are busy.
        self._idle: list[_Child] = []
        self._num_trying = 0

    def begin(self) -> None:
        """Start a child for the next answer unless one is free; does not block.

        Raises:
            OSError: No process or file descriptor is left.
        """
        if not self._idle:
            self._idle.append(_Child(self._fork()))

    async def try_all(self, metadata: Sequence[bytes]) -> list[bytes]:
        """Check that a process survives loading an engine's metadata.

        Args:
            metadata: The metadata of each of the engine's workers.

        Returns:
            The metadata as they were tried and are to be loaded, padded by
            `agent_metadata.with_room`.

        Raises:
            RemoteHandshakeError: A process did not survive, or the metadata could not be tried.
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
            # If this fails, the next answer reports it.
            self.begin()
        if not survives:
            raise RemoteHandshakeError(
                "NIXL ends the process that loads its metadata, hangs, or refuses most of it: "
                f"{_REMEDY}"
            )
        return tried

    def close(self) -> None:
        """End the forking process and the free children; busy children end with their answer."""
        while self._idle:
            self._idle.pop().socket.close()
        self._end_process()

    def _end_process(self) -> None:
        """End the forking process, if it runs."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if (process := self._process) is not None:
            self._process = None
            process.kill()
            process.wait()

    async def _try(self, child: _Child, message: bytes) -> bool:
        """Have a child load a message; return True, and keep the child, if it survives."""
        loop, said = asyncio.get_running_loop(), b""
        try:
            # The socket of a child that has ended is closed.
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
        """Return a child with an agent; if `fresh`, one that has tried nothing yet.

        Raises:
            OSError: None could be made.
        """
        loop = asyncio.get_running_loop()
        # A free child may have ended meanwhile; so may the forking process, which the next fork
        # need not notice.
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
        """Have a child forked; return the socket to it.

        Raises:
            OSError: No process or file descriptor is left.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                ours.setblocking(False)
                try:
                    socket.send_fds(self._running(), [b"\0"], [theirs.fileno()])
                except OSError:
                    # The forking process has ended, or was stopped for long.
                    self._end_process()
                    socket.send_fds(self._running(), [b"\0"], [theirs.fileno()])
        except BaseException:
            ours.close()
            raise
        return ours

    def _running(self) -> socket.socket:
        """Return the socket to the forking process, starting it unless it runs.

        Raises:
            OSError: No process or file descriptor is left.
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
    """Return whether a child has ended; it must not have anything to send now."""
    try:
        return not child.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
