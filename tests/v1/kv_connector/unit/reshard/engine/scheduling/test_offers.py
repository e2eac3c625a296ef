# SPDX-License-Identifier: Apache-2.0
"""Offers go with the next step, and ahead of it where somebody listens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.v1.kv_connector.unit.reshard.transport.channels import HOST, wait_until
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.metadata import (
    Offer,
    ReshardConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.scheduling import offers
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.scheduling.offers import OfferBook
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.fingerprint import (
    OfferFingerprint,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    Announcement,
    decode_announcement,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.announcements import listen_to

OFFER = OfferFingerprint(48, 1, 2)


@pytest.fixture
def book() -> Iterator[OfferBook]:
    """A scheduler's."""
    opened = OfferBook()
    yield opened
    opened.close()


def next_step(book: OfferBook) -> ReshardConnectorMetadata:
    """What the workers are told in the next step."""
    metadata = ReshardConnectorMetadata()
    book.write_to(metadata, {name: {"a": 30.0, "b": 20.0}[name] for name in book._offers})
    return metadata


def test_offer_goes_with_one_step(book):
    """The next one; how many there were is told by all."""
    secrets = [book.offer("a", 3, OFFER), book.offer("b", 5, OFFER, {"traceparent": "00-1-2-01"})]
    first, second = next_step(book), next_step(book)
    assert first.offered == {
        "a": Offer(OFFER, 30.0, 3, secrets[0]),
        "b": Offer(OFFER, 20.0, 5, secrets[1], {"traceparent": "00-1-2-01"}),
    }
    assert second.offered == {}
    assert first.num_offers == second.num_offers == 2
    assert secrets[0] != secrets[1]
    assert first.announcer is None


def test_workers_hear_of_offers_before_the_step(book):
    """They are told once where, and each offer is newer than the step that they were told in."""
    book.announce_from(HOST)
    told, later = next_step(book), next_step(book)
    assert told.announcer is not None
    assert later.announcer is None
    heard: list[Announcement] = []
    listener = listen_to(told.announcer, lambda data: heard.append(decode_announcement(data)))
    try:

        def is_heard() -> bool:
            book.offer("a", 3, OFFER)
            return bool(heard)

        wait_until(is_heard)
        announced = heard[0]
        assert (announced.request_id, announced.fingerprint) == ("a", OFFER)
        assert later.num_offers < announced.number <= next_step(book).num_offers
    finally:
        listener.close()


def test_offers_go_with_steps_where_nothing_can_be_announced(book, monkeypatch):
    """As they would without."""
    monkeypatch.setattr(offers, "open_announcer", lambda host: None)
    book.announce_from(HOST)
    secret = book.offer("a", 3, OFFER)
    step = next_step(book)
    assert (step.announcer, step.offered) == (None, {"a": Offer(OFFER, 30.0, 3, secret)})
