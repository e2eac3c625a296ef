# SPDX-License-Identifier: Apache-2.0
"""What clients ask for is a function of the seed, fits the engines, and mixes all manners."""

from __future__ import annotations

from collections import Counter
from itertools import islice, pairwise

from hypothesis import given
from hypothesis import strategies as st

from tools.soak.fleet import MAX_MODEL_TOKENS
from tools.soak.workload import (
    Ask,
    Manner,
    Turn,
    asks,
    body,
    conversations,
    messages_before,
)

seeds = st.integers(0, 1 << 32)
TURN = Turn((("system", "opening"), ("user", "question")), 9, "answer")


@given(seeds)
def test_seed_says_everything(seed):
    """The same seed gives the same conversations and the same requests."""
    assert conversations(seed, 8) == conversations(seed, 8)
    assert list(islice(asks(seed, 3, 20), 30)) == list(islice(asks(seed, 3, 20), 30))


@given(seeds)
def test_every_turn_fits(seed):
    """One character is one token: the longest turn and its answer are less than an engine takes."""
    for conversation in conversations(seed, 12):
        answers = ["x" * question.answer_tokens for question in conversation.questions]
        messages = messages_before(conversation, answers[:-1])
        prompt_tokens = 1 + sum(len(text) for _, text in messages)
        assert prompt_tokens + conversation.questions[-1].answer_tokens <= MAX_MODEL_TOKENS


@given(seeds)
def test_turns_begin_with_what_was_said_before(seed):
    """A later turn has the earlier one as its beginning, and conversations share openings."""
    planned = conversations(seed, 8)
    answers = ["one", "two"]
    turns = [messages_before(planned[0], answers[:count]) for count in range(3)]
    for earlier, later in pairwise(turns):
        assert later[: len(earlier)] == earlier
    assert [len(turn) for turn in turns] == [2, 4, 6]
    assert len({each.opening for each in planned}) < len(planned)


def test_clients_ask_in_all_manners():
    """Streams, several answers, aborts and clients that vanish all come, from each client."""
    for client in range(4):
        seen = Counter(each.manner for each in islice(asks(7, client, 20), 200))
        assert set(seen) == {
            Manner.TURN,
            Manner.STREAM,
            Manner.SEVERAL,
            Manner.ABORT,
            Manner.VANISH,
        }


@given(seeds)
def test_who_leaves_does_so_for_one_reason(seed):
    """Aborts come after a time, streams are left after some tokens, and others stay."""
    for ask in islice(asks(seed, 0, 5), 60):
        assert (ask.leaves_after_s is not None) == (ask.manner is Manner.ABORT)
        assert (ask.leaves_after_tokens is not None) == (ask.manner is Manner.VANISH)
        assert ask.stream or ask.leaves_after_tokens is None
        assert 0 <= ask.turn < 5


def test_request_leaves_no_choice_of_tokens():
    """One answer is greedy; of several, each is drawn of one candidate."""
    one = body(Ask(Manner.TURN, 0), TURN, "tiny")
    assert one == {
        "model": "tiny",
        "messages": [
            {"role": "system", "content": "opening"},
            {"role": "user", "content": "question"},
        ],
        "max_tokens": 9,
        "temperature": 0.0,
    }
    several = body(Ask(Manner.SEVERAL, 0, num_answers=3, stream=True, salt="s"), TURN, "tiny")
    assert (several["n"], several["temperature"], several["top_k"]) == (3, 1.0, 1)
    assert (several["stream"], several["cache_salt"]) == (True, "s")
