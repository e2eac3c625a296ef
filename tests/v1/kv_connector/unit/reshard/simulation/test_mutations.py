# SPDX-License-Identifier: Apache-2.0
"""The simulation finds what it is for: each defect that is planted here, within some schedules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.v1.kv_connector.unit.reshard.simulation import prefill
from tests.v1.kv_connector.unit.reshard.simulation.engines import Worker
from tests.v1.kv_connector.unit.reshard.simulation.running import run, simulated
from tests.v1.kv_connector.unit.reshard.simulation.wire import Violation
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine import transfer_engine
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.connecting.peers import PeerTable
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.producer import ProducerSide
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.reading.consumer import (
    ConsumerSide,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.reading.notifier import Renewals
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.reading.prefetch import Prefetched
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.worker import CacheDevice
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.staging import ArenaAllocator, Span
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol import packing, subscriptions
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.fingerprint import (
    OfferFingerprint,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.leases import LeaseTable
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.ledgers import ProducerLedger
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport import (
    arena,
    packed_windows,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.lane import Lane, Lanes
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.lease_check import LeaseChecker
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.packed_windows import PackState
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.parts import RequestReads
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.transfers import Transfers

MAX_SCHEDULES = 3000

Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    """Nothing is logged of what goes wrong on purpose."""
    with simulated():
        yield


def blocks_are_free_once_nixl_says_failed(monkeypatch):
    """A read that has failed is taken for one that writes no more."""
    look = Transfers._has_left_nixl

    def hasty(self, running, now_s):
        left = look(self, running, now_s)
        if running in self._in_doubt:
            self._in_doubt.remove(running)
            self._drain(running)
        return left

    monkeypatch.setattr(Transfers, "_has_left_nixl", hasty)


def spans_are_free_once_nixl_says_failed(monkeypatch):
    """The same for its span alone."""
    look = Transfers._has_left_nixl

    def hasty(self, running, now_s):
        left = look(self, running, now_s)
        if running in self._in_doubt:
            self._free(running)
        return left

    monkeypatch.setattr(Transfers, "_has_left_nixl", hasty)


def requests_are_quiet_once_given_up(monkeypatch):
    """What nobody wants is forgotten while it is in flight."""
    give_up = Transfers.give_up

    def forget(self, reads):
        give_up(self, reads)
        for running in [each for each in self._posted if each.reads is reads]:
            self._posted.remove(running)
            running.connection.lifetime.done()
            self._drain(running)

    monkeypatch.setattr(Transfers, "give_up", forget)


def leases_are_not_looked_up(monkeypatch):
    """What was read is believed."""

    async def believe(*_):
        """Look at nothing."""

    monkeypatch.setattr(LeaseChecker, "confirm", believe)


def leases_are_not_struck_out(monkeypatch):
    """A producer tells readers of blocks that it has given away."""
    monkeypatch.setattr(LeaseTable, "remove", lambda *_: None)


def every_notification_is_believed(monkeypatch):
    """Whatever it is bound to."""
    count = ProducerLedger._count

    def believe(self, request_id, held, notice):
        return count(self, request_id, held, notice._replace(proof=held.fingerprint))

    monkeypatch.setattr(ProducerLedger, "_count", believe)


def leases_run_while_a_machine_stands_still(monkeypatch):
    """Though nobody could renew them."""
    monkeypatch.setattr(ProducerLedger, "extend", lambda *_: None)


def every_secret_is_believed(monkeypatch):
    """Whoever gives something up may."""
    count = ProducerLedger._count

    def believe(self, request_id, held, notice):
        if not isinstance(notice.proof, OfferFingerprint):
            notice = notice._replace(proof=held.secret)
        return count(self, request_id, held, notice)

    monkeypatch.setattr(ProducerLedger, "_count", believe)


def connections_drain_for_ever(monkeypatch):
    """No lane that was retired is closed."""
    monkeypatch.setattr(Lanes, "take_due", lambda *_: [])


def connections_are_not_retired(monkeypatch):
    """A connection that has failed is used on."""
    monkeypatch.setattr(PeerTable, "break_off", lambda *_: None)


def agents_outlive_their_lanes(monkeypatch):
    """A lane is called closed while its agent reads on."""

    def pretend(self):
        for connection in list(self.connections):
            del self.connections[connection]
            connection.lifetime.close()

    monkeypatch.setattr(Lane, "close", pretend)


def neighbours_are_quiet_once_their_lane_is_retired(monkeypatch):
    """What is read from other peers of a lane that broke is given away before the lane is closed.

    As if the lane had ended, and not only had been retired.
    """
    retire = Transfers.retire

    def hasty(self, connection):
        retire(self, connection)
        others = {other for other in connection.lane.connections if other is not connection}
        on_their_way = self._posted, self._in_doubt
        self._end(on_their_way, lambda each: each.connection in others, "given away")

    monkeypatch.setattr(Transfers, "retire", hasty)


def lanes_end_with_the_first_of_their_connections(monkeypatch):
    """A lane is closed as soon as one of its peers needs it no more, and the others do."""
    close_at_s = Lane.close_at_s

    def hasty(self, *, is_crowded=False):
        ends_s = [each.close_at_s for each in self.connections if each.close_at_s is not None]
        return min(ends_s) if ends_s else close_at_s(self, is_crowded=is_crowded)

    monkeypatch.setattr(Lane, "close_at_s", hasty)


def deadlines_are_missed(monkeypatch):
    """A request waits as long as its peer likes."""
    monkeypatch.setattr(ConsumerSide, "_next_deadline_s", property(lambda self: None))


def steps_in_flight_are_not_waited_for(monkeypatch):
    """Reads begin into blocks that the device writes."""
    monkeypatch.setattr(transfer_engine, "_may_begin", lambda step: True)


def steps_are_over_before_they_are_computed(monkeypatch):
    """What is launched is waited for on a stream of which nothing is known."""
    monkeypatch.setattr(CacheDevice, "computed_before", lambda *_: torch.cuda.Event())


def copies_are_made_once_they_are_launched(monkeypatch):
    """A copy out of the arena is taken for made while its stream has not come to it."""
    scatter = arena.ArenaCopier.scatter

    def scatter_and_forget(copier, each):
        scatter(copier, each)

    monkeypatch.setattr(arena.ArenaCopier, "scatter", scatter_and_forget)


def threads_keep_the_first_device(monkeypatch):
    """The connector's and the dialer's work with the first device of their process."""
    monkeypatch.setattr(CacheDevice, "choose", lambda _: None)


def reading_thread_keeps_the_first_device(monkeypatch):
    """Only the dialer's works with the worker's."""
    monkeypatch.setattr(Worker, "prepare_thread", lambda _: None)


def _due_of_who_has_not_failed(self):
    while self._deadlines:
        due_at_s, request_id = self._deadlines[0]
        request = self._requests.get(request_id)
        if request is not None and request.fault is None:
            return due_at_s
        self._deadlines.popleft()
    return None


def hung_reads_of_failed_requests_have_no_deadline(monkeypatch):
    """The connection of a read that hangs, for a request that failed elsewhere, is never cut."""
    monkeypatch.setattr(ConsumerSide, "_next_deadline_s", property(_due_of_who_has_not_failed))


def lookups_that_nobody_wants_break_nothing_off(monkeypatch):
    """The connection with an engine that is gone is never closed."""
    never = property(lambda _: False, lambda *_: None)
    monkeypatch.setattr(LeaseChecker, "is_broken", never, raising=False)


def peers_are_never_due(monkeypatch):
    """The thread sleeps while there are retries, idle peers to forget and agents to close."""
    monkeypatch.setattr(PeerTable, "next_due_s", math.inf)


def leases_are_renewed_by_steps_alone(monkeypatch):
    """A step that takes long costs the leases of all that waits."""
    monkeypatch.setattr(Renewals, "next_due_s", math.inf)


def backlog_is_forgotten(monkeypatch):
    """The thread sleeps though there was more to post than fits a turn."""
    monkeypatch.setattr(ConsumerSide, "has_backlog", False)
    monkeypatch.setattr(Transfers, "is_moving", property(lambda self: bool(self._posted)))


def requests_that_nobody_has_are_waited_for(monkeypatch):
    """A request that only the decode engine has been sent waits for ever."""
    monkeypatch.setattr(subscriptions, "KNOWN_WITHIN_S", math.inf)


def endings_are_not_told(monkeypatch):
    """Nobody hears that a prompt is not computed any more."""
    end = subscriptions.Publisher.end

    def quietly(self, request_id, reason):
        prompt = self._prompts.get(request_id)
        if prompt is not None:
            self._subscribers.pop(prompt.asker, None)
        end(self, request_id, reason)

    monkeypatch.setattr(subscriptions.Publisher, "end", quietly)
    monkeypatch.setattr(subscriptions, "KNOWN_WITHIN_S", math.inf)


def clients_that_leave_are_not_heard_of(monkeypatch):
    """Their blocks stay until prompts are computed that nobody wants."""
    monkeypatch.setattr(ConsumerSide, "abandon", lambda *_: None)


def attempts_are_not_compared(monkeypatch):
    """What was prefetched of a prompt counts though it was begun anew, in blocks as it likes."""
    monkeypatch.setattr(Prefetched, "is_of", lambda self, *_: not self.is_invalid)


def prefetched_parts_are_not_accounted_for(monkeypatch):
    """A request that ends while its prompt is computed is quiet at once."""
    start = Transfers.start

    def start_nobodys(self, reads, parts, connection, *, is_prefetch=False):
        whose = RequestReads(reads.request_id) if is_prefetch else reads
        start(self, whose, parts, connection, is_prefetch=is_prefetch)

    monkeypatch.setattr(Transfers, "start", start_nobodys)


def steps_are_told_of_before_they_are_over(monkeypatch):
    """Readers are told of blocks that a step has still to compute."""
    monkeypatch.setattr(prefill.Prompt, "num_in_flight", property(lambda _: 0, lambda *_: None))


class _OneRoom(ArenaAllocator):
    """An arena whose spans all begin at its start."""

    def allocate(self, size_bytes: int, alignment_bytes: int = 1) -> Span | None:
        return Span(0, size_bytes) if size_bytes <= self.size_bytes else None

    def free(self, span: Span) -> None:
        """It has never been taken."""


def windows_share_their_room(monkeypatch):
    """A window is packed where another one is."""
    monkeypatch.setattr(packing, "ArenaAllocator", _OneRoom)


def windows_stay_entered_when_their_room_is_used_again(monkeypatch):
    """A holder tells readers of windows that it has given up."""

    def keep(self, row):
        self._free.insert(0, row)

    monkeypatch.setattr(packing.PackTable, "remove", keep)


def windows_are_entered_before_they_are_gathered(monkeypatch):
    """A copy into the arena is taken for made while its stream has not come to it."""
    gather = arena.ArenaCopier.gather

    def gather_and_forget(copier, each):
        gather(copier, each)

    monkeypatch.setattr(arena.ArenaCopier, "gather", gather_and_forget)


def windows_count_without_a_second_look(monkeypatch):
    """What was read of a window is believed."""
    look = Transfers._has_left_nixl

    def believe(self, running, now_s):
        left = look(self, running, now_s)
        if running.packed is not None and running.packed.state is PackState.READ:
            running.packed.state = PackState.CONFIRMED
        return left

    monkeypatch.setattr(Transfers, "_has_left_nixl", believe)


def whoever_asks_may_have_a_window(monkeypatch):
    """Whatever he says is offered."""

    def believe(self, entry):
        return self._offered.get(entry.request_id, (None, None))[1]

    monkeypatch.setattr(ProducerSide, "_blocks_of", believe)


def windows_are_packed_of_blocks_that_were_given_away(monkeypatch):
    """A holder remembers what it has offered for ever."""
    end = ProducerSide._end

    def remember(self, request_id, *how):
        offered = self._offered.get(request_id)
        end(self, request_id, *how)
        if offered is not None:
            self._offered[request_id] = offered

    monkeypatch.setattr(ProducerSide, "_end", remember)


def hung_looks_at_windows_break_nothing_off(monkeypatch):
    """The connection with an engine that packs, and is gone, is never closed."""
    monkeypatch.setattr(packed_windows, "PEER_GRACE_S", math.inf)


PROMPTS = {"park": 12.0, "prefill": 9.0, "turn": 60.0, "move": 30.0}
"""Many prompts that are computed while they are waited for."""

PACKED = {
    "prefill": 9.0,
    "offer": 30.0,
    "begin_step": 24.0,
    "read": 14.0,
    "answer": 20.0,
    "connect": 20.0,
    "turn": 10.0,
    "hurry": 60.0,
    "let_time_pass": 12.0,
    "restart_prefill": 0.0,
    "restart_decode": 0.0,
    "length": 6,
}
"""Many windows, of which readers ask at once."""

WEIGHTS = {
    blocks_are_free_once_nixl_says_failed: {"hang": 6.0, "fail_read": 8.0},
    spans_are_free_once_nixl_says_failed: {"hang": 6.0, "fail_read": 8.0},
    hung_reads_of_failed_requests_have_no_deadline: {"hang": 6.0, "lose_read": 8.0},
    lookups_that_nobody_wants_break_nothing_off: {"hang": 6.0, "fail_read": 8.0},
    requests_that_nobody_has_are_waited_for: {"park": 8.0},
    endings_are_not_told: {"park": 8.0},
    clients_that_leave_are_not_heard_of: {"park": 8.0, "abort": 4.0, "hang": 1.0},
    attempts_are_not_compared: PROMPTS,
    prefetched_parts_are_not_accounted_for: {
        **PROMPTS,
        "abort": 8.0,
        "hurry": 20.0,
        "length": 3,
    },
    steps_are_told_of_before_they_are_over: PROMPTS,
    windows_share_their_room: PACKED,
    windows_stay_entered_when_their_room_is_used_again: PACKED,
    windows_are_entered_before_they_are_gathered: {**PACKED, "copy": 2.0},
    windows_count_without_a_second_look: PACKED,
    whoever_asks_may_have_a_window: PACKED,
    windows_are_packed_of_blocks_that_were_given_away: PACKED,
    hung_looks_at_windows_break_nothing_off: {**PACKED, "hang": 6.0, "lose_read": 8.0},
}
"""What has to happen often for a defect to show within some dozens of schedules."""


PLANTED = [
    (blocks_are_free_once_nixl_says_failed, "may be written|lands in memory|may write"),
    (spans_are_free_once_nixl_says_failed, "lands in memory of|may write"),
    (requests_are_quiet_once_given_up, "may be written|lands in memory|may write|forgets"),
    (leases_are_not_looked_up, "other bytes"),
    (leases_are_not_struck_out, "other bytes"),
    (every_notification_is_believed, "its lease has not run out"),
    (every_secret_is_believed, "its lease has not run out"),
    (leases_run_while_a_machine_stands_still, "its lease has not run out"),
    (connections_drain_for_ever, "is not over"),
    (connections_are_not_retired, "is not over"),
    (
        agents_outlive_their_lanes,
        "may be written|lands in memory|may write|left open|still open",
    ),
    (neighbours_are_quiet_once_their_lane_is_retired, "may be written|lands in memory"),
    (lanes_end_with_the_first_of_their_connections, "which others read with"),
    (deadlines_are_missed, "in its time"),
    (steps_in_flight_are_not_waited_for, "who writes there|may be written"),
    (steps_are_over_before_they_are_computed, "who writes there|may be written"),
    (
        copies_are_made_once_they_are_launched,
        "may be written|may write|is made into memory|other bytes",
    ),
    (threads_keep_the_first_device, "registers memory from a thread of another device"),
    (reading_thread_keeps_the_first_device, "reads from a thread of another device"),
    (hung_reads_of_failed_requests_have_no_deadline, "is not over"),
    (lookups_that_nobody_wants_break_nothing_off, "is not over"),
    (peers_are_never_due, "is not over"),
    (leases_are_renewed_by_steps_alone, "sleeps while the lease"),
    (backlog_is_forgotten, "sleeps though"),
    (requests_that_nobody_has_are_waited_for, "is not over"),
    (endings_are_not_told, "is not over"),
    (clients_that_leave_are_not_heard_of, "in its time|is not over"),
    (attempts_are_not_compared, "other bytes"),
    (prefetched_parts_are_not_accounted_for, "other bytes|may be written|may write"),
    (steps_are_told_of_before_they_are_over, "other bytes"),
    (windows_share_their_room, "other bytes"),
    (windows_stay_entered_when_their_room_is_used_again, "other bytes"),
    (windows_are_entered_before_they_are_gathered, "other bytes"),
    (windows_count_without_a_second_look, "other bytes"),
    (whoever_asks_may_have_a_window, "for who does not know it"),
    (windows_are_packed_of_blocks_that_were_given_away, "which is not offered"),
    (hung_looks_at_windows_break_nothing_off, "is not over"),
]
"""Each defect, and what the violation that it leads to says."""


@pytest.mark.parametrize(("plant", "fault"), PLANTED)
def test_planted_defect_is_found(plant: Plant, fault: str, monkeypatch):
    """And not by some other complaint than what it is about."""
    plant(monkeypatch)
    with pytest.raises(Violation, match=rf"^seed \d+: \w+: [^\n]*({fault})") as found:
        for seed in range(MAX_SCHEDULES):
            run(seed, **WEIGHTS.get(plant, {}))
    print(str(found.value).splitlines()[0])
