# SPDX-License-Identifier: Apache-2.0
"""The table of the nightly lane's parts."""

from __future__ import annotations

from tests.lanes import PARTS, RESHARD

from .blocks import code, table


def lines() -> list[str]:
    """A row for each part: its command, what it shows, and what changes ask for it."""
    rows = (
        (
            code(f"make nightly-{name}"),
            part.what,
            ", ".join(map(code, part.sources)).replace(RESHARD, "reshard"),
        )
        for name, part in PARTS.items()
    )
    return table(("command", "what", "after changes in"), rows)
