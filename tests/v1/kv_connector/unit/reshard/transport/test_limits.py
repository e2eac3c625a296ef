# SPDX-License-Identifier: Apache-2.0
"""The limit of open files: counted, raised, shared out, and watched."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport import limits
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.limits import (
    FULL,
    LOOK_INTERVAL_S,
    FileWatch,
    OpenFiles,
    open_files,
    within_limit,
)

MANY = 1 << 20


@pytest.fixture
def counted(monkeypatch) -> list[int]:
    """How many of 100 files are open: the last one counts."""
    counts = [0]
    monkeypatch.setattr(limits, "open_files", lambda: OpenFiles(counts[-1], 100))
    return counts


@pytest.fixture
def warnings(monkeypatch) -> list[str]:
    """What the module warns of, line by line."""
    lines: list[str] = []
    monkeypatch.setattr(limits.logger, "warning", lambda text, *of: lines.append(text % of))
    return lines


def test_files_are_counted(monkeypatch):
    """As many more as are opened, also where the system gives no size of the directory."""
    no_size = SimpleNamespace(stat=lambda: SimpleNamespace(st_size=0), iterdir=limits._OPEN.iterdir)
    for directory in (limits._OPEN, no_size):
        monkeypatch.setattr(limits, "_OPEN", directory)
        with contextlib.ExitStack() as kept:
            before = open_files()
            for _ in range(50):
                kept.callback(os.close, os.dup(0))
            after = open_files()
        # Other threads may close some of theirs meanwhile.
        assert after.count >= before.count + 30
        assert after.limit == resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_soft_limit_is_raised_to_the_hard_one():
    """In a process whose soft limit is low; the hard one stays."""
    program = (
        "import resource\n"
        f"from {limits.__name__} import raise_file_limit\n"
        "_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "hard = min(hard, 2048)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))\n"
        "raise_file_limit()\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)\n"
        "raise_file_limit()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert not ended.returncode, ended.stderr


@given(st.integers(1, MANY), st.floats(0.01, 1.0), st.integers(1, 20), st.integers(1, MANY))
def test_bound_stays_within_its_share(most, share, files_each, limit):
    """Of whatever limit; but one is always allowed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "file_limit", lambda: limit)
        bound = within_limit(most, share, files_each)
    assert 1 <= bound <= most
    assert bound == 1 or bound * files_each <= share * limit
    assert bound == most or (bound + 1) * files_each > share * limit * (1 - 1e-9)


def test_shortage_is_told_when_it_begins_and_ends(counted, warnings):
    """Once each, with what is open; and the metric whenever its hundredths change."""
    recorded: list[float] = []
    watch = FileWatch(recorded.append)
    seen = []
    for step, count in enumerate((50, 81, 90, 78, 60, 60)):
        counted.append(count)
        seen.append((watch.look(step * LOOK_INTERVAL_S), watch.shortage))
    says = "81 of 100 files are open"
    assert seen == [
        (False, ""),
        (True, says),
        (False, says),
        (False, says),
        (True, ""),
        (False, ""),
    ]
    assert recorded == [0.5, 0.81, 0.9, 0.78, 0.6]
    (warning,) = warnings
    assert warning.startswith(f"{says} (") and "pipe " in warning and "ulimit -n" in warning


def test_files_are_not_counted_again_at_once(counted):
    """Polls are more frequent than that."""
    watch = FileWatch(lambda _: None)
    assert not watch.look(0.0)
    counted.append(int(100 * FULL) + 1)
    assert not watch.look(0.9 * LOOK_INTERVAL_S)
    assert watch.look(LOOK_INTERVAL_S)
