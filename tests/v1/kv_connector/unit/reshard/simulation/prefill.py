# SPDX-License-Identifier: Apache-2.0
"""A simulated prefill engine: computes prompts, offers their blocks, and takes them back."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from tests.v1.kv_connector.unit.reshard.simulation.engines import Engine, Worker
from tests.v1.kv_connector.unit.reshard.simulation.memory import MAX_TOKENS
from tests.v1.kv_connector.unit.reshard.simulation.wire import Owner, check
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.metadata import (
    Offer as HeldOffer,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.transfer_engine import (
    SchedulerStep,
    WorkerReport,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.fingerprint import (
    OfferFingerprint,
    OfferSecret,
    fingerprint,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    Announcement,
    Pack,
    PackEntry,
    RemoteEngineAddress,
    Renew,
    decode_notification,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.packing import (
    TABLE_BYTES,
    entered,
    key_of,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.subscriptions import (
    Computed,
    Publisher,
)


def tokens_of(content: int) -> list[int]:
    """The tokens of a prompt, more than are ever used."""
    return [content * MAX_TOKENS + position for position in range(MAX_TOKENS)]


@dataclass(frozen=True)
class Ticket:
    """What a prefill engine tells the router, which passes it on.

    Attributes:
        address: Who holds the blocks.
        request_id: What the request is called there.
        blocks: Where its KV is.
        num_tokens: Of how many tokens.
        content: Which prompt it is, which a router knows and does not tell.
        secret: What gives it up.
    """

    address: RemoteEngineAddress
    request_id: str
    blocks: tuple[int, ...]
    num_tokens: int
    content: int
    secret: OfferSecret

    def fingerprint(self, tokens: Sequence[int]) -> OfferFingerprint:
        """What is offered, if these are its tokens."""
        return fingerprint(tokens, self.num_tokens, None, [self.blocks])


@dataclass
class Prompt:
    """What a scheduler knows of a prompt that it computes.

    Attributes:
        num_prompt_tokens: How long it is.
        num_computed_tokens: How many of its tokens are computed after what is scheduled.
        num_in_flight: How many of these are the step's that is not over.
        attempt: How often it was begun anew.
    """

    num_prompt_tokens: int
    num_computed_tokens: int = 0
    num_in_flight: int = 0
    attempt: int = 0


@dataclass(eq=False)
class Offer:
    """A request of a prefill engine's, from admission until its blocks are free.

    Attributes:
        ticket: What is told of it once it is offered.
        prompt: How much of it is computed.
        offered: Whether it is.
        expires_at_s: When each worker's lease runs out, as far as it was taken up.
        sent_by: Workers that have reported it.
    """

    ticket: Ticket
    prompt: Prompt
    offered: bool = False
    expires_at_s: dict[str, float] = field(default_factory=dict)
    sent_by: set[str] = field(default_factory=set)

    @property
    def fingerprint(self) -> OfferFingerprint:
        """What is offered."""
        return self.ticket.fingerprint(tokens_of(self.ticket.content))

    @property
    def is_computed(self) -> bool:
        """Whether its last chunk is scheduled."""
        return self.prompt.num_computed_tokens == self.prompt.num_prompt_tokens


class PrefillEngine(Engine):
    """Offers blocks, and checks that they come back when they may, and only then.

    Attributes:
        offers: Requests by their names.
        chunks: How often a step computes a chunk of a prompt, and not all that is left.
    """

    packs = True

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self.is_ahead = self.world.random.random() < 0.5
        self.chunks = self.world.random.choice((0.0, 0.5, 1.0))
        self._num_offers = 0
        self.offers: dict[str, Offer] = {}
        self.publisher = Publisher()
        # What was ever offered, and what each worker was asked to pack and has packed, by its key.
        self._proofs: set[tuple[str, OfferFingerprint]] = set()
        self._asked: dict[tuple[str, int], PackEntry] = {}
        self._packed: set[tuple[str, int]] = set()
        # Who was heard by a worker, for what, and of how many.
        self._heard: dict[tuple[str, str, OfferFingerprint | OfferSecret], dict[str, int]] = {}
        for worker in self.workers:
            worker.agent.heard = partial(self._note, worker)

    def begin(self, request_id: str, num_tokens: int) -> Offer | None:
        """Admit a prompt and compute it, or its first chunk, if there is room."""
        if request_id in self.offers:
            return None
        blocks = self._allocate(request_id, num_tokens)
        if blocks is None:
            return None
        content = self.world.new_content()
        secret = self.world.random.getrandbits(64)
        ticket = Ticket(self.address, request_id, blocks, num_tokens, content, secret)
        offer = self.offers[request_id] = Offer(ticket, Prompt(num_tokens))
        self.publisher.add(request_id, request_id, content)
        if self.world.random.random() < 0.3:
            # It waits for its turn.
            self.hand_over()
        self.go_on(offer, admitted={request_id})
        return offer

    def go_on(self, offer: Offer, **asked: object) -> None:
        """A step is over, and the next one computes more of a prompt, or all that is left."""
        prompt = offer.prompt
        self.end_step(offer)
        before = prompt.num_computed_tokens
        after = prompt.num_prompt_tokens
        if self.world.random.random() < self.chunks:
            after = min(after, before + self.world.random.randint(1, self.layout.block_tokens))
        self.hand_over(num_offers=self._num_offers, **asked)
        prompt.num_computed_tokens, prompt.num_in_flight = after, after - before
        self.tell_computed(offer)

    def tell_computed(self, offer: Offer) -> None:
        """Tell of the full blocks of all steps that are over, as the scheduler does."""
        prompt, ticket = offer.prompt, offer.ticket
        if not (num_tokens := prompt.num_computed_tokens - prompt.num_in_flight):
            return
        blocks = [list(ticket.blocks[: num_tokens // self.layout.block_tokens])]
        told = num_tokens, prompt.num_prompt_tokens, blocks
        address, name = self.address, ticket.request_id
        where = address.engine_id, address.host, address.port
        self.publisher.compute(name, Computed("", *where, name, prompt.attempt, *told))

    def end_step(self, offer: Offer) -> None:
        """All workers have computed the step that is under way, if one is."""
        prompt, ticket = offer.prompt, offer.ticket
        prompt.num_in_flight = 0
        num_full = prompt.num_computed_tokens // self.layout.block_tokens
        full = ticket.blocks if offer.is_computed else ticket.blocks[:num_full]
        for worker in self.workers:
            worker.memory.cache.compute(ticket.content, full)

    def preempt(self, offer: Offer) -> None:
        """A prompt that is not computed loses its blocks to others, and begins anew in some."""
        self.give_back(offer.ticket.blocks)
        offer.prompt.num_computed_tokens = offer.prompt.num_in_flight = 0
        offer.prompt.attempt += 1
        blocks = self._allocate(offer.ticket.request_id, offer.ticket.num_tokens)
        assert blocks is not None
        offer.ticket = replace(offer.ticket, blocks=blocks)
        if self.world.random.random() < 0.5:
            self.go_on(offer)

    def _allocate(self, request_id: str, num_tokens: int) -> tuple[int, ...] | None:
        """The blocks of a prompt, if there are so many."""
        count = -(-num_tokens // self.layout.block_tokens)
        blocks = self.allocate(count, Owner(f"{self.engine_id}'s {request_id}"))
        return None if blocks is None else tuple(blocks)

    def withdraw(self, offer: Offer) -> None:
        """Abort a request that was not offered: its blocks are free at once."""
        request_id = offer.ticket.request_id
        self.hand_over(num_offers=self._num_offers, withdrawn={request_id})
        self._end(offer)

    def offer(self, offer: Offer) -> Ticket | None:
        """Hold a request's blocks for readers; returns what the router hears.

        None if nobody will read it.
        """
        request_id = offer.ticket.request_id
        self.end_step(offer)
        if request_id in self.publisher.given_up:
            self.withdraw(offer)
            return None
        offer.offered = True
        self.owners[offer.ticket.blocks[0]].offered = True
        self._proofs.add((request_id, offer.fingerprint))
        self._num_offers += 1
        block_ids = ([*offer.ticket.blocks],)
        self.publisher.offer(request_id, {"ticket": offer.ticket}, offer.prompt.attempt)
        if self.is_ahead:
            for worker in self.workers:
                worker.announced.append(
                    Announcement(self._num_offers, request_id, offer.fingerprint, block_ids)
                )
        self.hand_over(
            num_offers=self._num_offers,
            offered={
                request_id: HeldOffer(
                    offer.fingerprint,
                    self.world.limits.lease_s,
                    len(offer.ticket.blocks),
                    offer.ticket.secret,
                    block_ids=block_ids,
                )
            },
        )
        return offer.ticket

    def taken_up(self, worker: Worker, steps: Sequence[SchedulerStep]) -> None:
        """Leases begin when a worker hears of them."""
        for step in steps:
            if step.metadata is None:
                continue
            for request_id, offer in step.metadata.offered.items():
                expires_at_s = self.world.now_s + offer.lease_s
                self.offers[request_id].expires_at_s[worker.name] = expires_at_s

    def stand_still(self, for_s: float) -> None:
        """Leases that have begun last as much longer."""
        super().stand_still(for_s)
        for offer in self.offers.values():
            for name in offer.expires_at_s:
                offer.expires_at_s[name] += for_s

    def hear(self, worker: Worker, report: WorkerReport) -> None:
        """Blocks come back once every worker is through with them, for a reason, once each."""
        check(not report.received and not report.failed, f"{worker.name} has received something")
        self._check_packed(worker)
        for request_id in sorted(report.sent):
            offer = self.offers.get(request_id)
            if offer is None:
                check(False, f"{worker.name} is through with {request_id}, which is not held")
                continue
            check(offer.offered, f"{worker.name} is through with {request_id} before its offer")
            check(worker.name not in offer.sent_by, f"{worker.name} has sent {request_id} twice")
            self._check_reason(worker, offer)
            offer.sent_by.add(worker.name)
            if len(offer.sent_by) == len(self.workers):
                self._end(offer)

    @property
    def is_busy(self) -> bool:
        """Whether something is held."""
        return bool(self.offers)

    @property
    def is_over(self) -> bool:
        """Whether nothing is held any more."""
        return not self.is_busy and super().is_over

    def _end(self, offer: Offer) -> None:
        self.publisher.end(offer.ticket.request_id, "it is over")
        del self.offers[offer.ticket.request_id]
        self.give_back(offer.ticket.blocks)

    def _check_packed(self, worker: Worker) -> None:
        """Windows are packed for those who know what is offered."""
        packs = worker.transfer_engine.producer.packs
        if packs is None:
            return
        words = np.frombuffer(ctypes.string_at(packs.address.table, TABLE_BYTES), np.uint64)
        for key in {(worker.name, key) for key in entered(words)} - self._packed:
            entry = self._asked[key]
            is_known = (entry.request_id, entry.proof) in self._proofs
            check(is_known, f"{worker.name} packs {entry.request_id} for who does not know it")
            self._packed.add(key)

    def _check_reason(self, worker: Worker, offer: Offer) -> None:
        """A lease that has run out, or all readers of what is offered."""
        request_id = offer.ticket.request_id
        if self.world.now_s >= offer.expires_at_s[worker.name]:
            return
        heard: dict[str, int] = {}
        for proof in (offer.ticket.secret, offer.fingerprint):
            heard |= self._heard.get((worker.name, request_id, proof), {})
        check(
            bool(heard) and len(heard) >= max(heard.values()),
            f"{worker.name} lets go of {request_id}: {len(heard)} readers of what it offers were "
            "heard, and its lease has not run out",
        )

    def _note(self, worker: Worker, message: bytes) -> None:
        """A worker takes a notification."""
        notification = decode_notification(message)
        if isinstance(notification, Renew):
            for request_id in notification.request_ids:
                offer = self.offers.get(request_id)
                if offer is not None and worker.name in offer.expires_at_s:
                    until_s = self.world.now_s + self.world.limits.lease_s
                    before_s = offer.expires_at_s[worker.name]
                    offer.expires_at_s[worker.name] = max(before_s, until_s)
            return
        if isinstance(notification, Pack):
            for entry in notification.asked:
                self._asked[worker.name, key_of(notification.reader, entry.ticket)] = entry
            return
        for release in notification.releases:
            key = worker.name, release.request_id, release.proof
            self._heard.setdefault(key, {})[notification.notifier] = release.num_notifiers
