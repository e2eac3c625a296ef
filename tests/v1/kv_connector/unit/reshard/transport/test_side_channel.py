# SPDX-License-Identifier: Apache-2.0
"""The side channel over real sockets: with ourselves, with upstream's connector, with strangers."""

from __future__ import annotations

import contextlib
import errno
import random
import re
import socket
import struct
import threading
import time
import traceback
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    GET_META_MSG,
    NixlHandshakePayload,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.scheduler import NixlConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.worker import NixlConnectorWorker

from tests.v1.kv_connector.unit.reshard import forms
from tests.v1.kv_connector.unit.reshard.transport.channels import (
    BOUNDS,
    DEADLINE_S,
    FACTORS,
    HOST,
    REPLIES,
    REPLY,
    SHORT_S,
    WORKERS,
    ask,
    asking,
    describe,
    engine_at,
    fetch,
    free_port,
    greet,
    listening,
    open_socket,
    reply_of,
    resident_bytes,
    serving,
    thread_named,
    wait_until,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import (
    LocalChannelError,
    RemoteEngineChangedError,
    RemoteHandshakeError,
    RemoteIncompatibleError,
    RemoteRefusedError,
    RemoteUnreachableError,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol import metadata
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.compatibility import (
    SPOKEN,
    VersionRange,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.metadata import (
    encode_refusal,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport import side_channel
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.side_channel import (
    MAX_REQUEST_BYTES,
    HandshakeServer,
    ServerCounters,
)

encode = msgspec.msgpack.encode
THREAD = "reshard-handshake-server"
NEXT = VersionRange(SPOKEN.newest + 1, SPOKEN.newest + 2)
REMEDY = (
    r"install the plugin vllm-kv-reshard, or the fork, on all nodes of the engine with upstream's, "
    r"and restart it; .*'Using upstream's NixlConnector'"
)


@pytest.fixture
def server() -> Iterator[HandshakeServer]:
    """A server of an engine with two workers."""
    with serving() as server:
        yield server


@pytest.fixture
def warnings(monkeypatch) -> list[str]:
    """What the side channel warns of, line by line."""
    lines: list[str] = []
    monkeypatch.setattr(
        side_channel.logger, "warning", lambda text, *values: lines.append(text % values)
    )
    return lines


class TestBetweenOurselves:
    """Our client and our server."""

    def test_one_round_trip(self, server):
        """All workers arrive for one request."""
        assert fetch(server.port) == WORKERS
        assert server.counters == ServerCounters(answered=1)

    def test_many_clients_at_once(self, server):
        """Clients in several threads do not get in each other's way."""
        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(lambda _: fetch(server.port), range(40)))
        assert results == [WORKERS] * 40
        assert server.counters == ServerCounters(answered=40)

    def test_large_reply(self):
        """A megabyte of metadata is no matter."""
        worker = replace(WORKERS[0], agent_metadata=random.Random(0).randbytes(1 << 20))
        with serving(reply_of(worker)) as server:
            assert fetch(server.port) == (worker,)

    def test_restarted_peer(self):
        """An engine that restarts at the same address is told apart, and served as the new one."""
        with serving() as server:
            port = server.port
            assert fetch(port) == WORKERS
        restarted = describe(0, "restarted")
        with serving(reply_of(restarted), port):
            with pytest.raises(
                RemoteEngineChangedError, match=f"{port}: engine restarted .* not engine: the peer"
            ):
                fetch(port)
            assert fetch(port, engine_id="restarted") == (restarted,)

    def test_differing_factor(self, server):
        """The error says where, what and how it differs."""
        with pytest.raises(
            RemoteIncompatibleError,
            match=f"{HOST}:{server.port}: .*dtype is bfloat16 there and float16 here",
        ):
            fetch(server.port, factors={"dtype": "float16"})

    def test_another_version(self, server, monkeypatch):
        """A client of another version is refused in words, and says so."""
        answer = ask(server.port, encode([str(NEXT).encode(), 0]))
        monkeypatch.setattr(metadata, "SPOKEN", NEXT)
        with pytest.raises(RemoteIncompatibleError, match=rf"peer speaks reshard/7, .* {NEXT}"):
            metadata.decode_reply(answer, FACTORS, BOUNDS)


class TestEngineWithoutDescriptors:
    """One that has few left refuses further readers, before UCX or ZeroMQ find none."""

    def test_reader_is_refused_with_the_limit(self, server):
        """Until a worker that has told so has some again."""
        server.shortage = "81 of 100 files are open"
        with asking() as client:
            failed = client.request(engine_at(server.port), FACTORS)
            with pytest.raises(RemoteRefusedError, match=r"as 81 of .* there: .*ulimit -n"):
                failed.result(DEADLINE_S)
        server.shortage = ""
        assert fetch(server.port) == WORKERS
        assert (server.counters.refused, server.counters.answered) == (1, 1)


class TestPeersThatDoNotServe:
    """Our client, at addresses where no engine of ours is."""

    def test_nobody_there(self):
        """A refused connection is an answer: it is told long before the deadline."""
        began_s = time.monotonic()
        with pytest.raises(RemoteUnreachableError, match=r"nothing listens there"):
            fetch(free_port(), timeout_s=10 * DEADLINE_S)
        assert time.monotonic() - began_s < DEADLINE_S

    def test_port_of_something_else(self):
        """A program that accepts connections and says nothing is not waited for."""
        with (
            listening() as (_, port),
            pytest.raises(RemoteUnreachableError, match=r"within 0\.3 s"),
        ):
            fetch(port, timeout_s=SHORT_S)

    def test_peer_that_is_stuck(self):
        """A peer that is connected but does not answer is told apart."""
        with open_socket(zmq.ROUTER) as stuck:
            port = stuck.bind_to_random_port(f"tcp://{HOST}")
            with pytest.raises(RemoteUnreachableError, match=r"connected, but no answer"):
                fetch(port, timeout_s=SHORT_S)

    @pytest.mark.parametrize(
        ("host", "port"), [("no host", 1), ("line\nline", 1), (HOST, -1), ("", 1), ("\udc80", 1)]
    )
    def test_address_that_is_none(self, host, port):
        """What a router passes on need not make sense."""
        with pytest.raises(RemoteUnreachableError) as caught:
            fetch(port, host=host, timeout_s=SHORT_S)
        assert str(caught.value).isprintable()

    @pytest.mark.parametrize(
        ("answer", "error"),
        [
            ([b""], RemoteHandshakeError),
            ([b"garbage"], RemoteHandshakeError),
            ([REPLY[0][:-1]], RemoteHandshakeError),
            ([REPLY[0]], RemoteHandshakeError),
            ([*REPLY[:-1], REPLY[-1][:-1]], RemoteHandshakeError),
            ([*REPLY, b"more"], RemoteHandshakeError),
            ([encode_refusal("not today")], RemoteRefusedError),
        ],
        ids=[
            "empty",
            "garbage",
            "cut greeting",
            "no ranks",
            "cut rank",
            "another frame",
            "refusal",
        ],
    )
    def test_answers_that_are_none(self, answer, error):
        """Whatever comes back, a typed error comes out that names the address."""
        with open_socket(zmq.REP) as peer, ThreadPoolExecutor(1) as pool:
            port = peer.bind_to_random_port(f"tcp://{HOST}")
            asking = pool.submit(fetch, port)
            peer.recv()
            peer.send_multipart(answer)
            with pytest.raises(error, match=f"side channel {HOST}:{port}: "):
                asking.result(DEADLINE_S)


class TestUpstream:
    """Either side of ours against the other side of upstream's NixlConnector."""

    def test_our_client_at_upstreams_listener(self, caplog_vllm):
        """The listener lives on; our error says what the peer is, its log what to do there."""
        port, ready, stop = free_port(), threading.Event(), threading.Event()
        payload = encode(NixlHandshakePayload("5ca1ab1e", b"metadata"))
        listener = threading.Thread(
            target=NixlConnectorScheduler._nixl_handshake_listener,
            args=(forms.upstreams_payloads(payload, 2), ready, stop, HOST, port),
            daemon=True,
        )
        listener.start()
        try:
            assert ready.wait(DEADLINE_S)
            for _ in range(3):
                error = f"runs upstream's NixlConnector, but this engine runs {SPOKEN}: {REMEDY}"
                with pytest.raises(RemoteIncompatibleError, match=error):
                    fetch(port)
            assert re.search(f"unexpected message .*{SPOKEN} reads .*{REMEDY}", caplog_vllm.text)
            # Its own peers are still served.
            assert ask(port, encode(forms.upstreams_request(1)))[0] == payload
            assert listener.is_alive()
        finally:
            stop.set()
            listener.join(DEADLINE_S)

    @pytest.mark.parametrize(("numbers", "num_frames"), [((3,), 1), ((0, 3), 2)])
    def test_answer_has_as_many_frames_as_the_asker_expects(self, server, numbers, num_frames):
        """Of whatever release it is: one that is missing would end its handshake without a word."""
        with open_socket(zmq.REQ, server.port) as peer:
            before_s = time.perf_counter()
            peer.send(encode((GET_META_MSG, *numbers)))
            payload, *clock = peer.recv_multipart()
        assert (
            msgspec.msgpack.decode(payload, type=NixlHandshakePayload).agent_metadata_bytes == b""
        )
        assert len(clock) == num_frames - 1
        assert all(msgspec.msgpack.decode(each) > before_s for each in clock)

    @pytest.mark.parametrize("numbers", [(), (0,), (0, 0), (0, 0, 0)])
    def test_our_own_verb_is_answered_whatever_follows(self, server, numbers):
        """Peers on other releases send other numbers, and may be told what differs."""
        assert ask(server.port, encode((b"reshard/5", *numbers))) == REPLY
        assert ask(server.port, encode((b"reshard/5 and words", *numbers))) == REPLY

    @pytest.mark.parametrize("versions", ["5-6", "4-5", "1-99", "5-5"])
    def test_peer_that_speaks_other_versions_as_well_is_answered(self, server, versions):
        """In the newest that both speak."""
        assert ask(server.port, encode((f"reshard/{versions} words".encode(), 0))) == REPLY

    @pytest.mark.parametrize("versions", ["8-9", "1-4", "8"])
    def test_peer_that_speaks_other_versions_only_is_refused(self, server, warnings, versions):
        """It is told which this engine speaks, and the log has both."""
        answer = ask(server.port, encode((f"reshard/{versions}".encode(), 0)))
        with pytest.raises(RemoteRefusedError, match=f"reshard/{versions} is unknown, {SPOKEN} is"):
            metadata.decode_reply(answer, FACTORS, BOUNDS)
        assert f"request reshard/{versions} is unknown, {SPOKEN} is not: install" in warnings[0]

    @pytest.mark.parametrize("tp_rank", [0, 7])
    def test_upstreams_client_at_our_server(self, server, warnings, tp_rank):
        """It can decode the answer, cannot take it for a match, and quotes our words."""
        answer, *_ = ask(server.port, encode(forms.upstreams_request(tp_rank)))
        payload = msgspec.msgpack.decode(answer, type=NixlHandshakePayload)
        assert payload.compatibility_hash.startswith(f"{SPOKEN}: this engine does not run upstream")
        assert payload.agent_metadata_bytes == b""
        assert server.counters == ServerCounters(refused=1)
        assert re.search(f"a peer runs upstream's NixlConnector.*{REMEDY}", warnings[0])
        assert fetch(server.port) == WORKERS

    @pytest.mark.parametrize(
        ("enforced", "message"),
        [
            (True, f"hash mismatch.*{SPOKEN}: this engine does not run upstream's.*{REMEDY}"),
            (False, "Failed to decode NixlAgentMetadata"),
        ],
        ids=["hash checked", "hash not checked"],
    )
    def test_upstreams_worker_refuses_at_the_handshake(
        self, server, caplog_vllm, enforced, message
    ):
        """Its own code ends with an error that carries our words, and connects to nothing.

        Where it does not check, its error says nothing; our words stand in the line before that.
        """
        worker = SimpleNamespace(
            use_host_buffer=True,
            transfer_topo=SimpleNamespace(handshake_target_ranks=lambda *sizes: [0]),
            _is_csa_linear=False,
            compat_hash="5ca1ab1e",
            enforce_compat_hash=enforced,
        )
        with pytest.raises(RuntimeError, match=message):
            NixlConnectorWorker._nixl_handshake(worker, HOST, server.port, 1, "engine")
        assert enforced or re.search(f"check passed .*{REMEDY}", caplog_vllm.text)
        assert server.counters == ServerCounters(refused=1)


class TestStrangers:
    """Our server, and those who are no engines."""

    def test_unknown_request_is_refused_in_words(self, server):
        """The refusal reads as such for our own client, and names the request."""
        answer = msgspec.msgpack.decode(ask(server.port, encode([b"what?\n", 0]))[0])
        assert answer["refusal"] == rf"request 'what?\n' is unknown, {SPOKEN} is not"
        assert server.counters == ServerCounters(refused=1)

    @pytest.mark.parametrize(
        "parts",
        [
            [b""],
            [b"garbage"],
            [b"", b""],
            [b"", b"garbage"],
            [b"", encode("reshard/5")],
            [b"", encode([])],
            [b"", encode({"verb": b"reshard/5"})],
            [b"", encode(["reshard/5", 0])],
            [b"", b"\xdd\xff\xff\xff\xff"],
            [b"", b"\x91" * 60_000],
            [b"", b"\x92" + encode(b"reshard/5") + b"\x91" * 60_000],
            [b"", encode([b"reshard/5", 0]) + b"\0"],
            [encode([b"reshard/5", 0])],
            [b"x", encode([b"reshard/5", 0])],
            [b"", b"", encode([b"reshard/5", 0])],
            [b"", encode([b"reshard/5", 0]), b""],
            [b"x"] * 1000,
        ],
        ids=lambda parts: b"|".join(parts)[:12].hex() or "empty",
    )
    def test_garbage_is_dropped_and_counted(self, server, warnings, parts):
        """What is no request gets no answer, and does not disturb the next one."""
        with open_socket(zmq.DEALER, server.port) as stranger:
            stranger.send_multipart(parts)
            wait_until(lambda: warnings)
            assert "bytes is no request" in warnings[0]
            assert server.counters == ServerCounters(dropped=1)
            stranger.send_multipart([b"", encode([b"reshard/5", 0])])
            assert stranger.recv_multipart() == [b"", *REPLY]

    def test_message_without_anything_is_dropped(self, server):
        """A socket type that sends neither envelope nor body is no matter."""
        with open_socket(zmq.REQ, server.port) as stranger:
            stranger.send(b"")
            wait_until(lambda: server.counters.dropped == 1)
        assert fetch(server.port) == WORKERS

    def test_ten_thousand_hostile_frames(self, server):
        """The thread is alive afterwards, and has counted each of them."""
        noise = random.Random(0)
        good = encode([b"reshard/5", 0])
        for number in range(100):
            # As many as one connection may bring.
            with open_socket(zmq.DEALER, server.port) as stranger:
                for _ in range(100):
                    kind = noise.randrange(4)
                    if kind == 0:
                        parts = [noise.randbytes(noise.randrange(1, 200))]
                    elif kind == 1:
                        parts = [b"", b"\xc1" + noise.randbytes(noise.randrange(200))]
                    elif kind == 2:
                        parts = [b"", encode([noise.randrange(1 << 60), b"reshard/5"])]
                    else:
                        parts = [b"x", *[good] * noise.randrange(1, 9)]
                    stranger.send_multipart(parts)
                wait_until(lambda so_far=100 * (number + 1): server.counters.dropped == so_far)
        assert fetch(server.port) == WORKERS
        assert server.counters == ServerCounters(answered=1, dropped=10_000)

    @pytest.mark.parametrize("frame_bytes", [0, 1000, 60 << 10])
    def test_request_that_never_ends(self, server, frame_bytes):
        """However it is divided, it is cut off with its connection, and costs next to nothing."""
        frame = b"\x03" + struct.pack(">Q", frame_bytes) + bytes(frame_bytes)
        before_bytes = resident_bytes()
        for _ in range(20):
            with socket.create_connection((HOST, server.port)) as stranger:
                stranger.settimeout(DEADLINE_S)
                greet(stranger, "REQ")
                with pytest.raises(ConnectionError):
                    while True:
                        stranger.sendall(b"\x01\x00" + frame * 100)
        assert resident_bytes() - before_bytes < 16 << 20
        assert fetch(server.port) == WORKERS
        # Some are cut off by ZeroMQ, which counts nothing.
        assert 1 <= server.counters.dropped <= 20

    def test_honest_peer_is_served_while_a_stranger_sends(self, server):
        """As fast as it can, over one connection after another: most within 100 ms."""
        over = threading.Event()

        def send() -> None:
            while not over.is_set():
                with (
                    contextlib.suppress(OSError),
                    socket.create_connection((HOST, server.port)) as stranger,
                ):
                    stranger.settimeout(DEADLINE_S)
                    greet(stranger, "REQ")
                    while not over.is_set():
                        stranger.sendall(b"\x03" + struct.pack(">Q", 60 << 10) + bytes(60 << 10))

        took_s = []
        with ThreadPoolExecutor(1) as pool, asking() as client:
            sending = pool.submit(send)
            try:
                for _ in range(20):
                    began_s = time.monotonic()
                    asked = client.request(engine_at(server.port), FACTORS)
                    assert asked.result(DEADLINE_S) == WORKERS
                    took_s.append(time.monotonic() - began_s)
            finally:
                over.set()
            sending.result(DEADLINE_S)
        # All of them, where nothing else needs this machine's cores.
        assert sorted(took_s)[len(took_s) // 2] < 0.1, took_s

    def test_oversized_frame_ends_its_connection(self, server):
        """It is not taken in, and nobody else notices."""
        with open_socket(zmq.DEALER, server.port) as stranger:
            monitor = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            stranger.send_multipart([b"", bytes(MAX_REQUEST_BYTES + 1)])
            assert monitor.poll(DEADLINE_S * 1000), "the connection was kept"
            stranger.disable_monitor()
        assert fetch(server.port) == WORKERS
        assert server.counters == ServerCounters(answered=1)

    def test_largest_frame_is_taken_in(self, server):
        """The bound is where it is said to be."""
        with open_socket(zmq.DEALER, server.port) as stranger:
            stranger.send_multipart([b"", bytes(MAX_REQUEST_BYTES)])
            wait_until(lambda: server.counters.dropped == 1)

    @pytest.mark.parametrize(
        "garbage",
        [
            b"",
            b"\0" * 100,
            b"GET / HTTP/1.1\r\n\r\n",
            b"\xff" * 10_000,
            b"\xff\0\0\0\0\0\0\0\1\x7f",
        ],
        ids=["nothing", "zeros", "http", "ones", "half a greeting"],
    )
    def test_other_protocols(self, server, warnings, garbage):
        """Bytes that are not even ZeroMQ's are counted, told of once, and do no harm."""
        with contextlib.ExitStack() as kept:
            for _ in range(20):
                raw = kept.enter_context(socket.create_connection((HOST, server.port)))
                with contextlib.suppress(ConnectionError):
                    raw.sendall(garbage)
            assert fetch(server.port) == WORKERS
        # Who waits for the rest of a greeting may still be an engine; who leaves before it is none.
        is_over = garbage[9:10] != b"\x7f"
        wait_until(lambda: server.counters == ServerCounters(answered=1, dropped=20 * is_over))
        assert len(warnings) == is_over
        assert all(
            "no engine has asked (" in line and "let only engines" in line for line in warnings
        )

    def test_peer_that_does_not_read(self):
        """Who asks again and again without listening holds up nobody, and loses the answers."""
        worker = replace(WORKERS[0], agent_metadata=bytes(1 << 20))
        with serving(reply_of(worker)) as server, open_socket(zmq.DEALER) as deaf:
            deaf.rcvhwm = 1
            deaf.connect(f"tcp://{HOST}:{server.port}")
            for _ in range(300):
                deaf.send_multipart([b"", encode([b"reshard/5", 0])])
            wait_until(lambda: server.counters.answered == 300)
            assert fetch(server.port) == (worker,)
            deaf.rcvtimeo = int(1000 * SHORT_S)
            received = 0
            with contextlib.suppress(zmq.Again):
                while deaf.recv_multipart():
                    received += 1
            assert 1 <= received < 100

    def test_failure_inside_is_survived(self, server, monkeypatch):
        """A fault of our own costs one request, not the thread."""

        def fail(frame: bytes) -> bytes | None:
            raise OSError("out of luck")

        with monkeypatch.context() as patch, open_socket(zmq.DEALER, server.port) as stranger:
            patch.setattr(side_channel, "_read_request", fail)
            stranger.send_multipart([b"", b"x"])
            wait_until(lambda: server.counters == ServerCounters(dropped=1))
        assert fetch(server.port) == WORKERS

    def test_breakdown_of_the_socket_is_survived(self, server, warnings, monkeypatch):
        """Others are opened at the same port, nothing is lost, and one line says so."""
        receive, broken = zmq.asyncio.Socket.recv_multipart, threading.Event()

        def fail_once(bare: zmq.asyncio.Socket, *args: object, **options: object) -> object:
            if bare.type == zmq.ROUTER and not broken.is_set():
                broken.set()
                raise zmq.ZMQError(zmq.ENOTSOCK)
            return receive(bare, *args, **options)

        monkeypatch.setattr(side_channel, "REOPEN_INTERVAL_S", 0.01)
        monkeypatch.setattr(zmq.asyncio.Socket, "recv_multipart", fail_once)
        # The first one is being waited for.
        assert fetch(server.port) == WORKERS
        assert fetch(server.port) == WORKERS
        assert broken.is_set()
        assert server.counters.breakdowns == 1
        (line,) = warnings
        assert f"{HOST}:{server.port}: it broke down (Socket operation on non-socket)" in line
        assert "restart this engine where that goes on" in line

    def test_end_of_the_thread_is_told(self, monkeypatch):
        """Should it end after all, there is an error in the log, with the remedy."""
        lines: list[str] = []
        monkeypatch.setattr(
            side_channel.logger, "error", lambda text, *values: lines.append(text % values)
        )
        monkeypatch.setattr(threading, "excepthook", lambda _: None)

        async def give_up(*work: Coroutine[Any, Any, object]) -> None:
            for each in work:
                each.close()
            raise SystemExit

        monkeypatch.setattr(side_channel, "first_of", give_up)
        with serving() as server:
            wait_until(lambda: lines)
            port = server.port
        assert lines == [
            f"Side channel {HOST}:{port} has ended: no other engine can connect to this one any "
            "more; restart this engine."
        ]

    def test_log_is_not_flooded(self, server, warnings, monkeypatch):
        """One line tells of any number of strangers, until some time has passed."""
        with open_socket(zmq.DEALER, server.port) as stranger:
            for _ in range(100):
                stranger.send_multipart([b"garbage"])
            wait_until(lambda: server.counters.dropped == 100)
            assert len(warnings) == 1
            assert (
                f"{server.port}: no engine has asked (a message of 7 bytes is no request)"
                in warnings[0]
            )
            monkeypatch.setattr(side_channel, "_COMPLAINT_INTERVAL_S", 0.0)
            stranger.send_multipart([b"garbage"])
            wait_until(lambda: len(warnings) == 2)
        assert "dropped=101" in warnings[1]

    def test_side_channel_that_accepts_nobody_says_why(self, warnings, monkeypatch):
        """Other engines only see that nothing answers."""
        accept, lacks = socket.socket.accept, threading.Event()

        def fail(listener: socket.socket) -> object:
            if lacks.is_set():
                raise OSError(errno.EMFILE, "Too many open files")
            return accept(listener)

        monkeypatch.setattr(socket.socket, "accept", fail)
        with serving() as server:
            lacks.set()
            with socket.create_connection((HOST, server.port)):
                wait_until(lambda: bool(warnings))
            lacks.clear()
            assert fetch(server.port) == WORKERS
        assert "no engine is answered ([Errno 24] Too many open files): raise" in warnings[0]
        assert "(ulimit -n)" in warnings[0]

    def test_one_complaint_hides_no_other(self, server, warnings):
        """Peers that differ in other ways within a minute are all told of, once each."""
        with open_socket(zmq.DEALER, server.port) as stranger:
            for verb in (b"get_meta_msg", b"reshard/8", b"get_meta_msg", b"reshard/8"):
                stranger.send_multipart([b"", msgspec.msgpack.encode((verb, 0))])
            stranger.send_multipart([b"garbage"])
            wait_until(lambda: server.counters == ServerCounters(refused=4, dropped=1))
        upstream, version, garbage = warnings
        assert "upstream's NixlConnector" in upstream
        assert "request reshard/8 is unknown" in version
        assert "is no request" in garbage


class TestLifeOfAServer:
    """`start` and `close`."""

    def test_port_that_is_taken(self, server):
        """The error names the address and the remedy, and a later start may succeed."""
        second = HandshakeServer(HOST, server.port, REPLIES)
        with pytest.raises(
            LocalChannelError,
            match=f"listen at {HOST}:{server.port} .*VLLM_NIXL_SIDE_CHANNEL_PORT to a free port",
        ) as caught:
            second.start()
        # Nothing else comes before it in the log of an engine that ends with it.
        assert "".join(traceback.format_exception(caught.value)).count("Error: ") == 1
        second.close()
        server.close()
        second.start()
        assert fetch(second.port) == WORKERS
        second.close()

    def test_address_of_another_machine(self):
        """The error says which address is wanted."""
        with pytest.raises(LocalChannelError, match="VLLM_NIXL_SIDE_CHANNEL_HOST to a numeric"):
            HandshakeServer("203.0.113.1", 0, REPLIES).start()

    def test_close_ends_the_thread_and_may_be_repeated(self, server):
        """It frees the port, and does nothing the second time."""
        thread = thread_named(THREAD)
        server.close()
        assert not thread.is_alive()
        server.close()
        with socket.socket() as free:
            free.bind((HOST, server.port))

    def test_close_waits_for_the_thread(self, server, monkeypatch):
        """The socket is not taken away from a thread that still uses it."""
        begun, go_on = threading.Event(), threading.Event()

        def wait(frame: bytes) -> bytes | None:
            begun.set()
            go_on.wait(DEADLINE_S)
            return None

        monkeypatch.setattr(side_channel, "_read_request", wait)
        with open_socket(zmq.REQ, server.port) as stranger, ThreadPoolExecutor(1) as pool:
            stranger.send(b"x")
            assert begun.wait(DEADLINE_S)
            closing = pool.submit(server.close)
            try:
                with pytest.raises(TimeoutError):
                    closing.result(SHORT_S)
            finally:
                go_on.set()
            closing.result(DEADLINE_S)

    def test_close_without_start(self):
        """A server that never listened has nothing to give back."""
        HandshakeServer(HOST, 0, REPLIES).close()

    def test_close_in_several_threads(self, server):
        """Nobody waits for ever."""
        with ThreadPoolExecutor(4) as pool:
            for closing in [pool.submit(server.close) for _ in range(4)]:
                closing.result(DEADLINE_S)

    def test_start_twice(self, server):
        """The second start changes nothing."""
        port, thread = server.port, thread_named(THREAD)
        server.start()
        assert (server.port, thread_named(THREAD)) == (port, thread)

    def test_thread_that_does_not_start(self, monkeypatch):
        """Leaves no port taken, and nothing to close; it is started when there are threads."""

        def no_more(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        server = HandshakeServer(HOST, 0, REPLIES)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_more)
            says = r"no thread \(can't start new thread\): raise .*ulimit -u"
            with pytest.raises(LocalChannelError, match=says):
                server.start()
        server.close()
        server.start()
        assert fetch(server.port) == WORKERS
        server.close()

    def test_ipv6(self):
        """Addresses with colons are written as ZeroMQ wants them."""
        try:
            with socket.socket(socket.AF_INET6) as probe:
                probe.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
        server = HandshakeServer("::1", 0, REPLIES)
        server.start()
        try:
            assert fetch(server.port, host="::1") == WORKERS
        finally:
            server.close()
