# SPDX-License-Identifier: Apache-2.0
"""Read the log of a server: its end, its root cause, and how far it has come."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

_TAIL_BYTES = 256 * 1024
_PREFIX = re.compile(
    r"^(\(\w+[^)]*\bpid=\d+\)\s*)?"  # (EngineCore pid=123)
    r"((DEBUG|INFO|WARNING|ERROR|CRITICAL)\s+\d\d-\d\d \d\d:\d\d:\d\d\s+(\[[^\]]*\]\s*)?)?"
)
_EXCEPTION = re.compile(r"^(\w+\.)*(?!Runtime\w*Warning)\w*(Error|Exception|Exit)\b(:\s*\S.*)?$")
# They only say that something else, further up, went wrong.
_CONSEQUENCES = ("See root cause above", "See stack trace for root cause", "EngineDeadError")
# What the core of an engine says last, in every release that is served here.
_START_FAILED = "EngineCore failed to start"
_ERROR_LINE = re.compile(
    r"\b(ERROR|CRITICAL|fatal|panicked)\b|\b[Ee]rror:|[Aa]ddress already in use"
)

# What a process that has loaded Triton says as it ends: longer than a tail, of use to nobody.
_LEAKS = re.compile(r"^(nanobind: | - (leaked |\.\.\. skipped )|See https://nanobind\.)")

_PHASES: tuple[tuple[str, str], ...] = (
    ("Application startup complete", "ready"),
    ("Starting vLLM server", "opening its port"),
    ("init engine", "starting the API server"),
    ("KV cache size", "warming up"),
    ("Loading weights took", "measuring its memory"),
    ("Starting to load model", "loading the model"),
    ("Initializing a V1 LLM engine", "starting workers"),
    ("Using max model len", "starting the engine"),
    ("non-default args", "reading the model's config"),
)


def tail(path: Path, lines: int = 30) -> list[str]:
    """Return the last lines of a log that say something, oldest first.

    Nothing if it cannot be read.
    """
    said = _read_end(path).splitlines()
    return [line for line in said if line.strip() and not _LEAKS.match(line)][-lines:]


def find_cause(path: Path) -> str:
    """Return the line that best says why a server failed, without vLLM's prefix.

    This is the first exception that is not the mere consequence of another one; without any,
    the last line that calls itself an error; without that, an empty string.
    """
    return cause_of(_read_end(path).splitlines())


def cause_of(lines: Iterable[str]) -> str:
    """See :func:`find_cause`."""
    error_line = ""
    consequence = ""
    for raw in lines:
        line = _PREFIX.sub("", raw).strip()
        if _EXCEPTION.match(line):
            if not any(text in line for text in _CONSEQUENCES):
                return line
            consequence = line
        elif _ERROR_LINE.search(raw) and line:
            error_line = line
    return error_line or consequence


def start_failed(path: Path) -> bool:
    """Say whether a vLLM server has written that its engine could not be started."""
    return _START_FAILED in _read_end(path)


def find_phase(path: Path) -> str:
    """Return in a few words how far the start-up of a vLLM server has come."""
    text = _read_end(path)
    return next((phase for mark, phase in _PHASES if mark in text), "importing vLLM")


def _read_end(path: Path) -> str:
    try:
        with path.open("rb") as log:
            log.seek(0, 2)
            log.seek(max(0, log.tell() - _TAIL_BYTES))
            return log.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
