# SPDX-License-Identifier: Apache-2.0
"""The tables of deadlines, limits and intervals, from the comments above what sets them.

Such a comment says which of the three it is, its name, and what happens when it is over::

    #: limit known: a request that was sent to both engines, and that the other one does not know,
    #: fails.
    KNOWN_WITHIN_S = 10.0

It stands above a constant of a module, or above a field of `Settings`.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from .blocks import ROOT, code, table
from .options import defaults

PACKAGE = ROOT / "vllm/distributed/kv_transfer/kv_connector/v1/reshard"

_COMMENT = re.compile(
    r"^ *#: (?P<kind>deadline|limit|interval) (?P<name>[\w ]+): (?P<text>.*(?:\n *#: .*)*)"
    r"\n *(?P<setting>\w+)(?:: [^=\n]+)? = (?P<value>.+)$",
    re.MULTILINE,
)
_BEFORE = {
    "deadline": [],
    "limit": [
        "### Limits within these",
        "",
        "These also end a handshake, a request or an offer. They lie within the deadlines above, "
        "or come before them:",
        "",
    ],
    "interval": [
        "### Intervals",
        "",
        "These end no handshake, no request and no offer:",
        "",
    ],
}


@dataclass(frozen=True)
class Deadline:
    """Something that ends a wait.

    Attributes:
        kind: "deadline", "limit" or "interval".
        name: Its name.
        text: What happens when it is over.
        setting: The option or the constant that sets it.
        value: Its default.
        unit: "s" or "looks".
    """

    kind: str
    name: str
    text: str
    setting: str
    value: float
    unit: str


def deadlines() -> list[Deadline]:
    """All that there are, the shortest first."""
    options = defaults()
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for comment in _COMMENT.finditer(path.read_text(encoding="utf-8")):
            setting = comment["setting"]
            if (option := options.get(setting)) is not None:
                setting, value = option
            else:
                value = ast.literal_eval(comment["value"])
                module = path.relative_to(PACKAGE).with_suffix("").parts
                setting = ".".join((*module, setting))
            assert isinstance(value, int | float), setting
            found.append(
                Deadline(
                    kind=comment["kind"],
                    name=comment["name"],
                    text=_sentence(comment["text"]),
                    setting=setting,
                    value=value,
                    unit="looks" if setting.endswith("_LOOKS") else "s",
                )
            )
    return sorted(found, key=lambda each: (each.unit, each.value, each.name))


def _sentence(comment: str) -> str:
    """The text of a comment in one line, from a capital letter."""
    text = " ".join(re.sub(r"\n *#:", "", comment).split())
    return text[0].upper() + text[1:]


def lines() -> list[str]:
    """A table of each kind."""
    found = deadlines()
    lines: list[str] = []
    for kind, before in _BEFORE.items():
        rows = (
            (each.name, f"{each.value:g} {each.unit}", each.text, code(each.setting))
            for each in found
            if each.kind == kind
        )
        head = (kind, "default", "what happens when it is over", "set by")
        lines += ["", *before, *table(head, rows)]
    return lines[1:]
