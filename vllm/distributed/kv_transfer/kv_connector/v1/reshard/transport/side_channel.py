# SPDX-License-Identifier: Apache-2.0
"""The side channel: where an engine says what it is; `handshake_client` asks others.

A server has one reply, made once, for all that ask; a client asks once. Both speak ZeroMQ's request
and reply over TCP. A request is the same kind of frame that upstream's NixlConnector sends, a verb
and numbers, because either connector may find the other one at an address, and neither may come to
harm by it. Upstream's once had one number and one frame for an answer; now it has two of each, the
second frame being its clock. Its listener ends when it is sent more or fewer numbers.

    request to us                            what we answer
    [b"reshard/<versions> ...", ...]         the engine's reply, in the newest that is ours, too
    [b"get_meta_msg", tp_rank]               what upstream reads as a mismatch, with our words in it
    [b"get_meta_msg", pp_rank, tp_rank]      the same, and a clock
    [any other verb, ...]                    a refusal
    anything else                            nothing

    our request to                           what it answers
    upstream's listener                      what it has for numbers 0, by which we recognise it;
                                             it logs the verb, and the words that follow it
    one of ours with other versions only     a refusal with its version

The address can be reached by others than engines. A relay (`zmtp`) closes connections that do not
speak ZeroMQ's protocol or that send more than `MAX_REQUEST_BYTES`; what gets through is counted.
With a key, only those that have it get through (`authentication`); how many others tried is
counted.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import NoReturn

import msgspec
import zmq
import zmq.asyncio
from vllm.logger import init_logger
from vllm.utils.network_utils import is_valid_ipv6_address

from ..errors import MEET_UPSTREAMS, LocalChannelError
from ..protocol.metadata import encode_refusal, encode_refusal_for_upstream
from ..protocol.quoting import one_line, quote
from ..protocol.versions import SPOKEN, read_verb
from .authentication import ChannelKey, ZapHandler
from .zmtp import Allowance, bind_privately, first_of, relay_all

logger = init_logger(__name__)

MAX_REQUEST_BYTES = 64 << 10
"""What one connection may bring, in bytes. A request takes less than 512."""

_BACKLOG = 4096
"""Connections that the kernel keeps until they are taken, if it allows as many. Where there are
more, it drops what comes, and the other end tries again after a second."""

MAX_CONNECTIONS = 256
"""Connections at once; the oldest makes room for another one."""

MAX_AGE_S = 30.0
"""How long a connection is kept. Clients give up after 10 s."""

REOPEN_INTERVAL_S = 1.0
"""How long after a breakdown, and after each try that failed, other sockets are tried."""

_UPSTREAM_VERB = b"get_meta_msg"
_NO_NUMBER = msgspec.Raw()
_COMPLAINT_INTERVAL_S = 60.0
_LOCKED_OUT = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_QUEUED_MESSAGES = 4
"""Messages that ZeroMQ holds for one connection in each direction; a client waits for its reply, so
that more are held only for those that do not read."""

_ALLOWANCE = Allowance(1024, MAX_REQUEST_BYTES)
"""A frame takes ZeroMQ 64 bytes, however short it is."""


class _Request(msgspec.Struct, frozen=True, array_like=True):
    """What is read of a request: its numbers are for the other connector, but how many are not."""

    verb: bytes
    first_number: msgspec.Raw = _NO_NUMBER
    second_number: msgspec.Raw = _NO_NUMBER


_REQUEST_DECODER = msgspec.msgpack.Decoder(_Request)


@dataclass(frozen=True, slots=True)
class ServerCounters:
    """What became of the requests that a server has received.

    Attributes:
        answered: Were given the reply.
        refused: Were well-formed, but asked for something else.
        dropped: Were not understood and got no answer.
        locked_out: Connections without the key; each may be tried many times.
        breakdowns: How often the server had to listen anew.
    """

    answered: int = 0
    refused: int = 0
    dropped: int = 0
    locked_out: int = 0
    breakdowns: int = 0


class _Complaint(Enum):
    """What can be wrong with a request. One kind in the log does not hide another one."""

    STRANGER = auto()
    UPSTREAM = auto()
    VERSION = auto()
    FAILURE = auto()
    KEY = auto()
    BREAKDOWN = auto()


class HandshakeServer:
    """Serves an engine's reply to any peer, or to any that has the key.

    `start` and `close` may be called by any thread. The TCP socket is opened by the caller of
    `start` and belongs to the server's own thread from then on, as do ZeroMQ's sockets and the
    counters; `counters` reads a value that the thread replaces as a whole. The thread ends with
    `close` only: where ZeroMQ's sockets break down, it says so and opens others.

    Args:
        host: Address of this machine to listen at.
        port: TCP port; 0 for any that is free.
        replies: What to answer, as frames, in each version of the protocol that is spoken.
        key: What engines know one another by; None to answer anybody.
    """

    def __init__(
        self,
        host: str,
        port: int,
        replies: Mapping[int, Sequence[bytes]],
        key: ChannelKey | None = None,
    ) -> None:
        self._host = host
        self._port = port
        self._replies = {version: list(reply) for version, reply in replies.items()}
        self._key = key
        self._counters = ServerCounters()
        self._complained_at_s: dict[_Complaint, float] = {}
        self._lock = threading.Lock()
        self._running: _Running | None = None

    @property
    def port(self) -> int:
        """The port that is listened at, once started."""
        return self._port

    @property
    def counters(self) -> ServerCounters:
        """What became of all requests so far."""
        return self._counters

    def start(self) -> None:
        """Listen. Does nothing where the server has been started.

        Raises:
            LocalChannelError: The address cannot be bound.
        """
        with self._lock:
            if self._running is not None:
                return
            listener = self._listen()
            running = _Running(asyncio.new_event_loop(), asyncio.Event())
            running.thread = threading.Thread(
                target=self._run,
                args=(listener, running),
                name="reshard-handshake-server",
                daemon=True,
            )
            try:
                running.thread.start()
            except BaseException:
                listener.close()
                running.loop.close()
                raise
            self._running = running

    def close(self) -> None:
        """Stop listening, and wait until the thread has ended; may be called repeatedly."""
        with self._lock:
            if self._running is None:
                return
            running, self._running = self._running, None
            # There is no loop any more where the thread has ended by itself.
            with suppress(RuntimeError):
                running.loop.call_soon_threadsafe(running.stopping.set)
            assert running.thread is not None
            running.thread.join()

    def _listen(self) -> socket.socket:
        """Listen over TCP.

        Raises:
            LocalChannelError: The address cannot be bound.
        """
        ipv6 = is_valid_ipv6_address(self._host)
        try:
            listener = socket.create_server(
                (self._host, self._port),
                family=socket.AF_INET6 if ipv6 else socket.AF_INET,
                backlog=_BACKLOG,
                dualstack_ipv6=ipv6 and socket.has_dualstack_ipv6(),
            )
        except OSError as error:
            # The engine ends with this error, and the one that it quotes would stand before it.
            raise LocalChannelError(
                f"the side channel cannot listen at {quote(self._host)}:{self._port:d} "
                f"({one_line(error)}): set "
                "VLLM_NIXL_SIDE_CHANNEL_PORT to a free port, another one for every engine on a "
                "machine, and VLLM_NIXL_SIDE_CHANNEL_HOST to a numeric address of this machine"
            ) from None
        self._port = listener.getsockname()[1]
        return listener

    def _run(self, listener: socket.socket, running: _Running) -> None:
        """The thread: answer until stopped."""
        try:
            with listener, closing(running.loop):
                running.loop.run_until_complete(self._serve_until(running.stopping, listener))
        finally:
            if not running.stopping.is_set():
                logger.error(
                    "Side channel %s:%d has ended: no other engine can connect to this one any "
                    "more; restart this engine.",
                    quote(self._host),
                    self._port,
                )

    async def _serve_until(self, stopping: asyncio.Event, listener: socket.socket) -> None:
        """Answer until stopped."""
        await first_of(stopping.wait(), self._keep_serving(listener))

    async def _keep_serving(self, listener: socket.socket) -> NoReturn:
        """Answer, with other sockets of ZeroMQ's where these break down."""
        while True:
            try:
                await self._serve(listener)
            except Exception as error:
                self._count(breakdowns=1)
                self._complain(
                    _Complaint.BREAKDOWN,
                    f"it broke down ({one_line(error)}), and is tried again every "
                    f"{REOPEN_INTERVAL_S:g} s",
                )
                await asyncio.sleep(REOPEN_INTERVAL_S)

    async def _serve(self, listener: socket.socket) -> NoReturn:
        """Answer what connects.

        Raises:
            ZMQError: A socket cannot be used any more.
        """
        context = zmq.asyncio.Context()
        try:
            router = context.socket(zmq.ROUTER)
            router.sndhwm = router.rcvhwm = _QUEUED_MESSAGES
            router.maxmsgsize = MAX_REQUEST_BYTES
            router.backlog = _BACKLOG
            work = [self._answer_all(router)]
            if self._key is not None:
                zap_handler = ZapHandler(context, self._key)
                self._key.configure_server(router)
                monitor = router.get_monitor_socket(_LOCKED_OUT)
                work += [zap_handler.answer_all(), self._count_locked_out(monitor)]
            name = bind_privately(router)
            work.append(relay_all(listener, name, _ALLOWANCE, MAX_CONNECTIONS, MAX_AGE_S))
            await first_of(*work)
        finally:
            context.destroy(linger=0)
        raise AssertionError

    async def _count_locked_out(self, monitor: zmq.asyncio.Socket) -> NoReturn:
        """Take note of connections that ended before they were any."""
        while True:
            await monitor.recv_multipart()
            self._count(locked_out=1)
            self._complain(
                _Complaint.KEY,
                "somebody without this engine's key tried to connect: if that is an engine, give "
                "it the same side_channel_key_file",
            )

    async def _answer_all(self, router: zmq.asyncio.Socket) -> NoReturn:
        """Take messages, and answer those that are requests.

        Raises:
            ZMQError: The socket cannot be used any more.
        """
        while True:
            sender, *message = await router.recv_multipart()
            try:
                if (answer := self._answer(message)) is not None:
                    # A peer that does not read loses its answers, and holds up no other one.
                    await router.send_multipart([sender, b"", *answer], zmq.NOBLOCK, copy=False)
            except Exception as error:
                # Whatever it is, the next peer is to be served.
                self._count(dropped=1)
                self._complain(_Complaint.FAILURE, f"a request failed: {error!r}")

    def _answer(self, message: list[bytes]) -> list[bytes] | None:
        """What to answer to a message; None if it is no request."""
        *envelope, frame = message
        request = _read_request(frame) if envelope == [b""] else None
        if request is None:
            self._count(dropped=1)
            self._complain(_Complaint.STRANGER, f"a message of {len(frame)} bytes is no request")
            return None
        verb, _, _ = request.verb.partition(b" ")
        theirs = read_verb(verb)
        version = None if theirs is None else SPOKEN.agreed(theirs)
        if version is not None:
            self._count(answered=1)
            return self._replies[version]
        self._count(refused=1)
        if request.verb == _UPSTREAM_VERB:
            self._complain(
                _Complaint.UPSTREAM,
                f"a peer runs upstream's NixlConnector, and this engine does not: {MEET_UPSTREAMS}",
            )
            clock = [msgspec.msgpack.encode(time.perf_counter())] if request.second_number else []
            return [encode_refusal_for_upstream(), *clock]
        name = quote(verb[:100].decode(errors="backslashreplace"))
        self._complain(
            _Complaint.VERSION,
            f"request {name} is unknown, {SPOKEN} is not: install builds that have a version of "
            "it in common",
        )
        return [encode_refusal(f"request {name} is unknown, {SPOKEN} is not")]

    def _count(self, **more: int) -> None:
        counters = self._counters
        changed = {name: getattr(counters, name) + count for name, count in more.items()}
        self._counters = replace(counters, **changed)

    def _complain(self, kind: _Complaint, what: str) -> None:
        """Log, but each kind once in a while only: others decide how often this happens."""
        now_s = time.monotonic()
        if now_s - self._complained_at_s.get(kind, -_COMPLAINT_INTERVAL_S) < _COMPLAINT_INTERVAL_S:
            return
        self._complained_at_s[kind] = now_s
        logger.warning(
            "Side channel %s:%d: %s. So far: %s. Further ones are only counted for %.0f s.",
            quote(self._host),
            self._port,
            one_line(what),
            one_line(self._counters),
            _COMPLAINT_INTERVAL_S,
        )


@dataclass(slots=True)
class _Running:
    """A started server: how to reach its thread."""

    loop: asyncio.AbstractEventLoop
    stopping: asyncio.Event
    thread: threading.Thread | None = None


def _read_request(frame: bytes) -> _Request | None:
    """What a request asks for; None for what is no request."""
    try:
        return _REQUEST_DECODER.decode(frame)
    except (msgspec.MsgspecError, RecursionError):
        return None
