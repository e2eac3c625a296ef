# SPDX-License-Identifier: Apache-2.0
"""Asking other engines what they are: all of them at once, in one thread.

    ask --inbox--> wait for addresses --> wait for a place --> connect --> wait for the answer
                   of a host's name       among those asked

Clients name the hosts, so that any number of them may not be there, not answer, or answer with
anything. Each is asked on a socket of its own, and all sockets are polled together; each ask has
one deadline for all of its way, whatever it waits for; and what an answer may hold is bounded
before it is received. ZeroMQ is given addresses only, never names, which it would look up in the
thread that serves all connections.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum, auto
from queue import Empty, SimpleQueue

import msgspec
import zmq
from vllm.logger import init_logger
from vllm.utils.network_utils import is_valid_ipv6_address, make_zmq_path

from ..errors import (
    RemoteEngineChangedError,
    RemoteHandshakeError,
    RemoteUnreachableError,
    RemoteUntrustedError,
)
from ..protocol.bounds import MAX_REPLY_BYTES, ReplyBounds
from ..protocol.compatibility import quote
from ..protocol.messages import RemoteEngineAddress
from ..protocol.metadata import OUR_VERB, WorkerDescription, decode_reply
from ..protocol.trust import TrustedPeers, numeric
from .authentication import ChannelKey
from .lookups import Found, Lookups
from .wakeup import Waker

logger = init_logger(__name__)

DEFAULT_TIMEOUT_S = 10.0

MAX_ASKED = 512
"""Engines that are connected to at once: two or three descriptors each."""

MAX_ENQUIRIES = 4096
"""Engines that are asked or wait to be asked; more are refused at once."""

_RECONNECT_MS, _LAST_RECONNECT_MS = 100, 1000
"""How soon a connection that was refused is tried again, and how soon after many tries."""

_OTHER_SOCKETS = 16
_PAUSE_S = 1.0

Answer = tuple[WorkerDescription, ...]


class _Stage(Enum):
    """What an ask waits for."""

    NAME = auto()
    PLACE = auto()
    CONNECTION = auto()
    ANSWER = auto()


@dataclass(slots=True, eq=False)
class _Enquiry:
    """One ask, from the call to its end.

    Attributes:
        address: Who is asked.
        factors: What must be equal at both engines; None to take any.
        deadline_s: When it ends in any case.
        future: What the asker holds.
        stage: What it waits for.
        addresses: Where its host is.
        socket: While it connects and waits for an answer.
    """

    address: RemoteEngineAddress
    factors: Mapping[str, str] | None
    deadline_s: float
    future: Future[Answer] = field(default_factory=Future)
    stage: _Stage = _Stage.NAME
    addresses: tuple[str, ...] = ()
    socket: zmq.Socket[bytes] | None = None


class Enquirer:
    """Asks engines what they are.

    `ask` and `close` may be called by any thread. Everything else belongs to the enquirer's own
    thread, which `ask` starts, and which completes the futures.

    Args:
        bounds: What an answer may hold; None to take whatever an engine of any model could say.
        numbers: What follows the verb, as many as upstream's listener of this release takes.
        key: What engines know one another by; None where they do not.
        trusted: Where hosts may be; None for anywhere.
        timeout_s: How long an ask may take, from the call to its end.
    """

    def __init__(
        self,
        bounds: ReplyBounds | None,
        *,
        numbers: Sequence[int] = (0, 0),
        key: ChannelKey | None = None,
        trusted: TrustedPeers | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self._bounds = bounds
        self._request = msgspec.msgpack.encode((OUR_VERB, *numbers))
        self._key = key
        self._trusted = trusted
        self._timeout_s = timeout_s
        self._max_bytes = MAX_REPLY_BYTES if bounds is None else bounds.max_reply_bytes
        self._inbox: SimpleQueue[_Enquiry] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._waker = Waker()
        # All that follows belongs to the thread.
        self._poller = zmq.Poller()
        self._lookups = Lookups(self._waker.wake)
        # All have the same time, so that the first to come is the first whose time is over.
        self._enquiries: dict[_Enquiry, None] = {}
        self._by_name: dict[str, dict[_Enquiry, None]] = {}
        self._placeless: dict[_Enquiry, None] = {}
        self._by_socket: dict[zmq.Socket[bytes], _Enquiry] = {}

    def ask(
        self, address: RemoteEngineAddress, factors: Mapping[str, str] | None
    ) -> Future[Answer]:
        """Ask an engine what it is; does not wait.

        Args:
            address: Where its side channel listens, and who should answer.
            factors: What must be equal at both engines, as it is here; None to take any.

        Returns:
            What each of its workers says, in the order of ranks, at least one; or one of these:

                RemoteUnreachableError     nobody answered in time, or there is no such host
                RemoteUntrustedError       the host is not where hosts may be
                RemoteIncompatibleError    another connector or version, or factors differ
                RemoteRefusedError         the peer declined
                RemoteEngineChangedError   another engine answers there
                RemoteHandshakeError       the answer is malformed, out of bounds, or contradicts
                                           itself

            An ask that is cancelled, or is under way at `close`, is cancelled.

        Raises:
            RuntimeError: The enquirer is closed.
        """
        enquiry = _Enquiry(address, factors, time.monotonic() + self._timeout_s)
        with self._lock:
            if self._closing.is_set():
                raise RuntimeError("enquirer is closed")
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="reshard-enquirer", daemon=True
                )
                self._thread.start()
            self._inbox.put(enquiry)
        self._waker.wake()
        return enquiry.future

    def close(self) -> None:
        """Cancel what is under way, and wait until the thread has ended; may be called repeatedly.

        Threads that look names up end when the resolver lets them.
        """
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
        self._waker.wake()
        if self._thread is not None:
            self._thread.join()
        self._waker.close()

    def _run(self) -> None:
        """The thread: what breaks costs the asks that are under way, and the next begin anew."""
        while not self._closing.is_set():
            try:
                self._serve()
            except Exception as error:
                self._take_inbox()
                logger.error(
                    "Asking other engines broke off (%r): %d handshakes fail with it.",
                    error,
                    len(self._enquiries),
                )
                for enquiry in list(self._enquiries):
                    self._fail(enquiry, _broken_off(error))
                self._closing.wait(_PAUSE_S)
        self._take_inbox()
        for enquiry in self._enquiries:
            enquiry.future.cancel()

    def _serve(self) -> None:
        """Take asks through their stages until closed."""
        context = zmq.Context()
        try:
            context.max_sockets = MAX_ASKED + _OTHER_SOCKETS
            self._poller = zmq.Poller()
            self._poller.register(self._waker, zmq.POLLIN)
            while not self._closing.is_set():
                self._take_inbox()
                for name, found in self._lookups.take():
                    for enquiry in self._by_name.pop(name, {}):
                        self._take_addresses(enquiry, found)
                self._expire()
                self._connect(context)
                for ready, _ in self._poller.poll(self._rest_ms()):
                    if (asked := self._by_socket.get(ready)) is not None:
                        self._advance(asked)
                    else:
                        self._waker.clear()
        finally:
            context.destroy(linger=0)

    def _take_inbox(self) -> None:
        """Begin with what was asked since the last time."""
        while True:
            try:
                enquiry = self._inbox.get_nowait()
            except Empty:
                return
            if len(self._enquiries) >= MAX_ENQUIRIES:
                reason = (
                    f"not asked, as {len(self._enquiries)} other engines are being asked: see who "
                    "names so many hosts; trusted_peers says where they may be"
                )
                self._fail(enquiry, RemoteUnreachableError(reason))
                continue
            self._enquiries[enquiry] = None
            host = enquiry.address.host
            if numeric(host) is not None:
                self._take_addresses(enquiry, (host,))
            else:
                self._by_name.setdefault(host, {})[enquiry] = None
                self._lookups.want(host)

    def _take_addresses(self, enquiry: _Enquiry, found: Found) -> None:
        """Queue an ask, if there is somewhere to connect to and that is allowed."""
        if not 0 < enquiry.address.port < 1 << 16:
            found = "a port is a number from 1 to 65535"
        if isinstance(found, str):
            reason = (
                f"no address to connect to ({quote(found)}): check what the router passes on as "
                "remote_host and remote_port"
            )
            self._fail(enquiry, RemoteUnreachableError(reason))
            return
        if self._trusted is not None:
            faults = {address: self._trusted.fault(address) for address in found}
            found = tuple(address for address, fault in faults.items() if fault is None)
            if not found:
                reason = next(filter(None, faults.values()))
                self._fail(enquiry, RemoteUntrustedError(reason))
                return
        enquiry.addresses, enquiry.stage = found, _Stage.PLACE
        self._placeless[enquiry] = None

    def _connect(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Connect to those for whom there is a place."""
        while self._placeless and len(self._by_socket) < MAX_ASKED:
            enquiry = next(iter(self._placeless))
            del self._placeless[enquiry]
            try:
                enquiry.socket = self._open(context, enquiry)
            except zmq.ZMQError as error:
                self._fail(enquiry, _broken_off(error))
                continue
            self._by_socket[enquiry.socket] = enquiry
            self._poller.register(enquiry.socket, zmq.POLLOUT)
            enquiry.stage = _Stage.CONNECTION

    def _open(
        self, context: zmq.Context[zmq.Socket[bytes]], enquiry: _Enquiry
    ) -> zmq.Socket[bytes]:
        """Begin to connect to all of a host's addresses; the first that is reached is asked."""
        client = context.socket(zmq.REQ)
        try:
            client.linger = 0
            client.ipv6 = any(map(is_valid_ipv6_address, enquiry.addresses))
            client.maxmsgsize = self._max_bytes
            client.reconnect_ivl, client.reconnect_ivl_max = _RECONNECT_MS, _LAST_RECONNECT_MS
            # Nothing is sent before there is a connection: that tells a peer that cannot be reached
            # from one that does not answer.
            client.immediate = 1
            if self._key is not None:
                self._key.show(client)
            for address in enquiry.addresses:
                client.connect(make_zmq_path("tcp", address, enquiry.address.port))
        except BaseException:
            client.close(linger=0)
            raise
        return client

    def _advance(self, enquiry: _Enquiry) -> None:
        """Send the request over a connection, or read the answer."""
        assert enquiry.socket is not None
        try:
            if enquiry.stage is _Stage.CONNECTION:
                enquiry.socket.send(self._request, zmq.NOBLOCK)
                self._poller.register(enquiry.socket, zmq.POLLIN)
                enquiry.stage = _Stage.ANSWER
                return
            frames = enquiry.socket.recv_multipart(zmq.NOBLOCK)
            workers = self._read(frames, enquiry)
        except zmq.Again:
            # The connection was lost before it was used.
            return
        except zmq.ZMQError as error:
            self._fail(enquiry, _broken_off(error))
        except Exception as error:
            # Whatever it is, it comes from this peer's answer, and is nobody else's.
            self._fail(enquiry, error)
        else:
            self._end(enquiry)
            if enquiry.future.set_running_or_notify_cancel():
                enquiry.future.set_result(workers)

    def _read(self, frames: Sequence[bytes], enquiry: _Enquiry) -> Answer:
        """Decode an answer, and see that it is from whom it should be.

        Raises:
            RemoteHandshakeError: It cannot be used.
        """
        if len(frames) > 2:
            raise RemoteHandshakeError(
                f"the answer has {len(frames)} parts, which are more than 2: check that the port "
                "is an engine's VLLM_NIXL_SIDE_CHANNEL_PORT"
            )
        workers = decode_reply(frames[0], enquiry.factors, self._bounds)
        engine_id, expected = workers[0].engine_id, enquiry.address.engine_id
        if engine_id != expected:
            raise RemoteEngineChangedError(
                f"engine {quote(engine_id)} answers, not {quote(expected)}: the peer was restarted "
                "and has lost its KV cache, or the address is another engine's; send the request "
                "through prefill again"
            )
        return workers

    def _expire(self) -> None:
        """End asks whose time is over, and those that nobody waits for any more."""
        now_s = time.monotonic()
        while self._enquiries:
            enquiry = next(iter(self._enquiries))
            if enquiry.deadline_s > now_s and not enquiry.future.cancelled():
                return
            self._fail(enquiry, RemoteUnreachableError(self._what_was_missing(enquiry.stage)))

    def _what_was_missing(self, stage: _Stage) -> str:
        """What an ask still waited for at its end, and what to do about it."""
        within = f"within {self._timeout_s:g} s"
        match stage:
            case _Stage.NAME:
                return (
                    f"the host's name was not resolved {within}: check what the router passes on "
                    "as remote_host, and this machine's resolver"
                )
            case _Stage.PLACE:
                return (
                    f"not asked {within}, as {MAX_ASKED} other engines were: see who names so many "
                    "hosts that do not answer; trusted_peers says where they may be"
                )
            case _Stage.CONNECTION:
                return (
                    f"no connection {within}: check that the engine runs, that this machine can "
                    "reach its VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT, and that both engines have "
                    "the same side_channel_key_file, or none"
                )
            case _Stage.ANSWER:
                return (
                    f"connected, but no answer of at most {self._max_bytes} bytes {within}: check "
                    "that the port is the engine's VLLM_NIXL_SIDE_CHANNEL_PORT, and that the "
                    "engine is not stuck"
                )

    def _fail(self, enquiry: _Enquiry, error: Exception) -> None:
        """End an ask with an error that says who was asked."""
        self._end(enquiry)
        if enquiry.future.set_running_or_notify_cancel():
            if isinstance(error, RemoteHandshakeError):
                address = enquiry.address
                where = f"side channel {quote(address.host)}:{address.port}"
                error = type(error)(f"{where}: {error}")
            enquiry.future.set_exception(error)

    def _end(self, enquiry: _Enquiry) -> None:
        """Give back what an ask has, in whichever stage it is."""
        self._enquiries.pop(enquiry, None)
        self._placeless.pop(enquiry, None)
        if enquiry.stage is _Stage.NAME:
            waiting = self._by_name.get(enquiry.address.host, {})
            waiting.pop(enquiry, None)
            if not waiting and self._by_name.pop(enquiry.address.host, None) is not None:
                self._lookups.forget(enquiry.address.host)
        if enquiry.socket is not None:
            del self._by_socket[enquiry.socket]
            if enquiry.socket in self._poller:
                self._poller.unregister(enquiry.socket)
            enquiry.socket.close(linger=0)
            enquiry.socket = None

    def _rest_ms(self) -> int | None:
        """How long to poll: until the first deadline."""
        for enquiry in self._enquiries:
            return max(0, math.ceil(1e3 * (enquiry.deadline_s - time.monotonic())))
        return None


def _broken_off(error: Exception) -> RemoteUnreachableError:
    return RemoteUnreachableError(f"the exchange broke off ({error}): check that the engine runs")
