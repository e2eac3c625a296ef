# SPDX-License-Identifier: Apache-2.0
"""Tells vLLM's router which engines there are, from one moment to the next.

A router that is started with engines on its command line keeps to them: vllm-router 0.1.17 removes
one on request, but adds none. With ``--vllm-discovery-address`` it knows those that say that they
are there, and forgets one that has not for five seconds. Here somebody else says so for them.
"""

from __future__ import annotations

import threading
from enum import Enum
from types import TracebackType

import msgspec
import zmq

from .ports import HOST

PERIOD_S = 1.0
"""How often the router is told of each engine."""

FORGOTTEN_AFTER_S = 6.0
"""After so long the router sends nothing to an engine any more of which it is told no more."""


class Role(str, Enum):
    """What an engine is there for; the value is the router's word for it."""

    PREFILL = "P"
    DECODE = "D"


class Registry:
    """Says of engines that they are there, in a thread of its own.

    The thread owns the socket; which engines there are is under a lock.

    Args:
        port: where the router listens for it.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._lock = threading.Lock()
        self._engines: dict[str, Role] = {}
        self._changed = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="registry", daemon=True)

    def __enter__(self) -> Registry:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def start(self) -> None:
        """Begin to tell the router."""
        self._thread.start()

    def close(self) -> None:
        """Tell it nothing any more; also where it was never begun."""
        self._closed = True
        self._changed.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def router_args(self) -> tuple[str, ...]:
        """What the router's command line says for it, in place of engines."""
        return ("--vllm-discovery-address", f"{HOST}:{self._port}")

    def admit(self, url: str, role: Role) -> None:
        """Let an engine have requests from now on.

        Args:
            url: its base URL, without a path.
        """
        with self._lock:
            self._engines[url] = role
        self._changed.set()

    def take_out(self, url: str) -> None:
        """Let an engine have no new requests, at the latest after `FORGOTTEN_AFTER_S`."""
        with self._lock:
            self._engines.pop(url, None)

    def _run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            # What was so while the router was away is not told to it later.
            socket.setsockopt(zmq.IMMEDIATE, 1)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(f"tcp://{HOST}:{self._port}")
            while not self._closed:
                self._changed.clear()
                with self._lock:
                    engines = list(self._engines.items())
                for url, role in engines:
                    self._say(socket, url.removeprefix("http://"), role)
                self._changed.wait(PERIOD_S)

    @staticmethod
    def _say(socket: zmq.Socket[bytes], address: str, role: Role) -> None:
        said = {"type": role.value, "http_address": address, "zmq_address": address}
        try:
            socket.send(msgspec.msgpack.encode(said), zmq.NOBLOCK)
        except zmq.Again:
            # There is no router (yet), and it is told again soon.
            return
