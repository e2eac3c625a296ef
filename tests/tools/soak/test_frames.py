# SPDX-License-Identifier: Apache-2.0
"""A channel that meddles loses or doubles whole messages, and passes the others on."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import zmq

from tools.pdstack.ports import HOST
from tools.soak.frames import Meddling, MeddlingChannel

SOON_MS = 10_000
SILENCE_MS = 200


class Echo:
    """Answers every request with itself, twice as long, and counts them."""

    def __init__(self, context: zmq.Context) -> None:
        self.taken: list[bytes] = []
        self._socket = context.socket(zmq.ROUTER)
        self.port = self._socket.bind_to_random_port(f"tcp://{HOST}")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.is_set():
            if self._socket.poll(20):
                sender, empty, frame = self._socket.recv_multipart()
                self.taken.append(frame)
                self._socket.send_multipart([sender, empty, frame * 2])

    def close(self) -> None:
        """Stop answering."""
        self._over.set()
        self._thread.join()


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    """A context, whose sockets are closed at the end."""
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def echo(context: zmq.Context) -> Iterator[Echo]:
    """Somebody who answers."""
    echo = Echo(context)
    yield echo
    echo.close()


def asked(context: zmq.Context, port: int, frame: bytes) -> bytes | None:
    """Ask once as an engine does; returns the answer, if one comes."""
    with context.socket(zmq.REQ) as client:
        client.linger = 0
        client.connect(f"tcp://{HOST}:{port}")
        client.send(frame)
        return client.recv() if client.poll(SILENCE_MS) else None


@pytest.mark.parametrize("meddling", Meddling)
def test_messages_are_lost_or_doubled(context, echo, meddling):
    """A handshake fails where it loses them, and is as it should be where they come twice."""
    with (
        MeddlingChannel(echo.port, meddling) as channel,
        context.socket(zmq.DEALER) as client,
    ):
        client.connect(f"tcp://{HOST}:{channel.port}")
        client.send_multipart([b"", b"abc"])
        replies = []
        while client.poll(SILENCE_MS if replies or meddling.loses else SOON_MS):
            replies.append(client.recv_multipart())
    passed = {Meddling.DROP_REQUESTS: 0, Meddling.DUPLICATE_REQUESTS: 2}.get(meddling, 1)
    assert echo.taken == [b"abc"] * passed
    assert replies == [[b"", b"abcabc"]] * (0 if meddling.loses else 2)


def test_answers_find_their_clients(context, echo):
    """Each client gets the answer to what it has asked, and no other one's."""
    with MeddlingChannel(echo.port, Meddling.DUPLICATE_REPLIES) as channel:
        frames = [b"x" * size for size in range(1, 9)]
        assert [asked(context, channel.port, frame) for frame in frames] == [
            frame * 2 for frame in frames
        ]
        assert channel.requests == len(frames)


def test_nobody_listens_once_it_is_closed(context, echo):
    """Closing twice does no harm."""
    with MeddlingChannel(echo.port, Meddling.DUPLICATE_REPLIES) as channel:
        assert asked(context, channel.port, b"abc") == b"abcabc"
    channel.close()
    assert asked(context, channel.port, b"abc") is None
