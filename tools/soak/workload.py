# SPDX-License-Identifier: Apache-2.0
"""What clients ask for, planned from a seed: conversations, and how each request is asked.

Conversations share beginnings, and each turn begins with all that was said before, so that engines
find prefixes in their caches. The tiny models have one token for each character: answers that are
the same text are the same tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

Message = dict[str, str]

_WORDS = (
    *("amber", "basin", "cedar", "delta", "ember", "fjord", "grove", "harbor", "inlet", "jetty"),
    *("kelp", "lagoon", "marsh", "north", "ocean", "pier", "quay", "reef", "shoal", "tide"),
)
NUM_OPENINGS = 3
_OPENING_CHARACTERS = 280
_QUESTION_CHARACTERS = (20, 160)
_ANSWER_TOKENS = (8, 40)
_SALTED = 0.5
"""Share of requests that find no block of any other request, and so have to be read whole."""


class Manner(str, Enum):
    """How a request is asked, and what becomes of its client."""

    TURN = "turn"
    STREAM = "stream"
    SEVERAL = "several answers"
    ABORT = "aborted"
    VANISH = "vanished"
    PROBE = "probe"
    HELD_READ = "held read"
    MEDDLED = "meddled with"
    EARLY = "early"

    def __str__(self) -> str:
        return self.value


_MANNERS = {
    Manner.TURN: 6,
    Manner.STREAM: 4,
    Manner.SEVERAL: 2,
    Manner.ABORT: 2,
    Manner.VANISH: 2,
}
"""How often clients of the load ask in each of these ways."""


@dataclass(frozen=True)
class Question:
    """A turn of a conversation, before anybody has answered.

    Attributes:
        text: what the user says.
        answer_tokens: how long the answer is.
    """

    text: str
    answer_tokens: int


@dataclass(frozen=True)
class Conversation:
    """What a user says, turn by turn, after an opening that others have, too."""

    opening: str
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Turn:
    """A turn that can be asked at any time: what was said before is part of it.

    Attributes:
        messages: up to the user's last one.
        answer_tokens: how long the answer is.
        answer: the right one.
    """

    messages: tuple[tuple[str, str], ...]
    answer_tokens: int
    answer: str

    @property
    def prompt_tokens(self) -> int:
        """How long its prompt is: a token for each character, and one that begins the sequence."""
        return 1 + sum(len(content) for _, content in self.messages)


@dataclass(frozen=True)
class Ask:
    """One request of a client.

    Attributes:
        turn: index of what is asked.
        num_answers: how many answers are wanted; all are the same.
        stream: whether tokens come one by one.
        leaves_after_s: when the client goes away; `None` for one that stays.
        leaves_after_tokens: after how many tokens it goes away.
        salt: under which blocks are cached; `None` for those that all share.
        rest_s: how long the client rests before it.
    """

    manner: Manner
    turn: int
    num_answers: int = 1
    stream: bool = False
    leaves_after_s: float | None = None
    leaves_after_tokens: int | None = None
    salt: str | None = None
    rest_s: float = 0.0

    @property
    def leaves(self) -> bool:
        """Whether the client goes away before the end."""
        return self.leaves_after_s is not None or self.leaves_after_tokens is not None


def conversations(seed: int, count: int, turns: int = 3) -> tuple[Conversation, ...]:
    """Plan conversations.

    Args:
        count: how many.
        turns: of each.
    """
    rng = random.Random(f"conversations {seed}")
    openings = [_text(rng, _OPENING_CHARACTERS) for _ in range(NUM_OPENINGS)]
    return tuple(
        Conversation(
            openings[number % NUM_OPENINGS],
            tuple(
                Question(
                    _text(rng, rng.randint(*_QUESTION_CHARACTERS)), rng.randint(*_ANSWER_TOKENS)
                )
                for _ in range(turns)
            ),
        )
        for number in range(count)
    )


def asks(seed: int, client: int, num_turns: int) -> Iterator[Ask]:
    """Yield what a client of the load asks, for ever.

    Args:
        client: its number; each asks for other things.
        num_turns: how many turns there are to ask for.
    """
    rng = random.Random(f"client {seed} {client}")
    manners, weights = zip(*_MANNERS.items(), strict=True)
    while True:
        (manner,) = rng.choices(manners, weights)
        yield Ask(
            manner=manner,
            turn=rng.randrange(num_turns),
            num_answers=rng.randint(2, 3) if manner is Manner.SEVERAL else 1,
            stream=manner in (Manner.STREAM, Manner.VANISH)
            or (manner is Manner.SEVERAL and rng.random() < 0.5),
            leaves_after_s=rng.uniform(0.0, 2.0) if manner is Manner.ABORT else None,
            leaves_after_tokens=rng.randint(0, 8) if manner is Manner.VANISH else None,
            salt=f"{rng.getrandbits(64):016x}" if rng.random() < _SALTED else None,
            rest_s=rng.expovariate(1 / 0.3),
        )


def body(ask: Ask, turn: Turn, model: str) -> dict[str, Any]:
    """Return the request of the OpenAI API, of which every token of the answer is determined.

    vLLM refuses to give several greedy answers; of one candidate it draws as often as it is asked.
    """
    fields: dict[str, Any] = {
        "model": model,
        "messages": [{"role": role, "content": content} for role, content in turn.messages],
        "max_tokens": turn.answer_tokens,
        "temperature": 0.0,
    }
    if ask.num_answers > 1:
        fields |= {"n": ask.num_answers, "temperature": 1.0, "top_k": 1}
    if ask.stream:
        fields["stream"] = True
    if ask.salt is not None:
        fields["cache_salt"] = ask.salt
    return fields


def messages_before(
    conversation: Conversation, answers: Sequence[str]
) -> tuple[tuple[str, str], ...]:
    """Return what stands before the answer that follows some earlier ones: pairs of role, text."""
    said = [("system", conversation.opening)]
    for number, question in enumerate(conversation.questions[: len(answers) + 1]):
        said.append(("user", question.text))
        if number < len(answers):
            said.append(("assistant", answers[number]))
    return tuple(said)


def _text(rng: random.Random, characters: int) -> str:
    """Return words, cut to a length."""
    words = " ".join(rng.choice(_WORDS) for _ in range(characters // 3 + 1))
    return words[:characters]
