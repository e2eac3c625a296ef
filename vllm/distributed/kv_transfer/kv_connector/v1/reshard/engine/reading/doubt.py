# SPDX-License-Identifier: Apache-2.0
"""Counts blocks of failed requests that reads may still write into, and limits their number."""

from __future__ import annotations

from vllm.logger import init_logger

from ...protocol.lifetimes import PEER_GRACE_S
from ...protocol.quoting import one_line
from ...transport.lane import Lane, Lanes
from ..compat import FAILED_READS_ARE_NAMED
from ..stats import ReshardStats

logger = init_logger(__name__)

_MOST_IN_DOUBT = 4
"""One in this many blocks of the cache may be in doubt; beyond that, hung peers are cut."""


class BlocksInDoubt:
    """Counts the blocks in doubt. Belongs to the connector's thread.

    Args:
        lanes: The lanes whose reads may write into them.
        stats: The worker's metrics, which get the number on 0.22.1; elsewhere the scheduler's do.

    Attributes:
        num_block_ids: Number of blocks in the cache; 0 until the caches are registered.
        count: Number of blocks in doubt.
    """

    def __init__(self, lanes: Lanes, stats: ReshardStats) -> None:
        self._lanes = lanes
        self._stats = stats
        self.num_block_ids = 0
        self.count = 0

    def add(self, num_blocks: int) -> None:
        """Add to the number of blocks in doubt; a negative number subtracts."""
        self.count += num_blocks
        if not FAILED_READS_ARE_NAMED:
            # Otherwise the scheduler counts them, over all workers.
            self._stats.record_blocks_in_doubt(self.count)

    @property
    def are_too_many(self) -> bool:
        """True if more blocks are in doubt than allowed."""
        return self.count * _MOST_IN_DOUBT > self.num_block_ids

    @property
    def hung(self) -> Lane | None:
        """The first draining lane to cut if too many blocks are in doubt; None without one."""
        if not self.count or not self.are_too_many:
            return None
        return next((lane for lane in self._lanes.draining if not lane.is_drained), None)

    def contain(self, now_s: float) -> None:
        """If too many are in doubt, cut a hung lane `PEER_GRACE_S` after its retirement."""
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
