# SPDX-License-Identifier: Apache-2.0
"""Lookups in a peer's table, over real NIXL."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import NamedTuple

import pytest

from tests.v1.kv_connector.unit.reshard.transport.channels import wait_until
from tests.v1.kv_connector.unit.reshard.transport.rows import Agent, Reads
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import (
    InDoubtError,
    TransferError,
    quote,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.fingerprint import (
    OfferFingerprint,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.leases import (
    WORDS_PER_BUCKET,
    LeaseTable,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.tasks import Tasks
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport import lease_check
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.agent import (
    NixlAgent,
    Prepared,
    Transfer,
    TransferState,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.lease_check import (
    LeaseChecker,
    LeaseCheckFailure,
    LeaseError,
    PreparedTable,
    RowBuffer,
    check_buffer,
    prepare_table,
)

DEADLINE_S = 60.0
OFFER = OfferFingerprint(48, 1, 2)
DUE_S = 1e12


class Holder:
    """A worker that holds requests."""

    def __init__(self, *request_ids: str) -> None:
        self.table = LeaseTable(64)
        self.agent = NixlAgent(f"producer-{uuid.uuid4()}", num_threads=1)
        address = self.table.address
        self.agent.register([(address.address, address.size_bytes, 0)], "DRAM")
        for request_id in request_ids:
            assert self.table.add(request_id)
            self.table.publish(request_id, OFFER)

    def seen_by(self, reader: NixlAgent) -> PreparedTable:
        """Its table, prepared by a reader."""
        return prepare_table(reader, self.table.address, reader.connect(self.agent.metadata()))


@pytest.fixture
def reader() -> NixlAgent:
    """The agent of a worker that reads."""
    return NixlAgent(f"reader-{uuid.uuid4()}", num_threads=0, polled=True)


class Result(NamedTuple):
    """How a check has ended."""

    key: str
    error: Exception | None = None

    @property
    def failure(self) -> LeaseCheckFailure | None:
        """The kind of fault; None if the lease held."""
        return self.error.failure if isinstance(self.error, LeaseError) else None


class Checks(LeaseChecker):
    """Checks that are told apart by their names, each a task of its own."""

    def __init__(
        self, buffer: RowBuffer, reads: Reads, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(buffer, reads, clock)
        self.tasks = Tasks()
        self.results: list[Result] = []

    def check_later(
        self, key: str, name: str, offer: OfferFingerprint, table: PreparedTable, due_at_s: float
    ) -> None:
        """Begin a check."""

        async def leave(error: Exception | None) -> None:
            self.results.append(Result(key, error))

        self.tasks.start(self.confirm(self.tasks, name, offer, [table], due_at_s), leave)

    def step(self) -> list[Result]:
        """Advance; returns the results since the last call."""
        self.tasks.run(self._clock())
        self.advance()
        self.tasks.run(self._clock())
        results, self.results = self.results, []
        return results

    @property
    def is_put_off(self) -> bool:
        """Whether all that was looked up is to be looked up again."""
        return self.is_busy and not len(self)


def results(checker: Checks, count: int) -> list[Result]:
    """Advance until there are so many."""
    found: list[Result] = []
    deadline = time.monotonic() + DEADLINE_S
    while len(found) < count:
        assert time.monotonic() < deadline
        found += checker.step()
    return found


def until_put_off(checker: Checks) -> None:
    """Advance until requests are to be looked up again, and none was judged."""
    deadline = time.monotonic() + DEADLINE_S
    while not checker.is_put_off:
        assert not checker.step()
        assert time.monotonic() < deadline


def test_only_held_requests_pass(reader):
    """A request that was struck or never entered is told apart from those that are held."""
    producer = Holder("a", "b", "c")
    producer.table.remove("b")
    checker, table = Checks(check_buffer(reader), reader), producer.seen_by(reader)
    for name in "abcd":
        checker.check_later(f"our {name}", name, OFFER, table, DUE_S)
    found = {result.key: result for result in results(checker, 4)}
    assert {name for name, result in found.items() if result.failure is None} == {
        "our a",
        "our c",
    }
    assert {found[name].failure for name in ("our b", "our d")} == {LeaseCheckFailure.LEASE}
    assert "kv_lease_duration" in str(found["our b"].error)


def test_one_read_serves_all_requests_of_a_step(reader, monkeypatch):
    """Ten requests read from one worker and one from another cost two reads."""
    producers = Holder(*map(str, range(10))), Holder("0")
    tables = [producer.seen_by(reader) for producer in producers]
    checker, posted, read = Checks(check_buffer(reader), reader), [], reader.read
    monkeypatch.setattr(reader, "read", lambda *lists: posted.append(lists) or read(*lists))
    for number in range(10):
        checker.check_later(f"our {number}", str(number), OFFER, tables[0], DUE_S)
    checker.check_later("our 0", "0", OFFER, tables[1], DUE_S)
    assert all(result.failure is None for result in results(checker, 11))
    assert len(posted) == 2


def test_more_checks_than_there_is_room_for_take_turns(reader):
    """None is lost, none is mistaken for another, and the room is used again."""
    buffer = RowBuffer(reader, 3, WORDS_PER_BUCKET)
    producer = Holder(*(str(number) for number in range(0, 20, 2)))
    checker, table = Checks(buffer, reader), producer.seen_by(reader)
    for number in range(20):
        checker.check_later(f"our {number}", str(number), OFFER, table, DUE_S)
    found = results(checker, 20)
    held = {result.key for result in found if result.failure is None}
    assert held == {f"our {number}" for number in range(0, 20, 2)}
    assert len({result.key for result in found}) == 20
    assert buffer.num_free == 3


def test_lookup_that_cannot_be_posted_is_a_fault(reader, monkeypatch):
    """It fails its requests and nobody else's, and its room is free again."""
    gone, alive = Holder("a"), Holder("b")
    buffer = check_buffer(reader)
    checker = Checks(buffer, reader)
    lost, table = gone.seen_by(reader), alive.seen_by(reader)
    read = reader.read

    def refuse(local, local_indices, remote, remote_indices):
        if remote is lost.buckets:
            raise TransferError("no")
        return read(local, local_indices, remote, remote_indices)

    monkeypatch.setattr(reader, "read", refuse)
    checker.check_later("our a", "a", OFFER, lost, DUE_S)
    checker.check_later("our b", "b", OFFER, table, DUE_S)
    found = {result.key: result for result in results(checker, 2)}
    assert found["our b"] == Result("our b")
    assert found["our a"].failure is LeaseCheckFailure.PEER and str(found["our a"].error) == "no"
    assert buffer.num_free == len(buffer.rows)


@pytest.mark.parametrize("refused", [False, True])
def test_room_of_a_failed_lookup_is_nobody_elses(reader, monkeypatch, refused):
    """What NIXL could not read proves nothing, and may still be written."""
    producer, buffer = Holder("a"), check_buffer(reader)
    checker, table = Checks(buffer, reader), producer.seen_by(reader)

    def begin(*_):
        if refused:
            raise InDoubtError("not any more")
        return Transfer(producer.agent.name, object())

    monkeypatch.setattr(reader, "read", begin)
    checker.check_later("our a", "a", OFFER, table, DUE_S)
    (result,) = results(checker, 1)
    assert result.failure is LeaseCheckFailure.PEER
    assert ("not any more" if refused else "could not be looked up") in str(result.error)
    assert buffer.num_free == len(buffer.rows) - 1 and len(checker) == 0


def test_everything_unanswered_is_given_up_with_the_connection(reader, monkeypatch):
    """What waits, what is to be looked at again, and what is in flight; each once."""
    producer, now_s = Holder(), [0.0]
    producer.table.add("early")
    checker, table = (
        Checks(check_buffer(reader), reader, clock=lambda: now_s[0]),
        producer.seen_by(reader),
    )
    checker.check_later("early", "early", OFFER, table, DUE_S)
    until_put_off(checker)
    monkeypatch.setattr(reader, "poll", lambda _: TransferState.IN_FLIGHT)
    checker.check_later("posted", "b", OFFER, table, DUE_S)
    assert checker.step() == []
    checker.check_later("waiting", "c", OFFER, table, DUE_S)
    checker.tasks.run(0.0)
    assert len(checker) == 2
    checker.give_up()
    now_s[0] = 1.0
    found = {result.key: result.failure for result in checker.step()}
    assert found == dict.fromkeys(("early", "posted", "waiting"), LeaseCheckFailure.PEER)
    assert not checker.is_busy and checker.step() == []


def test_producer_that_has_not_offered_yet_is_looked_at_again(reader):
    """What it says in the end counts, and nothing is reported before."""
    producer, now_s = Holder(), [0.0]
    producer.table.add("a")
    checker = Checks(check_buffer(reader), reader, clock=lambda: now_s[0])
    checker.check_later("our a", "a", OFFER, producer.seen_by(reader), DUE_S)
    until_put_off(checker)
    producer.table.publish("a", OFFER)
    now_s[0] = 1.0
    assert results(checker, 1) == [Result("our a")]


@pytest.mark.parametrize("offers", ["nothing", "something else"])
def test_producer_that_does_not_offer_in_time_is_told_apart(reader, offers):
    """It is looked up no longer than its request waits, and the connection is not to blame."""
    producer, now_s = Holder(), [0.0]
    producer.table.add("a")
    if offers == "something else":
        producer.table.publish("a", OfferFingerprint(48, 1, 9))
    checker = Checks(check_buffer(reader), reader, clock=lambda: now_s[0])
    checker.check_later("our a", "a", OFFER, producer.seen_by(reader), 30.0)
    until_put_off(checker)
    now_s[0] = 30.0
    (result,) = checker.step()
    assert (result.key, result.failure) == ("our a", LeaseCheckFailure.LEASE)
    assert f"{producer.agent.name} did not say in time what it offers" in str(result.error)
    assert len(checker) == 0


def test_exception_over_one_request_costs_no_other_its_result(reader, monkeypatch):
    """Each has one, with the next call at the latest."""
    producer, now_s = Holder(), [0.0]
    checker = Checks(check_buffer(reader), reader, clock=lambda: now_s[0])
    table = producer.seen_by(reader)
    for name, due_at_s in (("a", 40.0), ("b", 30.0), ("c", 30.0)):
        producer.table.add(name)
        checker.check_later(f"our {name}", name, OFFER, table, due_at_s)
    until_put_off(checker)
    now_s[0], faults = 30.0, [ZeroDivisionError()]

    def quote_once(text: str) -> str:
        if faults:
            raise faults.pop()
        return quote(text)

    monkeypatch.setattr(lease_check, "quote", quote_once)
    found = {result.key: result for result in checker.step()}
    assert isinstance(found.pop("our b").error, ZeroDivisionError)
    assert {key: result.failure for key, result in found.items()} == {
        "our c": LeaseCheckFailure.LEASE
    }
    now_s[0] = 40.0
    assert [result.key for result in results(checker, 1)] == ["our a"]


def test_last_look_before_a_request_is_due_counts(reader):
    """Also where what it has found is seen when the request is due."""
    producer, now_s = Holder(), [0.0]
    producer.table.add("a")
    states = [TransferState.IN_FLIGHT]

    class Slow:
        read, release = reader.read, reader.release

        def poll(self, transfer: Transfer) -> TransferState:
            return states.pop() if states else reader.poll(transfer)

    checker = Checks(check_buffer(reader), Slow(), clock=lambda: now_s[0])
    checker.check_later("our a", "a", OFFER, producer.seen_by(reader), 30.0)
    assert checker.step() == [] and len(checker) == 1
    wait_until(lambda: reader.poll(checker._looks[0].read.transfer) is TransferState.DONE)
    now_s[0] = 30.0
    (result,) = checker.step()
    assert result.failure is LeaseCheckFailure.LEASE and len(checker) == 0


def test_what_is_bound_to_something_else_is_told_apart(reader):
    """The request fails with what differs, and its neighbour passes."""
    producer = Holder("a", "b")
    producer.table.publish("a", OfferFingerprint(40, 1, 2))
    checker, table = Checks(check_buffer(reader), reader), producer.seen_by(reader)
    checker.check_later("our a", "a", OFFER, table, DUE_S)
    checker.check_later("our b", "b", OFFER, table, DUE_S)
    found = {result.key: result for result in results(checker, 2)}
    assert found["our b"] == Result("our b")
    assert found["our a"].failure is LeaseCheckFailure.FINGERPRINT
    assert "is of 40 tokens, and 48 are wanted here" in str(found["our a"].error)


def test_entry_that_was_read_in_two_pieces_is_looked_at_again(reader):
    """A difference may be gone with the next look."""
    producer, now_s = Holder("a"), [0.0]
    producer.table.publish("a", OfferFingerprint(48, 1, 9))
    checker = Checks(check_buffer(reader), reader, clock=lambda: now_s[0])
    checker.check_later("our a", "a", OFFER, producer.seen_by(reader), DUE_S)
    until_put_off(checker)
    producer.table.publish("a", OFFER)
    now_s[0] = 1.0
    assert results(checker, 1) == [Result("our a")]


def test_request_that_is_entered_late_is_looked_at_again(reader):
    """A reader may be faster than the thread that enters what a producer computes."""
    producer, now_s = Holder(), [0.0]
    checker = Checks(check_buffer(reader), reader, clock=lambda: now_s[0])
    checker.check_later("our a", "a", OFFER, producer.seen_by(reader), DUE_S)
    until_put_off(checker)
    producer.table.add("a")
    producer.table.publish("a", OFFER)
    now_s[0] = 1.0
    assert results(checker, 1) == [Result("our a")]


def test_request_that_is_not_entered_is_not_looked_at_for_ever(reader):
    """Half a second is enough, in which a table is looked at nine times."""
    producer, now_s = Holder(), [0.0]
    posted = []

    class Counting:
        def read(self, *read: object) -> Transfer:
            posted.append(now_s[0])
            return reader.read(*read)

        poll, release = reader.poll, reader.release

    checker = Checks(check_buffer(reader), Counting(), clock=lambda: now_s[0])
    checker.check_later("our a", "a", OFFER, producer.seen_by(reader), DUE_S)
    deadline = time.monotonic() + DEADLINE_S
    while not (found := checker.step()):
        if checker.is_put_off:
            now_s[0] += 0.001
        assert time.monotonic() < deadline
    (result,) = found
    assert result.failure is LeaseCheckFailure.LEASE
    assert len(posted) == 9 and 0.5 < posted[-1] < 0.6


def test_lookup_that_hangs_fails(reader, monkeypatch):
    """Its bucket stays its own, and it is polled on, until it ends after all."""
    producer, clock, buffer = Holder("a"), [0.0], check_buffer(reader)
    checker, table = (
        Checks(buffer, reader, lambda: clock[0]),
        producer.seen_by(reader),
    )
    poll = reader.poll
    monkeypatch.setattr(reader, "poll", lambda _: TransferState.IN_FLIGHT)
    free = buffer.num_free
    checker.check_later("our a", "a", OFFER, table, 120.0)
    assert checker.step() == [] and len(checker) == 1
    clock[0] = 120.0
    (result,) = checker.step()
    assert result.failure is LeaseCheckFailure.PEER and len(checker) == 0
    assert buffer.num_free == free - 1
    monkeypatch.setattr(reader, "poll", poll)
    assert checker.is_busy
    wait_until(lambda: checker.step() == [] and not checker.is_busy)
    assert buffer.num_free == free


TABLE = Prepared("peer", None)


@pytest.fixture
def reads() -> Reads:
    """Reads into a buffer of three rows of eight words."""
    return Reads(RowBuffer(Agent(), 3, 8))


def test_reads_land_beside_each_other(reads):
    """What one has brought stays when the rows are given to another one."""
    buffer = reads.buffer
    first, second = buffer.post(reads, TABLE, [7]), buffer.post(reads, TABLE, [3, 5])
    assert buffer.num_free == 0
    rows = buffer.landed(second)
    assert rows.shape == (2, 8) and rows[:, 0].tolist() == [3, 5]
    buffer.free(reads, second)
    assert buffer.num_free == 2 and reads.num_released == 1
    buffer.post(reads, TABLE, [9, 9])
    assert rows[:, 0].tolist() == [3, 5] and buffer.landed(first)[:, 0].tolist() == [7]


@pytest.mark.parametrize(("error", "kept"), [(TransferError("no"), 0), (InDoubtError("began"), 1)])
def test_rows_of_a_refused_read_are_free_unless_it_had_begun(reads, error, kept):
    """NIXL says which of them it is."""
    reads.refuses_with = error
    with pytest.raises(TransferError):
        reads.buffer.post(reads, TABLE, [1])
    assert reads.buffer.num_free == 3 - kept
