# SPDX-License-Identifier: Apache-2.0
"""A holder's arena for packed reads: its memory, and the copies into it. See `protocol.packing`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np
import torch
from vllm.logger import init_logger

from ..errors import RemoteLayoutError, ReshardError, one_line, quote
from ..memory.cache import RankCache
from ..memory.packing import PACK_UNIT_BYTES, Gather, PackedCache, Slice
from ..memory.staging import LARGEST_PACKING_BYTES
from ..protocol.ids import BlockIds
from ..protocol.messages import Pack, PackEntry
from ..protocol.packing import TABLE_BYTES, PackAddress, Packer, Packing
from .agent import NixlAgent
from .arena import ArenaCopier, allocate_arena
from .budget import Budget

logger = init_logger(__name__)

_HEAR_S = 2e-3
"""Interval at which readers are heard that have asked for windows of late."""

_FIRST_HEAR_S = 0.02
"""The same if none has: one that asks waits for a fifth of `PACKED_WITHIN_S` at most."""

_IN_USE_S = 1.0
"""For how long a reader counts as one that asks for windows."""

Offered = Callable[[PackEntry], BlockIds | None]
"""Returns the blocks of the offer that an entry names, by KV-cache group; None if it is not offered
yet. Raises `ReshardError` if there is no such offer, or its fingerprint differs."""


def open_packs(
    caches: Iterable[torch.Tensor],
    size_bytes: int | None,
    cache: RankCache,
    agent: NixlAgent,
) -> PackArea | None:
    """Allocate the arena for packed reads, and register it.

    Args:
        caches: The KV cache; the arena is on the same device.
        size_bytes: Size of the arena; None for a sixteenth of the free memory, but at most 64 MiB.
        cache: The worker's cache, with its layers in the order of its description.
        agent: Agent that others read from.

    Returns:
        The area; None where its size is less than a unit, or there is no such memory.

    Raises:
        LocalLayoutError: It cannot be registered.
    """
    tensors = list(caches)
    option = "packing_arena_bytes"
    memory = allocate_arena(tensors[0].device, size_bytes, LARGEST_PACKING_BYTES, option)
    if memory is None or memory.nbytes < PACK_UNIT_BYTES:
        return None
    return PackArea(memory, ArenaCopier(memory, tensors), PackedCache(cache), agent)


class PackArea:
    """The arena in which a worker packs windows for its readers. Of the connector's thread.

    Args:
        memory: The arena, on the KV cache's device; uint8, contiguous.
        copier: Copies into it.
        cache: The worker's cache.
        agent: Agent that others read from, which registers the arena and its table.

    Raises:
        LocalLayoutError: They cannot be registered.
    """

    def __init__(
        self, memory: torch.Tensor, copier: ArenaCopier, cache: PackedCache, agent: NixlAgent
    ) -> None:
        self._memory = memory
        self._copier = copier
        self._cache = cache
        self._packer = Packer(memory.nbytes)
        table = self._packer.table.words.ctypes.data
        device_id = max(memory.get_device(), 0)
        agent.register([(memory.data_ptr(), memory.nbytes, device_id)])
        agent.register([(table, TABLE_BYTES, 0)], "DRAM")
        self.address = PackAddress(table, memory.data_ptr(), memory.nbytes)
        # Being copied on a device, in order.
        self._copying: deque[tuple[Packing, torch.cuda.Event]] = deque()
        # When a reader was last heard.
        self._heard_at_s = -math.inf

    @property
    def is_serving(self) -> bool:
        """Whether a reader waits for a window or reads one."""
        return bool(len(self._packer))

    def hears_again_s(self, now_s: float) -> float:
        """Return when to hear at the latest what readers ask for, if they may."""
        is_in_use = now_s < self._heard_at_s + _IN_USE_S
        return now_s + (_HEAR_S if is_in_use else _FIRST_HEAR_S)

    def hear(self, pack: Pack, now_s: float) -> None:
        """Note what a reader asks for and returns."""
        self._heard_at_s = now_s
        self._packer.hear(pack, now_s)

    def serve(self, offered: Offered, now_s: float, budget: Budget) -> bool:
        """Pack windows, in turn, within the budget; return whether one was packed.

        Args:
            offered: Returns what is offered.
            now_s: The time.
            budget: Limit of the work.
        """
        self._packer.expire(now_s)
        has_packed = False
        while self._copying and self._copying[0][1].query():
            packing, _ = self._copying.popleft()
            self._packer.enter(packing, now_s)
            has_packed = True
        while True:
            try:
                following = self._packer.next(lambda entry: self._check(entry, offered))
            except ReshardError as error:
                logger.warning("A window is not packed: %s", one_line(error))
                if budget.is_spent:
                    return has_packed
                continue
            if following is None:
                return has_packed
            has_packed = True
            copy = following.gather.copy(following.span.start_bytes)
            try:
                copied = self._copier.gather(copy)
            except Exception as error:
                # The reader reads direct.
                logger.warning("A window cannot be packed: %s", one_line(error))
                self._packer.end(following)
            else:
                if copied is None:
                    self._packer.enter(following, now_s)
                else:
                    self._copying.append((following, copied))
            if budget.is_spent:
                return True

    def close(self) -> None:
        """Wait for copies."""
        self._copier.close()

    def _check(self, entry: PackEntry, offered: Offered) -> Gather | None:
        """Return what an entry asks for, if its reader may have it.

        Raises:
            ReshardError: It may not.
        """
        block_ids = offered(entry)
        if block_ids is None:
            return None
        sizes = len(entry.planes), len(entry.slot_offsets), len(entry.block_ids)
        if sizes[0] % 2 or sizes[1] % 4 or sizes[2] % 4:
            raise RemoteLayoutError(
                f"a window has {sizes[0]} bytes of planes, {sizes[1]} of offsets and {sizes[2]} of "
                "blocks: run the same build of the connector on both engines"
            )
        slice_ = Slice(
            entry.head_offset,
            entry.num_heads,
            entry.slot_bytes,
            token_major=entry.token_major,
        )
        planes = np.frombuffer(entry.planes, dtype="<u2").astype(np.int64)
        slot_offsets = np.frombuffer(entry.slot_offsets, dtype="<u4").astype(np.int64)
        wanted = np.frombuffer(entry.block_ids, dtype="<u4").astype(np.int64)
        gather = self._cache.check(slice_, planes, slot_offsets, wanted)
        ids = block_ids[gather.group] if gather.group < len(block_ids) else ()
        if not np.isin(wanted // gather.blocks_per_id, np.array(ids, dtype=np.int64)).all():
            raise RemoteLayoutError(
                f"a window of request {quote(entry.request_id)} is asked for, of which some blocks "
                "are not its own: run the same build of the connector on both engines"
            )
        return gather
