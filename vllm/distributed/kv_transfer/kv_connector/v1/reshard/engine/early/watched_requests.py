# SPDX-License-Identifier: Apache-2.0
"""Requests that are watched until another engine offers them, and what is handed on of them."""

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
from ...protocol.states import ReadState
from ...protocol.watch import Watch
from ..stats import ReadFailure

logger = init_logger(__name__)

_PARTS_OF_A_PROMPT = 64
"""In so many parts it is read at most while it is computed: each is told of with a record of all
blocks so far, however many of them another engine says there are."""


@dataclass(slots=True)
class WatchedRequest:
    """A request that is watched.

    Attributes:
        name: The name that both engines have for it.
        watch: What was seen of it.
        entry: What stands for its name on the boards of the engine that computes it.
        receive: What to fill, once the scheduler has said so.
        is_begun: The scheduler has heard that something of it is computed.
        is_told: The scheduler has heard that it may have blocks.
        has_waited: It was not offered at the first look, as it is where a router is serial.
        step_tokens: How many tokens the step of its last chunk computes; 0 until that is known.
        num_computed: How many of its tokens were handed on as computed.
        state: How far it is.
        since_s: Since when.
    """

    name: str
    watch: Watch
    entry: Entry = field(init=False)
    receive: Receive | None = None
    is_begun: bool = False
    is_told: bool = False
    has_waited: bool = False
    step_tokens: int = 0
    num_computed: int = 0
    state: ReadState = ReadState.AWAITING_PREFILL
    since_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.since_s = self.watch.since_s

    def enter(
        self, state: ReadState, request_id: RequestId, address: RemoteEngineAddress, now_s: float
    ) -> None:
        """Take note of its next state, if that is another one, and tell it in the log."""
        if state is self.state:
            return
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
        """Which record is to be read after a look: of its offer, or of what is computed anew."""
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
    """A record that is to be read.

    Attributes:
        place: Where it lies.
        num_computed: How many tokens are computed of whose blocks it tells; 0 for that of an offer.
    """

    place: RecordPlace
    num_computed: int


class Computed(NamedTuple):
    """A request that has blocks, and of which something is computed.

    Attributes:
        request_id: The request.
        receive: What is to be read of it once it is offered.
        part: What can be read now: as many tokens as it says there are.
    """

    request_id: RequestId
    receive: Receive
    part: Receive


class Offered(NamedTuple):
    """A request that is one like any other from now on.

    Attributes:
        request_id: The request.
        receive: What is to be read of it, and where; or whose producer is told.
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
        reason: Why it is not.
        failure: Of what kind that is; None where it is told elsewhere.
        state: How far it was.
        since_s: Since when.
    """

    request_id: RequestId
    receive: Receive
    reason: str
    failure: ReadFailure | None
    state: ReadState
    since_s: float


def with_record(receive: Receive, address: RemoteEngineAddress, record: Record) -> Receive:
    """A request, with what its source says of it."""
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
