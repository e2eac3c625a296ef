# SPDX-License-Identifier: Apache-2.0
"""Prompts for comparisons, and what makes answers equal."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.pdstack.accuracy import (
    LONGEST_TOKENS,
    SHORTEST_TOKENS,
    Completion,
    _Answer,
    compare,
    make_prompts,
    vocabulary_size,
)

ANSWER = Completion(("a", "b", "c"), (-0.5, -1.0, -2.0), ttft_s=0.2)


@given(st.integers(2, 80), st.integers(20, 50_000), st.integers())
def test_prompts_have_all_lengths_and_shared_beginnings(count, vocabulary, seed):
    """Lengths reach from 8 to 900 tokens, half of the prompts share a prefix, no id is special."""
    prompts = make_prompts(vocabulary, count, seed=seed)
    assert prompts == make_prompts(vocabulary, count, seed=seed)
    lengths = sorted(map(len, prompts))
    assert (len(prompts), lengths[0], lengths[-1]) == (count, SHORTEST_TOKENS, LONGEST_TOKENS)
    assert all(vocabulary // 10 <= token < vocabulary for prompt in prompts for token in prompt)
    for first, second in zip(prompts[::2], prompts[1::2], strict=False):
        shared = min(len(first), len(second) - 1)
        assert second[:shared] == first[:shared]


def test_equal_answers_agree():
    """The same tokens with the same log-probabilities leave no gap."""
    found = compare([ANSWER, ANSWER], [ANSWER, replace(ANSWER, ttft_s=0.4)])
    assert (found.requests, found.equal, found.agreement, found.logprob_gap) == (2, 2, 1.0, 0.0)
    assert found.ttft_p50_s == pytest.approx(0.3)
    assert found.reference_ttft_p50_s == 0.2


def test_tokens_agree_up_to_the_first_that_differs():
    """What follows another token is another text, and says nothing about the cache."""
    other = Completion(("a", "x", "c"), (-0.5, -9.0, -9.0), 0.2)
    found = compare([ANSWER], [other])
    assert (found.equal, found.agreement, found.logprob_gap) == (0, pytest.approx(1 / 3), 0.0)


@pytest.mark.parametrize(
    ("token", "other", "tied"),
    [
        pytest.param("x", ("x", -1.001), 1, id="hardly likelier"),
        pytest.param("x", ("x", -1.1), 0, id="clear"),
        pytest.param("y", ("x", -1.001), 0, id="a third token"),
        pytest.param("x", None, 0, id="no other one is known"),
    ],
)
def test_answers_that_part_where_two_tokens_are_as_likely_are_tied(token, other, tied):
    """The likelier token has to be clear; and what is answered has to be the next likely one."""
    reference = replace(ANSWER, others=(None, other, None))
    found = compare([reference, reference], [replace(ANSWER, tokens=("a", token, "c")), ANSWER])
    assert (found.equal, found.tied) == (1, tied)


def test_an_answer_that_is_cut_off_is_no_tie():
    """There is no token to compare."""
    reference = replace(ANSWER, others=(None, None, ("x", -2.0)))
    assert compare([reference], [replace(ANSWER, tokens=("a", "b"))]).tied == 0


def test_the_largest_gap_counts():
    """One log-probability that is off is seen among many that are not."""
    other = replace(ANSWER, logprobs=(-0.5, -1.25, -2.0))
    found = compare([ANSWER, ANSWER], [ANSWER, other])
    assert (found.equal, found.logprob_gap) == (2, 0.25)


def test_a_stream_becomes_an_answer():
    """Tokens are collected over chunks, and the first one's time is kept."""
    answer = _Answer()
    for after_s, tokens in enumerate((["a"], ["b", "c"]), start=1):
        likeliest = [{token: -1.0, "x": -3.0, "y": -2.0} for token in tokens]
        logprobs = {
            "tokens": tokens,
            "token_logprobs": [-1.0] * len(tokens),
            "top_logprobs": likeliest,
        }
        chunk = {"choices": [{"text": "".join(tokens), "logprobs": logprobs}]}
        answer.add(f"data: {json.dumps(chunk)}", float(after_s))
        answer.add("", float(after_s))
    answer.add("data: [DONE]", 3.0)
    assert (answer.tokens, answer.logprobs, answer.ttft_s) == (["a", "b", "c"], [-1.0] * 3, 1.0)
    assert answer.others == [("y", -2.0)] * 3


def test_the_vocabulary_may_be_nested(tmp_path):
    """Models that take more than text keep their sizes a level deeper."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"vocab_size": 99}))
    assert vocabulary_size(tmp_path) == 99
    config.write_text(json.dumps({"text_config": {"vocab_size": 7}}))
    assert vocabulary_size(tmp_path) == 7
