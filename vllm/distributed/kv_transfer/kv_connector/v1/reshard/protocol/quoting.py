# SPDX-License-Identifier: Apache-2.0
"""Text that others have written, made fit for one line of a log.

Clients name engines, hosts and requests, engines name themselves, and libraries quote them in what
they raise. A line feed in a name would begin a line that is not ours. So whatever may
be text is quoted where it is put into a line, and a test finds where it is not.
"""

from __future__ import annotations

_NAME_CHARACTERS = 200
_LINE_CHARACTERS = 4000


def quote(name: str | None) -> str:
    """A name, of any length and with anything in it."""
    return "unset" if name is None else _printable(name, _NAME_CHARACTERS)


def one_line(message: object) -> str:
    """A message or an error, which may quote names."""
    return _printable(str(message), _LINE_CHARACTERS)


def _printable(text: str, max_characters: int) -> str:
    head = text[:max_characters]
    printable = head if head.isprintable() else ascii(head)
    if max(len(text), len(printable)) > max_characters:
        return f"{printable[:max_characters]}..."
    return printable
