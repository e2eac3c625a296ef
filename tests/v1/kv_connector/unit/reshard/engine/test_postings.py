# SPDX-License-Identifier: Apache-2.0
"""What a scheduler says of the requests that it computes."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.postings import Postings
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.board import State
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    decode_announcement,
    encode_announcement,
)


def made() -> tuple[Postings, list]:
    """Postings, and what they announce."""
    announced: list = []
    return Postings(
        lambda posting: announced.append(decode_announcement(encode_announcement(posting)))
    ), announced


def states(postings: Postings) -> list[tuple[str, State | None]]:
    """What a step tells."""
    return [(each.name, each.state) for each in postings.take()]


def complete(postings: Postings, request_id: str) -> None:
    """Compute a request's prompt, in two steps."""
    postings.admit(request_id, 40)
    postings.compute([("another", 99), (request_id, 32)], 64)
    postings.compute([(request_id, 40)], 9)
    postings.compute([(request_id, 41)], 1)


def test_request_is_known_computed_and_offered():
    """Each is announced, and told by the next step once; of its steps the last is."""
    postings, announced = made()
    postings.know("a", "x")
    complete(postings, "a")
    postings.offer("a", 40, [[5, 2, 9]])
    told = postings.take()
    assert told == announced and postings.take() == []
    assert [each.state for each in told] == [State.KNOWN, State.LAST_CHUNK, State.OFFERED]
    assert [each.step_tokens for each in told] == [0, 9, 0]
    assert [each.number for each in told] == [1, 2, 3]
    postings.forget(["a"])
    assert states(postings) == [] and not len(postings)


def test_requests_that_nobody_waits_for_are_not_told_of():
    """As those of clients that ask this engine alone."""
    postings, announced = made()
    complete(postings, "a")
    postings.end("a", State.ABORTED)
    postings.forget(["a"])
    assert not announced


def test_two_requests_of_one_name_are_ambiguous_until_both_have_ended():
    """Nobody could say which is meant, also once one of them has ended."""
    postings, _ = made()
    for request_id in ("a", "b"):
        postings.know(request_id, "x")
    complete(postings, "a")
    postings.offer("a", 40, [[1]])
    postings.end("b", State.ABORTED)
    assert states(postings) == [("x", State.KNOWN), ("x", State.AMBIGUOUS)]
    postings.forget(["a"])
    assert states(postings) == [("x", None)]
    postings.know("c", "x")
    assert states(postings) == [("x", State.KNOWN)]
