# SPDX-License-Identifier: Apache-2.0
"""Parameters of requests that no engine returned, made of those that one did."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

Params = dict[str, Any]

_UNUSED_PORT = 9
"""The port of the discard service, which nobody runs; below all that engines listen at."""
_UNREACHABLE_HOST = "192.0.2.1"
"""An address that is kept for documentation: packets to it get lost."""
_MANY = 1 << 20


class Forgery(str, Enum):
    """What is done to the parameters of a request."""

    BLOCKS_BEYOND_THE_POOL = "blocks beyond the pool"
    NEGATIVE_BLOCKS = "negative blocks"
    OTHER_BLOCKS = "somebody else's blocks"
    REVERSED_BLOCKS = "blocks in another order"
    TOO_MANY_BLOCKS = "more blocks than the prompt has"
    TOO_FEW_BLOCKS = "fewer blocks than the prompt has"
    BLOCKS_OF_NO_GROUP = "no blocks"
    OTHER_REQUEST = "somebody else's request"
    UNKNOWN_REQUEST = "a request that nobody knows"
    OTHER_ENGINE = "an engine that is not there"
    UNUSED_PORT = "a port that nobody listens at"
    UNREACHABLE_HOST = "a host that cannot be reached"
    MORE_TOKENS = "more tokens than there are"
    WRONG_TYPES = "values of other types"
    MISSING_ADDRESS = "no address"

    def __str__(self) -> str:
        return self.value


def forge(params: Mapping[str, Any], forgery: Forgery, other: Mapping[str, Any]) -> Params:
    """Return parameters that were tampered with.

    Args:
        params: what a prefill engine returned for this request.
        other: what it returned for somebody else's.
    """
    blocks: list[list[int]] = [list(group) for group in params["remote_block_ids"]]
    changes: dict[Forgery, Params] = {
        Forgery.BLOCKS_BEYOND_THE_POOL: {
            "remote_block_ids": [[block + _MANY for block in group] for group in blocks]
        },
        Forgery.NEGATIVE_BLOCKS: {
            "remote_block_ids": [[-1 - block for block in group] for group in blocks]
        },
        Forgery.OTHER_BLOCKS: {"remote_block_ids": other["remote_block_ids"]},
        Forgery.REVERSED_BLOCKS: {"remote_block_ids": [group[::-1] for group in blocks]},
        Forgery.TOO_MANY_BLOCKS: {"remote_block_ids": [group + group for group in blocks]},
        Forgery.TOO_FEW_BLOCKS: {"remote_block_ids": [group[1:] for group in blocks]},
        Forgery.BLOCKS_OF_NO_GROUP: {"remote_block_ids": []},
        Forgery.OTHER_REQUEST: {"remote_request_id": other["remote_request_id"]},
        Forgery.UNKNOWN_REQUEST: {"remote_request_id": "nobody's"},
        Forgery.OTHER_ENGINE: {"remote_engine_id": "nobody's"},
        Forgery.UNUSED_PORT: {"remote_port": _UNUSED_PORT},
        Forgery.UNREACHABLE_HOST: {"remote_host": _UNREACHABLE_HOST},
        Forgery.MORE_TOKENS: {"remote_num_tokens": _MANY},
        Forgery.WRONG_TYPES: {"remote_block_ids": "0,1,2", "remote_port": "here"},
    }
    if forgery is Forgery.MISSING_ADDRESS:
        lost = ("remote_host", "remote_port")
        return {name: value for name, value in params.items() if name not in lost}
    return {**params, **changes[forgery]}
