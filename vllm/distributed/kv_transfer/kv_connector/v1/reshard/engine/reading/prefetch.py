# SPDX-License-Identifier: Apache-2.0
"""What of a request is read while its prompt is computed, and what is left when it is offered.

Whole blocks of KV-cache groups that keep all tokens, in the order of the sequence. What is read at
the end, the tokens in windows and the state among it, is what would be read behind a prefix that is
cached here.

What was prefetched counts where the offer names the very blocks, of the same attempt to compute
them: a request that was preempted there may have lost its blocks to others while they were read.
That the offer holds, and is of these tokens, is looked up after everything, as of any request.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from ...memory.leg import Leg
from ...protocol.ids import BlockIds
from ...protocol.messages import Receive
from ...transport.connection import PeerConnection


@dataclass(frozen=True, slots=True)
class FullGroups:
    """The KV-cache groups that keep all tokens, of which something is read.

    Attributes:
        src_tokens: How many tokens of a sequence a block id of each stands for at the source.
        dst_tokens: The same here.
    """

    src_tokens: Mapping[int, int]
    dst_tokens: Mapping[int, int]

    @classmethod
    def of(
        cls, legs: Iterable[Leg], src_block_ids: BlockIds, window_groups: Collection[int]
    ) -> FullGroups:
        """Those that legs read from and into.

        Args:
            legs: What is read.
            src_block_ids: The blocks that the source tells of, none of other groups.
            window_groups: The groups here that keep the last tokens only.
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
        """Blocks of all of them end after so many tokens, and after multiples of these."""
        return math.lcm(*self.src_tokens.values(), *self.dst_tokens.values())


@dataclass(slots=True)
class Prefetched:
    """What was read of a request, or is being read, before it was offered.

    Attributes:
        groups: Where it is read from and into: those of which the first part has something. Others
            are read whole at the end.
        part: The last that was read: it names all blocks of the source's that were.
        num_tokens: To which token of the sequence the reads go.
        connection: What it is read with.
        is_invalid: Some of it has failed: all is read anew once none of it is under way.
    """

    groups: FullGroups = field(default_factory=lambda: FullGroups({}, {}))
    part: Receive | None = None
    num_tokens: int = 0
    connection: PeerConnection | None = None
    is_invalid: bool = False

    def next(self, part: Receive, groups: FullGroups) -> Receive | None:
        """What to read of what is computed now, beyond what was read before.

        Args:
            part: What is computed.
            groups: Where to read from and into, if this is the first part.

        Returns:
            It, as a request of that part; None where no block is full at both ends.
        """
        if self.part is not None:
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

    def take(
        self, part: Receive, wanted: Receive, groups: FullGroups, connection: PeerConnection
    ) -> None:
        """Some of a part is read from now on.

        Args:
            part: What is computed.
            wanted: What `next` has made of it.
            groups: What that was asked for.
            connection: What it is read with.
        """
        if self.part is None:
            self.groups, self.connection = groups, connection
        self.part, self.num_tokens = part, wanted.local_tokens

    def is_of(self, more: Receive, connection: PeerConnection) -> bool:
        """Whether what was read is part of what is computed by now, or is offered.

        Args:
            more: What that is.
            connection: What the rest is read with. The engine behind another one may have begun
                anew, with the same names and numbers.
        """
        part = self.part
        if part is None:
            return not self.is_invalid
        if self.is_invalid or connection is not self.connection:
            return False
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
        """What is left to be read of an offer that it is part of."""
        left = _between(whole, self.groups, self.num_tokens, whole.local_tokens)
        ids = [
            some if group in self.groups.dst_tokens else all_ids
            for group, (some, all_ids) in enumerate(zip(left, whole.local_block_ids, strict=True))
        ]
        return replace(whole, local_block_ids=ids)


def _names_all(src_block_ids: BlockIds, groups: FullGroups, num_tokens: int) -> bool:
    """Whether a source tells of all blocks up to a token: it may say anything."""
    return all(
        group < len(src_block_ids) and len(src_block_ids[group]) >= num_tokens // tokens
        for group, tokens in groups.src_tokens.items()
    )


def _between(receive: Receive, groups: FullGroups, start: int, stop: int) -> list[list[int]]:
    """The blocks here that are to be filled with some tokens, none of other groups.

    Args:
        receive: What is to be filled: the last blocks of a sequence.
        groups: Those that are meant.
        start: Where the tokens begin, with a block.
        stop: Where they end.
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
