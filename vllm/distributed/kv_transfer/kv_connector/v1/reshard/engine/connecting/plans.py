# SPDX-License-Identifier: Apache-2.0
"""A cache of plans, which engines of the same layout share.

Replicas of an engine differ only in their addresses, which planning does not read. So two hundred
replicas need one plan.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Literal

import msgspec

from ...plan.reshard import ReshardPlan, plan_reshard
from ...plan.shards import Layer, Shard
from ..caches.drafts import without_missing_drafts

MOST_PLANS = 8
"""Number of cached plans: more than the layouts that one worker reads from. A plan of 128 ranks
with 128 takes 1 MB."""


@dataclass(frozen=True, slots=True)
class Planned:
    """What is read from engines of one layout.

    Attributes:
        missing: Draft layers that are not read because the other engine does not have them.
        plan: The plan.
    """

    missing: tuple[Layer, ...]
    plan: ReshardPlan


class Planner:
    """Plans for one worker's engine. Belongs to the thread that opens connections.

    Args:
        shards: Shards of all of this engine's workers.
        replica_offset: Offset that spreads replicas of this engine over holders of the same heads.
        missing_drafts: What to do about draft layers that the other engine does not have.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        replica_offset: int,
        missing_drafts: Literal["refuse", "compute"],
    ) -> None:
        self._shards, self._replica_offset = shards, replica_offset
        self._missing_drafts = missing_drafts
        # By the digest of the other engine's layout; most recently used last.
        self._planned: OrderedDict[bytes, Planned] = OrderedDict()

    def plan(self, src: Sequence[Shard]) -> Planned:
        """Return the plan for reading from an engine, made before for its layout if there is one.

        Args:
            src: Shards of all of its workers.

        Raises:
            ReshardError: Its layout does not fit ours.
        """
        key = layout_digest(src)
        if key not in self._planned:
            self._planned[key] = self._plan(src)
            if len(self._planned) > MOST_PLANS:
                self._planned.popitem(last=False)
        self._planned.move_to_end(key)
        return self._planned[key]

    def _plan(self, src: Sequence[Shard]) -> Planned:
        needed, missing = without_missing_drafts(src, self._shards, self._missing_drafts)
        return Planned(missing, plan_reshard(src, needed, replica_offset=self._replica_offset))


def layout_digest(shards: Sequence[Shard]) -> bytes:
    """Return a digest of all that planning reads of an engine: its ranks and what each holds.

    The order of the shards does not matter; the order of a rank's layers does.
    """
    in_order = sorted(shards, key=lambda shard: shard.rank)
    # Encodes every attribute, without a call of Python for each layer.
    encoded = msgspec.msgpack.encode([(each.rank, [*each.holdings.items()]) for each in in_order])
    return sha256(encoded).digest()
