# SPDX-License-Identifier: Apache-2.0
"""Questions for requests over real side channels."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator

import pytest
import zmq

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.compatibility import SPOKEN
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    RemoteEngineAddress,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.subscriptions import (
    Ask,
    Gone,
    Known,
    Leave,
    News,
    Offered,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport import side_channel, subscriber
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.authentication import (
    ChannelKey,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.side_channel import (
    HandshakeServer,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.subscriber import Subscriber

REPLIES = {version: [b"a reply"] for version in range(SPOKEN.oldest, SPOKEN.newest + 1)}
DEADLINE_S = 60.0


def until(condition: Callable[[], bool]) -> None:
    """Wait until something is so."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(1e-3)


@pytest.fixture
def serve() -> Iterator[Callable[..., HandshakeServer]]:
    """Makes side channels."""
    servers: list[HandshakeServer] = []

    def make(port: int = 0, key: ChannelKey | None = None, engine_id: str = "p") -> HandshakeServer:
        servers.append(HandshakeServer("127.0.0.1", port, REPLIES, key, engine_id))
        servers[-1].start()
        return servers[-1]

    yield make
    for server in servers:
        server.close()


@pytest.fixture
def ask() -> Iterator[Callable[..., tuple[Subscriber, list[News]]]]:
    """Makes subscribers, with what each has heard."""
    made: list[Subscriber] = []

    def make(key: ChannelKey | None = None) -> tuple[Subscriber, list[News]]:
        heard: list[News] = []
        made.append(Subscriber(heard.append, key=key))
        return made[-1], heard

    yield make
    for each in made:
        each.close()


def place(server: HandshakeServer) -> RemoteEngineAddress:
    """Where a side channel is."""
    return RemoteEngineAddress("p", "127.0.0.1", server.port)


def put(client: Subscriber, where: RemoteEngineAddress, name: str, content: int) -> str:
    """Ask for a request; returns the number of the question."""
    asker = uuid.uuid4().hex
    client.ask(where, Ask(asker, name, content))
    return asker


@pytest.mark.parametrize("has_key", [False, True])
def test_news_comes_as_it_is(serve, ask, has_key):
    """In order, over one connection; also among engines with a key."""
    key = ChannelKey(*zmq.curve_keypair()) if has_key else None
    server, (client, heard) = serve(key=key), ask(key)
    asker = put(client, place(server), "x", 7)
    until(lambda: server.publisher.num_subscribers == 1)
    server.tell(lambda publisher: publisher.add("r", "x", 7))
    until(lambda: heard == [Known(asker)])
    server.tell(lambda publisher: publisher.offer("r", {"blocks": [[1]]}, 2))
    until(lambda: heard[1:] == [Offered(asker, {"blocks": [[1]]}, 2)])
    assert server.counters.answered == 1


def test_answers_are_heard_at_once_after_a_rest(serve, ask, monkeypatch):
    """A connection that nothing is waited for over is used by the next question."""
    monkeypatch.setattr(subscriber, "_LINGER_MS", 10_000 * DEADLINE_S)
    server, (client, heard) = serve(), ask()
    for number in range(3):
        asker = put(client, place(server), f"n{number}", number)
        server.tell(lambda publisher, n=number: publisher.add(f"r{n}", f"n{n}", n))
        server.tell(lambda publisher, n=number: publisher.offer(f"r{n}", {}, 0))
        until(lambda asker=asker: Offered(asker, {}, 0) in heard)
    assert server.counters.answered == 1


def test_more_questions_than_a_connection_hears(serve, ask):
    """Further ones go over another."""
    server, (client, heard) = serve(), ask()
    for number in range(2000):
        put(client, place(server), f"n{number}", number)
        server.tell(lambda publisher, n=number: publisher.add(f"r{n}", f"n{n}", n))
    until(lambda: len(heard) == 2000)
    assert server.counters.answered > 1 and not server.counters.dropped


def test_subscription_outlives_its_connection(serve, ask, monkeypatch):
    """It is asked for again over the next one."""
    monkeypatch.setattr(side_channel, "MAX_AGE_S", 0.3)
    server, (client, heard) = serve(), ask()
    asker = put(client, place(server), "x", 7)
    until(lambda: server.counters.answered >= 3)
    server.tell(lambda publisher: publisher.add("r", "x", 7))
    server.tell(lambda publisher: publisher.offer("r", {}, 0))
    until(lambda: Offered(asker, {}, 0) in heard)


def test_engine_that_has_ended_is_told_of(serve, ask):
    """At once; and one that took its place does not know the request."""
    server, (client, heard) = serve(), ask()
    server.tell(lambda publisher: publisher.add("r", "x", 7))
    asker = put(client, place(server), "x", 7)
    until(lambda: heard == [Known(asker)])
    server.close()
    serve(server.port, engine_id="another")
    until(lambda: len(heard) > 1)
    assert isinstance(heard[-1], Gone) and heard[-1].asker == asker


def test_engine_that_falls_silent_is_told_of(serve, ask, monkeypatch):
    """Its machine still accepts connections, and ZeroMQ waits for half a minute over each."""
    monkeypatch.setattr(subscriber, "ANSWERS_WITHIN_S", 1.0)
    server, (client, heard) = serve(), ask()
    asker, stands_still = put(client, place(server), "x", 7), threading.Event()
    until(lambda: server.publisher.num_subscribers == 1)
    server.tell(lambda publisher: publisher.add("r", "x", 7))
    until(lambda: heard == [Known(asker)])
    server.tell(lambda _: stands_still.wait(DEADLINE_S))
    try:
        until(lambda: len(heard) > 1)
    finally:
        stands_still.set()
    assert heard[1].asker == asker
    assert "does not answer within 0.5 s" in heard[1].reason


def test_engine_that_is_not_there_is_told_of(serve, ask):
    """Of all that is asked for there."""
    server, (client, heard) = serve(), ask()
    server.close()
    askers = {put(client, place(server), "x", number) for number in range(3)}
    until(lambda: {each.asker for each in heard} == askers)
    assert all(isinstance(each, Gone) for each in heard)


def test_engines_are_bounded(serve, ask, monkeypatch):
    """A further one is not asked."""
    monkeypatch.setattr(subscriber, "MAX_ENGINES", 1)
    client, heard = ask()
    put(client, place(serve()), "x", 7)
    asker = put(client, place(serve()), "x", 7)
    until(lambda: len(heard) == 1)
    assert heard[0].asker == asker and "other engines" in heard[0].reason


def test_who_leaves_is_answered(serve, ask):
    """With what gives the offer up, or that there is none."""
    server, (client, heard) = serve(), ask()
    server.tell(lambda publisher: publisher.add("r", "x", 7))
    asker = put(client, place(server), "x", 7)
    until(lambda: heard == [Known(asker)])
    client.ask(place(server), Leave(asker, "x", 7))
    until(lambda: server.publisher.given_up == {"r"})
    server.tell(lambda publisher: publisher.end("r", "nobody reads it"))
    until(lambda: len(heard) == 2)
    assert heard[1] == Gone(asker, "nobody reads it")


def test_next_attempt_is_not_left_with_the_one_before(serve, ask):
    """Of a client that left, and asked again, before there was a connection."""
    server, (client, heard) = serve(), ask()
    server.tell(lambda publisher: publisher.add("r", "x", 7))
    server.tell(lambda publisher: publisher.offer("r", {}, 0))
    client.ask(place(server), Leave("before", "x", 7))
    asker = put(client, place(server), "x", 7)
    until(lambda: len(heard) == 2)
    assert {each.asker: type(each) for each in heard} == {asker: Offered, "before": Gone}


def test_thread_that_does_not_start_costs_one_request(serve, ask, monkeypatch):
    """It is told so, and the next one is asked for."""
    server, (client, heard) = serve(), ask()
    server.tell(lambda publisher: publisher.add("r", "x", 7))

    def lack(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as lacking:
        lacking.setattr(threading.Thread, "start", lack)
        asker = put(client, place(server), "x", 7)
    assert heard == [Gone(asker, "it cannot be asked for: can't start new thread")]
    asker = put(client, place(server), "x", 7)
    until(lambda: heard[1:] == [Known(asker)])
