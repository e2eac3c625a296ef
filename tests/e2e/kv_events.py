# SPDX-License-Identifier: Apache-2.0
"""What engines publish of the blocks in their prefix caches, and what a router makes of it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq

Block = tuple[Any, tuple[int, ...]]


def published_at(socket: Path) -> tuple[str, ...]:
    """Return the part of a command line that has an engine publish at a Unix socket."""
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"ipc://{socket}"}
    return ("--kv-events-config", json.dumps(config))


@dataclass
class Subscriber:
    """Knows of an engine's prefix cache what it has published since this was made.

    Attributes:
        socket: Where the engine publishes.
        block_tokens: Size of a block.
    """

    socket: Path
    block_tokens: int
    _names: dict[Block, Any] = field(default_factory=dict)
    _kept: set[Any] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._zmq = zmq.Context.instance().socket(zmq.SUB)
        self._zmq.subscribe(b"")
        self._zmq.connect(f"ipc://{self.socket}")

    def close(self) -> None:
        """Unsubscribe."""
        self._zmq.close(linger=0)

    def hear(self, limit_s: float) -> bool:
        """Take in one batch of events, if one comes in time; return whether it did."""
        if not self._zmq.poll(limit_s * 1000):
            return False
        *_, payload = self._zmq.recv_multipart()
        _, events, *_ = msgspec.msgpack.decode(payload)
        for event in events:
            if event["type"] == "BlockStored":
                self._store(event)
            elif event["type"] == "BlockRemoved":
                self._kept.difference_update(event["block_hashes"])
            else:
                self._kept.clear()
        return True

    def num_blocks(self, prompt: list[int]) -> int:
        """Return how many of a prompt's first blocks are published."""
        parent, num_blocks = None, 0
        for begin in range(0, len(prompt), self.block_tokens):
            tokens = tuple(prompt[begin : begin + self.block_tokens])
            parent = self._names.get((parent, tokens))
            if parent not in self._kept:
                break
            num_blocks += 1
        return num_blocks

    def _store(self, event: dict[str, Any]) -> None:
        parent, tokens = event["parent_block_hash"], event["token_ids"]
        extra_keys = event.get("extra_keys") or [None] * len(event["block_hashes"])
        for number, (name, extra) in enumerate(zip(event["block_hashes"], extra_keys, strict=True)):
            begin = number * self.block_tokens
            # Those of a prompt with a salt serve no other one.
            if not extra:
                block = tuple(tokens[begin : begin + self.block_tokens])
                self._names[parent, block] = name
            self._kept.add(name)
            parent = name
