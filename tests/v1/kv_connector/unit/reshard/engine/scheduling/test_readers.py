# SPDX-License-Identifier: Apache-2.0
"""Who reads what, and what vLLM may give up in whose place."""

from __future__ import annotations

import pytest

from tests.v1.kv_connector.unit.reshard.containers import largest
from tests.v1.kv_connector.unit.reshard.engine.schedulers import request
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.scheduling.readers import (
    MAX_REMEMBERED,
    OfferClaims,
    is_placeholder,
)

REMOTE, OTHER = ("prefill", "p-a"), ("prefill", "p-b")


@pytest.mark.parametrize(
    ("num_tokens", "at_once", "expected"),
    [(1, True, True), (1, False, False), (2, True, False)],
)
def test_made_up_requests_are_told_from_others(num_tokens, at_once, expected):
    """From a client's of the same prompt, and from one that vLLM ends at once with its own."""
    asked = request({}, num_tokens)
    asked.abort_immediately = at_once
    assert is_placeholder(asked) is expected


def test_one_request_reads_at_a_time():
    """Another one may when it has ended; the end of one that did not read changes nothing."""
    readers = OfferClaims()
    assert readers.claim(REMOTE, "d-a") and readers.claim(OTHER, "d-b")
    assert not readers.claim(REMOTE, "d-b")
    readers.finish(REMOTE, "d-b")
    assert not readers.claim(REMOTE, "d-b") and readers.claim(REMOTE, "d-a")
    readers.finish(REMOTE, "d-a")
    assert readers.claim(REMOTE, "d-b")


def test_what_nobody_has_read_may_be_given_up():
    """And nothing else, as long as vLLM may be cleaning up after its reader."""
    readers = OfferClaims()
    assert readers.may_give_up(REMOTE)
    readers.claim(REMOTE, "d-a")
    assert not readers.may_give_up(REMOTE) and readers.may_give_up(OTHER)
    readers.finish(REMOTE, "d-a")
    assert not readers.may_give_up(REMOTE)


def test_holder_of_what_is_given_up_is_notified_once():
    """Of all that share a request id; of one remote request once."""
    readers, made_up = OfferClaims(), [request({}, 1) for _ in range(3)]
    for remote, each in zip((REMOTE, REMOTE, OTHER), made_up, strict=True):
        readers.give_up(remote, each)
    assert readers.take_given_up() == made_up[1:]
    assert readers.take_given_up() == []


def test_readers_that_have_ended_are_not_remembered_for_ever():
    """The oldest are forgotten first; one that has read again is not the oldest."""
    readers = OfferClaims()
    for remote in (REMOTE, OTHER, REMOTE, *(("prefill", str(n)) for n in range(MAX_REMEMBERED))):
        readers.claim(remote, "d-a")
        readers.finish(remote, "d-a")
        if remote == ("prefill", str(MAX_REMEMBERED - 2)):
            assert readers.may_give_up(OTHER) and not readers.may_give_up(REMOTE)
    assert largest(readers) == MAX_REMEMBERED
