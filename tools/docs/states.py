# SPDX-License-Identifier: Apache-2.0
"""The diagram of the states of a request that is read."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.states import (
    READ_TRANSITIONS,
    ReadState,
)


def lines() -> list[str]:
    """A mermaid diagram with an arrow for each transition; failures, from all states, once."""
    arrows = [
        f"    {before.name} --> {after.name}"
        for before, follow in READ_TRANSITIONS.items()
        for after in ReadState
        if after in follow and (after is not ReadState.FAILED or before is ReadState.CHECKING)
    ]
    return ["```mermaid", "stateDiagram-v2", *arrows, "    ENDED --> [*]", "```"]
