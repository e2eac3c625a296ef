# SPDX-License-Identifier: Apache-2.0
"""Handshakes over real sockets: many at once, most of them with what is no engine."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import Any

import pytest
import zmq

from tests.v1.kv_connector.unit.reshard.programs import run_program
from tests.v1.kv_connector.unit.reshard.transport.channels import (
    BOUNDS,
    DEADLINE_S,
    FACTORS,
    HOST,
    REPLIES,
    REPLY,
    SHORT_S,
    WORKERS,
    Loops,
    asking,
    describe,
    engine_at,
    fetch,
    free_port,
    greet,
    listening,
    no_more_threads,
    num_descriptors,
    reply_of,
    resident_bytes,
    serving,
    thread_named,
    wait_until,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import (
    LocalLimitError,
    RemoteEngineChangedError,
    RemoteHandshakeError,
    RemoteMisdirectedError,
    RemoteUnreachableError,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.bounds import (
    MAX_REPLY_BYTES,
    ReplyBounds,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    RemoteEngineAddress,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.metadata import OUR_REQUEST
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport import handshake_client, zmtp
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.handshake_client import (
    HandshakeClient,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.side_channel import (
    HandshakeServer,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.zmtp import Allowance

NUM_BOGUS = 320
THREAD = "reshard-handshakes"


def bogus_addresses(silent_port: int) -> list[RemoteEngineAddress]:
    """Addresses where somebody listens who never answers, and far away."""
    places = [(HOST, silent_port), ("192.0.2.1", 5600)]
    return [engine_at(*reversed(places[n % 2]), f"bogus {n}") for n in range(NUM_BOGUS)]


def test_healthy_peer_is_not_held_up_by_unreachable_ones():
    """Of 321 handshakes, the last is the first to end, while all others wait for deadlines."""
    with serving() as server, listening() as (_, silent_port), asking() as client:
        asked = [client.request(address, FACTORS) for address in bogus_addresses(silent_port)]
        assert client.request(engine_at(server.port), FACTORS).result(DEADLINE_S) == WORKERS
        # Of those that are far away, networks may refuse some.
        assert [future.exception() for future in asked[::2] if future.done()] == []
        assert sum(thread.name == THREAD for thread in threading.enumerate()) == 1


def test_healthy_peer_is_not_held_up_by_names_that_resolve_slowly(resolver):
    """Addresses need no resolver, and a name that is known is served meanwhile."""
    with serving() as server, asking() as client:
        asked = [
            client.request(engine_at(server.port, f"slow-{n}.example"), FACTORS)
            for n in range(NUM_BOGUS)
        ]
        for host in (HOST, "engine.example"):
            healthy = client.request(engine_at(server.port, host), FACTORS)
            assert healthy.result(DEADLINE_S) == WORKERS
        assert not any(future.done() for future in asked)
        resolver.answers.set()
        for number, future in enumerate(asked):
            with pytest.raises(RemoteUnreachableError, match=f"slow-{number}.example is unknown"):
                future.result(DEADLINE_S)


def test_requests_beyond_the_places_wait_with_their_deadlines_running(monkeypatch):
    """What comes after them ends in time, and says what it waited for."""
    monkeypatch.setattr(handshake_client, "MAX_CONNECTIONS", 2)
    with listening() as (_, port), asking() as client:
        kept = [client.request(engine_at(port, engine_id=str(n)), None) for n in range(2)]
        monkeypatch.setattr(client, "_timeout_s", SHORT_S)
        late = [client.request(engine_at(port, engine_id=str(n)), None) for n in range(3)]
        messages = [str(future.exception(DEADLINE_S)) for future in late]
        assert not any(future.done() for future in kept)
    assert all(
        "not asked within 0.3 s, as too many other engines were" in each for each in messages
    )


def test_places_are_given_back(monkeypatch):
    """Many more handshakes than there are places all end well."""
    monkeypatch.setattr(handshake_client, "MAX_CONNECTIONS", 2)
    with serving() as server, asking() as client:
        asked = [client.request(engine_at(server.port), FACTORS) for _ in range(40)]
        assert [future.result(DEADLINE_S) for future in asked] == [WORKERS] * 40


def test_nothing_is_unbounded(monkeypatch):
    """What could not even wait is refused at once."""
    monkeypatch.setattr(handshake_client, "MAX_PENDING", 3)
    with listening() as (_, port), asking() as client:
        asked = [client.request(engine_at(port, engine_id=str(n)), FACTORS) for n in range(4)]
        with pytest.raises(
            LocalLimitError, match=f"{HOST}:{port}: not asked \\(3 other engines are being"
        ):
            asked[3].result(DEADLINE_S)
        assert not any(future.done() for future in asked[:3])


class TestBounds:
    """Answers of those who say more than an engine like ours could."""

    def test_honest_answer(self):
        """It is within them."""
        with serving() as server:
            assert fetch(server.port, bounds=BOUNDS) == WORKERS

    def test_answer_beyond_them(self):
        """The error says who was asked, and what does not fit."""
        stranger = describe(3, "engine")
        with (
            serving(reply_of(stranger)) as server,
            pytest.raises(RemoteHandshakeError, match=rf":{server.port}: .* last of them pp0tp3"),
        ):
            fetch(server.port, bounds=BOUNDS)

    def test_answer_beyond_its_size_is_not_received(self, monkeypatch):
        """It ends with the connection, and at once."""
        monkeypatch.setattr(ReplyBounds, "max_reply_bytes", 2000)
        with (
            serving([*REPLY, bytes(10_000)]) as server,
            pytest.raises(RemoteHandshakeError, match=r"goes on after \d frames, to"),
        ):
            fetch(server.port, bounds=BOUNDS)

    @pytest.mark.parametrize("frame_bytes", [0, 1000, 1 << 20])
    def test_answer_that_never_ends(self, frame_bytes):
        """However it is divided, it is cut off, and costs memory within the bounds."""
        with endless_answer(frame_bytes) as port:
            before_bytes = resident_bytes()
            with pytest.raises(RemoteHandshakeError, match=r"what comes goes on after \d+ frames"):
                fetch(port, bounds=BOUNDS)
            # What is received is held by ZeroMQ once.
            assert resident_bytes() - before_bytes < MAX_REPLY_BYTES + (8 << 20)

    def test_large_answers_take_turns(self, monkeypatch):
        """One that stalls keeps others of its size waiting, and no small one."""
        monkeypatch.setattr(handshake_client, "MAX_LARGE_ANSWERS", 1)
        monkeypatch.setattr(handshake_client, "SMALL_ANSWER_BYTES", 4 << 10)
        allowances: list[Allowance] = []

        def allow(*limits: Any) -> Allowance:
            allowances.append(Allowance(*limits))
            return allowances[-1]

        monkeypatch.setattr(handshake_client, "Allowance", allow)
        large = [*REPLY[:2], REPLY[2] + bytes(8 << 10)]
        with (
            stalling_answer(8 << 10) as (port, stalled),
            serving(large) as others,
            serving() as server,
            asking() as client,
        ):
            first = client.request(engine_at(port), FACTORS)
            assert stalled.wait(DEADLINE_S)
            (allowance,) = allowances
            wait_until(allowance.turns.locked)
            second = client.request(engine_at(others.port), FACTORS)
            assert client.request(engine_at(server.port), FACTORS).result(DEADLINE_S) == WORKERS
            assert not second.done()
            assert first.cancel()
            # Its last rank says more than it should.
            assert isinstance(second.exception(DEADLINE_S), RemoteHandshakeError)

    @pytest.mark.parametrize(
        "greeting",
        [
            b"HTTP/1.1 400 Bad Request\r\n\r\n",
            b"\x01\x00",
            b"\xff" + bytes(8) + b"\x7f\x01",
            b"\xff" * 64,
        ],
        ids=["http", "zmtp 1", "zmtp 2", "ones"],
    )
    def test_other_protocols(self, greeting):
        """They are told apart at once, and nothing of them reaches ZeroMQ."""
        with (
            tcp_peer(lambda peer: peer.sendall(greeting)) as port,
            pytest.raises(RemoteHandshakeError, match=r"what begins with b.* is no ZeroMQ"),
        ):
            fetch(port)


@contextlib.contextmanager
def tcp_peer(talk: Callable[[socket.socket], object]) -> Iterator[int]:
    """Someone at a port who talks to the first that connects, and then keeps the line open."""
    over = threading.Event()

    def serve() -> None:
        peer, _ = listener.accept()
        with peer, contextlib.suppress(OSError):
            talk(peer)
            over.wait()

    with listening() as (listener, port):
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield port
        finally:
            over.set()
            thread.join(DEADLINE_S)


def begin_answer(peer: socket.socket) -> None:
    """Speak ZMTP 3 with a client up to the first frame of its answer."""
    greet(peer, "ROUTER")
    heard = b""
    while OUR_REQUEST not in heard:
        heard += peer.recv(1 << 16)
    peer.sendall(b"\x01\x00")


@contextlib.contextmanager
def endless_answer(frame_bytes: int) -> Iterator[int]:
    """Someone whose answer never ends, at a port."""

    def talk(peer: socket.socket) -> None:
        begin_answer(peer)
        frame = b"\x03" + struct.pack(">Q", frame_bytes) + bytes(frame_bytes)
        frames = frame * max(1, (1 << 20) // len(frame))
        while True:
            peer.sendall(frames)

    with tcp_peer(talk) as port:
        yield port


@contextlib.contextmanager
def stalling_answer(num_bytes: int) -> Iterator[tuple[int, threading.Event]]:
    """Someone who never sends the last byte of a frame, and whether it has sent the others."""
    stalled = threading.Event()

    def talk(peer: socket.socket) -> None:
        begin_answer(peer)
        peer.sendall(b"\x02" + struct.pack(">Q", num_bytes) + bytes(num_bytes - 1))
        stalled.set()

    with tcp_peer(talk) as port:
        yield port, stalled


class TestWhoAnswers:
    """Addresses that are others' than the engine's that was asked for."""

    @pytest.mark.parametrize("host", ["localhost", "0.0.0.0", HOST])
    def test_this_engine_itself(self, host):
        """Left at localhost on two machines, an address leads an engine back to itself."""
        with (
            serving() as server,
            pytest.raises(RemoteMisdirectedError, match=r"this engine itself answers, not prefill"),
        ):
            fetch(server.port, host=host, engine_id="prefill", own_id="engine")

    def test_nobody_at_a_host_that_is_everybodys(self):
        """It is said that the host is this machine; of another host, it is not."""
        for host, told in {"localhost": True, "::": True, "127.0.0.1": True}.items():
            with pytest.raises(RemoteUnreachableError) as caught:
                fetch(free_port(), host=host)
            assert ("that host is this machine itself" in str(caught.value)) is told

    def test_address_of_another_engine_does_not_hide_the_next(self, resolver):
        """A name may lead to several engines, of which the first to answer is another one."""
        resolver.known["engine.example"] = (HOST, "127.0.0.2")
        with serving(reply_of(describe(0, "other"))) as other:
            server = HandshakeServer("127.0.0.2", other.port, REPLIES)
            server.start()
            try:
                assert fetch(other.port, host="engine.example") == WORKERS
            finally:
                server.close()

    def test_only_other_engines_at_all_addresses(self, resolver):
        """That is told when the last one has answered, or when there is no more time."""
        resolver.known["engine.example"] = (HOST, "127.0.0.2")
        with serving(reply_of(describe(0, "other"))) as other:
            with pytest.raises(RemoteEngineChangedError, match=r"engine other answers, not engine"):
                fetch(other.port, host="engine.example", timeout_s=10 * DEADLINE_S)
            with socket.socket() as silent:
                silent.bind(("127.0.0.2", other.port))
                silent.listen()
                with pytest.raises(RemoteEngineChangedError, match=r"engine other answers"):
                    fetch(other.port, host="engine.example", timeout_s=1)


class TestConnections:
    """What becomes of connections that fail, or are lost."""

    def test_lost_connection_is_made_again(self, monkeypatch):
        """A network that drops one costs no handshake."""
        passing, lost = zmtp.relay, []

        async def lose_the_first(*arguments):
            if not lost:
                lost.append(True)
                raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
            await passing(*arguments)

        monkeypatch.setattr(zmtp, "relay", lose_the_first)
        with serving() as server:
            assert fetch(server.port) == WORKERS
        assert lost

    def test_no_descriptors_are_left(self):
        """Whatever became of the handshakes."""
        with serving() as server, listening() as (_, port), asking() as client:
            assert client.request(engine_at(server.port), FACTORS).result(DEADLINE_S) == WORKERS
            before = num_descriptors()
            stuck = [client.request(engine_at(port), None) for _ in range(20)]
            good = [client.request(engine_at(server.port), FACTORS) for _ in range(20)]
            assert [future.result(DEADLINE_S) for future in good] == [WORKERS] * 20
            assert all(future.cancel() for future in stuck)
            wait_until(lambda: num_descriptors() <= before)

    def test_no_more_descriptors(self, monkeypatch):
        """The handshake fails at once over this process's limit, and the next one is served."""

        def refuse(*_: object) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

        with serving() as server, asking() as client:
            with monkeypatch.context() as patch:
                patch.setattr(zmtp, "_joined", refuse)
                failed = client.request(engine_at(server.port), FACTORS)
                with pytest.raises(
                    LocalLimitError, match=r"not asked .*Too many open files.*ulimit -n"
                ):
                    failed.result(DEADLINE_S)
            assert client.request(engine_at(server.port), FACTORS).result(DEADLINE_S) == WORKERS

    def test_few_descriptors_are_left(self, monkeypatch):
        """A further engine is not asked, before a library finds none; later it is."""
        with serving() as server, asking() as client:
            with monkeypatch.context() as patch:
                patch.setattr(handshake_client, "shortage", lambda: "81 of 100 files are open")
                failed = client.request(engine_at(server.port), FACTORS)
                says = r"not asked \(81 of 100 files are open\): .*ulimit -n"
                with pytest.raises(LocalLimitError, match=says):
                    failed.result(DEADLINE_S)
            assert not server.counters.answered
            assert client.request(engine_at(server.port), FACTORS).result(DEADLINE_S) == WORKERS

    def test_every_error_of_zeromq_comes_with_a_remedy(self, monkeypatch):
        """Whichever it is, the line ends with what to do, here or at the other engine."""
        codes = ({*zmq.Errno} - {zmq.EAGAIN}) | {errno.EMFILE, errno.ENFILE}
        raised: list[int] = []

        async def fail(*_: object) -> None:
            raise zmq.ZMQError(raised[-1])

        monkeypatch.setattr(zmtp, "relay", fail)
        with serving() as server, asking() as client:
            for code in codes:
                raised.append(code)
                error = client.request(engine_at(server.port), None).exception(DEADLINE_S)
                is_limit = code in (errno.EMFILE, errno.ENFILE)
                assert isinstance(error, LocalLimitError if is_limit else RemoteUnreachableError)
                assert re.search(r"\): (see who|check that)", str(error)), code


BAD_DESCRIPTOR = OSError(errno.EBADF, "Bad file descriptor")


def break_loop(loops: Loops, faults: Iterator[OSError]) -> None:
    """Have the loop that was made last fail where it waits."""
    loop, selector = loops.made[-1]
    wait_until(loop.is_running)
    selector.faults = faults
    loop.call_soon_threadsafe(lambda: None)


class TestLife:
    """Beginning, end, and what breaks in between."""

    def test_many_threads_ask(self):
        """All get their own answers."""
        with serving() as server, asking() as client, ThreadPoolExecutor(8) as pool:
            asked = pool.map(
                lambda _: client.request(engine_at(server.port), FACTORS).result(DEADLINE_S),
                range(80),
            )
            assert list(asked) == [WORKERS] * 80

    def test_no_thread_without_a_request(self):
        """Engines that only hold blocks for others have none."""
        before = threading.active_count()
        with asking():
            assert threading.active_count() == before

    def test_thread_that_does_not_start(self, monkeypatch):
        """The handshake fails and says so, the next one is served, and closing ends."""
        with serving() as server, asking() as client:
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", no_more_threads)
                failed = client.request(engine_at(server.port), FACTORS)
            with pytest.raises(LocalLimitError, match=r"not asked \(can't start new thr"):
                failed.result(0)
            assert client.request(engine_at(server.port), FACTORS).result(DEADLINE_S) == WORKERS
        with asking() as client, monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_more_threads)
            client.request(engine_at(1), FACTORS)

    def test_close_cancels_what_is_under_way(self, resolver):
        """In whichever stage; and nothing is asked any more."""
        with listening() as (_, port):
            client = HandshakeClient(BOUNDS)
            hosts = (HOST, "slow.example")
            asked = [client.request(engine_at(port, host), None) for host in hosts]
            wait_until(lambda: resolver.asked)
            client.close()
            client.close()
            assert all(future.cancelled() for future in asked)
            assert THREAD not in [thread.name for thread in threading.enumerate()]
            with pytest.raises(RuntimeError, match="closed"):
                client.request(engine_at(port), None)

    def test_end_of_the_interpreter_does_not_wait_for_a_resolver(self):
        """Nor does closing: a resolver may take minutes to say that it knows nothing."""
        program = (
            "import threading\n"
            "from reshard.protocol.messages import RemoteEngineAddress\n"
            "from reshard.transport import handshake_client, resolver\n"
            "asked = threading.Event()\n"
            "def hang(name):\n"
            "    asked.set()\n"
            "    threading.Event().wait()\n"
            "resolver.addresses_of = hang\n"
            "bounds = handshake_client.ReplyBounds({'a': 1})\n"
            "client = handshake_client.HandshakeClient(bounds)\n"
            "client.request(RemoteEngineAddress('e', 'slow.example', 1), None)\n"
            "assert asked.wait(20)\n"
            "client.close()\n"
        )
        run_program(program).check_returncode()

    def test_request_that_was_cancelled(self):
        """Nobody is told, and the next is served."""
        with listening() as (_, port), asking(timeout_s=2 * SHORT_S) as client:
            cancelled = client.request(engine_at(port), None)
            assert cancelled.cancel()
            late = client.request(engine_at(port), None)
            assert isinstance(late.exception(DEADLINE_S), RemoteUnreachableError)
        with listening() as (_, port), serving() as server, asking() as client:
            cancelled = client.request(engine_at(port), None)
            assert cancelled.cancel()
            assert client.request(engine_at(server.port), FACTORS).result(DEADLINE_S) == WORKERS

    def test_breakdown_costs_what_was_under_way_only(self, monkeypatch, loops):
        """The next handshake is served by another thread."""
        lines: list[str] = []
        monkeypatch.setattr(
            handshake_client.logger, "error", lambda text, *values: lines.append(text % values)
        )
        with serving() as server, listening() as (_, port), asking() as client:
            asked = client.request(engine_at(port), None)
            thread = thread_named(THREAD)
            break_loop(loops, iter([BAD_DESCRIPTOR]))
            with pytest.raises(RemoteUnreachableError, match=f":{port}: the exchange broke off"):
                asked.result(DEADLINE_S)
            thread.join(DEADLINE_S)
            assert client.request(engine_at(server.port), FACTORS).result(DEADLINE_S) == WORKERS
        (line,) = lines
        assert "Bad file descriptor')): 1 fail with it" in line

    def test_breakdown_costs_what_was_about_to_begin(self, monkeypatch, loops):
        """It says why it has failed, too: its thread had heard of it and done nothing yet."""
        monkeypatch.setattr(handshake_client.logger, "error", lambda *_: None)
        with serving() as server, listening() as (_, port), asking() as client:
            assert client.request(engine_at(server.port), FACTORS).result(DEADLINE_S) == WORKERS
            thread, asked = thread_named(THREAD), []

            def faults() -> Iterator[OSError]:
                asked.append(client.request(engine_at(port), None))
                yield BAD_DESCRIPTOR

            break_loop(loops, faults())
            thread.join(DEADLINE_S)
            with pytest.raises(RemoteUnreachableError, match=f":{port}: the exchange broke off"):
                asked[0].result(DEADLINE_S)
            assert client.request(engine_at(server.port), FACTORS).result(DEADLINE_S) == WORKERS

    def test_breakdown_for_good_ends_what_was_under_way(self, monkeypatch, loops):
        """Also where the loop cannot be used any more; nothing is left that would never end."""
        monkeypatch.setattr(handshake_client.logger, "error", lambda *_: None)
        monkeypatch.setattr(threading, "excepthook", lambda _: None)
        with serving() as server, listening() as (_, port), asking() as client:
            asked = client.request(engine_at(port), None)
            thread = thread_named(THREAD)
            break_loop(loops, repeat(BAD_DESCRIPTOR))
            thread.join(DEADLINE_S)
            with pytest.raises(RemoteUnreachableError, match=f":{port}: the exchange broke off"):
                asked.result(DEADLINE_S)
            assert client.request(engine_at(server.port), FACTORS).result(DEADLINE_S) == WORKERS

    def test_answer_that_breaks_our_reading(self, monkeypatch):
        """Whatever comes out of it costs this handshake, and no other."""
        with serving() as server, asking() as client:
            with monkeypatch.context() as patch:
                patch.setattr(handshake_client, "decode_reply", lambda *_: 1 / 0)
                asked = client.request(engine_at(server.port), FACTORS)
                assert isinstance(asked.exception(DEADLINE_S), ZeroDivisionError)
            assert client.request(engine_at(server.port), FACTORS).result(DEADLINE_S) == WORKERS

    def test_tasks_end_with_their_handshakes(self, loops):
        """Nothing is left on the loop but the client itself."""
        with serving() as server, listening() as (_, port), asking() as client:
            stuck = client.request(engine_at(port), None)
            assert client.request(engine_at(server.port), FACTORS).result(DEADLINE_S) == WORKERS
            assert stuck.cancel()
            loop, _ = loops.made[-1]
            wait_until(lambda: len(asyncio.all_tasks(loop)) == 1)
