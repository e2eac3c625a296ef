# SPDX-License-Identifier: Apache-2.0
"""A simulated decode engine: reads what it was told of, and gives blocks back when it may."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.v1.kv_connector.unit.reshard.simulation.engines import Engine, Worker
from tests.v1.kv_connector.unit.reshard.simulation.prefill import Ticket, tokens_of
from tests.v1.kv_connector.unit.reshard.simulation.wire import Owner, check
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.transfer_engine import (
    Report,
    SchedulerStep,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.fingerprint import (
    OfferSecret,
    fingerprint,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    Receive,
    RemoteRequest,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.watch import OFFERED_WITHIN_S


@dataclass(eq=False)
class Request:
    """A request of a decode engine's that is read, or was.

    Attributes:
        request_id: Its name.
        ticket: What it was told.
        content: Its own prompt.
        num_tokens: Of that prompt, which are to be read.
        first_block: How many blocks of its own it had in its cache.
        blocks: The others.
        owner: The owner of these.
        due_at_s: When each worker is to have told of it, as far as it was taken up.
        failed_by: Workers that could not read it.
        received_by: Workers that are through with it.
        is_early: It was asked for before it was offered.
        is_prefetched: It had blocks before its last chunk was computed.
    """

    request_id: str
    ticket: Ticket
    content: int
    num_tokens: int
    first_block: int
    blocks: list[int]
    owner: Owner
    due_at_s: dict[str, float] = field(default_factory=dict)
    failed_by: set[str] = field(default_factory=set)
    received_by: set[str] = field(default_factory=set)
    is_early: bool = False
    is_prefetched: bool = False


class DecodeEngine(Engine):
    """Reads, and checks what it has read.

    Attributes:
        reading: Requests that some worker is not through with.
        running: Requests that were received well.
        parked: Requests that have no blocks yet, as the router has told them.
        may_have_blocks: Those of them that may have some.
        begun: Those of them that may have some before, of which something is computed.
        faults: Those that will not be read.
        num_early: Requests that were received of those.
        num_prefetched: Those of them that had blocks before their last chunks were computed.
        num_received: How many were.
        num_failed: How many could not be.
    """

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self.reading: dict[str, Request] = {}
        self.running: list[Request] = []
        self.parked: dict[str, Ticket] = {}
        self.may_have_blocks: set[str] = set()
        self.begun: set[str] = set()
        self.faults: dict[str, str] = {}
        self.num_early = self.num_prefetched = 0
        self.num_received = self.num_failed = 0
        self._backlog: dict[str, list[SchedulerStep]] = {worker.name: [] for worker in self.workers}

    def begin(
        self,
        request_id: str,
        ticket: Ticket,
        content: int,
        num_tokens: int,
        *,
        cached_blocks: int,
        while_computing: bool = False,
        fault: str | None = None,
    ) -> Request | None:
        """Read a request, if there is room.

        Args:
            request_id: Its name.
            ticket: What it was told.
            content: Its own prompt.
            num_tokens: Of that prompt.
            cached_blocks: How many of its blocks are in the prefix cache, which may be all.
            while_computing: A step that is launched writes into its blocks, where it is on devices.
            fault: What is wrong with its parameters, if anything.
        """
        count = -(-num_tokens // self.layout.block_tokens)
        first_block = min(cached_blocks, count)
        name = f"{self.engine_id}'s {request_id}"
        owner = Owner(name, reads=True)
        blocks = self.allocate(count - first_block, owner)
        if blocks is None:
            return None
        request = Request(request_id, ticket, content, num_tokens, first_block, blocks, owner)
        receive = Receive(
            ticket.address,
            ticket.request_id,
            [blocks] if blocks else [],
            [ticket.blocks],
            num_tokens,
            ticket.num_tokens,
            ticket.fingerprint(tokens_of(content)[:num_tokens]),
            fault,
        )
        if while_computing and blocks:
            for worker in self.workers:
                worker.write_late(owner)
        self.hand_over(
            receive={request_id: receive},
            awaited={request_id: RemoteRequest(ticket.address, ticket.request_id)},
        )
        if blocks:
            self.reading[request_id] = request
        return request

    def park(self, request_id: str, ticket: Ticket) -> None:
        """Wait for a request that has this name elsewhere; more of its ticket is not told."""
        self.parked[request_id] = ticket
        self.hand_over(early={request_id: RemoteRequest(ticket.address, ticket.request_id)})

    def give_blocks(self, request_id: str) -> Request | None:
        """Give blocks to a request that waits, if there is room."""
        ticket = self.parked[request_id]
        count = -(-ticket.num_tokens // self.layout.block_tokens)
        owner = Owner(f"{self.engine_id}'s {request_id}", reads=True)
        blocks = self.allocate(count, owner)
        if blocks is None:
            return None
        request = Request(request_id, ticket, ticket.content, ticket.num_tokens, 0, blocks, owner)
        request.is_early = True
        request.is_prefetched = request_id not in self.may_have_blocks | self.faults.keys()
        self.reading[request_id] = request
        self._leave(request_id, [blocks])
        return request

    def abort(self, request_id: str) -> None:
        """The client of an early request has left."""
        if request_id in self.parked:
            self._leave(request_id, [], ended={request_id})
        elif request_id in self.reading:
            self.hand_over(ended={request_id})

    def _leave(self, request_id: str, blocks: list[list[int]], **asked: object) -> None:
        """Tell workers what to fill for a request that has waited, which may be nothing."""
        ticket = self.parked.pop(request_id)
        num_tokens = ticket.num_tokens
        self.may_have_blocks.discard(request_id)
        self.begun.discard(request_id)
        receive = Receive(
            ticket.address,
            ticket.request_id,
            blocks,
            [],
            num_tokens,
            num_tokens,
            fingerprint(tokens_of(ticket.content), num_tokens, None, []),
            self.faults.pop(request_id, None),
            is_early=True,
        )
        self.hand_over(receive={request_id: receive}, **asked)

    def give_up(self, ticket: Ticket, secret: OfferSecret) -> None:
        """Refuse a request, of which nothing but its parameters is known."""
        self.hand_over(
            given_up=[
                Receive(
                    ticket.address,
                    ticket.request_id,
                    (),
                    [ticket.blocks],
                    0,
                    ticket.num_tokens,
                    secret=secret,
                )
            ]
        )

    def finish(self, request: Request) -> None:
        """A request that was received has run to its end."""
        self.running.remove(request)
        self._check_bytes(request)
        self.give_back(request.blocks)

    def taken_up(self, worker: Worker, steps: Sequence[SchedulerStep]) -> None:
        """A request's time begins when a worker hears of it, after what comes before it."""
        backlog = self._backlog[worker.name]
        backlog += steps
        while backlog and (backlog[0].before is None or backlog[0].before.query()):
            metadata = backlog.pop(0).metadata
            for request_id in metadata.ended if metadata is not None else ():
                if request_id in self.reading and request_id in worker.early._at:
                    # It is not being read, and need not be waited for any more.
                    self.reading[request_id].due_at_s[worker.name] = self.world.now_s
            for request_id in metadata.receive if metadata is not None else ():
                if request_id in self.reading:
                    due_at_s = self.world.now_s + self.world.limits.read_timeout_s
                    if self.reading[request_id].is_early:
                        due_at_s += OFFERED_WITHIN_S
                    self.reading[request_id].due_at_s[worker.name] = due_at_s

    def hear(self, worker: Worker, report: Report) -> None:
        """A request fails at once, and is given back once it is quiet; both once each."""
        check(not report.sent, f"{worker.name} was never offered {report.sent}")
        self.may_have_blocks |= report.news.may_have_blocks & self.parked.keys()
        self.begun |= report.news.begun & self.parked.keys()
        for request_id, reason in report.news.faults.items():
            if request_id in self.parked:
                self.faults[request_id] = reason
        failed = sorted(report.failed)
        for request_id in failed:
            request = self.reading.get(request_id)
            if request is None or worker.name in request.failed_by | request.received_by:
                check(False, f"{worker.name} fails {request_id}, of which it had told")
                continue
            blocks = report.failed[request_id]
            check(blocks == set(request.blocks), f"{worker.name} fails {blocks} of {request_id}")
            request.failed_by.add(worker.name)
        if failed:
            self.hand_over(failed=set(failed))
        for request_id in sorted(report.received):
            request = self.reading.get(request_id)
            if request is None or worker.name in request.received_by:
                check(False, f"{worker.name} receives {request_id}, of which it had told")
                continue
            request.received_by.add(worker.name)
            self._check_quiet(worker, request)
            if len(request.received_by) == len(self.workers):
                self._end(request)
        for request in self.reading.values():
            told = worker.name in request.failed_by | request.received_by
            due_at_s = request.due_at_s.get(worker.name)
            late = due_at_s is not None and due_at_s <= self.world.now_s and not told
            check(not late, f"{worker.name} has not told of {request.request_id} in its time")
            if due_at_s is not None and not told and not request.is_early:
                self._check_renewed(worker, request)

    @property
    def is_over(self) -> bool:
        """Whether nothing is being read any more."""
        waiting = self.reading or self.running or self.parked
        return not waiting and super().is_over

    def _end(self, request: Request) -> None:
        del self.reading[request.request_id]
        if request.failed_by:
            self.num_failed += 1
            self.give_back(request.blocks)
            return
        self.num_received += 1
        self.num_early += request.is_early
        self.num_prefetched += request.is_prefetched
        self._check_bytes(request)
        request.owner.reads = False
        self.running.append(request)

    def _check_quiet(self, worker: Worker, request: Request) -> None:
        """Nothing may write into the blocks of a request that a worker is through with."""
        wire, copies = self.world.wire, worker.memory.copies
        writes = any(
            piece.owner is request.owner and read.agent.owner_at == worker.memory.owner_at
            for read in wire.reads
            for piece in read.pieces
        )
        copied = copies is not None and copies.may_write(request.owner)
        check(
            not writes and not copied,
            f"{worker.name} has reported {request.request_id} as received, and it may be written",
        )

    def _check_renewed(self, worker: Worker, request: Request) -> None:
        """A worker that waits for blocks wakes before their lease is over, also without steps."""
        due_s = worker.transfer_engine.next_due_s(self.world.now_s)
        check(
            due_s is not None and due_s < self.world.now_s + self.world.limits.lease_s,
            f"{worker.name} sleeps while the lease of {request.request_id} runs out",
        )

    def _check_bytes(self, request: Request) -> None:
        """It holds the KV of its own tokens, and no other."""
        start = request.first_block * self.layout.block_tokens
        for worker in self.workers:
            check(
                worker.memory.cache.holds(
                    request.content, request.blocks, start, request.num_tokens
                ),
                f"{worker.name} has received other bytes for {request.request_id} than those of "
                f"its prompt {request.content}, from {request.ticket}",
            )
