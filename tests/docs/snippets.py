# SPDX-License-Identifier: Apache-2.0
"""What stands in code on a page of Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator

_FENCED = re.compile(r"^( *)```[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`([^`]+)`")


def code_in(page: str) -> Iterator[str]:
    """Blocks of code, and words in code, which may be wrapped like the others."""
    yield from (block for _, block in _FENCED.findall(page))
    yield from (" ".join(words.split()) for words in _INLINE.findall(_FENCED.sub("", page)))
