# SPDX-License-Identifier: Apache-2.0
"""Replies are read as they come: whole, in pieces, broken off, or not understood."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.soak.replies import Reply


def chunk(index: int, text: str | None = None, ending: str | None = None) -> str:
    """Return a line of a stream."""
    choice = {"index": index, "delta": {"content": text} if text else {}, "finish_reason": ending}
    return f"data: {json.dumps({'choices': [choice]})}"


@given(st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=4), st.randoms())
def test_stream_of_several_answers_is_sorted_out(texts, rng):
    """Pieces of several answers may come in any order; together they are the answers."""
    pieces = [index for index, text in enumerate(texts) for _ in text]
    rng.shuffle(pieces)
    reply, letters = Reply(len(texts)), [iter(text) for text in texts]
    for index in pieces:
        assert not reply.complete
        reply.take_line(chunk(index, next(letters[index])))
        reply.take_line("")
    for index in range(len(texts)):
        assert not reply.complete
        reply.take_line(chunk(index, ending="length"))
    reply.take_line("data: [DONE]")
    assert reply.answers == tuple(texts)
    assert reply.complete and not reply.error
    assert reply.num_pieces == len(pieces)


def test_whole_reply_is_read():
    """One without a stream has messages."""
    reply = Reply(1)
    choice = {"index": 0, "message": {"content": "all is well"}, "finish_reason": "stop"}
    reply.take(json.dumps({"choices": [choice]}).encode())
    assert (reply.answers, reply.complete) == (("all is well",), True)


def test_error_in_a_stream_makes_it_incomplete():
    """What came before it is kept, and is no whole answer, even if it ends in order."""
    reply = Reply(1)
    reply.take_line(chunk(0, "all"))
    reply.take_line('data: {"error": {"message": "Internal server error", "code": 500}}')
    reply.take_line(chunk(0, ending="stop"))
    assert reply.answers == ("all",)
    assert "Internal server error" in reply.error
    assert not reply.complete


@pytest.mark.parametrize("ending", ["error", "abort"])
def test_other_endings_are_no_answers(ending):
    """Where vLLM breaks an answer off, it names the reason in the same place."""
    reply = Reply(1)
    reply.take_line(chunk(0, "all", ending))
    assert not reply.complete
    assert ending in reply.error


@pytest.mark.parametrize("content", [b"", b"<html>", b"[]", b'{"choices": [{}]}', b"\xff", b"1"])
def test_what_is_no_reply_is_told(content):
    """Whatever stands there is quoted, and nothing is raised."""
    reply = Reply(1)
    reply.take(content)
    assert not reply.complete
    assert reply.error.startswith("not understood")
