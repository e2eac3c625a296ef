# SPDX-License-Identifier: Apache-2.0
"""The parts that a request is read in: how they are cut, and what has become of them.

A leg is read direct, staged or packed, as `StagedLeg.choose` says; what is not read direct is cut
into windows of the arena. To *verify* a part that has arrived, it is cut again, for another way.

Everything here belongs to the connector's thread of the reading worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ..memory.leg import Selection
from ..memory.packing import MAX_PACKED_BLOCKS
from ..memory.staging import MAX_WINDOW_BYTES, Span, Strategy, Window
from ..protocol.ids import RequestId
from ..protocol.tasks import Task, suspended
from .agent import Transfer, TransferState
from .arena import StagingArea
from .connection import PeerConnection
from .packed_windows import Claim, PackedWindow
from .remote import PreparedLeg

_WINDOWS_PER_ARENA = 8
"""So many windows fit at least, so that some are scattered while others are being read."""

_VERIFIED_BLOCKS = 16
"""Blocks of each plane that verify a part: mistakes of layouts show in each."""


@dataclass(frozen=True, slots=True)
class Part:
    """The share of a leg that one transfer reads.

    Attributes:
        leg: The leg.
        selections: Blocks to read with it.
        window: The same blocks as a window of the arena; None for a direct read.
        claim: The offer by which its window is packed; None for a direct or a staged read.
        verifies: Whether its window is compared with the blocks, and not put there.
    """

    leg: PreparedLeg
    selections: Sequence[Selection]
    window: Window | None = None
    claim: Claim | None = None
    verifies: bool = False


class PartError(Exception):
    """A part will not arrive. Its read may still write.

    Args:
        fault: Why it failed.
        is_local: True if the peer did not cause the fault.
    """

    def __init__(self, fault: str, *, is_local: bool = False) -> None:
        super().__init__(fault)
        self.is_local = is_local


class DiffersError(PartError):
    """A part that verifies others has other bytes than have arrived."""


class Arrived(NamedTuple):
    """A part that has arrived; if it verifies another, with the same bytes.

    Attributes:
        part: The part.
        strategy: How it was read.
        telemetry: NIXL's measurements; None if NIXL has none.
    """

    part: Part
    strategy: Strategy
    telemetry: Any


class RequestReads:
    """The parts of one request that may still write into its blocks, or verify them.

    Args:
        request_id: The request.
        task: Task to wake once a part has failed or none is left; None if nobody waits.

    Attributes:
        parts: The parts.
        error: The first failure of a part; None without one.
        arrived: Parts that have arrived and were not taken out yet.
    """

    def __init__(self, request_id: RequestId, task: Task | None = None) -> None:
        self.request_id, self.task = request_id, task
        self.parts: dict[PartRead, None] = {}
        self.error: PartError | None = None
        self.arrived: list[Arrived] = []

    @property
    def has_begun(self) -> bool:
        """Whether a part has arrived, or may: its read has not failed, as NIXL says now."""
        return bool(self.arrived) or any(
            each.connection.poll(each.transfer) is not TransferState.FAILED
            for each in self.parts
            if each.transfer is not None
        )

    async def landed(self) -> None:
        """Wait until all parts have arrived.

        Raises:
            PartError: One of them has failed.
        """
        while self.parts and self.error is None:
            await suspended()
        if self.error is not None:
            raise self.error

    async def drained(self) -> None:
        """Wait until no part can write any more."""
        while self.parts:
            await suspended()

    def fail(self, error: PartError) -> None:
        """Record that a part has failed."""
        self.error = self.error or error
        if self.task is not None:
            self.task.wake()

    def drain(self, part: PartRead) -> None:
        """Record that a part can write no more; a second call changes nothing."""
        self.parts.pop(part, None)
        if not self.parts and self.task is not None:
            self.task.wake()


@dataclass(slots=True, eq=False)
class PartRead:
    """A part that is queued or under way."""

    reads: RequestReads
    part: Part
    connection: PeerConnection
    transfer: Transfer | None = None
    span: Span | None = None
    copied: torch.cuda.Event | None = None
    telemetry: Any = None
    unwanted: bool = False
    strategy: Strategy = Strategy.DIRECT
    # Until it is returned, or lost.
    packed: PackedWindow | None = None
    # NIXL's post was called, so the read may have begun.
    asked: bool = False


def cut(
    leg: PreparedLeg,
    selections: Sequence[Selection],
    area: StagingArea | None,
    claim: Claim | None = None,
) -> Iterable[Part]:
    """Choose how to read a leg's selections, and cut them into parts.

    Args:
        leg: The leg.
        selections: What to read.
        area: Our arena; None to read direct.
        claim: The offer; None before it, when nothing is packed.
    """
    if not selections:
        return ()
    staging = leg.staging
    if area is None or staging is None:
        return (Part(leg, selections),)
    how = staging.leg.choose(selections, area.policy, may_pack=bool(leg.packing and claim))
    if how is Strategy.DIRECT:
        return (Part(leg, selections),)
    return _windows(leg, selections, area, claim if how is Strategy.PACKED else None)


def cut_again(arrived: Arrived, area: StagingArea | None, claim: Claim) -> Iterable[Part]:
    """Cut a part that has arrived into parts that verify it, or the first blocks of each plane.

    What was read direct or staged is packed by its holder, which knows where it lies from its own
    memory, and not from what it has told. What was packed is staged by what was told.

    Args:
        arrived: The part. If its holder packs nothing, nothing is verified.
        area: Our arena; None to verify nothing.
        claim: The offer.
    """
    leg = arrived.part.leg
    if area is None or leg.staging is None or leg.packing is None:
        return ()
    first = [
        replace(each, overlap=each.overlap.part(0, _VERIFIED_BLOCKS))
        for each in arrived.part.selections
    ]
    other = None if arrived.strategy is Strategy.PACKED else claim
    return _windows(leg, first, area, other, verifies=True)


def _windows(
    leg: PreparedLeg,
    selections: Sequence[Selection],
    area: StagingArea,
    claim: Claim | None,
    *,
    verifies: bool = False,
) -> Iterable[Part]:
    """Cut a leg's selections into windows, to be packed by a claim or staged without one."""
    assert leg.staging is not None
    limit_bytes = min(area.spans.size_bytes // _WINDOWS_PER_ARENA, MAX_WINDOW_BYTES)
    max_blocks = MAX_PACKED_BLOCKS if claim else None
    return (
        Part(leg, (window.selection,), window, claim, verifies)
        for window in leg.staging.leg.windows(selections, limit_bytes, max_blocks)
    )
