# SPDX-License-Identifier: Apache-2.0
"""The server side of the side channel, which describes this engine to others.

The clients are in `handshake_client` and `subscriber`. A server sends one reply, made once, to
clients that ask what the engine is; to those that ask for requests, it sends what its scheduler
says of them, see `protocol.subscriptions`. Both use ZeroMQ over TCP. A request has the format of
upstream's NixlConnector, a verb and numbers, because either connector may find the other at an
address, and neither may be harmed by that. Older releases of upstream send one number and answer
one frame; newer ones send two numbers and answer two frames, the second being a clock. Upstream's
listener ends when it receives more or fewer numbers than it expects.

    request to us                            our answer
    [b"reshard/<versions> ...", ...]         the engine's reply, in the newest common version
    [b"get_meta_msg", tp_rank]               what upstream reads as a mismatch, with our message
    [b"get_meta_msg", pp_rank, tp_rank]      the same, and a clock
    [b"reshard-subscribe/1", ...]            this engine's id; then questions, and news as it comes
    [any other verb, ...]                    a refusal
    anything else                            nothing

    our request to                           its answer
    upstream's listener                      its reply for numbers 0, by which we recognise it;
                                             it logs the verb, and the words that follow it
    one of ours with other versions only     a refusal with its version

Other programs than engines can reach the address. A relay (`zmtp`) closes connections that do not
speak ZeroMQ's protocol or that send more than `MAX_REQUEST_BYTES`; the server counts these and the
rest. With a key, only clients that have it get through (`authentication`); failed attempts are
counted.
"""

from __future__ import annotations

import asyncio
import errno
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import NoReturn

import msgspec
import zmq
import zmq.asyncio
from vllm.logger import init_logger
from vllm.utils.network_utils import is_valid_ipv6_address

from ..errors import MEET_UPSTREAMS, LocalChannelError, one_line, quote
from ..protocol.compatibility import SPOKEN, read_verb
from ..protocol.ids import EngineId
from ..protocol.metadata import encode_refusal, encode_refusal_for_upstream
from ..protocol.subscriptions import (
    SUBSCRIBE,
    Leave,
    Publisher,
    decode_questions,
    encode_hello,
    encode_news,
)
from .authentication import ChannelKey, ZapHandler
from .limits import within_limit
from .zmtp import Allowance, first_of, relay_all

logger = init_logger(__name__)

MAX_REQUEST_BYTES = 64 << 10
"""Maximum bytes received over one connection. A request takes less than 512."""

_BACKLOG = 4096
"""Connections that the kernel queues until they are accepted, if its own limit allows. It drops
further ones, and the other end retries after a second."""

MAX_CONNECTIONS = 256
"""Maximum open connections; a further one closes the oldest of the address that has most. Fewer
where their files are more than a quarter of this process's limit."""

_FILES_PER_CONNECTION = 3

#: interval connection: the side channel closes it. Clients have left by then.
MAX_AGE_S = 30.0
"""Maximum lifetime of a connection. Clients give up after 10 s."""

REOPEN_INTERVAL_S = 1.0
"""Delay before new sockets are opened, after a breakdown and after each failed attempt."""

_EXPIRY_INTERVAL_S, _SEND_AGAIN_S = 1.0, 5e-3
"""How often subscriptions are looked through, and when news is sent again to who does not read."""

_UPSTREAM_VERB = b"get_meta_msg"
_NO_NUMBER = msgspec.Raw()
_COMPLAINT_INTERVAL_S = 60.0
_LOCKED_OUT = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_QUEUED_MESSAGES = 4
"""Messages that ZeroMQ queues for a connection, per direction. A client waits for its reply, so
only clients that do not read could fill more."""

_ALLOWANCE = Allowance(1024, MAX_REQUEST_BYTES)
"""Limited in frames, too: each costs ZeroMQ 64 bytes, however short it is."""


class _Request(msgspec.Struct, frozen=True, array_like=True):
    """A request's verb and numbers. Only how many numbers there are matters, not their values."""

    verb: bytes
    first_number: msgspec.Raw = _NO_NUMBER
    second_number: msgspec.Raw = _NO_NUMBER


_REQUEST_DECODER = msgspec.msgpack.Decoder(_Request)


@dataclass(frozen=True, slots=True)
class ServerCounters:
    """Counts of the requests that a server has received, by outcome.

    Attributes:
        answered: Requests answered with the engine's reply.
        refused: Well-formed requests with another verb or version.
        dropped: Messages that could not be decoded, or failed, and got no answer; and connections
            that do not speak ZeroMQ's protocol, or say more than engines do.
        locked_out: Connection attempts without the key; a client may make many.
        breakdowns: Number of times the server had to open new sockets.
    """

    answered: int = 0
    refused: int = 0
    dropped: int = 0
    locked_out: int = 0
    breakdowns: int = 0


class _Complaint(Enum):
    """Kinds of warnings. The log's rate limit applies to each kind separately."""

    STRANGER = auto()
    UPSTREAM = auto()
    VERSION = auto()
    FAILURE = auto()
    KEY = auto()
    BREAKDOWN = auto()
    LIMIT = auto()


class HandshakeServer:
    """Serves an engine's reply to any peer, or with a key, to any peer that has it.

    Any thread may call `start` and `close`. The caller of `start` opens the TCP socket; from then
    on it belongs to the server's own thread, as do ZeroMQ's sockets and the counters. `counters`
    reads a value that the thread replaces as a whole. The thread ends only with `close`: if
    ZeroMQ's sockets break down, it logs that and opens new ones.

    Args:
        host: Address of this machine to listen at.
        port: TCP port; 0 for any free one.
        replies: The reply's frames, by protocol version, for every version in `SPOKEN`.
        key: Key that clients must have; None to answer any client.
        engine_id: This engine's id, for those that ask for requests.

    Attributes:
        shortage: Why this engine's workers cannot serve further ones, whom the server then refuses;
            empty if they can. Any thread may set it.
        publisher: The requests that other engines may ask for. Belongs to the server's thread.
        came_round_s: When the scheduler last took up all requests that had arrived, by
            `time.monotonic`; infinite while it waits for some. The scheduler's thread sets it.
    """

    def __init__(
        self,
        host: str,
        port: int,
        replies: Mapping[int, Sequence[bytes]],
        key: ChannelKey | None = None,
        engine_id: EngineId = "",
    ) -> None:
        self._engine_id = engine_id
        self.publisher = Publisher()
        self.came_round_s = math.inf
        # What the scheduler has said, and the publisher has not heard of.
        self._said: deque[Callable[[Publisher], None]] = deque()
        self._has_news = asyncio.Event()
        self._host = host
        self._port = port
        self.shortage = ""
        self._replies = {version: list(reply) for version, reply in replies.items()}
        self._key = key
        self._counters = ServerCounters()
        self._complained_at_s: dict[_Complaint, float] = {}
        self._lock = threading.Lock()
        self._started: _Started | None = None

    @property
    def port(self) -> int:
        """The listening port, once the server has started."""
        return self._port

    @property
    def counters(self) -> ServerCounters:
        """Counts of all requests so far."""
        return self._counters

    def start(self) -> None:
        """Start listening; does nothing if the server has already started.

        Raises:
            LocalChannelError: The address cannot be bound, or there is no thread.
        """
        with self._lock:
            if self._started is not None:
                return
            listener = self._listen()
            loop, stopping = asyncio.new_event_loop(), asyncio.Event()
            thread = threading.Thread(
                target=self._run,
                args=(listener, loop, stopping),
                name="reshard-handshake-server",
                daemon=True,
            )
            try:
                thread.start()
            except RuntimeError as error:
                listener.close()
                loop.close()
                raise LocalChannelError(
                    f"the side channel has no thread ({one_line(error)}): raise the limits of "
                    "threads (ulimit -u, and pids.max of the container)"
                ) from None
            self._started = _Started(thread, loop, stopping)

    def tell(self, event: Callable[[Publisher], None]) -> None:
        """Have the publisher hear of an event; any thread may call it."""
        self._said.append(event)
        if len(self._said) == 1 and (started := self._started) is not None:
            try:
                started.loop.call_soon_threadsafe(self._has_news.set)
            except RuntimeError:
                # The thread has ended by itself: nobody will hear of anything.
                self._said.clear()

    def close(self) -> None:
        """Stop listening and wait until the thread has ended; may be called repeatedly."""
        with self._lock:
            if self._started is None:
                return
            started, self._started = self._started, None
            # The loop is closed if the thread has ended by itself.
            with suppress(RuntimeError):
                started.loop.call_soon_threadsafe(started.stopping.set)
            started.thread.join()

    def _listen(self) -> socket.socket:
        """Open the listening TCP socket.

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
            # The engine ends with this error; a chained traceback would be printed before it.
            raise LocalChannelError(
                f"the side channel cannot listen at {quote(self._host)}:{self._port:d} "
                f"({one_line(error)}): set "
                "VLLM_NIXL_SIDE_CHANNEL_PORT to a free port, another one for every engine on a "
                "machine, and VLLM_NIXL_SIDE_CHANNEL_HOST to a numeric address of this machine"
            ) from None
        self._port = listener.getsockname()[1]
        return listener

    def _run(
        self, listener: socket.socket, loop: asyncio.AbstractEventLoop, stopping: asyncio.Event
    ) -> None:
        """Run the server's thread: answer until stopped."""
        try:
            with listener, closing(loop):
                loop.run_until_complete(first_of(stopping.wait(), self._keep_serving(listener)))
        finally:
            if not stopping.is_set():
                logger.error(
                    "Side channel %s:%d has ended: no other engine can connect to this one any "
                    "more; restart this engine.",
                    quote(self._host),
                    self._port,
                )

    async def _keep_serving(self, listener: socket.socket) -> NoReturn:
        """Answer, opening new ZeroMQ sockets after each breakdown."""
        while True:
            try:
                await self._serve(listener)
            except Exception as error:
                self._count(breakdowns=1)
                self._complain(
                    _Complaint.BREAKDOWN,
                    f"it broke down ({one_line(error)}), and is tried again every "
                    f"{REOPEN_INTERVAL_S:g} s: restart this engine where that goes on",
                )
                await asyncio.sleep(REOPEN_INTERVAL_S)

    async def _serve(self, listener: socket.socket) -> NoReturn:
        """Answer all connections.

        Raises:
            ZMQError: A socket has become unusable.
        """
        context = zmq.asyncio.Context()
        try:
            router = context.socket(zmq.ROUTER)
            router.sndhwm = router.rcvhwm = _QUEUED_MESSAGES
            router.maxmsgsize = MAX_REQUEST_BYTES
            router.backlog = _BACKLOG
            router.router_mandatory = 1
            work = [self._answer_all(router), self._publish_all(router)]
            if self._key is not None:
                zap_handler = ZapHandler(context, self._key)
                self._key.configure_server(router)
                monitor = router.get_monitor_socket(_LOCKED_OUT)
                work += [zap_handler.answer_all(), self._count_locked_out(monitor)]
            most = within_limit(MAX_CONNECTIONS, 1 / 4, _FILES_PER_CONNECTION)
            limits = _ALLOWANCE, most, MAX_AGE_S
            heard = self._count_stranger, self._tell_limit
            work.append(relay_all(listener, router, *limits, *heard))
            await first_of(*work)
        finally:
            context.destroy(linger=0)
        raise AssertionError

    async def _count_locked_out(self, monitor: zmq.asyncio.Socket) -> NoReturn:
        """Count and log connections that failed their handshake."""
        while True:
            await monitor.recv_multipart()
            self._count(locked_out=1)
            self._complain(
                _Complaint.KEY,
                "somebody without this engine's key tried to connect: if that is an engine, give "
                "it the same side_channel_key_file",
            )

    def _count_stranger(self, what: object) -> None:
        """Count and log what a port scan, a health check or another program has sent."""
        self._count(dropped=1)
        remedy = "harmless from a port scan or a health check; let only engines reach this port"
        self._complain(_Complaint.STRANGER, f"no engine has asked ({one_line(what)}): {remedy}")

    def _tell_limit(self, error: OSError) -> None:
        """Log why other engines are not accepted."""
        self._complain(
            _Complaint.LIMIT,
            f"no engine is answered ({one_line(error)}): raise the limit of open files of this "
            f"process (ulimit -n), and see what holds them (ls -l /proc/{os.getpid():d}/fd)",
        )

    async def _answer_all(self, router: zmq.asyncio.Socket) -> NoReturn:
        """Receive messages, and answer those that are requests.

        Raises:
            ZMQError: The socket has become unusable.
        """
        while True:
            sender, *message = await router.recv_multipart()
            try:
                if (answer := self._answer(sender, message)) is not None:
                    # A peer that does not read loses its answers, and does not delay other peers.
                    await _send(router, sender, answer)
            except Exception as error:
                # Whatever the error, go on to serve the next peer.
                self._count(dropped=1)
                self._complain(_Complaint.FAILURE, f"a request failed: {error!r}")

    async def _publish_all(self, router: zmq.asyncio.Socket) -> NoReturn:
        """Send news of requests to those who ask for them.

        Raises:
            ZMQError: The socket has become unusable.
        """
        expires_at_s = 0.0
        while True:
            delay_s = _EXPIRY_INTERVAL_S if self.publisher.num_subscribers else None
            try:
                while self._said:
                    self._said.popleft()(self.publisher)
                if (now_s := time.monotonic()) >= expires_at_s:
                    self.publisher.expire(now_s, min(self.came_round_s, now_s))
                    expires_at_s = now_s + _EXPIRY_INTERVAL_S
                for connection, news in self.publisher.take().items():
                    for frame in encode_news(news):
                        if await _send(router, connection, [frame]) == errno.EAGAIN:
                            self.publisher.take_back(connection, news)
                            delay_s = _SEND_AGAIN_S
                            break
            except zmq.ZMQError:
                raise
            except Exception as error:
                self._complain(_Complaint.FAILURE, f"news was not sent: {error!r}")
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._has_news.wait(), delay_s)
            self._has_news.clear()

    def _answer(self, sender: bytes, message: list[bytes]) -> list[bytes] | None:
        """Return the frames to answer a message with; None if there is no answer, or not yet."""
        *envelope, frame = message
        if envelope == [b""] and (questions := decode_questions(frame)) is not None:
            # Whoever left before there was a connection leaves requests to those who ask since.
            for question in sorted(questions, key=lambda each: isinstance(each, Leave)):
                self.publisher.ask(sender, question, time.monotonic())
            self._has_news.set()
            return None
        request = _read_request(frame) if envelope == [b""] else None
        if request is None:
            self._count_stranger(f"a message of {len(frame)} bytes is no request")
            return None
        if request.verb == SUBSCRIBE:
            self._count(answered=1)
            return [encode_hello(self._engine_id)]
        verb, _, _ = request.verb.partition(b" ")
        theirs = read_verb(verb)
        version = None if theirs is None else SPOKEN.agreed(theirs)
        if version is not None and self.shortage:
            self._count(refused=1)
            return [
                encode_refusal(
                    f"no further engine can be served, as {one_line(self.shortage)} there: raise "
                    "that engine's limit (ulimit -n), or have fewer engines read from it"
                )
            ]
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
        """Log a warning, rate-limited by kind: other hosts decide how often this is called."""
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


@dataclass(frozen=True, slots=True)
class _Started:
    """A started server's thread, and what is needed to stop it."""

    thread: threading.Thread
    loop: asyncio.AbstractEventLoop
    stopping: asyncio.Event


async def _send(router: zmq.asyncio.Socket, peer: bytes, frames: list[bytes]) -> int:
    """Send to a peer without waiting; return 0, or why it was not sent: it does not read, or left.

    Raises:
        ZMQError: The socket has become unusable.
    """
    try:
        await router.send_multipart([peer, b"", *frames], zmq.NOBLOCK, copy=False)
    except zmq.ZMQError as error:
        if error.errno not in (errno.EAGAIN, errno.EHOSTUNREACH):
            raise
        return error.errno
    return 0


def _read_request(frame: bytes) -> _Request | None:
    """Decode a request; returns None if the frame is not one."""
    try:
        return _REQUEST_DECODER.decode(frame)
    except (msgspec.MsgspecError, RecursionError):
        return None
