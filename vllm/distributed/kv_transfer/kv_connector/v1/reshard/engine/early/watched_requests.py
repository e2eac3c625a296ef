# SPDX-License-Identifier: Apache-2.0
"""Requests that are watched until another engine offers them, and the values handed on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from vllm.logger import init_logger

from ...protocol.board import Record, RecordPlace, Sighting
from ...protocol.fingerprint import with_blocks
from ...protocol.ids import RequestId
from ...protocol.leases import Entry
from ...protocol.messages import Receive, RemoteEngineAddress
from ...protocol.quoting import one_line, quote
from ...protocol.states import ReadState, expect_transition
from ...protocol.watch import Watch
from ..stats import ReadFailure

logger = init_logger(__name__)

_PARTS_OF_A_PROMPT = 64
"""Most parts in which a prompt is read while it is computed, however many the other engine shows:
each costs the read of a record of all blocks so far."""


@dataclass(slots=True)
class WatchedRequest:
    """A request that is watched.

    Attributes:
        name: The name that both engines use for it.
        watch: Its progress as seen on the board, and its deadlines.
        entry: Its name's entry on the board of the engine that computes it.
        receive: The blocks to fill; None until the scheduler has set them.
        is_begun: Whether the scheduler was notified that some of it is computed.
        is_told: Whether the scheduler was notified that it may be given blocks.
        has_waited: Whether a look found it not offered yet; with a serial router, none does.
        num_computed: Number of its tokens that were handed on as computed.
        state: Its state.
        since_s: Since when it is in that state.
    """

    name: str
    watch: Watch
    entry: Entry = field(init=False)
    receive: Receive | None = None
    is_begun: bool = False
    is_told: bool = False
    has_waited: bool = False
    num_computed: int = 0
    state: ReadState = ReadState.AWAITING_PREFILL
    since_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.since_s = self.watch.since_s

    def enter(
        self, state: ReadState, request_id: RequestId, address: RemoteEngineAddress, now_s: float
    ) -> None:
        """Enter a state and log it, unless it is in that state already."""
        if state is self.state:
            return
        expect_transition(self.state, state)
        logger.debug(
            "Request %s: %s at engine %s, after %.1f ms of %s.",
            quote(request_id),
            one_line(state.value),
            quote(address.engine_id),
            1e3 * (now_s - self.since_s),
            one_line(self.state.value),
        )
        self.state, self.since_s = state, now_s

    def wanted_record(self, sighting: Sighting) -> WantedRecord | None:
        """Return the record to read after a look: its offer or computed part; None without one."""
        if sighting.offered is not None:
            return WantedRecord(sighting.offered, 0)
        receive = self.receive
        if sighting.computed is None or receive is None or not any(receive.local_block_ids):
            return None
        part_tokens = -(-receive.remote_tokens // _PARTS_OF_A_PROMPT)
        if sighting.num_computed < self.num_computed + part_tokens:
            return None
        return WantedRecord(sighting.computed, sighting.num_computed)


class WantedRecord(NamedTuple):
    """A record to read.

    Attributes:
        place: Its rows on the board.
        num_computed: Number of computed tokens whose blocks it names; 0 for an offer.
    """

    place: RecordPlace
    num_computed: int


class Computed(NamedTuple):
    """A request that has blocks here and computed tokens at its producer.

    Attributes:
        request_id: The request.
        receive: What to read once it is offered.
        part: What can be read now, up to its `remote_tokens`.
    """

    request_id: RequestId
    receive: Receive
    part: Receive


class Offered(NamedTuple):
    """A request that is treated like any other from now on.

    Attributes:
        request_id: The request.
        receive: What to read, and where; without blocks, the offer to release.
        offered_at_s: When its offer was seen.
    """

    request_id: RequestId
    receive: Receive
    offered_at_s: float


class Refusal(NamedTuple):
    """A request that has blocks, and will not be read.

    Attributes:
        request_id: The request.
        receive: What should have been read.
        reason: Why it is not read.
        failure: The kind of failure; None where it is reported elsewhere.
        state: Its state when it failed.
        since_s: Since when it was in that state.
    """

    request_id: RequestId
    receive: Receive
    reason: str
    failure: ReadFailure | None
    state: ReadState
    since_s: float


def with_record(receive: Receive, address: RemoteEngineAddress, record: Record) -> Receive:
    """Return a request completed with the record of its source."""
    blocks = record.blocks()
    return replace(
        receive,
        source=address,
        remote_request_id=record.request_id,
        remote_block_ids=blocks,
        fingerprint=receive.fingerprint and with_blocks(receive.fingerprint, blocks),
        is_early=False,
        attempt=record.attempt,
    )
