# SPDX-License-Identifier: Apache-2.0
"""What a decode engine's scheduler asks a prefill engine's: "tell me of NAME".

A router that sends a request to both engines at once knows neither the prefill engine's id of it
nor its blocks. So the decode engine asks, once a request, over the side channel:

    decode engine                        prefill engine
    Ask(asker, name, content)    --->
                                 <---    Known       it has the request
                                 <---    Computed    so many tokens, in these blocks
                                 <---    Offered     what a router would have passed on; the last
                                 <---    Gone        why it is not offered; the last
    Leave(asker, name)           --->    nobody reads it any more: answered by one of the last two,
                                         as it may have been offered meanwhile

A name alone does not tell requests apart: clients choose it, use it again, and some APIs make names
of their own. So an asker also says the digest of its prompt, and is answered for a request with
both, or with the digest alone where it has no name. Requests of one digest are of one prompt, and
whichever is read is right. Each is one asker's.

`Publisher` is the prefill engine's side, without sockets or clocks. What it says is a hint: the
lease decides. A subscription ends with its connection, or soon after: the asker asks again over the
next one, under the same number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from .ids import EngineId, RequestId

SUBSCRIBE = b"reshard-subscribe/1"
"""First word of a request that begins a subscription; `Hello` answers it."""

MAX_SUBSCRIBERS = 1 << 14
"""Requests that are asked for at a time, by all engines."""

#: limit known: a request sent to both engines fails, as the prefill engine does not know it. The
#: time in which that one computes a single step does not count.
KNOWN_WITHIN_S = 10.0

#: interval subscription: a prefill engine forgets it. Its connection was closed before.
FORGET_AFTER_S = 40.0

MAX_NEWS_BYTES = 4 << 20
"""Maximum size of a message to a decode engine. An offer of a million tokens takes 1 MiB."""

_BATCH_BYTES = 64 << 10
_Text: TypeAlias = Annotated[str, Meta(max_length=1 << 10)]
_Asker: TypeAlias = Annotated[str, Meta(min_length=1, max_length=64)]
_Count: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 31)]


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """Asks for a request.

    Attributes:
        asker: Number of the question; the same when it is asked again.
        name: The request's name at both engines; empty if they have none in common.
        content: Digest of its prompt.
    """

    asker: _Asker
    name: _Text
    content: int


class Leave(msgspec.Struct, frozen=True, array_like=True, tag="leave"):
    """Says that a request will not be read, whether it was asked for before or not.

    Without a digest it waits for the request, as an API server that refuses one may be first.

    Attributes:
        asker: Number of the question, or a new one.
        name: The request's name; empty if the engines have none in common.
        content: Digest of its prompt; None if that is not known.
    """

    asker: _Asker
    name: _Text
    content: int | None = None


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """Says which engine answers."""

    engine_id: _Text


class Known(msgspec.Struct, frozen=True, array_like=True, tag="known"):
    """The request is there."""

    asker: _Asker


class Computed(msgspec.Struct, frozen=True, array_like=True, tag="computed"):
    """A part of the request's prompt is computed.

    Attributes:
        asker: Number of the question.
        engine_id: The prefill engine.
        host: Host of its side channel, as it knows it.
        port: TCP port of its side channel.
        request_id: The prefill engine's id of the request.
        attempt: Number of the attempt to compute it; another one once it is begun anew.
        num_tokens: Number of its tokens that are computed.
        total_tokens: Number of tokens that will be offered.
        block_ids: The full blocks of these tokens, for each KV-cache group that keeps all tokens.
    """

    asker: str
    engine_id: _Text
    host: _Text
    port: Annotated[int, Meta(ge=1, lt=1 << 16)]
    request_id: _Text
    attempt: _Count
    num_tokens: _Count
    total_tokens: _Count
    block_ids: list[list[_Count]]


class Offered(msgspec.Struct, frozen=True, array_like=True, tag="offered"):
    """The request is held for a reader.

    Attributes:
        asker: Number of the question.
        params: The parameters for the decode engine, as routers pass them on.
        attempt: Number of the attempt that has computed it.
    """

    asker: str
    params: dict[str, Any]
    attempt: _Count


class Gone(msgspec.Struct, frozen=True, array_like=True, tag="gone"):
    """The request will not be offered."""

    asker: str
    reason: _Text


Question: TypeAlias = Ask | Leave
News: TypeAlias = Known | Computed | Offered | Gone


class _Questions(msgspec.Struct, frozen=True, array_like=True, tag="questions"):
    all: list[Question]


class _Batch(msgspec.Struct, frozen=True, array_like=True, tag="news"):
    all: list[News]


_ENCODER = msgspec.msgpack.Encoder()
_QUESTIONS = msgspec.msgpack.Decoder(_Questions)
_ANSWER: msgspec.msgpack.Decoder[Hello | _Batch] = msgspec.msgpack.Decoder(Hello | _Batch)
_NOT_UNDERSTOOD = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def encode_questions(questions: list[Question]) -> bytes:
    """Encode questions for a prefill engine."""
    return _ENCODER.encode(_Questions(questions))


def decode_questions(data: bytes) -> list[Question] | None:
    """Decode questions; None if they are none."""
    try:
        return _QUESTIONS.decode(data).all
    except _NOT_UNDERSTOOD:
        return None


def encode_hello(engine_id: EngineId) -> bytes:
    """Encode the answer to `SUBSCRIBE`."""
    return _ENCODER.encode(Hello(engine_id))


def encode_news(news: list[News]) -> Iterator[bytes]:
    """Encode news for a decode engine, in messages of a moderate size."""
    batch: list[bytes] = []
    size_bytes = 0
    for each in news:
        encoded = _ENCODER.encode(each)
        if batch and size_bytes + len(encoded) > _BATCH_BYTES:
            yield _in_one(batch)
            batch, size_bytes = [], 0
        batch.append(encoded)
        size_bytes += len(encoded)
    if batch:
        yield _in_one(batch)


def _in_one(batch: list[bytes]) -> bytes:
    return _ENCODER.encode(["news", [msgspec.Raw(each) for each in batch]])


def decode_answer(data: bytes) -> Hello | list[News] | None:
    """Decode a prefill engine's message; None if it is none of these."""
    try:
        answer = _ANSWER.decode(data)
    except _NOT_UNDERSTOOD:
        return None
    return answer if isinstance(answer, Hello) else answer.all


@dataclass(slots=True)
class _Prompt:
    """A request that a prefill engine computes or holds.

    Attributes:
        request_id: Its id.
        name: Its name at both engines.
        content: Digest of its prompt.
        asker: Who is told of it; empty if nobody is yet.
        computed: What is computed of it; None before.
        params: The parameters of its offer; None before.
        attempt: Number of the attempt that has computed it.
    """

    request_id: RequestId
    name: str
    content: int
    asker: str = ""
    computed: Computed | None = None
    params: dict[str, Any] | None = None
    attempt: int = 0

    def news(self) -> News:
        """What its asker is told."""
        if self.params is not None:
            return Offered(self.asker, self.params, self.attempt)
        if self.computed is not None:
            return msgspec.structs.replace(self.computed, asker=self.asker)
        return Known(self.asker)


@dataclass(slots=True)
class _Subscriber:
    """Who asks.

    Attributes:
        connection: Over which connection.
        name: The request's name; empty without one.
        content: Digest of its prompt; None if it is not known.
        leaves: Whether it will not be read.
        since_s: When it was asked for.
        request_id: The request; None if it is not known yet.
    """

    connection: bytes
    name: str
    content: int | None
    leaves: bool
    since_s: float
    request_id: RequestId | None = None

    @property
    def key(self) -> tuple[str, int | None]:
        """What it waits for."""
        return self.name, self.content


class Publisher:
    """The requests of a prefill engine, and who asks for them. Belongs to one thread.

    Attributes:
        claimed: Requests that somebody is told of. Another thread may look at it.
        given_up: Requests that nobody will read, and that are not offered. Likewise.
    """

    def __init__(self) -> None:
        self.claimed: set[RequestId] = set()
        self.given_up: set[RequestId] = set()
        self._prompts: dict[RequestId, _Prompt] = {}
        # Oldest first, as in the next.
        self._by_name: dict[str, dict[RequestId, None]] = {}
        self._by_content: dict[int, dict[RequestId, None]] = {}
        self._subscribers: dict[str, _Subscriber] = {}
        self._waiting: dict[tuple[str, int | None], dict[str, None]] = {}
        self._outbox: dict[bytes, dict[str, News]] = {}

    def __len__(self) -> int:
        """Return the number of requests that have not ended."""
        return len(self._prompts)

    @property
    def num_subscribers(self) -> int:
        """Number of questions that are not forgotten."""
        return len(self._subscribers)

    # What the scheduler says.

    def add(self, request_id: RequestId, name: str, content: int) -> None:
        """Add a request that has arrived."""
        if request_id in self._prompts:
            self.end(request_id, "its prefill begins anew")
        prompt = self._prompts[request_id] = _Prompt(request_id, name, content)
        self._by_name.setdefault(name, {})[request_id] = None
        self._by_content.setdefault(content, {})[request_id] = None
        for key in ((name, content), ("", content), (name, None)):
            if waiting := self._waiting.get(key):
                self._match(next(iter(waiting)), prompt)
                return

    def compute(self, request_id: RequestId, computed: Computed) -> None:
        """Note how much of a request is computed."""
        if (prompt := self._prompts.get(request_id)) is not None:
            prompt.computed = computed
            self._tell(prompt)

    def offer(self, request_id: RequestId, params: dict[str, Any], attempt: int) -> None:
        """Note that a request is held for its reader."""
        if (prompt := self._prompts.get(request_id)) is not None:
            prompt.params, prompt.attempt = params, attempt
            # The scheduler may not have seen that it is given up: who has left does it again.
            self.given_up.discard(request_id)
            self._tell(prompt)

    def end(self, request_id: RequestId, reason: str) -> None:
        """Forget a request that has ended, or is not held any more."""
        prompt = self._prompts.pop(request_id, None)
        self.claimed.discard(request_id)
        self.given_up.discard(request_id)
        if prompt is None:
            return
        _remove(self._by_name, prompt.name, request_id)
        _remove(self._by_content, prompt.content, request_id)
        subscriber = self._subscribers.get(prompt.asker)
        if subscriber is not None and subscriber.request_id == request_id:
            del self._subscribers[prompt.asker]
            if prompt.params is None:
                self._push(subscriber.connection, Gone(prompt.asker, reason))

    # What other engines say.

    def ask(self, connection: bytes, question: Question, now_s: float) -> None:
        """Answer a question, and further ones under its number over this connection from now on."""
        asker = question.asker
        before = self._forget(asker)
        leaves = isinstance(question, Leave)
        if len(self._subscribers) >= MAX_SUBSCRIBERS:
            reason = f"{MAX_SUBSCRIBERS} other requests are asked for there"
            self._push(connection, Gone(asker, reason))
            return
        subscriber = _Subscriber(connection, question.name, question.content, leaves, now_s)
        self._subscribers[asker] = subscriber
        prompt = self._prompts.get(before.request_id or "") if before is not None else None
        if prompt is None and not (leaves and before is not None):
            prompt = self._find(question)
        if prompt is not None:
            self._match(asker, prompt)
        elif leaves and question.content is not None:
            # It was asked for, or would have been: another request of its name is the next attempt.
            self._forget(asker)
            self._push(connection, Gone(asker, "it is not known there"))
        else:
            self._waiting.setdefault(subscriber.key, {})[asker] = None

    def expire(self, now_s: float, came_round_s: float) -> None:
        """Forget old subscriptions, and tell of requests that were not sent here.

        Args:
            now_s: The time.
            came_round_s: When the scheduler last took up all requests that had arrived.
        """
        for asker, subscriber in list(self._subscribers.items()):
            age_s = now_s - subscriber.since_s
            if age_s >= FORGET_AFTER_S:
                self._forget(asker)
            elif (
                subscriber.request_id is None
                and came_round_s - subscriber.since_s >= KNOWN_WITHIN_S
            ):
                self._forget(asker)
                other = subscriber.name in self._by_name
                reason = (
                    "another prompt has its name there: send both engines the same prompt"
                    if other
                    else f"it was not known there within {KNOWN_WITHIN_S:g} s: send the request to "
                    "both engines"
                )
                self._push(subscriber.connection, Gone(asker, reason))

    def take(self) -> dict[bytes, list[News]]:
        """Return the news since the last call, by connection; of each question the last."""
        outbox, self._outbox = self._outbox, {}
        return {connection: list(news.values()) for connection, news in outbox.items()}

    def take_back(self, connection: bytes, news: list[News]) -> None:
        """Keep news that could not be sent; later news of a question count."""
        later = self._outbox.get(connection, {})
        self._outbox[connection] = {each.asker: each for each in news} | later

    def _find(self, question: Question) -> _Prompt | None:
        """Return the oldest request that a question may be about, and that is nobody's."""
        name, content = question.name, question.content
        if name:
            ids = self._by_name.get(name, {})
        else:
            ids = {} if content is None else self._by_content.get(content, {})
        found = [self._prompts[each] for each in ids]
        found = [each for each in found if content in (None, each.content)]
        for prompt in found:
            if prompt.asker in ("", question.asker) and prompt.request_id not in self.given_up:
                return prompt
        return next((each for each in found if each.request_id in self.given_up), None)

    def _match(self, asker: str, prompt: _Prompt) -> None:
        """Tell a subscriber of a request, or give that up for it."""
        subscriber = self._subscribers[asker]
        _remove(self._waiting, subscriber.key, asker)
        if prompt.asker != asker and (left := self._subscribers.pop(prompt.asker, None)):
            self._push(left.connection, Gone(prompt.asker, "another request reads it"))
        subscriber.request_id, prompt.asker = prompt.request_id, asker
        if subscriber.leaves and prompt.params is None:
            # It is answered once the request has ended, or was offered all the same.
            self.given_up.add(prompt.request_id)
            return
        self.given_up.discard(prompt.request_id)
        self.claimed.add(prompt.request_id)
        self._tell(prompt)

    def _tell(self, prompt: _Prompt) -> None:
        subscriber = self._subscribers.get(prompt.asker)
        if subscriber is not None and (not subscriber.leaves or prompt.params is not None):
            self._push(subscriber.connection, prompt.news())

    def _push(self, connection: bytes, news: News) -> None:
        self._outbox.setdefault(connection, {})[news.asker] = news

    def _forget(self, asker: str) -> _Subscriber | None:
        """Forget a subscriber; its request is another's to ask for, unless it was offered."""
        subscriber = self._subscribers.pop(asker, None)
        if subscriber is None:
            return None
        _remove(self._waiting, subscriber.key, asker)
        prompt = self._prompts.get(subscriber.request_id or "")
        if prompt is not None and prompt.params is None and prompt.asker == asker:
            prompt.asker = ""
            self.claimed.discard(prompt.request_id)
        return subscriber


def _remove(table: dict[Any, dict[str, None]], key: Any, name: str) -> None:
    """Remove a name from a key's names."""
    names = table.get(key, {})
    names.pop(name, None)
    if not names:
        table.pop(key, None)
