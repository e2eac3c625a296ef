# SPDX-License-Identifier: Apache-2.0
"""Parts on their way, with reads and copies that end when the test says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import NamedTuple

import numpy as np
import pytest
import torch

from tests.v1.kv_connector.unit.reshard.memory.cases import Memory, read, select, span
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import (
    InDoubtError,
    TransferError,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.lowering import lower_read
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.packing import (
    PACK_UNIT_BYTES,
    PackedCache,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.staging import (
    StagingPolicy,
    Strategy,
    stage_leg,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.fingerprint import (
    OfferFingerprint,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.lifetimes import Lifetime
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.agent import (
    Prepared,
    Transfer,
    TransferState,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.arena import StagingArea
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.budget import UNLIMITED, Budget
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.packed_windows import (
    Claim,
    PackedWindow,
    PackState,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.parts import (
    Arrived,
    Part,
    PartError,
    RequestReads,
    cut,
    cut_again,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.remote import (
    PreparedLeg,
    PreparedPacking,
    PreparedStaging,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.transfers import (
    _SPAN_WAIT_S,
    Transfers,
)


class Failed(NamedTuple):
    """A part that will not arrive."""

    request_id: str
    fault: str
    is_local: bool


class Drained(NamedTuple):
    """A part that can be written no more; with how it arrived, if it has."""

    request_id: str
    key: int
    strategy: Strategy | None = None
    telemetry: object = None


Event = Failed | Drained


class RecordedReads(RequestReads):
    """The parts of a request, and what is told of them."""

    def __init__(self, request_id: str, events: list[Event]) -> None:
        super().__init__(request_id)
        self.events = events
        self.keys: dict[object, int] = {}

    def number(self) -> None:
        """Number the parts that were added."""
        for part in self.parts:
            self.keys.setdefault(part, len(self.keys))

    def fail(self, error: PartError) -> None:
        """A part has failed."""
        super().fail(error)
        self.events.append(Failed(self.request_id, str(error), error.is_local))

    def drain(self, part) -> None:
        """A part is drained."""
        super().drain(part)
        arrived, self.arrived = self.arrived, []
        how = arrived[0][1:] if arrived else ()
        self.events.append(Drained(self.request_id, self.keys[part], *how))


class Recorded(Transfers):
    """Transfers of requests that are told apart by their names."""

    def __init__(self, area: StagingArea | None = None) -> None:
        super().__init__(area)
        self.events: list[Event] = []
        self.requests: dict[str, RecordedReads] = {}

    def begin(self, request_id: str, parts, connection, *, is_prefetch: bool = False) -> None:
        """Queue parts of a request."""
        reads = RecordedReads(request_id, self.events)
        self.requests[request_id] = reads
        self.start(reads, parts, connection, is_prefetch=is_prefetch)
        reads.number()

    def end(self, request_id: str) -> None:
        """Give a request up."""
        self.give_up(self.requests[request_id])

    def look(self, now_s: float, budget: Budget = UNLIMITED) -> list[Event]:
        """Advance; returns the events since the last call."""
        self.advance(now_s, budget)
        events, self.events[:] = list(self.events), []
        return events


class Connection:
    """What parts are read with: posts nothing, and answers what it is told."""

    def __init__(self) -> None:
        self.posted: list[tuple[Prepared, np.ndarray, Prepared, np.ndarray]] = []
        self.states: dict[int, TransferState] = {}
        self.released: list[int] = []
        self.refusal: TransferError | None = None
        self.ends_at_once = False
        # Each is alone on its lane.
        self.lane = self
        self.lifetime = Lifetime(100.0)

    def read(self, *lists) -> Transfer:
        """Remember a read."""
        if self.refusal is not None:
            raise self.refusal
        self.posted.append(lists)
        if self.ends_at_once:
            self.states[len(self.posted) - 1] = TransferState.DONE
        return Transfer("peer", len(self.posted) - 1, self.ends_at_once)

    def poll(self, transfer: Transfer) -> TransferState:
        """What the test has said."""
        return self.states.get(transfer.handle, TransferState.IN_FLIGHT)

    def telemetry(self, transfer: Transfer) -> str:
        """Something that is not None."""
        return f"telemetry {transfer.handle}"

    def release(self, transfer: Transfer) -> None:
        """Remember it."""
        self.released.append(transfer.handle)


@dataclass
class Copy:
    """A copy on a device that is made when the test says so."""

    made: bool = False

    def query(self) -> bool:
        """Whether it is."""
        return self.made


@dataclass
class Copies:
    """Every copy that was asked for."""

    made: list[Copy] = field(default_factory=list)
    closed: bool = False

    def scatter(self, copy) -> Copy:
        """Begin one."""
        self.made.append(Copy())
        return self.made[-1]

    def close(self) -> None:
        """Wait for all."""
        self.closed = True


class Windows:
    """Windows of another worker, in the states that the test gives them."""

    has_room = is_busy = True
    has_hung = False

    def __init__(self) -> None:
        self.asked: list[PackedWindow] = []
        self.returned: list[PackedWindow] = []

    def serves(self, now_s: float) -> bool:
        """It does."""
        return True

    def hangs(self, now_s: float) -> bool:
        """As the test says."""
        return self.has_hung

    def ask(self, claim, leg, window, now_s: float, *, verifies: bool) -> PackedWindow:
        """Ask for one."""
        self.asked.append(PackedWindow(len(self.asked), 1, now_s + 1.0))
        return self.asked[-1]

    def lists(self, asked, window, span):
        """Return what to read it with."""
        return PACKED_LIST, [0], REMOTE_LIST, [0]

    def give_back(self, asked: PackedWindow) -> None:
        """Return it."""
        self.returned.append(asked)

    def look(self, now_s: float) -> None:
        """The test does."""

    def send(self, now_s: float) -> None:
        """Nobody hears it."""


SRC = Memory("HND", 2, 4)
(LEG,) = lower_read(read(2), SRC.cache(), Memory("HND", 4, 4).cache())
STAGED = stage_leg(LEG, SRC.cache())
DIRECT_LIST, ARENA_LIST, PACKED_LIST, REMOTE_LIST = (
    Prepared(peer, None) for peer in (None, None, None, "peer")
)
PREPARED = PreparedLeg(
    LEG, DIRECT_LIST, REMOTE_LIST, PreparedStaging(STAGED, ARENA_LIST, REMOTE_LIST)
)
BLOCKS = [2, 3, 4, 5]
PLANE_BYTES = len(BLOCKS) * STAGED.slice_bytes
"""One of 4 planes; a window is an eighth of the arena."""


def make(planes_in_arena: int) -> tuple[Recorded, Connection, Copies]:
    """Transfers with an arena for so many planes, one plane being a window."""
    agent, copies = Connection(), Copies()
    area = StagingArea(torch.zeros(planes_in_arena * PLANE_BYTES, dtype=torch.uint8), copies)
    return Recorded(area), agent, copies


def start(
    transfers: Recorded,
    request_id: str,
    parts: Sequence[Part],
    connection: Connection,
    now_s: float,
    budget: Budget = UNLIMITED,
) -> None:
    """Read the parts of a request, as far as they can be posted now."""
    transfers.begin(request_id, parts, connection)
    transfers.post(now_s, budget)


def failures(events) -> dict[str, str]:
    """What failed, and why."""
    return {each.request_id: each.fault for each in events if isinstance(each, Failed)}


def drained(events) -> list[tuple[str, int]]:
    """The parts that nothing writes for any more."""
    return [(each.request_id, each.key) for each in events if isinstance(each, Drained)]


def parts_of(transfers: Transfers) -> Sequence[Part]:
    """All of a request's blocks."""
    return list(cut(PREPARED, select(LEG, [span(BLOCKS)], [span([7, 1, 9, 3])]), transfers.area))


@pytest.fixture
def one_window_parts() -> list[Part]:
    """Parts of one plane each."""
    transfers, _, _ = make(8)
    parts = list(parts_of(transfers))
    assert [len(part.window.selection.planes) for part in parts] == [1] * 4
    return parts


def packed_parts_of(transfers: Transfers, windows: Windows) -> list[Part]:
    """The same blocks, packed."""
    claim = Claim("r", OfferFingerprint(16, 1, 2))
    packing = PreparedPacking(PackedCache(SRC.cache()).lower(STAGED), windows)
    leg = replace(PREPARED, packing=packing)
    return [replace(each, leg=leg, claim=claim) for each in parts_of(transfers)]


def test_staged_part_ends_once_it_is_scattered(one_window_parts):
    """Not when it has landed; until then its span is nobody else's."""
    transfers, agent, copies = make(4)
    start(transfers, "r", one_window_parts, agent, 0.0)
    assert len(agent.posted) == 4 and transfers.area.spans.free_bytes == 0
    assert {lists[0] for lists in agent.posted} == {ARENA_LIST}
    agent.states[2] = TransferState.DONE
    assert transfers.look(0.0) == [] and agent.released == [2]
    assert len(copies.made) == 1 and transfers.area.spans.free_bytes == 0
    copies.made[0].made = True
    assert transfers.look(0.0) == [Drained("r", 2, Strategy.STAGED, "telemetry 2")]
    assert transfers.area.spans.free_bytes == PLANE_BYTES
    assert len(transfers) == 3


@pytest.mark.parametrize("planes_in_arena", [0, 4], ids=["direct", "staged"])
def test_read_that_ends_at_once_needs_no_look(one_window_parts, planes_in_arena):
    """What NIXL reads while it posts is over, or being scattered, before the next is posted."""
    transfers, agent, copies = make(planes_in_arena)
    agent.ends_at_once = True
    start(transfers, "r", one_window_parts, agent, 0.0)
    assert agent.released == [0, 1, 2, 3] and not transfers.is_lingering
    for copy in copies.made:
        copy.made = True
    assert drained(transfers.look(0.0)) == [("r", key) for key in range(4)]
    assert len(transfers) == 0


def test_what_arrives_is_told_for_as_long_as_that_is_news(one_window_parts):
    """Where it has landed and where it was copied; not while nothing moves."""
    transfers, agent, copies = make(4)
    start(transfers, "r", one_window_parts, agent, 0.0)
    seen = []
    for step in (lambda: None, lambda: agent.states.update({2: TransferState.DONE}), lambda: None):
        step()
        transfers.look(0.0)
        seen.append(transfers.has_moved)
    copies.made[0].made = True
    transfers.look(0.0)
    assert (seen, transfers.has_moved) == ([False, True, False], True)


@pytest.mark.parametrize("planes_in_arena", [0, 2], ids=["direct", "staged"])
def test_failed_read_is_not_quiet_until_its_connection_has_ended(one_window_parts, planes_in_arena):
    """What NIXL has given up may still arrive: neither blocks nor span are somebody else's."""
    transfers, agent, copies = make(planes_in_arena)
    start(transfers, "r", one_window_parts[:1], agent, 0.0)
    agent.states[0] = TransferState.FAILED
    events = transfers.look(0.0)
    assert (
        "could not read from peer: see that its" in failures(events)["r"] and drained(events) == []
    )
    assert transfers.area.spans.free_bytes == max(planes_in_arena - 1, 0) * PLANE_BYTES
    assert len(transfers) == 1 and not agent.released and not copies.made
    transfers.on_lane_closed(Connection())
    assert drained(transfers.look(0.0)) == []
    transfers.on_lane_closed(agent)
    assert drained(transfers.look(0.0)) == [("r", 0)]
    assert transfers.area.spans.free_bytes == planes_in_arena * PLANE_BYTES
    assert len(transfers) == 0


@pytest.mark.parametrize("planes_in_arena", [0, 2], ids=["direct", "staged"])
def test_read_that_nobody_wants_is_quiet_when_it_is_done(one_window_parts, planes_in_arena):
    """However late; it is polled until then, not released, and what it brings is not copied."""
    transfers, agent, copies = make(planes_in_arena)
    start(transfers, "r", one_window_parts[:1], agent, 0.0)
    transfers.end("r")
    assert transfers.look(1000.0) == [] and not agent.released
    assert transfers.is_lingering and not transfers.is_moving
    agent.states[0] = TransferState.DONE
    (event,) = transfers.look(2000.0)
    assert not transfers.is_lingering
    assert drained([event]) == [("r", 0)] and event.telemetry is None
    assert agent.released == [0] and not copies.made
    assert transfers.area.spans.free_bytes == planes_in_arena * PLANE_BYTES


def test_failure_is_told_though_nobody_wants_the_read(one_window_parts):
    """Only the end of its connection makes it quiet: somebody has to break that off."""
    transfers, agent, _ = make(0)
    start(transfers, "r", one_window_parts[:1], agent, 0.0)
    transfers.end("r")
    agent.states[0] = TransferState.FAILED
    events = transfers.look(0.0)
    assert (
        "could not read from peer: see that its" in failures(events)["r"] and drained(events) == []
    )


def test_connection_that_is_cut_fails_what_was_in_flight(one_window_parts):
    """Which is quiet then, too."""
    transfers, agent, _ = make(0)
    start(transfers, "r", one_window_parts[:2], agent, 0.0)
    transfers.on_lane_closed(agent)
    events = transfers.look(0.0)
    assert "connection with peer was given up" in failures(events)["r"]
    assert drained(events) == [("r", 0), ("r", 1)]


def test_nothing_is_posted_with_a_connection_that_drains(one_window_parts):
    """What waits for its turn fails, and what is in flight goes on."""
    transfers, agent, _ = make(1)
    other = Connection()
    start(transfers, "r", one_window_parts[:2], agent, 0.0)
    start(transfers, "s", one_window_parts[:1], other, 0.0)
    transfers.retire(agent)
    events = transfers.look(0.0)
    assert set(failures(events)) == {"r"} and drained(events) == [("r", 1)]
    agent.states[0] = TransferState.DONE
    transfers.end("r")
    assert drained(transfers.look(0.0)) == [("r", 0)]
    assert len(agent.posted) == 1 and len(other.posted) == 1


def test_window_without_a_span_goes_direct_after_a_while(one_window_parts):
    """A read that never ends holds up nobody for ever."""
    transfers, agent, _ = make(1)
    start(transfers, "r", one_window_parts, agent, 0.0)
    transfers.look(_SPAN_WAIT_S * 0.9)
    assert len(agent.posted) == 1
    transfers.look(_SPAN_WAIT_S)
    assert [lists[0] for lists in agent.posted] == [ARENA_LIST] + 3 * [DIRECT_LIST]
    for number in (1, 2, 3):
        agent.states[number] = TransferState.DONE
    ended = transfers.look(_SPAN_WAIT_S)
    assert {(each.key, each.strategy) for each in ended if isinstance(each, Drained)} == {
        (key, Strategy.DIRECT) for key in (1, 2, 3)
    }


def test_patience_begins_anew_when_a_span_was_given_back(one_window_parts):
    """A queue that moves is waited in."""
    transfers, agent, copies = make(1)
    start(transfers, "r", one_window_parts, agent, 0.0)
    now_s = 0.0
    for number in range(4):
        now_s += _SPAN_WAIT_S * 0.9
        agent.states[number] = TransferState.DONE
        transfers.look(now_s)
        copies.made[number].made = True
        assert len(transfers.look(now_s)) == 1
    assert [lists[0] for lists in agent.posted] == 4 * [ARENA_LIST]
    assert len(transfers) == 0


def test_window_larger_than_the_arena_goes_direct_at_once(one_window_parts):
    """It would never be its turn."""
    transfers, agent, _ = make(0)
    start(transfers, "r", one_window_parts, agent, 0.0)
    assert [lists[0] for lists in agent.posted] == 4 * [DIRECT_LIST]


def test_queued_windows_of_a_failed_request_are_given_up(one_window_parts):
    """Nothing more is read for it, and another request takes its turn."""
    transfers, agent, _ = make(1)
    start(transfers, "bad", one_window_parts, agent, 0.0)
    start(transfers, "good", one_window_parts[:1], agent, 0.0)
    transfers.end("bad")
    events = transfers.look(0.0)
    assert drained(events) == [("bad", 1), ("bad", 2), ("bad", 3)] and not failures(events)
    agent.states[0] = TransferState.DONE
    assert drained(transfers.look(0.0)) == [("bad", 0)]
    assert len(agent.posted) == 2 and len(transfers) == 1


def test_read_that_was_refused_before_it_began_is_quiet(one_window_parts):
    """Its span is free at once."""
    transfers, agent, _ = make(4)
    agent.refusal = TransferError("no")
    start(transfers, "r", one_window_parts[:1], agent, 0.0)
    events = transfers.look(0.0)
    assert failures(events) == {"r": "no"} and drained(events) == [("r", 0)]
    assert transfers.area.spans.free_bytes == 4 * PLANE_BYTES


def test_read_that_was_refused_after_it_began_is_not(one_window_parts):
    """What NIXL has read of it may still arrive, until its connection has ended."""
    transfers, agent, _ = make(4)
    agent.refusal = InDoubtError("not any more")
    start(transfers, "r", one_window_parts[:1], agent, 0.0)
    events = transfers.look(0.0)
    assert failures(events) == {"r": "not any more"} and drained(events) == []
    assert transfers.area.spans.free_bytes == 3 * PLANE_BYTES
    transfers.on_lane_closed(agent)
    assert drained(transfers.look(0.0)) == [("r", 0)]
    assert transfers.area.spans.free_bytes == 4 * PLANE_BYTES


def test_copy_on_the_host_is_made_once_its_window_has_landed(one_window_parts):
    """Its span is free at once: more windows than fit are read in one call."""
    transfers, agent, copies = make(2)
    copies.scatter = lambda scatter: None
    agent.ends_at_once = True
    start(transfers, "r", one_window_parts, agent, 0.0)
    assert transfers.area.spans.free_bytes == 2 * PLANE_BYTES
    assert drained(transfers.look(0.0)) == [("r", key) for key in range(4)]
    assert {lists[0] for lists in agent.posted} == {ARENA_LIST} and len(transfers) == 0


def test_policy_decides_for_each_read():
    """A few small pages go direct, and without an arena everything does."""
    transfers, _, _ = make(8)
    assert all(part.window is not None for part in parts_of(transfers))
    transfers.area.policy = StagingPolicy()
    (part,) = parts_of(transfers)
    assert part.window is None
    transfers.area = None
    (part,) = parts_of(transfers)
    assert part.window is None


def test_nothing_selected_is_no_part():
    """A prefix-cache hit of everything reads nothing."""
    transfers, _, _ = make(8)
    assert list(cut(PREPARED, [], transfers.area)) == []


def test_close_waits_for_copies(one_window_parts):
    """Nobody writes into blocks after that."""
    transfers, agent, copies = make(2)
    start(transfers, "r", one_window_parts, agent, 0.0)
    transfers.close()
    assert not agent.released and copies.closed and len(transfers) == 0


def test_copy_that_cannot_be_made_fails_its_part_only(one_window_parts):
    """Bytes that are not in their places have not arrived; the engine goes on."""
    transfers, agent, copies = make(4)

    def refuse(scatter):
        raise RuntimeError("out of memory")

    copies.scatter = refuse
    start(transfers, "r", one_window_parts, agent, 0.0)
    agent.states[1] = TransferState.DONE
    failed, ended = transfers.look(0.0)
    assert failed.is_local
    assert failed.fault == "its bytes could not be put in their places: out of memory"
    assert drained([ended]) == [("r", 1)] and ended.telemetry is None
    assert transfers.look(0.0) == [] and agent.released == [1]
    assert transfers.area.spans.free_bytes == PLANE_BYTES and len(transfers) == 3


def test_long_step_is_no_standstill(one_window_parts):
    """What has landed in a step that outlasts patience is copied, and its span is waited for."""
    transfers, agent, copies = make(1)
    start(transfers, "r", one_window_parts, agent, 0.0)
    agent.states[0] = TransferState.DONE
    transfers.look(2 * _SPAN_WAIT_S)
    assert len(agent.posted) == 1
    transfers.look(4 * _SPAN_WAIT_S)
    assert len(agent.posted) == 1
    copies.made[0].made = True
    transfers.look(6 * _SPAN_WAIT_S)
    assert [lists[0] for lists in agent.posted] == 2 * [ARENA_LIST]


def test_arena_that_stands_still_keeps_nobody_waiting(one_window_parts):
    """Who comes when it has stood still for long goes direct at once."""
    transfers, agent, _ = make(1)
    start(transfers, "first", one_window_parts[:1], agent, 0.0)
    start(transfers, "late", one_window_parts[:1], agent, 1000.0)
    assert [lists[0] for lists in agent.posted] == [ARENA_LIST, DIRECT_LIST]


def pieces(number: int) -> Budget:
    """A budget for so many pieces of work."""
    return Budget(number, partial(next, count()))


@pytest.mark.parametrize("planes_in_arena", [0, 32], ids=["direct", "staged"])
def test_posting_goes_on_in_the_next_turn(one_window_parts, planes_in_arena):
    """A request of many parts takes as many turns as the budget says, and every part is posted."""
    transfers, agent, _ = make(planes_in_arena)
    parts = one_window_parts
    if not planes_in_arena:
        parts = [Part(PREPARED, [part.window.selection]) for part in parts]
    start(transfers, "r", parts, agent, 0.0, pieces(1))
    assert len(agent.posted) == 1 and transfers.is_moving
    assert transfers.has_backlog
    for posted in (2, 3, 4):
        transfers.look(0.0, pieces(1))
        assert len(agent.posted) == posted
    assert not transfers.has_backlog


def test_direct_backlog_holds_up_no_windows(one_window_parts):
    """Each turn posts one of each at least."""
    transfers, agent, _ = make(32)
    direct = [Part(PREPARED, [part.window.selection]) for part in one_window_parts]
    start(transfers, "direct", direct, agent, 0.0, pieces(1))
    start(transfers, "staged", one_window_parts, agent, 0.0, pieces(1))
    arenas = [lists[0] is ARENA_LIST for lists in agent.posted]
    assert arenas == [False, False, True]


def test_every_read_is_looked_at_in_turns(one_window_parts):
    """However small the budget, and whatever is in flight before it."""
    transfers, agent, _ = make(32)
    looked: list[int] = []
    agent.poll = lambda transfer: looked.append(transfer.handle) or TransferState.IN_FLIGHT
    start(transfers, "r", one_window_parts, agent, 0.0)
    looked.clear()
    for _ in range(8):
        transfers.look(0.0, pieces(1))
    assert looked == [0, 1, 2, 3, 0, 1, 2, 3]


def test_backlog_of_a_connection_that_drains_is_never_posted(one_window_parts):
    """Nor that of a request that nobody wants any more."""
    transfers, agent, _ = make(0)
    direct = [Part(PREPARED, [part.window.selection]) for part in one_window_parts]
    other = Connection()
    start(transfers, "a", direct, agent, 0.0, pieces(1))
    start(transfers, "b", direct, other, 0.0, pieces(1))
    transfers.end("b")
    transfers.retire(agent)
    events = transfers.look(0.0)
    assert "was given up" in failures(events)["a"] and "b" not in failures(events)
    num_posted = len(agent.posted) + len(other.posted)
    assert len(drained(events)) + num_posted == 2 * len(direct)
    assert not transfers.has_backlog and len(transfers) == num_posted


def test_windows_without_spans_are_no_backlog(one_window_parts):
    """They wait for others, and not for a turn."""
    transfers, agent, _ = make(2)
    start(transfers, "r", one_window_parts, agent, 0.0)
    assert len(agent.posted) == 2 and len(transfers) == 4
    assert transfers.is_moving and not transfers.has_backlog


@pytest.mark.parametrize("planes_in_arena", [0, 32], ids=["direct", "staged"])
def test_what_is_prefetched_is_posted_once_nothing_else_is(one_window_parts, planes_in_arena):
    """A request that is offered waits for none of it that is not posted yet."""
    transfers, agent, _ = make(planes_in_arena)
    parts = one_window_parts
    if not planes_in_arena:
        parts = [Part(PREPARED, [part.window.selection]) for part in parts]
    whole, early = Connection(), agent
    transfers.begin("early", parts, early, is_prefetch=True)
    transfers.post(0.0, pieces(1))
    assert len(early.posted) == 1
    transfers.begin("whole", parts, whole)
    for posted in (1, 2, 3):
        transfers.post(0.0, pieces(1))
        assert (len(whole.posted), len(early.posted)) == (posted, 1)
    transfers.post(0.0, pieces(1))
    assert len(whole.posted) == 4
    assert transfers.is_moving and not transfers.has_backlog
    transfers.post(0.0, UNLIMITED)
    assert len(early.posted) == 4 and len(transfers) == 8
    for handle in range(4):
        early.states[handle] = TransferState.FAILED
    assert set(failures(transfers.look(0.0))) == {"early"}


def test_what_is_prefetched_is_given_up_as_anything_else(one_window_parts):
    """With its request, and with its connection."""
    transfers, agent, _ = make(0)
    direct = [Part(PREPARED, [part.window.selection]) for part in one_window_parts]
    other = Connection()
    for name, connection in (("a", agent), ("b", other)):
        transfers.begin(name, direct, connection, is_prefetch=True)
    transfers.end("a")
    transfers.retire(other)
    transfers.post(0.0, UNLIMITED)
    assert not agent.posted and not other.posted and not len(transfers)
    events = transfers.look(0.0)
    assert set(failures(events)) == {"b"}
    assert sorted(drained(events)) == [(name, key) for name in "ab" for key in range(4)]


@pytest.mark.parametrize("planes_in_arena", [0, 32], ids=["direct", "staged"])
def test_what_was_prefetched_takes_its_turn_once_its_request_is_offered(
    one_window_parts, planes_in_arena
):
    """However much others have to be read."""
    transfers, agent, _ = make(planes_in_arena)
    parts = one_window_parts
    if not planes_in_arena:
        parts = [Part(PREPARED, [part.window.selection]) for part in parts]
    other = Connection()
    transfers.begin("early", parts, agent, is_prefetch=True)
    transfers.begin("another early", parts, other, is_prefetch=True)
    transfers.begin("first", parts[:1], other)
    transfers.promote(transfers.requests["early"])
    transfers.begin("last", parts, other)
    for _ in range(5):
        transfers.post(0.0, pieces(1))
    assert (len(other.posted), len(agent.posted)) == (1, 4)
    assert len(transfers) == 13


@pytest.fixture
def packs() -> tuple[Recorded, Connection, Windows]:
    """Transfers with an arena of one unit, and a worker that packs."""
    area = StagingArea(torch.zeros(PACK_UNIT_BYTES, dtype=torch.uint8), Copies())
    return Recorded(area), Connection(), Windows()


def test_window_that_is_lost_while_it_is_read_is_read_direct(packs):
    """Nobody looks at it any more: it would be waited for until its request is due."""
    transfers, agent, windows = packs
    transfers.begin("r", packed_parts_of(transfers, windows)[:1], agent)
    transfers.look(0.0)
    windows.asked[0].state = PackState.PACKED
    transfers.look(0.0)
    assert [lists[0] for lists in agent.posted] == [PACKED_LIST]
    windows.asked[0].state = PackState.LOST
    agent.states[0] = TransferState.DONE
    transfers.look(0.0)
    assert [lists[0] for lists in agent.posted] == [PACKED_LIST, DIRECT_LIST]
    assert windows.returned == windows.asked and transfers.area.spans.free_bytes == PACK_UNIT_BYTES
    agent.states[1] = TransferState.DONE
    assert transfers.look(0.0) == [Drained("r", 0, Strategy.DIRECT, "telemetry 1")]


def test_windows_that_were_read_are_scattered_within_the_budget(packs):
    """However many are confirmed by one look; the next poll goes on."""
    _, agent, windows = packs
    area = StagingArea(torch.zeros(3 * PACK_UNIT_BYTES, dtype=torch.uint8), Copies())
    transfers = Recorded(area)
    transfers.begin("r", packed_parts_of(make(8)[0], windows)[:3], agent)
    transfers.look(0.0)
    for each in windows.asked:
        each.state = PackState.CONFIRMED
    for number in range(1, 4):
        transfers.look(0.0, Budget(0.0, lambda: 1.0))
        assert len(area.copier.made) == number


@pytest.mark.parametrize("strategy", Strategy)
def test_part_is_verified_another_way(packs, strategy):
    """What was not packed is packed, and what was packed is not; a few blocks of it."""
    transfers, _, windows = packs
    part = packed_parts_of(transfers, windows)[0]
    (again,) = cut_again(Arrived(part, strategy, None), transfers.area, part.claim)
    assert again.verifies and (again.claim is None) == (strategy is Strategy.PACKED)
    assert again.window.selection.overlap.src_blocks.tolist() == BLOCKS
    no_packing = replace(part, leg=replace(part.leg, packing=None))
    assert list(cut_again(Arrived(no_packing, strategy, None), transfers.area, part.claim)) == []
    assert list(cut_again(Arrived(part, strategy, None), None, part.claim)) == []


def test_layers_that_share_memory_are_packed_for_their_own_group():
    """As vLLM's hybrid allocator has them: one address stands for a layer of each group."""
    cache = SRC.cache()
    others = {
        f"other {name}": replace(layer, group=1 - layer.group)
        for name, layer in cache.layers.items()
    }
    for layers in ({**cache.layers, **others}, {**others, **cache.layers}):
        planes = PackedCache(replace(cache, layers=layers)).lower(STAGED).planes
        groups = [layer.group for layer in layers.values() for _ in layer.planes]
        assert {groups[each] for each in planes} == {LEG.pairs[0].groups[0]}
        assert len({*planes}) == len(LEG.pairs)


def test_windows_without_room_for_them_are_polled(packs):
    """What is in doubt may keep all room, and tells nobody that it does."""
    transfers, agent, windows = packs
    (part,) = packed_parts_of(transfers, windows)
    transfers.begin("bad", [part], agent)
    transfers.look(0.0)
    windows.asked[0].state = PackState.PACKED
    transfers.look(0.0)
    agent.states[0] = TransferState.FAILED
    transfers.end("bad")
    # Nothing is left to say to the worker.
    windows.is_busy = False
    transfers.look(0.0)
    assert not transfers.is_moving
    transfers.begin("good", [part], agent)
    transfers.look(0.0)
    assert len(agent.posted) == 1 and transfers.is_moving
    transfers.look(_SPAN_WAIT_S)
    transfers.look(_SPAN_WAIT_S)
    assert [lists[0] for lists in agent.posted] == [PACKED_LIST, DIRECT_LIST]


def test_windows_that_hang_break_a_connection_that_nothing_else_would(packs):
    """A request that is read over it has a deadline; its blocks are not in doubt before that."""
    transfers, agent, windows = packs
    transfers.begin("bad", packed_parts_of(transfers, windows), agent)
    agent.lifetime.begin_request()
    transfers.look(0.0)
    windows.has_hung = True
    transfers.look(1.0)
    assert not transfers.broken
    agent.lifetime.end_request()
    transfers.look(2.0)
    assert list(transfers.broken) == [agent]
    agent.lifetime.retire(2.0)
    transfers.look(3.0)
    assert list(transfers.broken) == [agent]
