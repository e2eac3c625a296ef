# SPDX-License-Identifier: Apache-2.0
"""Asking engines over real sockets: many at once, most of which are none."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from types import SimpleNamespace

import pytest
import zmq

from tests.v1.kv_connector.unit.reshard.transport.channels import (
    DEADLINE_S,
    FACTORS,
    HOST,
    REPLY,
    SHORT_S,
    WORKERS,
    describe,
    engine_at,
    enquiring,
    fetch,
    free_port,
    listening,
    reply_of,
    serving,
    wait_until,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import (
    RemoteHandshakeError,
    RemoteUnreachableError,
    RemoteUntrustedError,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.bounds import ReplyBounds
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    RemoteEngineAddress,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.trust import TrustedPeers
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport import enquiries, lookups
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.enquiries import Enquirer

NUM_BOGUS = 320


@pytest.fixture
def resolver(monkeypatch) -> Iterator[Resolver]:
    """Stands for this machine's resolver."""
    resolver = Resolver()
    monkeypatch.setattr(lookups, "addresses_of", resolver.addresses_of)
    yield resolver
    resolver.answers.set()


class Resolver:
    """Knows some names at once, and says of the others that it knows nothing when it is told to."""

    def __init__(self) -> None:
        self.known = {"engine.example": (HOST,)}
        self.answers = threading.Event()
        self.asked: list[str] = []

    def addresses_of(self, name: str) -> tuple[str, ...]:
        """As the function that it stands for."""
        self.asked.append(name)
        if name not in self.known:
            self.answers.wait()
            raise OSError(f"{name} is unknown")
        return self.known[name]


def bogus_addresses(silent_port: int, closed_port: int) -> list[RemoteEngineAddress]:
    """Addresses where nobody listens, where somebody listens who never answers, and far away."""
    places = [(HOST, silent_port), (HOST, closed_port), ("192.0.2.1", 5600)]
    return [engine_at(*reversed(places[n % 3]), f"bogus {n}") for n in range(NUM_BOGUS)]


def test_healthy_peer_is_not_held_up_by_unreachable_ones():
    """Of 321 asks, the last is the first to end, while all others wait for their deadlines."""
    with serving() as server, listening() as (_, silent_port), enquiring() as enquirer:
        asked = [
            enquirer.ask(address, FACTORS) for address in bogus_addresses(silent_port, free_port())
        ]
        assert enquirer.ask(engine_at(server.port), FACTORS).result(DEADLINE_S) == WORKERS
        assert not any(future.done() for future in asked)
        assert sum(thread.name == "reshard-enquirer" for thread in threading.enumerate()) == 1


def test_healthy_peer_is_not_held_up_by_names_that_resolve_slowly(resolver):
    """ZeroMQ would look them up one after another; one that is known is served meanwhile."""
    with serving() as server, enquiring() as enquirer:
        asked = [
            enquirer.ask(engine_at(server.port, f"slow-{n}.example"), FACTORS)
            for n in range(NUM_BOGUS)
        ]
        for host in (HOST, "engine.example"):
            healthy = enquirer.ask(engine_at(server.port, host), FACTORS)
            assert healthy.result(DEADLINE_S) == WORKERS
        assert not any(future.done() for future in asked)
        resolver.answers.set()
        for number, future in enumerate(asked):
            with pytest.raises(RemoteUnreachableError, match=f"slow-{number}.example is unknown"):
                future.result(DEADLINE_S)


def test_asks_beyond_the_places_wait_with_their_deadlines_running(monkeypatch):
    """Whoever comes after them is told so in time."""
    now_s = 0.0
    monkeypatch.setattr(enquiries, "MAX_ASKED", 2)
    # All of them are due at once: nobody gets the place of one who was due before him.
    monkeypatch.setattr(enquiries, "time", SimpleNamespace(monotonic=lambda: now_s))
    with listening() as (_, port), enquiring(timeout_s=SHORT_S) as enquirer:
        asked = [enquirer.ask(engine_at(port, engine_id=str(n)), FACTORS) for n in range(5)]
        wait_until(lambda: len(enquirer._by_socket) == 2 and len(enquirer._placeless) == 3)
        now_s = SHORT_S
        wait(asked, DEADLINE_S)
        messages = [str(future.exception(0)) for future in asked]
    assert all("no connection within 0.3 s" in each for each in messages[:2])
    assert all("not asked within 0.3 s, as 2 other engines were" in each for each in messages[2:])


def test_places_are_given_back(monkeypatch):
    """Many more asks than there are places all end well."""
    monkeypatch.setattr(enquiries, "MAX_ASKED", 2)
    with serving() as server, enquiring() as enquirer:
        asked = [enquirer.ask(engine_at(server.port), FACTORS) for _ in range(40)]
        assert [future.result(DEADLINE_S) for future in asked] == [WORKERS] * 40


def test_nothing_is_unbounded(monkeypatch):
    """What could not even wait is refused at once."""
    monkeypatch.setattr(enquiries, "MAX_ENQUIRIES", 3)
    with listening() as (_, port), enquiring() as enquirer:
        asked = [enquirer.ask(engine_at(port, engine_id=str(n)), FACTORS) for n in range(4)]
        with pytest.raises(RemoteUnreachableError, match="not asked, as 3 other engines are being"):
            asked[3].result(DEADLINE_S)
        assert not any(future.done() for future in asked[:3])


def test_name_that_does_not_resolve_in_time(resolver):
    """The error says that it was the name, and nothing more is waited for."""
    with pytest.raises(
        RemoteUnreachableError,
        match=r"^side channel slow\.example:1: the host's name was not resolved within 0\.3 s",
    ):
        fetch(1, host="slow.example", timeout_s=SHORT_S)


def test_name_is_looked_up_once_for_all_who_ask(resolver):
    """Requests for one engine come in crowds."""
    with enquiring() as enquirer:
        asked = [enquirer.ask(engine_at(1, "slow.example", str(n)), None) for n in range(9)]
        wait_until(lambda: resolver.asked)
        resolver.answers.set()
        wait(asked, DEADLINE_S)
    assert resolver.asked == ["slow.example"]


def test_all_addresses_of_a_name_are_tried(resolver):
    """An engine that listens at one of them is found, whichever comes first."""
    resolver.known["engine.example"] = ("127.0.0.2", HOST)
    with serving() as server:
        assert fetch(server.port, host="engine.example") == WORKERS


@pytest.mark.parametrize("host", ["2130706433", "0x7f.1", "127.1"])
def test_old_spellings_of_addresses_are_names(host):
    """The resolver reads them; what it says is held to the trusted networks."""
    trusted = TrustedPeers.parse(["10.0.0.0/8"])
    with pytest.raises(RemoteUntrustedError, match=r"host 127\.0\.0\.1 is not among trusted_peers"):
        fetch(1, host=host, trusted=trusted)


class TestTrustedPeers:
    """Hosts that may be asked, and those that may not."""

    def test_address_in_a_trusted_network(self):
        """It is asked."""
        with serving() as server:
            trusted = TrustedPeers.parse(["127.0.0.0/8"])
            assert fetch(server.port, trusted=trusted) == WORKERS

    @pytest.mark.parametrize("host", [HOST, "engine.example", "::ffff:127.0.0.1"])
    def test_others_are_not_connected_to(self, resolver, host):
        """Whether named by an address or by a name; nothing is sent to them."""
        with listening() as (listener, port):
            trusted = TrustedPeers.parse(["10.0.0.0/8"])
            with pytest.raises(RemoteUntrustedError, match=r"trusted_peers \(10\.0\.0\.0/8\)"):
                fetch(port, host=host, trusted=trusted)
            listener.setblocking(False)
            with pytest.raises(BlockingIOError):
                listener.accept()

    def test_only_trusted_addresses_of_a_name_are_used(self, resolver):
        """A name that also leads elsewhere does not."""
        resolver.known["engine.example"] = ("127.0.0.2", HOST)
        with serving() as server, socket.socket() as other:
            other.bind(("127.0.0.2", server.port))
            other.listen()
            trusted = TrustedPeers.parse(["127.0.0.1/32"])
            assert fetch(server.port, host="engine.example", trusted=trusted) == WORKERS
            other.setblocking(False)
            with pytest.raises(BlockingIOError):
                other.accept()


class TestBounds:
    """Answers of those who say more than an engine like ours could."""

    BOUNDS = ReplyBounds.of([worker.shard for worker in WORKERS])

    def test_honest_answer(self):
        """It is within them."""
        with serving() as server:
            assert fetch(server.port, bounds=self.BOUNDS) == WORKERS

    def test_answer_beyond_them(self):
        """The error says who was asked, and what does not fit."""
        stranger = describe(3, "engine")
        with (
            serving(reply_of(stranger)) as server,
            pytest.raises(RemoteHandshakeError, match=rf":{server.port}: .* last of them pp0tp3"),
        ):
            fetch(server.port, bounds=self.BOUNDS)

    def test_answer_beyond_its_size_is_not_received(self, monkeypatch):
        """It ends with the connection, and in time."""
        monkeypatch.setattr(ReplyBounds, "max_reply_bytes", len(REPLY) - 1)
        with (
            serving() as server,
            pytest.raises(RemoteUnreachableError, match=f"of at most {len(REPLY) - 1} bytes"),
        ):
            fetch(server.port, bounds=self.BOUNDS, timeout_s=SHORT_S)


class TestLife:
    """Beginning, end, and what breaks in between."""

    def test_many_threads_ask(self):
        """All get their own answers."""
        with serving() as server, enquiring() as enquirer, ThreadPoolExecutor(8) as pool:
            asked = pool.map(
                lambda _: enquirer.ask(engine_at(server.port), FACTORS).result(DEADLINE_S),
                range(80),
            )
            assert list(asked) == [WORKERS] * 80

    def test_no_thread_without_an_ask(self):
        """Engines that only hold blocks for others have none."""
        before = threading.active_count()
        with enquiring():
            assert threading.active_count() == before

    def test_close_cancels_what_is_under_way(self, resolver):
        """In whichever stage; and nothing is asked any more."""
        with listening() as (_, port):
            enquirer = Enquirer(None)
            hosts = (HOST, "slow.example")
            asked = [enquirer.ask(engine_at(port, host), None) for host in hosts]
            wait_until(lambda: resolver.asked)
            enquirer.close()
            enquirer.close()
            assert all(future.cancelled() for future in asked)
            assert "reshard-enquirer" not in [thread.name for thread in threading.enumerate()]
            with pytest.raises(RuntimeError, match="closed"):
                enquirer.ask(engine_at(port), None)

    def test_ask_that_was_cancelled(self):
        """Nobody is told, and the next is served."""
        with (
            listening() as (_, port),
            serving() as server,
            enquiring(timeout_s=2 * SHORT_S) as enquirer,
        ):
            cancelled = enquirer.ask(engine_at(port), None)
            assert cancelled.cancel()
            late = enquirer.ask(engine_at(port), None)
            assert isinstance(late.exception(DEADLINE_S), RemoteUnreachableError)
            assert enquirer.ask(engine_at(server.port), FACTORS).result(DEADLINE_S) == WORKERS

    def test_breakdown_costs_what_was_under_way_only(self, monkeypatch):
        """The next ask is served by the same thread, with other sockets."""
        poll, broken = zmq.Poller.poll, threading.Event()

        def fail_once(poller: zmq.Poller, *args: object) -> object:
            ours = threading.current_thread().name == "reshard-enquirer"
            if ours and len(poller.sockets) > 1 and not broken.is_set():
                broken.set()
                raise zmq.ZMQError(zmq.ENOTSOCK)
            return poll(poller, *args)

        lines: list[str] = []
        monkeypatch.setattr(enquiries, "_PAUSE_S", 0.01)
        monkeypatch.setattr(
            enquiries.logger, "error", lambda text, *values: lines.append(text % values)
        )
        monkeypatch.setattr(zmq.Poller, "poll", fail_once)
        with serving() as server, enquiring() as enquirer:
            asked = enquirer.ask(engine_at(server.port), FACTORS)
            with pytest.raises(RemoteUnreachableError, match="the exchange broke off"):
                asked.result(DEADLINE_S)
            assert enquirer.ask(engine_at(server.port), FACTORS).result(DEADLINE_S) == WORKERS
        (line,) = lines
        assert "1 handshakes fail with it" in line

    def test_answer_that_breaks_our_reading(self, monkeypatch):
        """Whatever comes out of it costs this ask, and no other."""
        with serving() as server, enquiring() as enquirer:
            with monkeypatch.context() as patch:
                patch.setattr(enquiries, "decode_reply", lambda *_: 1 / 0)
                asked = enquirer.ask(engine_at(server.port), FACTORS)
                assert isinstance(asked.exception(DEADLINE_S), ZeroDivisionError)
            assert enquirer.ask(engine_at(server.port), FACTORS).result(DEADLINE_S) == WORKERS
