# SPDX-License-Identifier: Apache-2.0
"""The ledgers, alone and joined by a fake wire."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.v1.kv_connector.unit.reshard.containers import largest
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.reshard import plan_reshard
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import (
    ParallelMesh,
    shard_model,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.fingerprint import (
    OfferFingerprint,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.ledgers import (
    MAX_EARLY_NOTIFICATIONS,
    Expiry,
    Mismatch,
    Notice,
    ProducerLedger,
    Receipt,
)

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
