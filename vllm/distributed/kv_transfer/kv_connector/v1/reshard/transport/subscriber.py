# SPDX-License-Identifier: Apache-2.0
"""Asks prefill engines for requests over their side channels: see `protocol.subscriptions`.

    ask      --- queue of an engine --->  session  <--- TCP --->  that engine's side channel
    on_news  <--------------------------

A session is one connection. Its server closes it after a while, and hears no more than some KiB
over it; then the next session asks for what is still waited for. There is no deadline while an
engine answers. If it does not, all that waits for it is told so: ZeroMQ ends a session that half of
the limit has passed in silence, and another one has the other half.
"""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NoReturn

import msgspec
import zmq
import zmq.asyncio
from vllm.logger import init_logger

from ..errors import (
    MEET_UPSTREAMS,
    RemoteIncompatibleError,
    RemoteUnreachableError,
    one_line,
    quote,
)
from ..protocol.bounds import TrustedPeers
from ..protocol.messages import RemoteEngineAddress
from ..protocol.subscriptions import (
    MAX_NEWS_BYTES,
    SUBSCRIBE,
    Ask,
    Gone,
    Hello,
    News,
    Offered,
    Question,
    decode_answer,
    encode_questions,
)
from .authentication import ChannelKey
from .handshake_client import typed
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

#: limit prefill engine: requests that wait for it fail, as it does not answer.
ANSWERS_WITHIN_S = 10.0

MAX_ENGINES = 128
"""Engines that are asked at the same time, of five file descriptors a session."""

_LINGER_MS = 5000
"""How long a session stays open that nothing is waited for over."""
_QUESTION_BYTES = 40 << 10
"""Bytes of questions in a session: a side channel hears of no more than 64 KiB."""
_AT_ONCE = 100
_MAX_MESSAGES = 500
_ALLOWANCE = Allowance(1 << 14, 32 << 20)
"""What a session may receive."""
_RETRY_S, _LAST_RETRY_S = 0.1, 1.0
_REFUSALS = 2
"""Refusals that count as an engine's end: something on the way may refuse one of many."""


@dataclass(slots=True, eq=False)
class _Session:
    """One connection.

    Attributes:
        greeted_within_s: How long the engine may take to answer the greeting.
        asked: The questions that were asked over it and not answered for good.
        is_open: Whether an engine of ours has answered.
        has_questions: Set when the queue has more.
    """

    greeted_within_s: float
    asked: dict[str, Question] = field(default_factory=dict)
    is_open: bool = False
    has_questions: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, eq=False)
class _Channel:
    """A prefill engine that requests are waited for of.

    Attributes:
        place: Where it is.
        queue: What no session has sent, or has to send again.
        known_at: By question, the engine that has said that it knows the request.
        accepting: The session that takes from the queue; None without one.
        num_tries: How many sessions were begun.
        changed: Set when the queue or the sessions have changed.
    """

    place: RemoteEngineAddress
    queue: dict[str, Question] = field(default_factory=dict)
    known_at: dict[str, str] = field(default_factory=dict)
    accepting: _Session | None = None
    num_tries: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class Subscriber:
    """Asks for requests. Any thread may call it; the rest belongs to its own thread.

    The thread starts with the first question.

    Args:
        on_news: Called by the thread with each answer.
        numbers: Numbers after the verb, as many as upstream's listener of this release takes.
        key: Key that authenticates engines to one another; None without authentication.
        trusted: Networks that hosts may be in; None for any.
    """

    def __init__(
        self,
        on_news: Callable[[News], None],
        numbers: Sequence[int] = (0, 0),
        key: ChannelKey | None = None,
        trusted: TrustedPeers | None = None,
    ) -> None:
        self._on_news = on_news
        self._greeting = msgspec.msgpack.encode((SUBSCRIBE, *numbers))
        self._key = key
        self._trusted = trusted
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._channels: dict[tuple[str, int], _Channel] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def ask(self, place: RemoteEngineAddress, question: Question) -> None:
        """Ask a question; `Offered` or `Gone` is the last answer."""
        with self._lock:
            if self._closed:
                return
            try:
                self._started().call_soon_threadsafe(self._take, place, question)
            except (OSError, RuntimeError) as error:
                self._on_news(Gone(question.asker, f"it cannot be asked for: {one_line(error)}"))

    def close(self) -> None:
        """End all sessions and the thread; may be called repeatedly."""
        with self._lock:
            self._closed = True
            loop, thread = self._loop, self._thread
        if loop is not None and thread is not None:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(loop.stop)
            thread.join()

    def _started(self) -> asyncio.AbstractEventLoop:
        """Return the thread's loop; start it with the first question.

        Raises:
            OSError, RuntimeError: The process has too few files or threads left.
        """
        if self._loop is None:
            loop = asyncio.new_event_loop()
            thread = threading.Thread(
                target=self._run, args=(loop,), name="reshard-subscriber", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:
                loop.close()
                raise
            self._loop, self._thread = loop, thread
        return self._loop

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run the loop until `close`."""
        asyncio.set_event_loop(loop)
        self._resolver = Resolver(self._trusted)
        self._context = zmq.asyncio.Context()
        self._context.max_sockets = 4 * MAX_ENGINES
        try:
            loop.run_forever()
            loop.run_until_complete(cancel_all([*self._resolver.lookups, *self._tasks]))
        finally:
            self._context.destroy(linger=0)
            loop.close()

    def _take(self, place: RemoteEngineAddress, question: Question) -> None:
        where = place.host, place.port
        channel = self._channels.get(where)
        if channel is None:
            if len(self._channels) >= MAX_ENGINES:
                reason = f"{MAX_ENGINES} other engines are asked for requests"
                self._on_news(Gone(question.asker, reason))
                return
            channel = self._channels[where] = _Channel(place)
            task = asyncio.get_running_loop().create_task(self._keep(channel))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        channel.queue[question.asker] = question
        channel.changed.set()
        if channel.accepting is not None:
            channel.accepting.has_questions.set()

    async def _keep(self, channel: _Channel) -> None:
        """Keep sessions with an engine while something waits for it."""
        sessions: set[asyncio.Task[None]] = set()
        within_s = ANSWERS_WITHIN_S
        down_since_s: float | None = None
        num_refusals, retry_s = 0, _RETRY_S
        try:
            while True:
                if channel.queue and channel.accepting is None:
                    channel.accepting = session = _Session(within_s)
                    sessions.add(asyncio.create_task(self._session(channel, session)))
                if not sessions:
                    return
                channel.changed.clear()
                changed = asyncio.create_task(channel.changed.wait())
                await asyncio.wait({*sessions, changed}, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                for ended in [each for each in sessions if each.done()]:
                    sessions.remove(ended)
                    fault = ended.exception()
                    if fault is None:
                        within_s = ANSWERS_WITHIN_S / 2
                        down_since_s, num_refusals, retry_s = None, 0, _RETRY_S
                        continue
                    now_s = time.monotonic()
                    down_since_s = down_since_s or now_s
                    num_refusals += isinstance(fault, ConnectionRefusedError)
                    if (
                        now_s - down_since_s >= ANSWERS_WITHIN_S
                        or num_refusals >= _REFUSALS
                        or not isinstance(fault, OSError)
                        or fault.errno in (errno.EMFILE, errno.ENFILE)
                    ):
                        self._give_up(channel, fault)
                        continue
                    await asyncio.sleep(retry_s)
                    retry_s = min(2 * retry_s, _LAST_RETRY_S)
        finally:
            await cancel_all(list(sessions))
            del self._channels[channel.place.host, channel.place.port]

    def _give_up(self, channel: _Channel, fault: BaseException) -> None:
        """Tell all that waits for an engine that it does not answer."""
        queue, channel.queue = channel.queue, {}
        reason = one_line(typed(fault) if isinstance(fault, Exception) else fault)
        if isinstance(fault, ConnectionRefusedError):
            reason = "its engine has ended, or listens elsewhere: send the request again"
        logger.info(
            "Engine at %s:%d is not asked for %d requests: %s",
            quote(channel.place.host),
            channel.place.port,
            len(queue),
            one_line(reason),
        )
        for asker in queue:
            self._settle(channel, Gone(asker, reason))

    async def _session(self, channel: _Channel, session: _Session) -> None:
        """Ask over one connection until it ends; what is not answered goes back to the queue.

        Raises:
            OSError: No engine can be reached.
            ProtocolError, ReshardError, ZMQError: No engine of ours has answered.
        """
        try:
            addresses = await self._resolver.resolve(channel.place)
            address = addresses[channel.num_tries % len(addresses)]
            channel.num_tries += 1
            with self._context.socket(zmq.DEALER) as client:
                client.maxmsgsize = MAX_NEWS_BYTES + FRAME_OVERHEAD_BYTES
                client.heartbeat_ivl = int(200 * ANSWERS_WITHIN_S)
                client.heartbeat_timeout = int(500 * ANSWERS_WITHIN_S)
                if self._key is not None:
                    self._key.configure_client(client)
                async with connected(client, address, channel.place.port, _ALLOWANCE) as passing:
                    await first_of(self._talk(channel, session, client), passing)
        except (OSError, ProtocolError, zmq.ZMQError):
            if not session.is_open:
                raise
        finally:
            if channel.accepting is session:
                channel.accepting = None
            again: dict[str, Question] = {
                each.asker: each for each in session.asked.values() if isinstance(each, Ask)
            }
            for asker in session.asked.keys() - again.keys():
                # Whoever has left is not waited for over another connection.
                self._settle(channel, Gone(asker, "the connection has ended"))
            channel.queue = again | channel.queue
            channel.changed.set()

    async def _talk(
        self, channel: _Channel, session: _Session, client: zmq.asyncio.Socket
    ) -> NoReturn:
        """Greet an engine; then send questions and hear news until the connection ends.

        Raises:
            ReshardError: It is none of ours, or does not answer.
        """
        within_s = session.greeted_within_s
        try:
            # Nothing can be sent before ZeroMQ at the other end has answered.
            frames = await asyncio.wait_for(self._greet(client), within_s)
        except asyncio.TimeoutError:
            raise RemoteUnreachableError(
                f"its engine does not answer within {within_s:g} s: check that it runs, "
                "and that both engines have the same side_channel_key_file, or none"
            ) from None
        hello = decode_answer(frames[-1])
        if not isinstance(hello, Hello):
            raise RemoteIncompatibleError(
                f"its engine cannot be asked for requests: {MEET_UPSTREAMS}"
            )
        session.is_open = True
        for asker in [each for each in channel.queue if each in channel.known_at]:
            if channel.known_at[asker] != hello.engine_id:
                del channel.queue[asker]
                self._settle(channel, Gone(asker, "its engine was restarted: send it again"))
        await first_of(
            self._send_all(channel, session, client),
            self._hear_all(channel, session, client, hello.engine_id),
        )
        raise AssertionError

    async def _greet(self, client: zmq.asyncio.Socket) -> list[bytes]:
        """Return the answer to the greeting."""
        await client.send_multipart([b"", self._greeting])
        frames: list[bytes] = await client.recv_multipart()
        return frames

    async def _send_all(
        self, channel: _Channel, session: _Session, client: zmq.asyncio.Socket
    ) -> None:
        """Send the questions of the queue, as many as one connection may."""
        num_bytes = num_messages = 0
        while num_bytes < _QUESTION_BYTES and num_messages < _MAX_MESSAGES:
            while not channel.queue:
                await session.has_questions.wait()
                session.has_questions.clear()
            batch = [channel.queue.pop(each) for each in list(channel.queue)[:_AT_ONCE]]
            session.asked |= {each.asker: each for each in batch}
            frame = encode_questions(batch)
            num_bytes, num_messages = num_bytes + len(frame), num_messages + 1
            await client.send_multipart([b"", frame])
        # Another session sends the rest; this one hears what it has asked for.
        channel.accepting = None
        channel.changed.set()
        await asyncio.Future()

    async def _hear_all(
        self, channel: _Channel, session: _Session, client: zmq.asyncio.Socket, engine_id: str
    ) -> NoReturn:
        """Pass on the news of what this session has asked for."""
        while True:
            # More may be asked for while this waits.
            if not await client.poll(_LINGER_MS):
                if not session.asked and not channel.queue:
                    raise ConnectionResetError("nothing is waited for")
                continue
            frames = await client.recv_multipart()
            news = decode_answer(frames[-1])
            if not isinstance(news, list):
                raise ProtocolError("what is no news was sent")
            for each in news:
                if each.asker not in session.asked:
                    continue
                if isinstance(each, Offered | Gone):
                    del session.asked[each.asker]
                    self._settle(channel, each)
                else:
                    channel.known_at[each.asker] = engine_id
                    self._on_news(each)

    def _settle(self, channel: _Channel, news: Offered | Gone) -> None:
        """Pass on the last news of a question."""
        channel.known_at.pop(news.asker, None)
        self._on_news(news)
