# SPDX-License-Identifier: Apache-2.0
"""An engine that writes down how many blocks of its KV cache are in use, whatever its connector.

An engine that has this directory on PYTHONPATH, and HELD_BLOCKS names a file, adds a line to it
each time that the number changes: the time by the clock that processes of a machine share, and the
number. Cached blocks that no request has are free.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from vllm.v1.core.block_pool import BlockPool

FILE = "HELD_BLOCKS"
_CHANGES = ("get_new_blocks", "touch", "free_blocks")


def register() -> None:
    """Look at each pool when its blocks change hands, where the environment asks for it."""
    path = os.environ.get(FILE)
    if not path or hasattr(BlockPool.free_blocks, "__wrapped__"):
        return
    for name in _CHANGES:
        setattr(BlockPool, name, _told(getattr(BlockPool, name), Path(path)))


def _told(change: Callable[..., Any], path: Path) -> Callable[..., Any]:
    @wraps(change)
    def told(self: Any, *args: Any, **kwargs: Any) -> Any:
        free_before = self.get_num_free_blocks()
        try:
            return change(self, *args, **kwargs)
        finally:
            if (free := self.get_num_free_blocks()) != free_before:
                # One block is never given away.
                held = self.num_gpu_blocks - 1 - free
                with path.open("a", encoding="utf-8") as book:
                    book.write(f"{time.monotonic():.6f} {held}\n")

    return told
