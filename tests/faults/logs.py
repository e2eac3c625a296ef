# SPDX-License-Identifier: Apache-2.0
"""What a log says from some moment on, without what is in order."""

from __future__ import annotations

import re
from collections import Counter

from tools.pdstack.stack import Engine

_LINE = re.compile(
    r"(?:\(\w+[^)]*\bpid=\d+\) )?(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL)"
    r"(?::\s+| \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] )(?P<text>.*)"
)
_OF_ANY_FAILURE = re.compile(
    r"Failing \d+ request\(s\) due to KV load failure .*"
    r"|Recovered from KV load failure: \d+ request\(s\) rescheduled .*"
    r"|Request \S+ failed with an internal error during generation"
)
_NIXLS_INFO = re.compile(r"\S+ \S+ NIXL INFO +.*")
"""Of each agent that is made, as where a lane is replaced."""

_DURATION = re.compile(r"\b\d+\.\d s\b")


class Log:
    """A log, from now on.

    Args:
        engine: whose log. What each of its workers says once counts as one line.
    """

    def __init__(self, engine: Engine) -> None:
        self._path = engine.child.log_path
        self._num_workers = engine.spec.layout.world_size
        self._offset_bytes = self._path.stat().st_size

    def complaints(self, *, but: str | None = None) -> list[str]:
        """Return what is no matter of course: warnings, errors, and lines without a level.

        vLLM says by itself that a read and a request have failed, but not why; that is left out.

        Args:
            but: leave out what contains these words, too.
        """
        with self._path.open("rb") as log:
            log.seek(self._offset_bytes)
            lines = log.read().decode(errors="replace").splitlines()
        texts = [text for text in map(_complaint, lines) if text]
        # Each worker has measured for itself how long it has waited.
        keys = [_DURATION.sub("", text) for text in texts]
        alike, counts = dict(zip(keys, texts, strict=True)), Counter(keys)
        return [
            text
            for key, text in alike.items()
            if but is None or but not in text
            for _ in range(-(-counts[key] // self._num_workers))
        ]

    def find(self, words: str) -> list[str]:
        """Return the complaints that contain some words."""
        return [line for line in self.complaints() if words in line]


def _complaint(line: str) -> str | None:
    """The text of a line that complains."""
    match = _LINE.fullmatch(line)
    if match is None:
        return None if _NIXLS_INFO.fullmatch(line) else line.strip()
    text = match["text"]
    if match["level"] in ("DEBUG", "INFO") or _OF_ANY_FAILURE.fullmatch(text):
        return None
    return text
