# SPDX-License-Identifier: Apache-2.0
"""What stands for tokens in blocks is the same at both ends, and another for anything else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.fingerprint import (
    OfferFingerprint,
    fingerprint,
)

TOKENS = st.lists(st.integers(0, 200_000), min_size=1, max_size=40)
GROUPS = st.lists(st.lists(st.integers(0, (1 << 31) - 1), max_size=6), min_size=1, max_size=3)
EXTRA_KEYS = st.none() | st.tuples(st.sampled_from(["salt", "adapter", ("mm", "item", 3)]))


@given(TOKENS, EXTRA_KEYS, GROUPS, TOKENS, EXTRA_KEYS, GROUPS)
def test_fingerprints_agree_where_everything_does(
    tokens, keys, blocks, others, other_keys, elsewhere
):
    """Two offers have one fingerprint exactly where tokens, keys and blocks are the same."""
    ours = fingerprint(tokens, len(tokens), keys, blocks)
    theirs = fingerprint(others, len(others), other_keys, elsewhere)
    same = (tokens, keys, blocks) == (others, other_keys, elsewhere)
    assert (ours == theirs) == same
    assert (ours.difference(theirs) is None) == same


@given(TOKENS, TOKENS, GROUPS)
def test_only_offered_tokens_count(tokens, more, blocks):
    """A prompt that goes on after the tokens that are held wants the same of the producer."""
    assert fingerprint(tokens, len(tokens), None, blocks) == fingerprint(
        tokens + more, len(tokens), None, blocks
    )


@given(TOKENS, GROUPS)
def test_json_changes_nothing(tokens, blocks):
    """A router turns tuples into lists, and numpy's integers into Python's."""
    sent = tuple(tuple(np.asarray(group, dtype=np.int64)) for group in blocks)
    assert fingerprint(tokens, len(tokens), None, sent) == fingerprint(
        tuple(tokens), len(tokens), None, blocks
    )


@given(TOKENS, st.integers(1, 5), GROUPS)
def test_missing_tokens_are_a_difference(tokens, missing, blocks):
    """A reader whose prompt is shorter than what is held never agrees with its producer."""
    held = fingerprint(tokens + [7] * missing, len(tokens) + missing, None, blocks)
    assert held.difference(fingerprint(tokens, len(tokens) + missing, None, blocks)) is not None


class CountedTokens(Sequence):
    """Tokens of a prompt.

    Attributes:
        num_asked: How often some of them were asked for.
    """

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self.num_asked = 0

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, which):
        """One of them, or some."""
        self.num_asked += 1
        return self._tokens[which]


def test_number_that_a_client_has_made_up_costs_nothing():
    """It takes no longer than the prompt is long."""
    tokens = CountedTokens(list(range(5000)))
    made_up = fingerprint(tokens, 2**31 - 1, None, [[1]])
    assert made_up.num_tokens == 2**31 - 1
    assert tokens.num_asked == 2


def test_groups_do_not_run_into_each_other():
    """The same ids, divided otherwise among groups, are other blocks."""
    assert fingerprint([1], 1, None, [[1, 2], [3]]) != fingerprint([1], 1, None, [[1], [2, 3]])


def test_fingerprints_are_the_same_in_every_process():
    """No hash seed and no machine has a part in them."""
    assert fingerprint([5, 7, 11], 3, ("adapter",), [[1, 2]]) == OfferFingerprint(
        3, content=3312898702473162500, blocks=5007576965748057616
    )


@pytest.mark.parametrize("strange", [-1, 1 << 32, (1 << 64) - 1])
def test_ids_that_no_vocabulary_has_are_bound_too(strange):
    """They end nobody's engine, and are the same at both ends and other than any others."""
    ours = fingerprint([5, strange], 2, None, [[1]])
    assert ours == fingerprint((5, strange), 2, None, [[1]])
    assert ours != fingerprint([strange, 5], 2, None, [[1]]) != fingerprint([5, 7], 2, None, [[1]])


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (OfferFingerprint(4, 1, 1), "is of 3 tokens, and 4 are wanted here"),
        (OfferFingerprint(3, 2, 1), "was computed for 3 other tokens than this prompt's"),
        (OfferFingerprint(3, 1, 2), "lies in other blocks than those that were read"),
    ],
)
def test_differences_are_named(wanted, message):
    """The first that differs, from the most to the least telling."""
    assert OfferFingerprint(3, 1, 1).difference(wanted) == message
