# SPDX-License-Identifier: Apache-2.0
"""Handshakes with other engines, concurrent on one event loop in one thread.

    request --> resolve the host's name --> wait for a place --> connect --> wait for the answer
        --> have its NIXL metadata tried

Clients name the hosts, so any number of hosts may not exist, not answer, or answer with anything.
Each handshake is a task with one deadline for all its stages. The number of handshakes under way is
bounded, and so is the size of an answer before it is received (`zmtp`, `bounds`).
"""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TypeAlias

import msgspec
import zmq
import zmq.asyncio
from vllm.logger import init_logger

from ..errors import (
    LocalLimitError,
    RemoteEngineChangedError,
    RemoteHandshakeError,
    RemoteMisdirectedError,
    RemoteUnreachableError,
    ReshardError,
    one_line,
    quote,
)
from ..protocol.bounds import MAX_RANKS, ReplyBounds, TrustedPeers, is_own
from ..protocol.compatibility import CONNECTOR_NAME
from ..protocol.description import WorkerDescription
from ..protocol.messages import RemoteEngineAddress
from ..protocol.metadata import OUR_REQUEST, decode_reply
from .authentication import ChannelKey
from .limits import shortage, within_limit
from .probe import MAX_AT_ONCE, MetadataProbe
from .resolver import Resolver
from .zmtp import (
    FRAME_OVERHEAD_BYTES,
    Allowance,
    ProtocolError,
    cancel_all,
    connected,
    first_of,
)

logger = init_logger(__name__)

#: deadline handshake: the handshake fails, and the requests that wait for it. Counted from the
#: lookup of the host's name until the answer's NIXL metadata was tried.
DEFAULT_TIMEOUT_S = 10.0

MAX_PENDING = 4096
"""Handshakes under way, waiting ones included; further ones are refused at once."""

MAX_CONNECTIONS = 512
"""Connections at the same time; further ones wait. Fewer where their files are more than a quarter
of this process's limit."""

_FILES_PER_CONNECTION = 5

SMALL_ANSWER_BYTES = 256 << 10
"""Answers up to this size are received without waiting. Eight workers' answer takes 100 KiB."""

MAX_LARGE_ANSWERS = 8
"""Larger answers that are received at the same time; further ones wait."""

_OTHER_FRAMES = 16
"""Frames of an answer besides its ranks': ZeroMQ's own, an empty one, and a greeting."""

_RETRY_S, _LAST_RETRY_S = 0.1, 1.0
"""Wait before a failed connection is tried again: the first time, and after many tries."""

_REFUSALS = 2
"""Refusals of an address that count as its answer: something on the way may refuse one of many
connections."""

_NEXT_ADDRESS_S = 0.25
"""How long one address of a name is tried before the next is tried, too (RFC 8305)."""

_OTHER_SOCKETS = 16

Answer: TypeAlias = tuple[WorkerDescription, ...]


class _Stage(IntEnum):
    """Stages of a handshake, named after what it waits for."""

    NAME = 0
    PLACE = 1
    CONNECTION = 2
    ANSWER = 3
    PROBE = 4


_MISSING = {
    _Stage.NAME: "the host's name was not resolved within {} s: check what the router passes on as "
    "remote_host, and this machine's resolver",
    _Stage.PLACE: "not asked within {} s, as too many other engines were: see who names so many "
    "hosts that do not answer; trusted_peers says where they may be",
    _Stage.CONNECTION: "no connection within {} s: check that the engine runs, that this machine "
    "can reach its VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT, and that both engines have the same "
    "side_channel_key_file, or none",
    _Stage.ANSWER: "connected, but no answer within {} s: check that the port is the engine's "
    "VLLM_NIXL_SIDE_CHANNEL_PORT, that the engine is not stuck, and that large packets get through "
    "(MTU)",
    _Stage.PROBE: "answered, but its NIXL metadata was not tried within {} s: see who names so "
    "many hosts, and whether this machine is overloaded; side_channel_key_file makes it needless",
}
"""Error message of a handshake that timed out, by the stage it had reached."""

_WEIGHTS_UNKNOWN = " Weights are not compared: one of the two engines does not tell its own."

_REFUSED = (
    "nothing listens there (connection refused), so that the engine has ended or listens "
    "elsewhere: check its VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT, and send the request through "
    "prefill again"
)


@dataclass(slots=True)
class _Handshake:
    """One handshake.

    Attributes:
        address: Side channel to ask, and the engine that should answer.
        required: Factors that must be equal at both engines; None to accept any.
        stage: Furthest stage reached with any of the host's addresses.
        num_left: Number of addresses that may still give the answer.
        fault: Why the answer of one of them cannot be used; None without such a one.
    """

    address: RemoteEngineAddress
    required: Mapping[str, str] | None
    stage: _Stage = _Stage.NAME
    num_left: int = 0
    fault: Exception | None = None

    def reach(self, stage: _Stage) -> None:
        """Record a stage; never goes back to an earlier one."""
        self.stage = max(self.stage, stage)

    def give_up(self, fault: Exception) -> None:
        """Record that an address is of no use: a name may have those of several engines.

        Raises:
            Exception: It was the last one.
        """
        self.num_left -= 1
        if not isinstance(fault, RemoteUnreachableError):
            self.fault = fault
        if not self.num_left:
            raise self.fault or fault

    def error(self, error: ReshardError) -> ReshardError:
        """Return an error with the asked engine's address in its message."""
        address = self.address
        message = f"side channel {quote(address.host)}:{address.port}: {error}"
        if isinstance(error, RemoteUnreachableError) and is_own(address.host):
            message += "; that host is this machine itself: give an engine elsewhere another one"
        if isinstance(error, RemoteEngineChangedError):
            return RemoteEngineChangedError(message, error.found)
        return type(error)(message)


class HandshakeClient:
    """Asks engines for their workers' descriptions.

    Any thread may call `prepare`, `request` and `close`. Everything else belongs to the client's
    own thread, which the first two start, and which completes the futures.

    Args:
        bounds: Bounds on an answer.
        numbers: Numbers after the verb, as many as upstream's listener of this release takes.
        key: Key that authenticates engines to one another; None without authentication.
        trusted: Networks that hosts may be in; None for any.
        probe: Tries NIXL metadata of unknown origin; None to accept it untried. The client closes
            it.
        timeout_s: How long a handshake may take, from the call to its end.
        own_id: Id of this engine, which an address may lead back to.
    """

    def __init__(
        self,
        bounds: ReplyBounds,
        *,
        numbers: Sequence[int] = (0, 0),
        key: ChannelKey | None = None,
        trusted: TrustedPeers | None = None,
        probe: MetadataProbe | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        own_id: str = "",
    ) -> None:
        self._own_id = own_id
        self._bounds = bounds
        self._question = msgspec.msgpack.encode((OUR_REQUEST, *numbers))
        self._key = key
        self._trusted = trusted
        self._probe = probe
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pending: dict[Future[Answer], _Handshake] = {}

    def prepare(self, metadata: bytes) -> None:
        """Start the thread and the probe before the first handshake needs them; does not wait.

        A failure is ignored here: the next handshake tries again, and reports it.

        Args:
            metadata: NIXL metadata of an agent of this process. An agent takes 8 ms to load its
                first metadata and 0.4 ms for each further one (nixl 1.5.1, UCX over TCP).
        """
        with self._lock:
            if self._closed or self._loop is not None or self._probe is None:
                return
            with suppress(OSError, RuntimeError, zmq.ZMQError):
                asyncio.run_coroutine_threadsafe(self._prepare(metadata), self._start())

    def request(
        self, address: RemoteEngineAddress, required: Mapping[str, str] | None
    ) -> Future[Answer]:
        """Ask an engine for its workers' descriptions; does not wait.

        Args:
            address: Where its side channel listens, and which engine should answer.
            required: Factors that must be equal at both engines, with their values here; None to
                accept any.

        Returns:
            A future of the workers' descriptions, at least one, in the order of ranks; or of one of
            these errors:

                RemoteUnreachableError     nothing answered in time, or there is no such host
                RemoteMisdirectedError     this engine itself answers there
                RemoteUntrustedError       the host is not where hosts may be
                RemoteIncompatibleError    another connector or version, or factors differ
                RemoteRefusedError         the peer declined
                RemoteEngineChangedError   another engine answers there
                RemoteHandshakeError       the answer is malformed, out of bounds, contradicts
                                           itself, or ends a process that loads its NIXL metadata
                LocalLimitError            this process has no more descriptors, threads or places

            Cancelling it cancels the handshake; `close` cancels all that are under way.

        Raises:
            RuntimeError: The client is closed.
        """
        handshake, deadline_s = _Handshake(address, required), time.monotonic() + self._timeout_s
        with self._lock:
            if self._closed:
                raise RuntimeError("client is closed")
            try:
                if len(self._pending) >= MAX_PENDING:
                    raise RuntimeError(f"{MAX_PENDING} other engines are being asked")
                if why := shortage():
                    raise RuntimeError(why)
                loop = self._loop or self._start()
                shaking = self._shake_hands(handshake, deadline_s)
                future = asyncio.run_coroutine_threadsafe(shaking, loop)
            except (OSError, RuntimeError, zmq.ZMQError) as error:
                future = Future()
                future.set_exception(handshake.error(typed(error)))
            self._pending[future] = handshake
        future.add_done_callback(lambda future: self._pending.pop(future, None))
        return future

    def close(self) -> None:
        """Cancel all handshakes, and wait for the thread to end; may be called repeatedly.

        Does not wait for threads that resolve names: they end when the resolver returns.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._closing.set)
        if self._thread is not None:
            self._thread.join()
        if self._probe is not None:
            self._probe.close()

    def _start(self) -> asyncio.AbstractEventLoop:
        """Start the thread and its event loop; leave no loop behind if that fails.

        Raises:
            OSError: No more file descriptors.
            RuntimeError: No more threads.
        """
        loop = asyncio.new_event_loop()
        thread = threading.Thread(
            target=self._run, args=(loop,), name="reshard-handshakes", daemon=True
        )
        self._closing = asyncio.Event()
        self._breakdown: Exception | None = None
        most = within_limit(MAX_CONNECTIONS, 1 / 4, _FILES_PER_CONNECTION)
        self._connections = asyncio.Semaphore(most)
        self._trials = asyncio.Semaphore(MAX_AT_ONCE)
        self._allowance = Allowance(
            MAX_RANKS + _OTHER_FRAMES,
            self._bounds.max_reply_bytes,
            asyncio.Semaphore(MAX_LARGE_ANSWERS),
            SMALL_ANSWER_BYTES,
        )
        self._resolver = Resolver(self._trusted)
        self._context = zmq.asyncio.Context()
        self._context.max_sockets = most + _OTHER_SOCKETS
        try:
            thread.start()
        except BaseException:
            loop.close()
            raise
        self._thread, self._loop = thread, loop
        return loop

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run the loop until `close`; if it breaks, fail all handshakes (`request` restarts it)."""
        try:
            try:
                loop.run_until_complete(self._closing.wait())
            except Exception as error:
                self._breakdown, num_failed = error, len(self._pending)
                logger.error("Handshakes broke off (%r): %d fail with it.", error, num_failed)
            loop.run_until_complete(self._end_tasks())
        finally:
            self._context.destroy(linger=0)
            loop.close()
            with self._lock:
                self._loop, left = None, list(self._pending.items())
                breakdown = self._breakdown
            # Those that the loop could not end, or that were requested meanwhile.
            for future, handshake in left:
                if breakdown is None:
                    future.cancel()
                else:
                    with suppress(InvalidStateError):
                        # Its caller may cancel it at this moment.
                        future.set_exception(handshake.error(typed(breakdown)))

    async def _end_tasks(self) -> None:
        """End all tasks of the loop, those about to start included."""
        # Let them start: a task cancelled before its first step could not report why it ended.
        await asyncio.sleep(0)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        await cancel_all([*self._resolver.lookups, *tasks])

    async def _shake_hands(self, handshake: _Handshake, deadline_s: float) -> Answer:
        """Run a handshake up to its deadline; its errors name the engine that was asked."""
        try:
            timeout_s = deadline_s - time.monotonic()
            return await asyncio.wait_for(self._find_and_ask(handshake), timeout_s)
        except asyncio.TimeoutError:
            missing = _MISSING[handshake.stage].format(f"{self._timeout_s:g}")
            fault: Exception = handshake.fault or RemoteUnreachableError(missing)
        except asyncio.CancelledError:
            if self._breakdown is None:
                raise
            fault = self._breakdown
        except (OSError, zmq.ZMQError, ProtocolError, ReshardError) as error:
            fault = error
        raise handshake.error(typed(fault))

    async def _find_and_ask(self, handshake: _Handshake) -> Answer:
        """Ask a host's addresses, each a little later than the last, and take the first answer."""
        if self._probe is not None:
            with suppress(OSError):
                # It starts while the answer is awaited.
                self._probe.begin()
        addresses = await self._resolver.resolve(handshake.address)
        handshake.reach(_Stage.PLACE)
        handshake.num_left = len(addresses)
        turns = enumerate(addresses)
        workers = await first_of(*(self._ask(each, number, handshake) for number, each in turns))
        if self._probe is not None:
            handshake.reach(_Stage.PROBE)
            async with self._trials:
                tried = await self._probe.try_all([each.agent_metadata for each in workers])
            workers = tuple(
                replace(each, agent_metadata=metadata)
                for each, metadata in zip(workers, tried, strict=True)
            )
        return workers

    async def _prepare(self, metadata: bytes) -> None:
        assert self._probe is not None
        with suppress(asyncio.TimeoutError, RemoteHandshakeError):
            await asyncio.wait_for(self._probe.try_all([metadata]), self._timeout_s)

    async def _ask(self, address: str, number: int, handshake: _Handshake) -> Answer:
        """Connect to one address, again and again, until it answers.

        An engine listens from before its first request until it ends, so it has ended, or listens
        elsewhere, if all its addresses refuse.
        """
        await asyncio.sleep(number * _NEXT_ADDRESS_S)
        async with self._connections:
            handshake.reach(_Stage.CONNECTION)
            retry_s, num_refusals = _RETRY_S, 0
            while True:
                try:
                    return await self._connect_and_ask(address, handshake)
                except ConnectionRefusedError:
                    num_refusals += 1
                    if num_refusals == _REFUSALS:
                        handshake.give_up(RemoteUnreachableError(_REFUSED))
                        break
                except OSError as error:
                    # Other faults may be gone at the next try.
                    if error.errno in (errno.EMFILE, errno.ENFILE, socket.EAI_NONAME):
                        raise
                except (ProtocolError, RemoteHandshakeError) as fault:
                    handshake.give_up(fault)
                    break
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, _LAST_RETRY_S)
        # Leave the result to the other addresses.
        return await asyncio.Future()

    async def _connect_and_ask(self, address: str, handshake: _Handshake) -> Answer:
        """Connect once, ask, and read the answer.

        Raises:
            OSError: The connection failed or was lost, or there are no more file descriptors.
            ProtocolError: The peer does not speak ZeroMQ's protocol, or exceeds the bounds.
            RemoteHandshakeError: The answer cannot be used.
        """
        with self._context.socket(zmq.REQ) as client:
            client.maxmsgsize = self._bounds.max_frame_bytes + FRAME_OVERHEAD_BYTES
            if self._key is not None:
                self._key.configure_client(client)
            port = handshake.address.port
            async with connected(client, address, port, self._allowance) as passing:
                frames = await first_of(self._exchange(client, handshake), passing)
        reply = decode_reply(frames, handshake.required, self._bounds)
        engine_id, expected = reply.workers[0].engine_id, handshake.address.engine_id
        if engine_id == self._own_id != expected:
            raise RemoteMisdirectedError(
                f"this engine itself answers, not {quote(expected)}: set that one's "
                "VLLM_NIXL_SIDE_CHANNEL_HOST to an address by which this machine reaches it"
            )
        if engine_id != expected:
            raise RemoteEngineChangedError(
                f"engine {quote(engine_id)} answers, not {quote(expected)}: the peer was restarted "
                "and has lost its KV cache, or the address is another engine's; send the request "
                "through prefill again",
                engine_id,
            )
        logger.info(
            "Engine %s runs vLLM %s, and speaks %s/%d.%s",
            quote(engine_id),
            quote(reply.release),
            CONNECTOR_NAME,
            reply.version,
            "" if reply.compares_weights else _WEIGHTS_UNKNOWN,
        )
        return reply.workers

    async def _exchange(self, client: zmq.asyncio.Socket, handshake: _Handshake) -> list[bytes]:
        """Ask once ZeroMQ is connected, and keys are checked; return the frames of the answer."""
        await client.send(self._question)
        handshake.reach(_Stage.ANSWER)
        return await client.recv_multipart()


def typed(fault: Exception) -> ReshardError:
    """Return what a fault of a handshake means, with its remedy."""
    if isinstance(fault, ReshardError):
        return fault
    if isinstance(fault, ProtocolError):
        return RemoteHandshakeError(
            f"{one_line(fault)}: check that the port is an engine's VLLM_NIXL_SIDE_CHANNEL_PORT"
        )
    number = fault.errno if isinstance(fault, OSError | zmq.ZMQError) else None
    if number in (errno.EMFILE, errno.ENFILE) or isinstance(fault, RuntimeError):
        return LocalLimitError(
            f"not asked ({one_line(fault)}): see who names so many hosts, and raise this process's "
            "limits of open files (ulimit -n) and threads"
        )
    return RemoteUnreachableError(
        f"the exchange broke off ({one_line(fault)}): check that the engine runs"
    )
