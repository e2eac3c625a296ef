# SPDX-License-Identifier: Apache-2.0
"""The ledgers, alone and joined by a fake wire."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.v1.kv_connector.unit.reshard.containers import largest
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.mesh import ParallelMesh
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.reshard import plan_reshard
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import shard_model
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.fingerprint import (
    OfferFingerprint,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.ledgers import (
    MAX_EARLY_NOTIFICATIONS,
    ConsumerLedger,
    Expiry,
    Mismatch,
    Notice,
    ProducerLedger,
    Receipt,
    RequestRead,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.states import ReadState

OFFER, OTHER = OfferFingerprint(48, 1, 2), OfferFingerprint(48, 9, 2)
SECRET, GUESS = 3 << 62, 1


def notice(notifier: str, num_notifiers: int, proof: OfferFingerprint | int = OFFER) -> Notice:
    """What a reader says that has read what is offered, or something else, or gives it up."""
    return Notice(notifier, num_notifiers, proof)


@pytest.fixture
def producer() -> ProducerLedger:
    """A producer that has admitted one request."""
    ledger = ProducerLedger()
    ledger.admit(["a"])
    return ledger


class TestProducer:
    """`ProducerLedger`."""

    def test_request_is_released_by_its_last_reader(self, producer):
        """Each of several readers is waited for."""
        assert producer.offer("a", expires_at_s=10, fingerprint=OFFER)
        assert producer.hear("a", notice("d0", 2)) is Receipt.COUNTED
        assert producer.hear("a", notice("d1", 2)) is Receipt.RELEASED
        assert len(producer) == 0

    def test_a_reader_counts_once(self, producer):
        """A repeated notification neither releases nor harms."""
        producer.offer("a", expires_at_s=10, fingerprint=OFFER)
        producer.hear("a", notice("d0", 2))
        assert producer.hear("a", notice("d0", 2)) is Receipt.REPEATED
        assert producer.hear("a", notice("d1", 2)) is Receipt.RELEASED

    def test_readers_may_be_faster_than_the_offer(self, producer):
        """A request that was read before it was offered is released then, once, and not before."""
        assert producer.hear("a", notice("d0", 1)) is Receipt.EARLY
        assert producer.take_released() == []
        assert not producer.offer("a", expires_at_s=10, fingerprint=OFFER)
        assert producer.take_released() == ["a"]
        assert producer.take_released() == []
        assert producer.expire(now_s=11) == []

    def test_count_before_the_offer_is_kept(self, producer):
        """Readers heard before the offer need not repeat themselves."""
        producer.hear("a", notice("d0", 2))
        assert producer.offer("a", expires_at_s=10, fingerprint=OFFER)
        assert producer.hear("a", notice("d1", 2)) is Receipt.RELEASED

    def test_withdrawn_request_is_unknown(self, producer):
        """An aborted request is neither offered nor counted."""
        producer.withdraw(["a", "never seen"])
        assert not producer.offer("a", expires_at_s=10, fingerprint=OFFER)
        assert producer.hear("a", notice("d0", 1)) is Receipt.UNKNOWN

    def test_lease_runs_out(self, producer):
        """An expired request is let go once, with what was heard and awaited."""
        producer.admit(["b"])
        producer.offer("a", expires_at_s=10, fingerprint=OFFER)
        producer.offer("b", expires_at_s=5, fingerprint=OFFER)
        producer.hear("a", notice("d0", 3))
        assert producer.expire(now_s=4.9) == []
        assert producer.expire(now_s=10) == [Expiry("b", 0, None), Expiry("a", 1, 3)]
        assert producer.expire(now_s=20) == []

    def test_late_reader_is_told_apart(self, producer):
        """Whoever reads after the lease ran out may have read other blocks."""
        producer.offer("a", expires_at_s=10, fingerprint=OFFER)
        producer.expire(now_s=10)
        assert producer.hear("a", notice("d0", 1)) is Receipt.UNKNOWN

    def test_renewal_moves_the_lease_forward_only(self, producer):
        """A heartbeat that was overtaken by a later one does not shorten the lease."""
        producer.offer("a", expires_at_s=10, fingerprint=OFFER)
        assert producer.renew(["a", "never seen"], expires_at_s=20) == 1
        assert producer.renew(["a"], expires_at_s=15) == 1
        assert producer.expire(now_s=19) == []
        assert [expiry.request_id for expiry in producer.expire(now_s=20)] == ["a"]

    def test_requests_that_were_not_offered_have_no_lease(self, producer):
        """A request that is still being computed does not expire, and cannot be renewed."""
        assert producer.renew(["a"], expires_at_s=20) == 0
        assert producer.expire(now_s=1e9) == []

    def test_disagreeing_readers_are_awaited_in_the_larger_number(self, producer):
        """Blocks are kept too long rather than freed too early."""
        producer.offer("a", expires_at_s=10, fingerprint=OFFER)
        assert producer.hear("a", notice("d0", 3)) is Receipt.COUNTED
        assert producer.hear("a", notice("d1", 1)) is Receipt.COUNTED
        assert producer.hear("a", notice("d2", 2)) is Receipt.RELEASED

    def test_admitting_again_keeps_the_count(self, producer):
        """A request that is scheduled in several steps is one request."""
        producer.hear("a", notice("d0", 2))
        producer.admit(["a"])
        producer.offer("a", expires_at_s=10, fingerprint=OFFER)
        assert producer.hear("a", notice("d1", 2)) is Receipt.RELEASED

    def test_reader_of_something_else_is_not_believed(self, producer):
        """Who knows the name alone takes nothing from those who wait; one is told of, not all."""
        producer.offer("a", expires_at_s=10, fingerprint=OFFER)
        for _ in range(3):
            assert producer.hear("a", notice("d0", 1, OTHER)) is Receipt.MISBOUND
        assert producer.take_mismatches() == [Mismatch("a", "d0")]
        assert producer.take_mismatches() == []
        assert producer.hear("a", notice("d0", 1)) is Receipt.RELEASED

    def test_reader_of_something_else_does_not_name_the_number(self, producer):
        """What it says of other readers is not believed either."""
        producer.hear("a", notice("d0", 7, OTHER))
        assert producer.offer("a", expires_at_s=10, fingerprint=OFFER)
        producer.hear("a", notice("d0", 7, OTHER))
        assert producer.take_mismatches() == [Mismatch("a", "d0")]
        assert producer.hear("a", notice("d0", 1)) is Receipt.RELEASED

    def test_early_notification_in_somebodys_name_does_not_displace_his(self, producer):
        """Before the offer nobody can tell which is right, so both are kept."""
        producer.hear("a", notice("d0", 1, OTHER))
        producer.hear("a", notice("d0", 1))
        assert not producer.offer("a", expires_at_s=10, fingerprint=OFFER)
        assert producer.take_released() == ["a"]

    @pytest.mark.parametrize("early", [False, True])
    def test_reader_that_gives_up_needs_the_secret(self, producer, early):
        """It counts as one that has read, and one of several may."""
        if not early:
            producer.offer("a", 10, OFFER, SECRET)
        producer.hear("a", notice("d0", 2, GUESS))
        producer.hear("a", notice("d0", 2, SECRET))
        if early:
            producer.offer("a", 10, OFFER, SECRET)
        assert producer.take_mismatches() == [Mismatch("a", "d0")]
        assert producer.hear("a", notice("d0", 2)) is Receipt.REPEATED
        assert producer.hear("a", notice("d1", 2)) is Receipt.RELEASED

    @pytest.mark.parametrize("guess", [0, SECRET, OFFER.content])
    def test_offer_without_a_secret_is_not_given_up(self, producer, guess):
        """Whatever is shown."""
        producer.offer("a", 10, OFFER)
        assert producer.hear("a", notice("d0", 1, guess)) is Receipt.MISBOUND
        assert len(producer) == 1

    def test_early_notifications_are_bounded(self, producer):
        """Whatever is said of a request that is still being computed, what is kept has an end."""
        for number in range(2 * MAX_EARLY_NOTIFICATIONS):
            assert producer.hear("a", notice(f"d{number}", 1, OTHER)) is Receipt.EARLY
        assert largest(producer) == MAX_EARLY_NOTIFICATIONS
        # The lease ends what could not be kept.
        assert producer.offer("a", expires_at_s=10, fingerprint=OFFER)
        assert len(producer.take_mismatches()) == 1
        assert largest(producer) == 1

    def test_steps_do_not_look_at_what_is_held(self, producer):
        """Ten thousand held requests cost a step in which nothing expires one comparison."""
        for number in range(10_000):
            producer.admit([str(number)])
            producer.offer(str(number), 10.0 + number, fingerprint=OFFER)
        now_s = CountedTime(5.0)
        assert producer.expire(now_s) == []
        assert now_s.comparisons == 1
        now_s = CountedTime(12.0)
        assert len(producer.expire(now_s)) == 3
        assert now_s.comparisons <= 8

    def test_renewals_cost_one_look_a_lease(self, producer):
        """However often it was renewed, a lease comes up once for each term."""
        producer.offer("a", expires_at_s=10, fingerprint=OFFER)
        for expires_at_s in range(11, 1000):
            producer.renew(["a"], expires_at_s)
        assert largest(producer) == 1
        assert producer.expire(now_s=10) == []
        now_s = CountedTime(998.0)
        assert producer.expire(now_s) == []
        assert now_s.comparisons == 1


class CountedTime(float):
    """A time that counts how often others are compared with it."""

    comparisons = 0

    def __ge__(self, other) -> bool:
        self.comparisons += 1
        return float(self) >= other

    def __lt__(self, other) -> bool:
        self.comparisons += 1
        return float(self) < other


class ProducerMachine(RuleBasedStateMachine):
    """Any order of events: the ledger does what one does that looks at everything each time."""

    NAMES = st.sampled_from("abc")
    FINGERPRINTS = st.sampled_from([OFFER, OTHER])
    SECRETS = st.sampled_from([None, SECRET])
    PROOFS = st.sampled_from([OFFER, OTHER, SECRET, GUESS])

    def __init__(self) -> None:
        super().__init__()
        self.ledger = ProducerLedger()
        self.admitted: dict[str, set[Notice]] = {}
        self.offered: dict[str, tuple[set[object], float, dict[str, int]]] = {}
        self.released: list[str] = []
        self.doubted: set[str] = set()
        self.mismatches: list[Mismatch] = []
        self.now_s = 0.0

    @rule(name=NAMES)
    def admit(self, name):
        """A request is being computed, or still is."""
        self.ledger.admit([name])
        if name not in self.offered:
            self.admitted.setdefault(name, set())

    @rule(name=NAMES)
    def withdraw(self, name):
        """A request has ended otherwise."""
        self.ledger.withdraw([name])
        self.forget(name)

    @precondition(lambda self: self.admitted)
    @rule(data=st.data(), lease_s=st.integers(0, 5), fingerprint=FINGERPRINTS, secret=SECRETS)
    def offer(self, data, lease_s, fingerprint, secret):
        """A request was computed."""
        name = data.draw(st.sampled_from(sorted(self.admitted)))
        early = self.admitted.pop(name)
        self.offered[name] = {fingerprint, secret}, self.now_s + lease_s, {}
        for each in sorted(early, key=lambda each: each[:2]):
            self.count(name, each)
        over = self.complete(name)
        assert self.ledger.offer(name, self.now_s + lease_s, fingerprint, secret) is not over
        if over:
            self.forget(name)
            self.released.append(name)

    @rule(
        name=NAMES,
        notifier=st.sampled_from(["d0", "d1", "d2"]),
        num_notifiers=st.integers(1, 3),
        proof=PROOFS,
    )
    def hear(self, name, notifier, num_notifiers, proof):
        """Somebody is through with what he takes for the request."""
        said = Notice(notifier, num_notifiers, proof)
        receipt = self.ledger.hear(name, said)
        if name in self.admitted:
            self.admitted[name].add(said)
            assert receipt is Receipt.EARLY
        elif name not in self.offered:
            assert receipt is Receipt.UNKNOWN
        elif proof not in self.offered[name][0]:
            self.count(name, said)
            assert receipt is Receipt.MISBOUND
        elif not self.count(name, said):
            assert receipt is Receipt.REPEATED
        elif self.complete(name):
            self.forget(name)
            assert receipt is Receipt.RELEASED
        else:
            assert receipt is Receipt.COUNTED

    @rule(names=st.sets(NAMES), lease_s=st.integers(0, 5))
    def renew(self, names, lease_s):
        """A heartbeat."""
        renewed = names & self.offered.keys()
        assert self.ledger.renew(names, self.now_s + lease_s) == len(renewed)
        for name in renewed:
            proofs, expires_at_s, heard = self.offered[name]
            self.offered[name] = proofs, max(expires_at_s, self.now_s + lease_s), heard

    @rule(passed_s=st.integers(0, 4))
    def expire(self, passed_s):
        """Time passes."""
        self.now_s += passed_s
        due = sorted(
            (expires_at_s, name)
            for name, (_, expires_at_s, _) in self.offered.items()
            if expires_at_s <= self.now_s
        )
        expected = []
        for _, name in due:
            heard = self.offered[name][2]
            expected.append(Expiry(name, len(heard), max(heard.values(), default=None)))
            self.forget(name)
        assert self.ledger.expire(self.now_s) == expected

    def count(self, name, said) -> bool:
        """Count a reader of an offered request; whether it is a new one."""
        proofs, _, heard = self.offered[name]
        if said.proof not in proofs:
            if name not in self.doubted:
                self.doubted.add(name)
                self.mismatches.append(Mismatch(name, said.notifier))
            return False
        is_new = said.notifier not in heard
        heard.setdefault(said.notifier, said.num_notifiers)
        return is_new

    def complete(self, name) -> bool:
        """Whether all readers of an offered request were heard."""
        heard = self.offered[name][2]
        return len(heard) >= max(heard.values(), default=1)

    def forget(self, name):
        """A request is held no more."""
        self.admitted.pop(name, None)
        self.offered.pop(name, None)
        self.doubted.discard(name)

    @invariant()
    def nothing_else_is_held(self):
        """Requests, notices and leases are those of what is held."""
        assert len(self.ledger) == len(self.admitted) + len(self.offered)
        assert len(self.ledger._leases) <= 2 * len(self.ledger)
        assert self.ledger.take_released() == self.released
        assert self.ledger.take_mismatches() == self.mismatches
        self.released, self.mismatches = [], []


TestProducerInAnyOrder = ProducerMachine.TestCase


class Consumer:
    """A ledger with one request, and what it tells.

    Args:
        state: Where the request is.
    """

    def __init__(self, state: ReadState = ReadState.WAITING) -> None:
        self.ledger: ConsumerLedger[RequestRead] = ConsumerLedger()
        self.read = RequestRead("a", state)
        self.ledger.begin(self.read)

    def drain(self, part: int) -> bool:
        """A part is drained; whether checks may begin."""
        return self.ledger.part_drained(self.read, part)

    @property
    def told(self) -> tuple[list[str | None], list[str | None]]:
        """Faults of what is told of as failed now, and as over; None for what was received."""
        failed, ended = self.ledger.take()
        return [each.fault for each in failed], [each.fault for each in ended]


class TestConsumer:
    """Requests being read."""

    def test_request_is_received_after_its_last_part(self):
        """Once, and not before."""
        a = Consumer()
        assert a.ledger.by_id == {"a": a.read} and a.told == ([], [])
        a.ledger.post(a.read, [0, 1])
        assert not a.drain(0)
        assert a.read.parts == {1} and a.read.state is ReadState.READING
        assert a.told == ([], [])
        assert a.drain(1)
        assert a.told == ([], [None])
        assert a.told == ([], []) and len(a.ledger) == 0 and a.read.state is ReadState.ENDED

    def test_request_without_parts_ends_at_once(self):
        """A full prefix-cache hit has nothing to wait for."""
        a = Consumer()
        a.ledger.post(a.read, [])
        assert a.read.state is ReadState.READING
        assert a.ledger.advance(a.read) and a.told == ([], [None])

    def test_checks_follow_the_parts(self):
        """A request is received when what arrived has been looked up."""
        a = Consumer()
        a.ledger.post(a.read, [0], pending_checks=2)
        assert a.drain(0) and a.read.state is ReadState.CHECKING
        # As after an exception, when what has happened is taken note of once more.
        assert a.drain(0) and a.read.checks_left == 2
        a.ledger.check_done(a.read)
        assert a.told == ([], [])
        a.ledger.check_done(a.read)
        assert a.told == ([], [None])

    def test_request_that_waits_fails_and_ends_at_once(self):
        """Nothing was posted for it that could write."""
        a = Consumer()
        assert a.ledger.fail(a.read, "no answer")
        assert a.told == (["no answer"], ["no answer"])
        assert not a.ledger.fail(a.read, "again") and a.told == ([], [])

    def test_failure_is_told_at_once_and_ends_with_the_last_part(self):
        """Blocks are another's only when nothing writes into them any more."""
        a = Consumer()
        a.ledger.post(a.read, [0, 1], pending_checks=1)
        assert a.ledger.fail(a.read, "lost")
        assert not a.ledger.fail(a.read, "lost as well")
        assert a.told == (["lost"], [])
        assert not a.drain(0)
        assert a.told == ([], []) and a.read.state is ReadState.FAILED
        assert not a.drain(1)
        assert a.told == ([], ["lost"])

    def test_checks_of_a_failed_request_are_not_waited_for(self):
        """They write into no blocks; what they find does not matter any more."""
        a = Consumer()
        a.ledger.post(a.read, [0], pending_checks=2)
        a.drain(0)
        a.ledger.check_done(a.read)
        assert a.ledger.fail(a.read, "lease ran out")
        assert a.told == (["lease ran out"], ["lease ran out"])
        a.ledger.check_done(a.read)
        assert a.told == ([], [])

    def test_failure_is_taken_note_of_at_once(self, monkeypatch):
        """Whatever else raises: it is not failed again, and would never end."""
        a = Consumer()
        monkeypatch.setattr(ConsumerLedger, "advance", lambda *_: 1 / 0)
        assert a.ledger.fail(a.read, "lease ran out")
        assert a.told == (["lease ran out"], ["lease ran out"])

    def test_request_that_is_over_does_not_fail(self):
        """It was received, though nothing has heard of that yet."""
        a = Consumer()
        a.ledger.post(a.read, [])
        a.ledger.advance(a.read)
        assert not a.ledger.fail(a.read, "too late")
        assert a.told == ([], [None])

    def test_request_that_is_prefetched_goes_on_to_wait(self):
        """Its parts are accounted for, and none of them ends it."""
        a = Consumer(ReadState.PREFETCHING)
        a.ledger.prefetch(a.read, [0, 1])
        a.ledger.prefetch(a.read, [2])
        assert not any(map(a.drain, (0, 1)))
        a.ledger.offer(a.read)
        assert a.read.state is ReadState.WAITING
        a.ledger.post(a.read, [3], pending_checks=1)
        assert not a.drain(3) and a.drain(2)
        assert a.told == ([], [])
        a.ledger.check_done(a.read)
        assert a.told == ([], [None])

    def test_request_that_fails_while_it_is_prefetched_ends_once_it_is_drained(self):
        """Also where nothing was posted of it since."""
        a = Consumer(ReadState.PREFETCHING)
        a.ledger.prefetch(a.read, [0, 1])
        a.drain(0)
        assert a.ledger.fail(a.read, "aborted") and a.told == (["aborted"], [])
        assert not a.drain(1)
        assert a.told == ([], ["aborted"])


class ConsumerMachine(RuleBasedStateMachine):
    """Any order of events: requests end once, when nothing writes any more, and rightly."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger: ConsumerLedger[RequestRead] = ConsumerLedger()
        self.reads: dict[str, RequestRead] = {}
        self.prefetched: set[str] = set()
        self.waiting: set[str] = set()
        self.parts: dict[str, set[int]] = {}
        self.steps: dict[str, int] = {}
        self.failed: set[str] = set()
        self.told: list[str] = []
        self.ended: dict[str, str | None] = {}

    @rule(is_prefetched=st.booleans(), parts=st.sets(st.integers(4, 6)))
    def begin(self, is_prefetched, parts):
        """A new request, of which parts are prefetched, perhaps."""
        request_id = f"request {len(self.parts)}"
        state = ReadState.PREFETCHING if is_prefetched else ReadState.WAITING
        read = self.reads[request_id] = RequestRead(request_id, state)
        self.waiting.add(request_id)
        self.parts[request_id], self.steps[request_id] = set(), 0
        self.ledger.begin(read)
        if is_prefetched:
            self.prefetched.add(request_id)
            self.parts[request_id] |= parts
            self.ledger.prefetch(read, parts)

    @precondition(lambda self: self.prefetched - self.failed)
    @rule(data=st.data())
    def offer(self, data):
        """It is offered at its producer."""
        request_id = data.draw(st.sampled_from(sorted(self.prefetched - self.failed)))
        self.prefetched.remove(request_id)
        self.ledger.offer(self.reads[request_id])

    @precondition(lambda self: self.waiting - self.failed - self.prefetched)
    @rule(data=st.data(), parts=st.sets(st.integers(0, 3)), steps=st.integers(0, 2))
    def post(self, data, parts, steps):
        """Its peer is connected."""
        ready = sorted(self.waiting - self.failed - self.prefetched)
        request_id = data.draw(st.sampled_from(ready))
        self.waiting.remove(request_id)
        self.parts[request_id] |= parts
        self.steps[request_id] = steps
        self.ledger.post(self.reads[request_id], parts, pending_checks=steps)
        assert self.ledger.advance(self.reads[request_id]) == (not self.parts[request_id])

    @precondition(lambda self: any(self.parts.values()))
    @rule(data=st.data())
    def end_part(self, data):
        """Nothing writes for a part any more."""
        request_id = data.draw(st.sampled_from([key for key, parts in self.parts.items() if parts]))
        part = data.draw(st.sampled_from(sorted(self.parts[request_id])))
        self.parts[request_id].remove(part)
        ready = self.ledger.part_drained(self.reads[request_id], part)
        begun = request_id not in self.failed and request_id not in self.waiting
        assert ready == (not self.parts[request_id] and begun)

    @precondition(lambda self: self.parts)
    @rule(data=st.data())
    def fail(self, data):
        """A request fails, if it still can."""
        request_id = data.draw(st.sampled_from(sorted(self.parts)))
        could = request_id in self.ledger.by_id and request_id not in self.failed
        assert self.ledger.fail(self.reads[request_id], "failed") == could
        if could:
            self.failed.add(request_id)

    @precondition(lambda self: any(map(self.may_step, self.parts)))
    @rule(data=st.data())
    def end_step(self, data):
        """A check that follows the parts ends, whether or not its request has failed."""
        request_id = data.draw(st.sampled_from(sorted(filter(self.may_step, self.parts))))
        self.steps[request_id] -= 1
        self.ledger.check_done(self.reads[request_id])

    def may_step(self, request_id):
        """Whether steps of a request are under way."""
        return not self.parts[request_id] and self.steps[request_id] > 0

    @invariant()
    def each_is_told_of_in_time(self):
        """Who has failed, at once; as over, who has no parts and has failed or has no step left."""
        failed, ended = self.ledger.take()
        self.told += [outcome.request_id for outcome in failed]
        assert len(self.told) == len(set(self.told)) and set(self.told) == self.failed
        for outcome in ended:
            assert outcome.request_id not in self.ended
            self.ended[outcome.request_id] = outcome.fault
        over = {
            key
            for key, parts in self.parts.items()
            if not parts
            and (key in self.failed or (key not in self.waiting and not self.steps[key]))
        }
        assert set(self.ended) == over
        assert {key for key, failure in self.ended.items() if failure} == self.failed & over
        assert len(self.ledger) == len(self.parts) - len(over)


TestAnyOrderOfEvents = ConsumerMachine.TestCase


@given(data=st.data(), order=st.randoms(use_true_random=False))
def test_plan_releases_every_producer_exactly_once(engine_pairs, data, order):
    """Notifications of a plan, delivered twice each and in any order, release every source rank."""
    src, dst = data.draw(engine_pairs)
    plan = plan_reshard(src, dst)
    producers = {shard.rank: ProducerLedger() for shard in src}
    for ledger in producers.values():
        ledger.admit(["a"])
        ledger.offer("a", expires_at_s=10, fingerprint=OFFER)
    wire = [
        (release.src_rank, str(notifier), len(release.notifiers))
        for release in plan.releases
        for notifier in release.notifiers
    ] * 2
    order.shuffle(wire)
    receipts = [producers[rank].hear("a", notice(*message)) for rank, *message in wire]
    assert receipts.count(Receipt.RELEASED) == len(producers)
    assert not any(len(ledger) for ledger in producers.values())


def test_producer_waits_for_readers_of_all_stages():
    """One prefill rank that decode stages share is released by the last of them."""
    src = shard_model(ParallelMesh(1, 1), 4, 1)
    dst = shard_model(ParallelMesh(2, 2), 4, 1)
    (release,) = plan_reshard(src, dst).releases
    producer = ProducerLedger()
    producer.admit(["a"])
    producer.offer("a", expires_at_s=10, fingerprint=OFFER)
    receipts = [
        producer.hear("a", notice(str(notifier), len(release.notifiers)))
        for notifier in release.notifiers
    ]
    assert receipts == [Receipt.COUNTED] * 3 + [Receipt.RELEASED]
