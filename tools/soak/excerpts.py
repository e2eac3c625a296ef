# SPDX-License-Identifier: Apache-2.0
"""What logs say around a moment."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from pathlib import Path

# vLLM's 11-22 05:31:02, local time; the router's and NIXL's begin with a year.
_STAMP = re.compile(r"\b(\d\d-\d\d)[ T](\d\d:\d\d:\d\d)")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_COMPLAINS = re.compile(r"\b(WARN|WARNING|ERROR|CRITICAL|Fatal|Traceback)\b|\w(Error|Exception)\b")
_LONGEST_LINE = 300


def around(
    lines: Iterable[str],
    at: float,
    *,
    before_s: float = 20.0,
    after_s: float = 5.0,
    limit: int = 12,
) -> list[str]:
    """Return lines that complain, out of those that were written around a moment.

    Args:
        lines: of a log; one without a time was written with the one before it.
        at: the moment, as the wall clock has it.
        limit: how many to return at most: the last ones.
    """
    earliest, latest = (_stamp(at + shift_s) for shift_s in (-before_s, after_s))
    found = []
    stamp = ""
    for raw in lines:
        line = _ESCAPES.sub("", raw).rstrip()
        match = _STAMP.search(line)
        if match is not None:
            stamp = f"{match[1]} {match[2]}"
        if earliest <= stamp <= latest and _COMPLAINS.search(line):
            found.append(line[:_LONGEST_LINE])
    return found[-limit:]


def around_all(paths: Iterable[Path], at: float) -> dict[str, list[str]]:
    """Return what each of some logs says around a moment, by its name; not those without a word."""
    found = {}
    for path in paths:
        with path.open(encoding="utf-8", errors="replace") as log:
            if said := around(log, at):
                found[path.stem] = said
    return found


def _stamp(at: float) -> str:
    return time.strftime("%m-%d %H:%M:%S", time.localtime(at))
