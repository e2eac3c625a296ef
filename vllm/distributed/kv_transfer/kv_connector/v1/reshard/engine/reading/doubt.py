# SPDX-License-Identifier: Apache-2.0
"""Blocks of failed requests that reads may still write into, and what is done about too many."""

from __future__ import annotations

from vllm.logger import init_logger

from ...protocol.lifetimes import PEER_GRACE_S
from ...protocol.quoting import one_line
from ...transport.lane import Lane, Lanes
from ..stats import ReshardStats

logger = init_logger(__name__)

_MOST_IN_DOUBT = 4
"""One in so many blocks of the cache may be in doubt; beyond that, hung peers are cut."""


class BlocksInDoubt:
    """Counts them. Belongs to the connector's thread.

    Args:
        lanes: What they are written over.
        stats: Where to count.

    Attributes:
        num_block_ids: How many blocks the cache has, once that is known.
        count: How many are in doubt.
    """

    def __init__(self, lanes: Lanes, stats: ReshardStats) -> None:
        self._lanes = lanes
        self._stats = stats
        self.num_block_ids = 0
        self.count = 0

    def add(self, num_blocks: int) -> None:
        """More are, or fewer if the number is negative."""
        self.count += num_blocks
        self._stats.record_blocks_in_doubt(self.count)

    @property
    def are_too_many(self) -> bool:
        """Whether they are more than may be."""
        return self.count * _MOST_IN_DOUBT > self.num_block_ids

    @property
    def hung(self) -> Lane | None:
        """A lane that is not waited for any longer, where they are too many."""
        if not self.count or not self.are_too_many:
            return None
        return next((lane for lane in self._lanes.draining if not lane.is_drained), None)

    def contain(self, now_s: float) -> None:
        """Where they are too many, wait for hung peers no longer than for slow ones."""
        if (lane := self.hung) is None:
            return
        assert lane.retired_at_s is not None
        if now_s < lane.retired_at_s + PEER_GRACE_S:
            return
        logger.error(
            "Cutting a connection whose reads do not end: %d blocks of failed requests "
            "may be written by such reads. %s Its engine may have to be restarted.",
            self.count,
            one_line(lane.summary(now_s)),
        )
        lane.force()
