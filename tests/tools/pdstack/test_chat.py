# SPDX-License-Identifier: Apache-2.0
"""Streaming answers, and hearing of a death while one streams."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.pdstack.chat import ChatClient, while_alive
from tools.pdstack.engine import Device, EngineSpec, ServedModel
from tools.pdstack.errors import ProcessDiedError
from tools.pdstack.stack import PDStack

Emit = Callable[[str], None]


def test_pieces_and_result_are_handed_out() -> None:
    """The iteration yields what the work emits, then its result is there."""

    def work(emit: Emit) -> int:
        emit("a")
        emit("b")
        return 7

    stream = while_alive(work, check=lambda: None)
    assert list(stream) == ["a", "b"]
    assert stream.result == 7


def test_an_error_of_the_work_is_raised() -> None:
    """What goes wrong in the thread comes out of the iteration."""

    def work(emit: Emit) -> int:
        emit("a")
        raise ConnectionError("gone")

    stream = while_alive(work, check=lambda: None)
    with pytest.raises(ConnectionError, match="gone"):
        list(stream)


def test_a_death_ends_a_hanging_request() -> None:
    """When the check fails, the iteration ends although the work never does."""
    release = threading.Event()
    dead = threading.Event()

    def check() -> None:
        if dead.is_set():
            raise ProcessDiedError("decode", "was ended", "", [])

    def work(emit: Emit) -> bool:
        emit("a")
        dead.set()
        return release.wait()

    with pytest.raises(ProcessDiedError):
        list(while_alive(work, check))
    release.set()


@pytest.mark.usefixtures("fake_scripts")
def test_an_answer_is_complete(model: ServedModel, run_dir: Path) -> None:
    """Text, tokens, finish reason and times come from the stream."""
    pieces: list[str] = []
    with PDStack(model, run_dir, device=Device.CPU) as stack:
        (engine,) = stack.start_engines(EngineSpec("e"))
        with ChatClient(engine.url, model.name) as client:
            answer = client.ask("how is it going?", 8, pieces.append)
    assert pieces == ["all", " is", " well"]
    assert answer.text == "all is well"
    assert (answer.prompt_tokens, answer.completion_tokens, answer.finish_reason) == (7, 3, "stop")
    assert 0 < answer.ttft_s <= answer.total_s
