# SPDX-License-Identifier: Apache-2.0
"""The side channel: where an engine says what it is, and where it asks others.

A server has one reply, made once, for whoever asks; a client asks once. Both speak ZeroMQ's request
and reply over TCP. A request is the same kind of frame that upstream's NixlConnector sends, a verb
and numbers, because either connector may find the other one at an address, and neither may come to
harm by it. Upstream's once had one number and one frame for an answer; now it has two of each, the
second frame being its clock. Its listener ends when it is sent more or fewer numbers.

    request to us                            what we answer
    [b"reshard/<our version>", ...]          the engine's reply
    [b"get_meta_msg", tp_rank]               what upstream reads as a mismatch, with our words in it
    [b"get_meta_msg", pp_rank, tp_rank]      the same, and a clock
    [any other verb, ...]                    a refusal
    anything else                            nothing

    our request to                           what it answers
    upstream's listener                      what it has for numbers 0, by which we recognise it
    another version of ours                  a refusal with its version

The address can be reached by others than engines. ZeroMQ itself closes connections that do not
speak its protocol or that send more than `MAX_REQUEST_BYTES`; what gets through is counted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

import msgspec
import zmq
from vllm.logger import init_logger
from vllm.utils.network_utils import is_valid_ipv6_address, make_zmq_path

from ..errors import (
    LocalChannelError,
    RemoteEngineChangedError,
    RemoteHandshakeError,
    RemoteUnreachableError,
)
from ..protocol.compatibility import quote
from ..protocol.metadata import (
    CONNECTOR_NAME,
    CONNECTOR_VERSION,
    MAX_REPLY_BYTES,
    WorkerDescription,
    decode_reply,
    encode_refusal,
    encode_refusal_for_upstream,
)

logger = init_logger(__name__)

MAX_REQUEST_BYTES = 64 << 10
"""Size of the largest frame that a server accepts, in bytes."""

DEFAULT_TIMEOUT_S = 10.0

_OUR_VERB = f"{CONNECTOR_NAME}/{CONNECTOR_VERSION}".encode()
_UPSTREAM_VERB = b"get_meta_msg"
_NO_NUMBER = msgspec.Raw()
_COMPLAINT_INTERVAL_S = 60.0
_QUEUED_MESSAGES = 4
"""Messages that ZeroMQ holds for one connection in each direction; a client waits for its reply, so
that more are held for those only who do not read."""


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
    """

    answered: int = 0
    refused: int = 0
    dropped: int = 0


class _Complaint(Enum):
    """What can be wrong with a request. One kind in the log does not hide another one."""

    STRANGER = auto()
    UPSTREAM = auto()
    VERSION = auto()
    FAILURE = auto()


class HandshakeServer:
    """Serves an engine's reply to any peer.

    `start` and `close` may be called by any thread. The socket is bound by the caller of `start`
    and belongs to the server's own thread from then on, as do the counters; `counters` reads a
    value that the thread replaces as a whole.

    Args:
        host: Address of this machine to listen at.
        port: TCP port; 0 for any that is free.
        reply: What to answer.
    """

    def __init__(self, host: str, port: int, reply: bytes) -> None:
        self._host = host
        self._port = port
        self._reply = reply
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
            context = zmq.Context()
            try:
                listener = self._bind(context)
                waker, wakened = (context.socket(zmq.PAIR) for _ in range(2))
                wakened.bind("inproc://stop")
                waker.connect("inproc://stop")
            except BaseException:
                context.destroy(linger=0)
                raise
            thread = threading.Thread(
                target=self._serve,
                args=(listener, wakened),
                name="reshard-handshake-server",
                daemon=True,
            )
            self._running = _Running(context, waker, thread)
            thread.start()

    def close(self) -> None:
        """Stop listening, and wait until the thread has ended; may be called repeatedly."""
        with self._lock:
            if self._running is None:
                return
            running, self._running = self._running, None
            running.waker.send(b"")
            running.thread.join()
            running.context.destroy(linger=0)

    def _bind(self, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
        listener = context.socket(zmq.ROUTER)
        listener.linger = 0
        listener.ipv6 = is_valid_ipv6_address(self._host)
        listener.maxmsgsize = MAX_REQUEST_BYTES
        listener.sndhwm = listener.rcvhwm = _QUEUED_MESSAGES
        # Peers that vanish without a word do not stay connected for ever.
        listener.tcp_keepalive = 1
        try:
            listener.bind(make_zmq_path("tcp", self._host, self._port))
        except zmq.ZMQError as error:
            # The engine ends with this error, and ZeroMQ's, which it quotes, would stand before it.
            raise LocalChannelError(
                f"the side channel cannot listen at {self._host}:{self._port} ({error}): set "
                "VLLM_NIXL_SIDE_CHANNEL_PORT to a free port, another one for every engine on a "
                "machine, and VLLM_NIXL_SIDE_CHANNEL_HOST to a numeric address of this machine"
            ) from None
        endpoint = listener.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        self._port = int(endpoint.rstrip(b"\0").rpartition(b":")[2])
        return listener

    def _serve(self, listener: zmq.Socket[bytes], wakened: zmq.Socket[bytes]) -> None:
        """The thread: answer until wakened."""
        poller = zmq.Poller()
        poller.register(listener, zmq.POLLIN)
        poller.register(wakened, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if wakened in ready:
                    return
                try:
                    self._serve_one(listener)
                except Exception as error:
                    # Whatever it is, the next peer is to be served.
                    self._count(dropped=1)
                    self._complain(_Complaint.FAILURE, f"a request failed: {error!r}")
        finally:
            listener.close(linger=0)
            wakened.close(linger=0)

    def _serve_one(self, listener: zmq.Socket[bytes]) -> None:
        """Take one message, and answer it if it is a request."""
        sender, *envelope, frame = listener.recv_multipart(zmq.NOBLOCK)
        request = _read_request(frame) if envelope == [b""] else None
        if request is None:
            self._count(dropped=1)
            self._complain(_Complaint.STRANGER, f"a message of {len(frame)} bytes is no request")
            return
        verb = request.verb
        if verb == _OUR_VERB:
            answer = [self._reply]
            self._count(answered=1)
        else:
            name = quote(verb[:100].decode(errors="backslashreplace"))
            if verb == _UPSTREAM_VERB:
                answer = [encode_refusal_for_upstream()]
                if request.second_number:
                    answer.append(msgspec.msgpack.encode(time.perf_counter()))
                self._complain(
                    _Complaint.UPSTREAM,
                    "a peer runs upstream's NixlConnector: configure the same connector on both "
                    "engines",
                )
            else:
                known = _OUR_VERB.decode()
                answer = [encode_refusal(f"request {name} is unknown, {known} is not")]
                self._complain(
                    _Complaint.VERSION,
                    f"request {name} is unknown: run the same build on both engines",
                )
            self._count(refused=1)
        # A peer that does not read loses its answers, and holds up nobody.
        listener.send_multipart([sender, b"", *answer], zmq.NOBLOCK)

    def _count(self, *, answered: int = 0, refused: int = 0, dropped: int = 0) -> None:
        counters = self._counters
        self._counters = replace(
            counters,
            answered=counters.answered + answered,
            refused=counters.refused + refused,
            dropped=counters.dropped + dropped,
        )

    def _complain(self, kind: _Complaint, what: str) -> None:
        """Log, but each kind once in a while only: others decide how often this happens."""
        now_s = time.monotonic()
        if now_s - self._complained_at_s.get(kind, -_COMPLAINT_INTERVAL_S) < _COMPLAINT_INTERVAL_S:
            return
        self._complained_at_s[kind] = now_s
        logger.warning(
            "Side channel %s:%d: %s. So far: %s. Further ones are only counted for %.0f s.",
            self._host,
            self._port,
            what,
            self._counters,
            _COMPLAINT_INTERVAL_S,
        )


@dataclass(frozen=True, slots=True)
class _Running:
    """What a started server has to give back."""

    context: zmq.Context[zmq.Socket[bytes]]
    waker: zmq.Socket[bytes]
    thread: threading.Thread


def fetch_handshake(
    host: str,
    port: int,
    local_factors: Mapping[str, str] | None,
    *,
    expected_engine_id: str,
    numbers: Sequence[int] = (0, 0),
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> tuple[WorkerDescription, ...]:
    """Ask an engine what it is, in one round trip.

    May be called by any thread; calls share nothing.

    Args:
        host: Where its side channel listens.
        port: TCP port.
        local_factors: What must be equal at both engines, as it is here; None to take any.
        expected_engine_id: Who should answer.
        numbers: What follows the verb, as many as upstream's listener of this release takes.
        timeout_s: How long to wait, in all.

    Returns:
        What each of its workers says, in the order of ranks; at least one.

    Raises:
        RemoteUnreachableError: Nobody answered in time.
        RemoteIncompatibleError: The peer runs another connector or version, or factors differ.
        RemoteRefusedError: The peer declined.
        RemoteEngineChangedError: Another engine answers there.
        RemoteHandshakeError: The answer is malformed or contradicts itself.
    """
    try:
        workers = decode_reply(_ask(host, port, numbers, timeout_s), local_factors)
    except RemoteHandshakeError as error:
        raise type(error)(f"side channel {quote(str(host))}:{port}: {error}") from error
    engine_id = workers[0].engine_id
    if engine_id != expected_engine_id:
        raise RemoteEngineChangedError(
            f"side channel {quote(str(host))}:{port}: engine {quote(engine_id)} answers, not "
            f"{quote(expected_engine_id)}: the peer was restarted and has lost its KV cache, or "
            "the address is another engine's; send the request through prefill again"
        )
    return workers


def _ask(host: str, port: int, numbers: Sequence[int], timeout_s: float) -> bytes:
    """Send a request and wait for what comes back."""
    try:
        return _exchange(host, port, msgspec.msgpack.encode((_OUR_VERB, *numbers)), timeout_s)
    except zmq.ZMQError as error:
        raise RemoteUnreachableError(
            f"the exchange broke off ({error}): check that the engine runs"
        ) from error


def _exchange(host: str, port: int, request: bytes, timeout_s: float) -> bytes:
    """One request and one reply."""
    deadline_s = time.monotonic() + timeout_s
    context = zmq.Context()
    try:
        client = context.socket(zmq.REQ)
        client.ipv6 = is_valid_ipv6_address(host)
        client.maxmsgsize = MAX_REPLY_BYTES
        # Nothing is sent before there is a connection: that tells a peer that cannot be reached
        # from one that does not answer.
        client.immediate = 1
        try:
            client.connect(make_zmq_path("tcp", host, port))
        except (zmq.ZMQError, UnicodeError) as error:
            raise RemoteUnreachableError(
                f"no address to connect to ({error}): check what the router passes on as "
                "remote_host and remote_port"
            ) from error
        if not client.poll(_remaining_ms(deadline_s), zmq.POLLOUT):
            raise RemoteUnreachableError(
                f"no connection within {timeout_s:g} s: check that the engine runs, and that this "
                "machine can reach its VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT"
            )
        client.send(request, zmq.NOBLOCK)
        if not client.poll(_remaining_ms(deadline_s), zmq.POLLIN):
            raise RemoteUnreachableError(
                f"connected, but no answer within {timeout_s:g} s: check that the port is the "
                "engine's VLLM_NIXL_SIDE_CHANNEL_PORT, and that the engine is not stuck"
            )
        frames = client.recv_multipart(zmq.NOBLOCK)
    finally:
        context.destroy(linger=0)
    if len(frames) > 2:
        raise RemoteHandshakeError(
            f"the answer has {len(frames)} parts, which are more than 2: check that the port is an "
            "engine's VLLM_NIXL_SIDE_CHANNEL_PORT"
        )
    return frames[0]


def _remaining_ms(deadline_s: float) -> int:
    return max(0, int(1e3 * (deadline_s - time.monotonic())))


def _read_request(frame: bytes) -> _Request | None:
    """What a request asks for; None for what is no request."""
    try:
        return _REQUEST_DECODER.decode(frame)
    except (msgspec.MsgspecError, RecursionError):
        return None
