# SPDX-License-Identifier: Apache-2.0
"""A decode worker that hears of engines of many ranks."""

from __future__ import annotations

import threading

from benchmarks.answers import AnswersHost
from benchmarks.specs import Watch


class AtOnce(threading.Thread):
    """A thread that is over before who has started it goes on."""

    def start(self) -> None:
        """Begin, and end."""
        super().start()
        self.join()


class Host(AnswersHost):
    """Reads answers in no time."""

    def __init__(self) -> None:
        pass

    def _answer(self) -> bytes:
        return b""

    def _prepare(self, answer: bytes) -> int:
        return 1


def test_answers_that_are_read_at_once_pause_nobody(monkeypatch):
    """There is one step in any case, to tell of."""
    monkeypatch.setattr(threading, "Thread", AtOnce)
    summary = Host().read_answers(3, Watch(step_s=1e-3))
    assert 0 < summary.longest_s < 1.0
