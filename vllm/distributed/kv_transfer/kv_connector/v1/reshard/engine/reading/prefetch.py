# SPDX-License-Identifier: Apache-2.0
"""Selects the blocks to read while a prompt is computed, and the rest to read after its offer.

Prefetched are whole blocks of KV-cache groups that keep all tokens, in sequence order. The rest,
including window tokens and state, is read as it would be after a prefix that is cached here.

Prefetched blocks count only if the offer names the same blocks of the same attempt to compute them:
a request preempted at the producer may have lost its blocks to others while they were read. The
lease and the fingerprint are checked after all reads, as for any request.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from ...memory.leg import Leg
from ...protocol.ids import BlockIds
from ...protocol.messages import Receive
from ...transport.connection import PeerConnection


@dataclass(frozen=True, slots=True)
class FullGroups:
    """The KV-cache groups that keep all tokens and can be prefetched.

    Attributes:
        src_tokens: Tokens of a sequence per block id at the source, by source group.
        dst_tokens: The same here, by local group.
    """

    src_tokens: Mapping[int, int]
    dst_tokens: Mapping[int, int]

    @classmethod
    def of(
        cls, legs: Iterable[Leg], src_block_ids: BlockIds, window_groups: Collection[int]
    ) -> FullGroups:
        """Return the groups that legs read from and into.

        Args:
            legs: The legs to read.
            src_block_ids: The block ids that the source names; empty for groups it does not offer.
            window_groups: The local groups that keep the last tokens only.
        """
        src_tokens, dst_tokens = {}, {}
        told = {group for group, ids in enumerate(src_block_ids) if ids}
        for leg in legs:
            if leg.per_sequence:
                continue
            for (src_group, dst_group), _ in leg.planes_by_groups:
                if src_group in told and dst_group not in window_groups:
                    read = leg.read
                    src_tokens[src_group] = leg.src.tokens_per_id * read.src_tokens.num_shares
                    dst_tokens[dst_group] = leg.dst.tokens_per_id * read.dst_tokens.num_shares
        return cls(src_tokens, dst_tokens)

    @property
    def unit_tokens(self) -> int:
        """Smallest number of tokens after which blocks of all groups end at both sides."""
        return math.lcm(*self.src_tokens.values(), *self.dst_tokens.values())


@dataclass(slots=True)
class Prefetched:
    """The reads of a request that began before it was offered.

    Attributes:
        groups: The groups read, fixed by the first part. Other groups are read whole at the end.
        connection: The connection they are read with.
        part: The last part read, which names all source blocks so far; None before the first.
        num_tokens: Number of tokens of the sequence that the reads cover.
        is_invalid: True if some of it cannot be used: all is read again once no read is under way.
    """

    groups: FullGroups
    connection: PeerConnection
    part: Receive | None = None
    num_tokens: int = 0
    is_invalid: bool = False

    def next(self, part: Receive) -> Receive | None:
        """Return the computed blocks of a part that were not read yet.

        Returns:
            The blocks, as a request of that part; None if no further block is full at both ends.
        """
        groups = self.groups
        if not groups.dst_tokens:
            return None
        computed_tokens = min(part.remote_tokens, part.local_tokens)
        until = computed_tokens // groups.unit_tokens * groups.unit_tokens
        if until <= self.num_tokens or not _names_all(part.remote_block_ids, groups, until):
            return None
        src_ids = [
            ids[self.num_tokens // tokens : until // tokens]
            if (tokens := groups.src_tokens.get(group))
            else []
            for group, ids in enumerate(part.remote_block_ids)
        ]
        dst_ids = _between(part, groups, self.num_tokens, until)
        if not any(dst_ids):
            return None
        return replace(
            part,
            local_block_ids=dst_ids,
            remote_block_ids=src_ids,
            local_tokens=until,
            remote_tokens=until,
        )

    def take(self, part: Receive, wanted: Receive) -> None:
        """Record that the reads of a part have begun, and what `next` returned for it."""
        self.part, self.num_tokens = part, wanted.local_tokens

    def is_of(self, more: Receive, connection: PeerConnection) -> bool:
        """Return whether the blocks read so far belong to a later part, or to the offer.

        Args:
            more: The later part, or the offer.
            connection: The connection to read the rest with. Behind another one, the engine may
                have restarted, with the same ids and numbers.
        """
        part = self.part
        if self.is_invalid or connection is not self.connection:
            return False
        if part is None:
            return True
        known = part.source, part.remote_request_id, part.attempt
        if known != (more.source, more.remote_request_id, more.attempt):
            return False
        return all(
            group < len(more.remote_block_ids)
            and list(more.remote_block_ids[group][: self.num_tokens // tokens])
            == list(part.remote_block_ids[group][: self.num_tokens // tokens])
            for group, tokens in self.groups.src_tokens.items()
        )

    def rest_of(self, whole: Receive) -> Receive:
        """Return the rest of an offer for which `is_of` is true."""
        left = _between(whole, self.groups, self.num_tokens, whole.local_tokens)
        ids = [
            some if group in self.groups.dst_tokens else all_ids
            for group, (some, all_ids) in enumerate(zip(left, whole.local_block_ids, strict=True))
        ]
        return replace(whole, local_block_ids=ids)


def _names_all(src_block_ids: BlockIds, groups: FullGroups, num_tokens: int) -> bool:
    """Return whether the source names all blocks of some tokens; its message is not trusted."""
    return all(
        group < len(src_block_ids) and len(src_block_ids[group]) >= num_tokens // tokens
        for group, tokens in groups.src_tokens.items()
    )


def _between(receive: Receive, groups: FullGroups, start: int, stop: int) -> list[list[int]]:
    """Return the local blocks to fill with a range of tokens; empty for other groups.

    Args:
        receive: The request, which names the last blocks of the sequence.
        groups: The groups to fill.
        start: The first token, at which a block begins.
        stop: The token after the last.
    """
    found: list[list[int]] = []
    for group, ids in enumerate(receive.local_block_ids):
        tokens = groups.dst_tokens.get(group)
        if tokens is None:
            found.append([])
            continue
        num_before = -(-receive.local_tokens // tokens) - len(ids)
        first, last = start // tokens - num_before, -(-stop // tokens) - num_before
        found.append(list(ids[max(first, 0) : max(last, 0)]))
    return found
