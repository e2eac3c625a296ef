# SPDX-License-Identifier: Apache-2.0
"""A simulated decode engine: reads what it was told of, and gives blocks back when it may."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.v1.kv_connector.unit.reshard.simulation.engines import Engine, Worker
from tests.v1.kv_connector.unit.reshard.simulation.prefill import Ticket, tokens_of
from tests.v1.kv_connector.unit.reshard.simulation.wire import Owner, check
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.transfer_engine import (
    SchedulerStep,
    WorkerReport,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.staging import Strategy
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.fingerprint import (
    OfferSecret,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    Receive,
    RemoteEngineAddress,
    RemoteRequest,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.subscriptions import (
    Ask,
    Computed,
    Gone,
    Known,
    Leave,
    News,
    Offered,
    Question,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.side_channel import MAX_AGE_S

ABORTED_WITHIN_S = 60.0
"""So soon workers tell of a request that ends while its prompt is computed."""


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
        parked: Requests that are not offered yet, as the router has told them.
        news: The last news of them.
        left: Requests whose clients have left, and that their engines have not answered of.
        questions: What was not asked yet, and where.
        inbox: News on its way.
        num_early: Requests that were received of those.
        num_prefetched: Those of them that had blocks before their last chunks were computed.
        num_received: How many were.
        num_failed: How many could not be.
        num_read_packed: How many windows were read that others had packed.
    """

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self.reading: dict[str, Request] = {}
        self.running: list[Request] = []
        self.parked: dict[str, Ticket] = {}
        self.news: dict[str, News] = {}
        self.left: set[str] = set()
        self._asked_at_s: dict[str, float] = {}
        self.questions: list[tuple[Ticket, Question]] = []
        self.inbox: list[News] = []
        self.num_early = self.num_prefetched = 0
        self.num_received = self.num_failed = self.num_read_packed = 0
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
        self.ask(request_id)

    def ask(self, request_id: str) -> None:
        """Ask for a request, or once more."""
        ticket = self.parked[request_id]
        self._asked_at_s[request_id] = self.world.now_s
        self.questions.append((ticket, Ask(request_id, ticket.request_id, ticket.content)))

    def ask_in_time(self) -> None:
        """Side channels close connections after a while: ask over another one."""
        for request_id in self.parked:
            is_settled = isinstance(self.news.get(request_id), Offered | Gone)
            if not is_settled and self.world.now_s >= self._asked_at_s[request_id] + MAX_AGE_S:
                self.ask(request_id)

    def ask_again(self) -> None:
        """All connections are lost: ask for what is not answered."""
        self.questions.clear()
        self.inbox.clear()
        self.left.clear()
        for request_id in self.parked:
            if not isinstance(self.news.get(request_id), Offered | Gone):
                self.ask(request_id)

    def note_end(self, address: RemoteEngineAddress) -> None:
        """An engine has ended, as its connection says: another may be there soon."""
        self.inbox = []
        self.left.clear()
        for request_id, ticket in list(self.parked.items()):
            news = self.news.get(request_id)
            if isinstance(news, Offered | Gone):
                continue
            if news is not None and ticket.address.host == address.host:
                self.note(Gone(request_id, "its engine was restarted"))
            else:
                self.ask(request_id)

    def note(self, news: News) -> None:
        """Hear news of a request, as the scheduler does."""
        request_id = news.asker
        if request_id in self.left:
            if isinstance(news, Offered | Gone):
                self.left.remove(request_id)
            if isinstance(news, Offered):
                ticket = news.params["ticket"]
                self.give_up(ticket, ticket.secret)
            return
        if request_id not in self.parked:
            return
        self.news[request_id] = news
        if request_id in self.reading:
            self._go_on(request_id)

    def may_have_blocks(self) -> list[str]:
        """The requests that wait without blocks, and may have some."""
        waiting = self.parked.keys() - self.reading.keys()
        return sorted(
            each for each in waiting if not isinstance(self.news.get(each), Known | type(None))
        )

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
        request.is_prefetched = isinstance(self.news[request_id], Computed)
        self.reading[request_id] = request
        self._go_on(request_id)
        return request

    def _go_on(self, request_id: str) -> None:
        """Tell workers of the news of a request that has blocks."""
        request, news, ticket = self.reading[request_id], self.news[request_id], None
        num_tokens = request.num_tokens
        if isinstance(news, Computed):
            address = RemoteEngineAddress(news.engine_id, news.host, news.port)
            counts = num_tokens, news.num_tokens
            receive = Receive(
                address,
                news.request_id,
                [request.blocks],
                news.block_ids,
                *counts,
                attempt=news.attempt,
            )
            self.hand_over(prefetch={request_id: receive})
            return
        del self.parked[request_id], self.news[request_id]
        awaited = {}
        if isinstance(news, Offered):
            ticket = news.params["ticket"]
            awaited[request_id] = RemoteRequest(ticket.address, ticket.request_id)
        else:
            ticket = request.ticket
        counts = num_tokens, ticket.num_tokens
        receive = Receive(
            ticket.address,
            ticket.request_id,
            [request.blocks],
            [ticket.blocks],
            *counts,
            fingerprint=ticket.fingerprint(tokens_of(request.content)[:num_tokens]),
            fault=news.reason if isinstance(news, Gone) else None,
            attempt=news.attempt if isinstance(news, Offered) else 0,
        )
        self.hand_over(receive={request_id: receive}, awaited=awaited)

    def abort(self, request_id: str) -> None:
        """The client of an early request has left."""
        if request_id in self.parked:
            ticket, news = self.parked.pop(request_id), self.news.pop(request_id, None)
            if isinstance(news, Offered):
                self.give_up(news.params["ticket"], news.params["ticket"].secret)
            elif not isinstance(news, Gone):
                self.left.add(request_id)
                self.questions.append(
                    (ticket, Leave(request_id, ticket.request_id, ticket.content))
                )
            if request_id in self.reading:
                now_s = self.world.now_s
                for worker in self.workers:
                    self.reading[request_id].due_at_s[worker.name] = now_s + ABORTED_WITHIN_S
                self.hand_over(failed={request_id}, ended={request_id})
        elif request_id in self.reading:
            self.hand_over(ended={request_id})

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
            for request_id in metadata.receive if metadata is not None else ():
                if request_id in self.reading:
                    due_at_s = self.world.now_s + self.world.limits.read_timeout_s
                    self.reading[request_id].due_at_s[worker.name] = due_at_s

    def hear(self, worker: Worker, report: WorkerReport) -> None:
        """A request fails at once, and is given back once it is quiet; both once each."""
        check(not report.sent, f"{worker.name} was never offered {report.sent}")
        if report.stats is not None:
            strategies = report.stats.data["read_strategies"]
            self.num_read_packed += strategies.count(Strategy.PACKED.value)
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
    def is_busy(self) -> bool:
        """Whether something is being read."""
        return bool(self.reading or self.running or self.parked)

    @property
    def is_over(self) -> bool:
        """Whether nothing is being read any more."""
        return not self.is_busy and super().is_over

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
