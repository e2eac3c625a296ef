# SPDX-License-Identifier: Apache-2.0
"""What has come of a reply so far, whole or token by token; no I/O."""

from __future__ import annotations

import json
from typing import Any

_ENDINGS = ("stop", "length")
_SHOWN_CHARACTERS = 300


class Reply:
    """A reply with status 200 as it comes in.

    Args:
        num_answers: how many answers were asked for.

    Attributes:
        error: what stands in place of (the rest of) an answer; empty where nothing does.
    """

    def __init__(self, num_answers: int) -> None:
        self.error = ""
        self._num_answers = num_answers
        self._texts: dict[int, list[str]] = {}
        self._ended: set[int] = set()

    @property
    def answers(self) -> tuple[str, ...]:
        """The text of each answer, as far as it has come."""
        return tuple("".join(self._texts[index]) for index in sorted(self._texts))

    @property
    def num_pieces(self) -> int:
        """How many pieces of answers have come."""
        return sum(map(len, self._texts.values()))

    @property
    def complete(self) -> bool:
        """Whether the server has said of as many answers as were wanted that they are complete."""
        return not self.error and len(self._ended) >= self._num_answers

    def take(self, content: bytes) -> None:
        """Take a whole reply."""
        self._take(content, "message")

    def take_line(self, line: str) -> None:
        """Take a line of a stream."""
        payload = line.removeprefix("data:").strip()
        if line.startswith("data:") and payload != "[DONE]":
            self._take(payload.encode(), "delta")

    def _take(self, content: bytes, part: str) -> None:
        try:
            said = json.loads(content)
            if said.get("error"):
                self.error = json.dumps(said["error"])[:_SHOWN_CHARACTERS]
            for choice in said.get("choices", ()):
                self._take_choice(choice, part)
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            shown = content.decode(errors="replace")[:_SHOWN_CHARACTERS]
            self.error = f"not understood ({error!r}): {shown}"

    def _take_choice(self, choice: dict[str, Any], part: str) -> None:
        pieces = self._texts.setdefault(choice["index"], [])
        text = choice[part].get("content")
        if text:
            pieces.append(text)
        ending = choice.get("finish_reason")
        if ending in _ENDINGS:
            self._ended.add(choice["index"])
        elif ending:
            self.error = self.error or f"the answer ended with {ending!r}"
