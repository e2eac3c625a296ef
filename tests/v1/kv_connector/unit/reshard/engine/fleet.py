# SPDX-License-Identifier: Apache-2.0
"""Engines that exchange good requests again and again, for whoever disturbs them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np
import pytest

from tests.v1.kv_connector.unit.reshard.engine.workers import (
    OFFER,
    Engine,
    assert_received,
    fill,
    receive,
    wait_until,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.connecting.peers import (
    LAST_RETRY_S,
    STEADY_S,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.metadata import (
    ReshardConnectorMetadata,
    ReshardHandshakeMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import ConnectorThreadError
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.description import (
    decode_worker,
    encode_worker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    Announcement,
    RemoteEngineAddress,
    RemoteRequest,
    encode_announcement,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.metadata import (
    encode_replies,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.agent import (
    NixlAgent,
    Transfer,
    TransferState,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.announcements import (
    open_announcer,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.side_channel import (
    HandshakeServer,
)

LEASE_S, READ_TIMEOUT_S = 30.0, 60.0
_SOURCE = [5, 2, 9]
_PLACES = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]]
"""Where each of four requests goes."""

_ENDS = (" 0", " 1"), (" 2", " 3")
"""How the names of those end that are read by each of its names; the last need a handshake."""

_ENOUGH_S = LEASE_S + 15.0
"""After so long all leases and graces are over, and no request has run out of time."""

_PATIENCE_S, _QUIET_S, _SKIP_S = 10.0, 0.05, 5.0
"""Where nothing has happened for so long, the clock goes on by so much; sooner where all requests
have ended, and it is leases alone that are waited for."""

_LIMIT_S = 60.0


class Reads:
    """All reads of NIXL's.

    Attributes:
        failing: The engine whose next read fails, if any; none after that.
    """

    def __init__(self) -> None:
        self.failing: str | None = None


@contextmanager
def all_reads() -> Iterator[Reads]:
    """Have reads fail when they are told to."""
    reads, poll = Reads(), NixlAgent.poll

    def look(agent: NixlAgent, transfer: Transfer) -> TransferState:
        if reads.failing is not None and agent.name.startswith(f"{reads.failing}/"):
            reads.failing = None
            return TransferState.FAILED
        return poll(agent, transfer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NixlAgent, "poll", look)
        yield reads


@dataclass
class Outcome:
    """What has become of a round.

    Attributes:
        received: Requests that have ended, by the engine that reads them.
        failed: Those of them that could not be read.
        sent: Requests that each worker of the engine that holds them is through with.
        ended: What an engine has ended with; None where all go on.
        took_s: Until then.
    """

    received: dict[str, set[str]] = field(default_factory=dict)
    failed: dict[str, set[str]] = field(default_factory=dict)
    sent: list[set[str]] = field(default_factory=list)
    ended: ConnectorThreadError | None = None
    took_s: float = 0.0


class Fleet:
    """An engine that prefills, with two stages, and two that decode, direct and staged.

    The first goes by two names. By one it is known to the others from the first round on; under the
    other it is a new engine in each round, at the place of the last.

    Args:
        reads: Has a read of theirs fail.
    """

    def __init__(self, reads: Reads) -> None:
        self._reads = reads
        self._skipped_s = 0.0
        options = {"clock": self._clock, "kv_read_timeout_s": READ_TIMEOUT_S, "lease_s": LEASE_S}
        self.source = Engine("prefill", pp=2, transfer_strategy="direct", **options)
        self.readers = [
            Engine("direct", transfer_strategy="direct", **options),
            Engine("staged", transfer_strategy="staged", staging_arena_bytes=1 << 20, **options),
        ]
        self._engines = [self.source, *self.readers]
        self._steady = self.source.serve()
        self._whole = fill(self.source, _SOURCE)
        self._announcer = open_announcer("127.0.0.1")
        self.source.start(announcer=self._announcer.address)
        self._server: HandshakeServer | None = None
        self._numbers = count(1)

    def warm_up(self) -> None:
        """Have the engines meet, which takes longest; whatever becomes of it."""
        for _ in range(2):
            self.round(_LIMIT_S)

    def reconnect(self) -> None:
        """Have readers meet the steady engine again whose lane an earlier round has cost.

        Else all requests that wait for that would share what is to be one request's. As the clock
        goes on, a lane over which many were connected is renewed: that happens here.
        """
        self._let_all_be_over()
        tables = [part.peers for each in self.readers for part in each.transfer_engines.values()]
        wait_until(
            lambda: all(each.next_due_s > self._clock() for each in tables),
            lambda: self._step(_nothing(self)),
        )
        if not all(each.is_connected_with(self._steady) for each in self.readers):
            self.round()

    def round(self, patience_s: float = _PATIENCE_S, *, breaks: bool = False) -> Outcome:
        """Have each reader read four requests, two by each name; returns once all is over.

        Args:
            patience_s: The clock goes on where nothing has happened for so long.
            breaks: Have NIXL fail a read of the second reader's.
        """
        self._reads.failing = self.readers[1].engine_id if breaks else None
        number = next(self._numbers)
        self._let_all_be_over()
        fresh = self._serve_as(f"prefill {number}")
        outcome = _nothing(self)
        names = [
            f"{number} {each.engine_id} {which}" for each in self.readers for which in range(4)
        ]
        self._announcer.send(encode_announcement(Announcement(number, names[0], OFFER)))
        self.source.offer(*names, lease_s=LEASE_S)
        held = [each.producer for each in self.source.transfer_engines.values()]
        # Readers give a holder half a second for that, which a busy machine may take.
        wait_until(lambda: all(len(each) == len(names) for each in held))
        for reader in self.readers:
            own = [name for name in names if f" {reader.engine_id} " in name]
            addresses = [self._steady, self._steady, fresh, fresh]
            wanted = {
                name: receive(address, place, _SOURCE, remote_request_id=name)
                for name, address, place in zip(own, addresses, _PLACES, strict=True)
            }
            _blank(reader)
            awaited = {own[0]: RemoteRequest(self._steady, own[0])}
            reader.start(receive=wanted, awaited=awaited)
        began_s = time.monotonic()
        self._wait(outcome, names, patience_s)
        outcome.took_s = time.monotonic() - began_s
        return outcome

    def check(
        self, outcome: Outcome, *, breaks: bool = False, over_one_connection: bool = False
    ) -> None:
        """See that a round has ended right.

        One request may have failed, or those that waited for one handshake. Where a read is to
        fail, so may those that are read over the same connection; what comes up besides may be
        another request's.

        Args:
            outcome: The round.
            breaks: A read of the second reader's was to fail.
            over_one_connection: NIXL has refused something over one connection, which ends with it.

        Raises:
            AssertionError: It has not.
        """
        assert outcome.ended is None, outcome.ended
        failed = [outcome.failed[each.engine_id] for each in self.readers]
        assert breaks or not all(failed), f"both engines' requests fail: {failed}"
        for names in failed[:1] if breaks else failed:
            by_name = [{name for name in names if name.endswith(ends)} for ends in _ENDS]
            may_be_more = names == by_name[1] or (over_one_connection and names in by_name)
            assert len(names) <= 1 or may_be_more, f"others fail as well: {failed}"
        for reader in self.readers:
            received = outcome.received[reader.engine_id]
            assert len(received) == len(_PLACES), f"{reader.engine_id}: these end: {received}"
            for place, name in zip(_PLACES, sorted(received), strict=True):
                if name not in outcome.failed[reader.engine_id]:
                    assert_received(reader, place, self._whole)
        self._see_nothing_left()

    def close(self) -> None:
        """End all."""
        for engine in self._engines:
            # The thread of one that has ended may leave something open.
            with suppress(Exception):
                engine.close()
        if self._server is not None:
            self._server.close()
        self._announcer.close()

    def _let_all_be_over(self) -> None:
        """So that leases are to be renewed, and what broke is no suspect any more."""
        self._skipped_s += LEASE_S + STEADY_S + LAST_RETRY_S

    def _clock(self) -> float:
        return time.monotonic() + self._skipped_s

    def _serve_as(self, engine_id: str) -> RemoteEngineAddress:
        port = 0 if self._server is None else self._server.port
        if self._server is not None:
            self._server.close()
        reply = {}
        for rank, worker in self.source.workers.items():
            said = worker.handshake
            assert said is not None
            body = encode_worker(replace(decode_worker(said.body), engine_id=engine_id))
            reply[rank.pp_rank, rank.tp_rank] = ReshardHandshakeMetadata(said.factors, body)
        self._server = HandshakeServer("127.0.0.1", port, encode_replies(reply))
        self._server.start()
        return RemoteEngineAddress(engine_id, "127.0.0.1", self._server.port)

    def _wait(self, outcome: Outcome, names: list[str], patience_s: float) -> None:
        """Step until all is over. Where nothing happens any more, the clock goes on."""
        began_s = changed_s = time.monotonic()
        skipped_s = 0.0
        while not self._is_over(outcome, names) and outcome.ended is None:
            now_s = time.monotonic()
            assert now_s < began_s + _LIMIT_S, outcome
            if self._step(outcome):
                changed_s = now_s
            # What is read goes on for as long as a machine needs that is busy; leases need time.
            ended = [outcome.received[name] | outcome.failed[name] for name in outcome.failed]
            all_read = all(len(each) == len(_PLACES) for each in ended)
            quiet_s = _QUIET_S if all_read else patience_s
            if now_s > changed_s + quiet_s and skipped_s < _ENOUGH_S:
                self._skipped_s += _SKIP_S
                skipped_s += _SKIP_S
                changed_s = now_s - patience_s
            time.sleep(1e-4)

    def _step(self, outcome: Outcome) -> bool:
        """A step of every worker; returns whether it has brought anything."""
        news = False
        try:
            for engine in self._engines:
                for position, worker in enumerate(engine.workers.values()):
                    worker.submit(ReshardConnectorMetadata())
                    sent, received = worker.collect().take_finished()
                    if engine is self.source:
                        outcome.sent[position] |= sent
                    else:
                        failed = worker.report.take_failed()
                        outcome.failed[engine.engine_id] |= set(failed)
                        outcome.received[engine.engine_id] |= received
                    news = news or bool(sent or received)
        except ConnectorThreadError as error:
            outcome.ended = error
        return news

    def _is_over(self, outcome: Outcome, names: list[str]) -> bool:
        return all(len(each) == 4 for each in outcome.received.values()) and all(
            len(each) == len(names) for each in outcome.sent
        )

    def _see_nothing_left(self) -> None:
        deadline_s = time.monotonic() + _LIMIT_S
        while left := self._left():
            assert time.monotonic() < deadline_s, f"left: {left}"
            self._step(_nothing(self))
            time.sleep(1e-3)

    def _left(self) -> dict[str, object]:
        left: dict[str, object] = {}
        for engine in self._engines:
            for each in engine.transfer_engines.values():
                area = each.transfers.area
                found = {
                    "reads": len(each.consumer),
                    "parts": len(each.transfers),
                    "held": len(each.producer),
                    "bytes of the arena": area.spans.size_bytes - area.spans.free_bytes
                    if area is not None
                    else 0,
                }
                left |= {f"{engine.engine_id}'s {k}": v for k, v in found.items() if v}
        return left


def _nothing(fleet: Fleet) -> Outcome:
    names = [each.engine_id for each in fleet.readers]
    sent: list[set[str]] = [set() for _ in fleet.source.workers]
    return Outcome({name: set() for name in names}, {name: set() for name in names}, sent)


def _blank(engine: Engine) -> None:
    """What was read before is not there any more."""
    for layers in engine.caches.values():
        for cache in layers.values():
            np.copyto(cache.numpy(), 0)
