# SPDX-License-Identifier: Apache-2.0
"""Prompts are hashed beside the scheduler's thread, and to the same digest."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.digests import (
    MIN_TOKENS,
    PromptDigests,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.fingerprint import fingerprint

BLOCKS = [[5, 2, 9]]


@pytest.fixture
def digests() -> Iterator[PromptDigests]:
    """What hashes; its thread is ended."""
    made = PromptDigests()
    yield made
    made.close()


class Watched(Sequence[int]):
    """Tokens that know who has read them."""

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids
        self.readers: set[int] = set()

    def __len__(self) -> int:
        return len(self.token_ids)

    def __getitem__(self, place):
        self.readers.add(threading.get_ident())
        return self.token_ids[place]


@pytest.mark.parametrize("num_more", [0, 1, 5000])
def test_digest_goes_on_with_the_answer(digests, num_more):
    """The prompt is hashed elsewhere, what has come to it here; the fingerprint is that of both."""
    tokens = Watched(list(range(3 * MIN_TOKENS)))
    digests.begin("a", tokens, len(tokens))
    hashed = digests.take("a")
    assert hashed.num_tokens == 3 * MIN_TOKENS
    assert threading.get_ident() not in tokens.readers
    tokens.token_ids.extend(range(num_more))
    whole = list(tokens.token_ids)
    expected = fingerprint(whole, len(whole), "salt", BLOCKS)
    assert fingerprint(tokens, len(whole), "salt", BLOCKS, hashed) == expected
    assert len(digests) == 0


def test_more_than_was_computed_is_not_bound(digests):
    """Where an answer ended early, its prompt is hashed anew as far as it was computed."""
    tokens = list(range(2 * MIN_TOKENS))
    digests.begin("a", tokens, len(tokens))
    hashed = digests.take("a")
    assert fingerprint(tokens, 100, None, BLOCKS, hashed) == fingerprint(tokens, 100, None, BLOCKS)


def test_nobody_waits_for_the_prompts_of_others(digests):
    """Who comes after a prompt that is not hashed yet hashes his own."""
    begun, may_end = threading.Event(), threading.Event()

    class Slow(Watched):
        def __getitem__(self, place):
            begun.set()
            assert may_end.wait(60)
            return super().__getitem__(place)

    tokens = list(range(MIN_TOKENS))
    digests.begin("a", Slow(tokens), MIN_TOKENS)
    digests.begin("b", tokens, MIN_TOKENS)
    assert begun.wait(60)
    assert digests.take("b") is None
    may_end.set()
    assert digests.take("a").num_tokens == MIN_TOKENS


@pytest.mark.parametrize("num_tokens", [MIN_TOKENS, MIN_TOKENS + 7, 9 * MIN_TOKENS])
def test_no_more_is_hashed_than_is_wanted(digests, num_tokens):
    """A prompt may have grown since it was prefilled, or may be shorter than its producer says."""
    tokens = list(range(2 * MIN_TOKENS))
    digests.begin("a", tokens, num_tokens)
    hashed = digests.take("a")
    assert hashed.num_tokens == min(num_tokens, len(tokens))
    expected = fingerprint(tokens, num_tokens, None, BLOCKS)
    assert fingerprint(tokens, num_tokens, None, BLOCKS, hashed) == expected


def test_short_prompts_wake_nobody(digests):
    """Another thread would take longer than their hash."""
    digests.begin("a", list(range(2 * MIN_TOKENS)), MIN_TOKENS - 1)
    digests.begin("a", list(range(MIN_TOKENS - 1)), 2 * MIN_TOKENS)
    assert len(digests) == 0
    assert digests.take("a") is None


def test_request_that_is_not_offered_is_forgotten(digests):
    """Whether it was hashed or not, and whether it was known or not."""
    for request_id in "abc":
        digests.begin(request_id, list(range(MIN_TOKENS)), MIN_TOKENS)
    for request_id in "abcd":
        digests.forget(request_id)
    assert len(digests) == 0
    assert digests.take("a") is None
