# SPDX-License-Identifier: Apache-2.0
"""A side channel that loses messages, or brings them twice: it stands between two engines.

It speaks ZeroMQ on both sides, because what gets lost between engines is whole messages: ZeroMQ's
own frames come in order or not at all.
"""

from __future__ import annotations

import threading
from enum import Enum

import zmq

from tools.pdstack.ports import HOST

Message = list[bytes]


class Meddling(str, Enum):
    """What becomes of messages."""

    DROP_REQUESTS = "requests are lost"
    DROP_REPLIES = "replies are lost"
    DUPLICATE_REQUESTS = "requests come twice"
    DUPLICATE_REPLIES = "replies come twice"

    def __str__(self) -> str:
        return self.value

    @property
    def loses(self) -> bool:
        """Whether the handshake cannot come about."""
        return self in (Meddling.DROP_REQUESTS, Meddling.DROP_REPLIES)

    def copies(self, *, of_request: bool) -> int:
        """Return how often a message is passed on."""
        dropped = Meddling.DROP_REQUESTS if of_request else Meddling.DROP_REPLIES
        doubled = Meddling.DUPLICATE_REQUESTS if of_request else Meddling.DUPLICATE_REPLIES
        return {dropped: 0, doubled: 2}.get(self, 1)


class MeddlingChannel:
    """Listens in place of an engine's side channel, until it is closed.

    Args:
        port: of the side channel that it passes messages on to.

    Attributes:
        port: where it listens.
        requests: how many it has taken.
    """

    def __init__(self, port: int, meddling: Meddling) -> None:
        self._meddling = meddling
        self._upstream = f"tcp://{HOST}:{port}"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self.port = self._front.bind_to_random_port(f"tcp://{HOST}")
        self.requests = 0
        self._waker, self._wakened = (self._context.socket(zmq.PAIR) for _ in range(2))
        self._wakened.bind("inproc://stop")
        self._waker.connect("inproc://stop")
        self._thread = threading.Thread(target=self._run, name="meddling channel", daemon=True)
        self._thread.start()

    def __enter__(self) -> MeddlingChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening; may be called repeatedly."""
        if self._thread.is_alive():
            self._waker.send(b"")
            self._thread.join()
            self._context.destroy(linger=0)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._front, zmq.POLLIN)
        poller.register(self._wakened, zmq.POLLIN)
        # A connection for each client: an engine's answer does not say whom it is for.
        backs: dict[bytes, zmq.Socket[bytes]] = {}
        while True:
            ready = dict(poller.poll())
            if self._wakened in ready:
                return
            if self._front in ready:
                client, *message = self._front.recv_multipart()
                self.requests += 1
                if client not in backs:
                    backs[client] = self._context.socket(zmq.DEALER)
                    backs[client].connect(self._upstream)
                    poller.register(backs[client], zmq.POLLIN)
                for _ in range(self._meddling.copies(of_request=True)):
                    backs[client].send_multipart(message)
            for client, back in backs.items():
                if back in ready:
                    reply = back.recv_multipart()
                    for _ in range(self._meddling.copies(of_request=False)):
                        self._front.send_multipart([client, *reply])
