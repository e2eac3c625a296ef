# SPDX-License-Identifier: Apache-2.0
"""The table of options, from `Settings` and its docstring."""

from __future__ import annotations

import re

import msgspec

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.settings import Settings

from .blocks import code, table
from .docstrings import section

_MORE = {
    "early_dispatch": "deploying.md#to-both-engines-at-once",
    "enforce_handshake_compat": "#what-can-be-combined",
    "missing_draft_layers": "#drafts",
    "seed_first_token": "deploying.md#the-prefill-engines-first-token",
    "side_channel_key_file": "security.md#one-key-for-all-engines",
    "trusted_peers": "security.md#where-engines-may-be",
}
"""Where docs/layouts.md sends those who want to know more of an option."""


def defaults() -> dict[str, tuple[str, object]]:
    """Name and default of each option, by its name in `Settings`."""
    return {
        field.name: (field.encode_name, field.default) for field in msgspec.structs.fields(Settings)
    }


def lines() -> list[str]:
    """A row for each option, in the order of the docstring."""
    known = defaults()
    told = section(Settings.__doc__, "Attributes")
    if told.keys() != known.keys():
        raise ValueError(f"Settings: {told.keys() ^ known.keys()} is told or there, and not both")
    rows = []
    for attribute, meaning in told.items():
        name, default = known[attribute]
        more = _MORE.get(name)
        rows.append(
            (
                f"[{code(name)}]({more})" if more else code(name),
                code(msgspec.json.encode(default).decode()),
                re.sub(r"\bNone\b", "`null`", meaning),
            )
        )
    return table(("option", "default", "meaning"), rows)
