# SPDX-License-Identifier: Apache-2.0
"""Quotes text from outside this process so that it fits on one line of a log.

Clients name engines, hosts and requests, engines name themselves, and libraries quote these names
in their errors. A line feed in a name would let a client forge a line of the log. So all such text
is quoted where it is put into a line, and a test finds places that do not quote it.
"""

from __future__ import annotations

_NAME_CHARACTERS = 200
_LINE_CHARACTERS = 4000


def quote(name: str | None) -> str:
    """Return a name in printable characters, shortened if it is long; "unset" for None."""
    return "unset" if name is None else _printable(name, _NAME_CHARACTERS)


def one_line(message: object) -> str:
    """Return a message or an error, which may contain names, as one printable line."""
    return _printable(str(message), _LINE_CHARACTERS)


def _printable(text: str, max_characters: int) -> str:
    head = text[:max_characters]
    printable = head if head.isprintable() else ascii(head)
    if max(len(text), len(printable)) > max_characters:
        return f"{printable[:max_characters]}..."
    return printable
