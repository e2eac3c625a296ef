# SPDX-License-Identifier: Apache-2.0
"""How many blocks of an engine's KV cache are in use, and for how long, as it writes it down.

What it shows at `/metrics` is of the moment in which it is asked, and asking takes time of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .engine import EngineSpec

_MODULE_DIR = Path(__file__).with_name("modules") / "held_blocks"
_FILE = "HELD_BLOCKS"


def watched(spec: EngineSpec, path: Path) -> EngineSpec:
    """Return how an engine is started that writes down how many blocks are in use.

    Args:
        path: the file that it writes.
    """
    return replace(
        spec,
        module_dirs=(*spec.module_dirs, _MODULE_DIR),
        env={**spec.env, _FILE: str(path)},
    )


@dataclass(frozen=True)
class HeldBlocks:
    """Blocks in use, as a number that changes in steps.

    Attributes:
        changes: times by `time.monotonic`, in their order, and the numbers from then on; before the
            first there were none.
    """

    changes: Sequence[tuple[float, int]]

    def between(self, began_s: float, ended_s: float) -> float:
        """Return blocks x seconds from one time until another."""
        inner = [each for each in self.changes if began_s < each[0] < ended_s]
        level = next((held for at_s, held in reversed(self.changes) if at_s <= began_s), 0)
        steps = [(began_s, level), *inner, (ended_s, 0)]
        return sum(
            held * (until_s - at_s) for (at_s, held), (until_s, _) in itertools.pairwise(steps)
        )


def read(path: Path) -> HeldBlocks:
    """Return what an engine has written; nothing where it has used no block."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    pairs = (line.split() for line in lines)
    return HeldBlocks([(float(at_s), int(held)) for at_s, held in pairs])
