# SPDX-License-Identifier: Apache-2.0
"""Of logs, what complains around a moment is shown."""

from __future__ import annotations

import time

from tools.soak.excerpts import around, around_all

AT = time.mktime((2026, 11, 22, 5, 31, 2, 0, 0, -1))
LINES = [
    "(Worker pid=3) ERROR 11-22 05:29:00 [worker.py:1] long ago",
    "(Worker pid=3) ERROR 11-22 05:30:50 [worker.py:1] before",
    "Traceback of what was before: ValueError: no",
    "(Worker pid=3) INFO 11-22 05:31:00 [worker.py:1] all is well",
    "\x1b[2m2026-11-22T05:31:01.123\x1b[0m \x1b[33m WARN\x1b[0m the router's",
    "(Worker pid=3) WARNING 11-22 05:31:07 [worker.py:1] after",
    "(Worker pid=3) ERROR 11-22 05:32:00 [worker.py:1] much later",
    "RuntimeError: then, too",
]


def test_complaints_around_a_moment_are_found():
    """What has no time of its own belongs to the line before it."""
    assert [line.rpartition(" ")[2] for line in around(LINES, AT)] == [
        "before",
        "no",
        "router's",
        "after",
    ]


def test_last_ones_are_kept():
    """Where there are many, those nearest to what went wrong are the last ones."""
    assert [line.rpartition(" ")[2] for line in around(LINES, AT, limit=1)] == ["after"]


def test_logs_without_a_word_are_left_out(tmp_path):
    """A log is named without its suffix."""
    (tmp_path / "loud.log").write_text("\n".join(LINES))
    (tmp_path / "quiet.log").write_text(LINES[3])
    assert list(around_all(sorted(tmp_path.glob("*.log")), AT)) == ["loud"]
