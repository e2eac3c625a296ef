# SPDX-License-Identifier: Apache-2.0
"""Lookups in a peer's table, over real NIXL."""

from __future__ import annotations

import time
import uuid

import pytest

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.leases import LeaseTable
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport import lease_check
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.agent import NixlAgent, Transfer
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.lease_check import (
    LeaseChecker,
    PreparedTable,
    Verdict,
    prepare_table,
)

DEADLINE_S = 60.0


class Holder:
    """A worker that holds requests."""

    def __init__(self, *request_ids: str) -> None:
        self.table = LeaseTable(64)
        self.agent = NixlAgent(f"holder-{uuid.uuid4()}", num_threads=1)
        address = self.table.address
        self.agent.register([(address.address, address.size_bytes, 0)], "DRAM")
        for request_id in request_ids:
            assert self.table.enter(request_id)

    def seen_by(self, reader: NixlAgent) -> PreparedTable:
        """Its table, prepared by a reader."""
        return prepare_table(reader, self.table.address, reader.connect(self.agent.metadata()))


@pytest.fixture
def reader() -> NixlAgent:
    """The agent of a worker that reads."""
    return NixlAgent(f"reader-{uuid.uuid4()}", num_threads=1)


def verdicts(checker: LeaseChecker, count: int) -> list[Verdict]:
    """Advance until there are so many."""
    found: list[Verdict] = []
    deadline = time.monotonic() + DEADLINE_S
    while len(found) < count:
        assert time.monotonic() < deadline
        found += checker.advance()
    return found


def test_only_held_requests_pass(reader):
    """A request that was struck or never entered is told apart from those that are held."""
    holder = Holder("a", "b", "c")
    holder.table.strike("b")
    checker, table = LeaseChecker(reader), holder.seen_by(reader)
    for name in "abcd":
        checker.want(f"our {name}", name, table)
    found = {verdict.request_id: verdict for verdict in verdicts(checker, 4)}
    assert {name for name, verdict in found.items() if verdict.fault is None} == {"our a", "our c"}
    assert not any(verdict.peer_broken for verdict in found.values())
    assert "kv_lease_duration" in found["our b"].fault


def test_one_read_serves_all_requests_of_a_step(reader, monkeypatch):
    """Ten requests read from one worker and one from another cost two reads."""
    holders = Holder(*map(str, range(10))), Holder("0")
    tables = [holder.seen_by(reader) for holder in holders]
    checker, posted, read = LeaseChecker(reader), [], reader.read
    monkeypatch.setattr(reader, "read", lambda *lists: posted.append(lists) or read(*lists))
    for number in range(10):
        checker.want(f"our {number}", str(number), tables[0])
    checker.want("our 0", "0", tables[1])
    assert all(verdict.fault is None for verdict in verdicts(checker, 11))
    assert len(posted) == 2


def test_more_lookups_than_there_is_room_for_take_turns(reader, monkeypatch):
    """None is lost, none is mistaken for another, and the room is used again."""
    monkeypatch.setattr(lease_check, "_NUM_LOOKUPS", 3)
    holder = Holder(*(str(number) for number in range(0, 20, 2)))
    checker, table = LeaseChecker(reader), holder.seen_by(reader)
    for number in range(20):
        checker.want(f"our {number}", str(number), table)
    found = verdicts(checker, 20)
    held = {verdict.request_id for verdict in found if verdict.fault is None}
    assert held == {f"our {number}" for number in range(0, 20, 2)}
    assert len({verdict.request_id for verdict in found}) == 20
    assert sorted(checker._free) == [0, 1, 2]


def test_lookup_that_cannot_be_posted_is_a_fault(reader):
    """A peer that is gone fails its requests and nobody else's."""
    gone, alive = Holder("a"), Holder("b")
    checker = LeaseChecker(reader)
    lost, table = gone.seen_by(reader), alive.seen_by(reader)
    reader.release_prepared(lost.buckets)
    reader.disconnect(gone.agent.name)
    checker.want("our a", "a", lost)
    checker.want("our b", "b", table)
    found = {verdict.request_id: verdict for verdict in verdicts(checker, 2)}
    assert found["our b"] == Verdict("our b", None)
    assert found["our a"].fault is not None
    assert found["our a"].peer_broken


def test_failed_lookup_is_a_fault(reader, monkeypatch):
    """What NIXL could not read proves nothing, and its room is free again."""
    holder = Holder("a")
    checker, table = LeaseChecker(reader), holder.seen_by(reader)
    monkeypatch.setattr(reader, "read", lambda *_: Transfer(holder.agent.name, object()))
    checker.want("our a", "a", table)
    (verdict,) = verdicts(checker, 1)
    assert verdict.peer_broken
    assert "could not be looked up" in verdict.fault
    assert 0 in checker._free
