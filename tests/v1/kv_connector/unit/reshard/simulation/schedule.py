# SPDX-License-Identifier: Apache-2.0
"""One run of a small world, all of it decided by one seed.

A schedule is a few hundred events, chosen at random among turns of workers, requests of clients,
progress of the wire and faults; which kinds of fault there are differs from schedule to schedule,
and so do the layouts, the sizes and the deadlines. Then everything is healed, time passes, and
nothing may be left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from random import Random
from typing import TypeVar

from tests.v1.kv_connector.unit.reshard.simulation.decode import DecodeEngine
from tests.v1.kv_connector.unit.reshard.simulation.engines import (
    Engine,
    Limits,
    Question,
    Worker,
    World,
)
from tests.v1.kv_connector.unit.reshard.simulation.memory import Layout
from tests.v1.kv_connector.unit.reshard.simulation.prefill import PrefillEngine, Ticket
from tests.v1.kv_connector.unit.reshard.simulation.wire import Faults, Message, Violation, check
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import (
    RemoteEngineChangedError,
    RemoteUnreachableError,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.fingerprint import (
    OfferFingerprint,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    Done,
    DoneEntry,
    GaveUp,
    GaveUpEntry,
    RemoteEngineAddress,
    encode_notification,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.subscriptions import Gone

LAYOUTS = [
    Layout(pp_size, tp_size, block_tokens)
    for pp_size, tp_size in ((1, 1), (2, 1), (1, 2))
    for block_tokens in (2, 4)
]
MAX_PROMPT_TOKENS = 12

_PATIENCE_S = (0.0, 0.0, 0.05, 0.2, 1.0, 1.0) + 160 * (5.0,)
"""How time passes once everything is healed: at the end all deadlines, graces and back-offs are
over, and every peer was idle for long."""

_MOST_TURNS = 100
"""More than any backlog takes, of any of these workers."""

_MOST_PARKED = 6
"""Of those that wait for one prompt in a small pool, each may take a deadline."""

_Each = TypeVar("_Each")


class Simulation:
    """A schedule and the world that it runs in.

    Args:
        seed: Decides everything else.
        weights: How often some events happen, by their names, in place of what the seed says.
        length: How many times as many events there are as in others.

    Attributes:
        trace: What has happened, one line an event.
        engines: Those that are alive.
    """

    def __init__(self, seed: int, weights: Mapping[str, float], length: int = 1) -> None:
        self.seed, self.random = seed, Random(seed)
        self._weights, self._length = weights, length
        random = self.random
        limits = Limits(
            read_timeout_s=random.choice((2.0, 20.0, 60.0)),
            hung_grace_s=random.choice((3.0, 30.0)),
            lease_s=random.choice((1.0, 10.0, 40.0)),
            idle_limit_s=random.choice((20.0, 90.0)),
        )
        self.world = World(random, limits)
        self.trace: list[str] = []
        self.engines: list[Engine] = []
        # The memory of those that are gone is not used again: it is another process's.
        self.gone: list[Engine] = []
        self.tickets: list[Ticket] = []
        self.num_received = self.num_failed = self.num_requests = 0
        self.num_neighbours_served = self.num_early = self.num_prefetched = 0
        self.num_read_packed = 0
        self.copy_failures = self.confusion = self.handshake_failures = self.preemptions = 0.0
        for _ in range(random.choice((1, 2, 3))):
            self._start_prefill(f"prefill{len(self.engines)}.example")
        for _ in range(random.choice((1, 1, 2))):
            self._start_decode(f"decode{len(self.engines)}.example")

    def run(self) -> None:
        """Run all events, heal everything, and wait until nothing is left.

        Raises:
            Violation: Something must not have happened; the message has the whole schedule.
        """
        try:
            events, weights = self._choose_faults()
            for _ in range(self._length * self.random.randrange(100, 300)):
                (event,) = self.random.choices(events, cum_weights=weights)
                event()
            self._heal()
            self._wait_until_over()
        except (Exception, Violation) as error:
            schedule = "\n".join(self.trace)
            raise Violation(
                f"seed {self.seed}: {type(error).__name__}: {error}\n{schedule}"
            ) from error

    # What may happen.

    def turn(self) -> None:
        """A worker's thread takes its turn."""
        worker = self._any(self._workers(hung=False))
        if worker is not None:
            self._turn(worker)

    def hurry(self) -> None:
        """Much of what is on its way arrives, and who is there takes a turn."""
        wire, random = self.world.wire, self.random
        self._note("much arrives")
        for message in list(wire.messages):
            if random.random() < 0.8:
                wire.deliver(message)
        for read in list(wire.reads):
            if random.random() < 0.6:
                wire.move(read, random.choice((1, 1000)), land=random.random() < 0.8)
        if random.random() < 0.5:
            self.copy()
        for worker in self._workers(hung=False):
            while worker.scheduled and random.random() < 0.8:
                worker.begin_step()
            if random.random() < 0.8:
                self._turn(worker)

    def let_time_pass(self) -> None:
        """A moment, or much."""
        self.world.now_s += self.random.choice((0.001, 0.001, 0.01, 0.05, 0.11, 0.5))
        self._note(f"now {self.world.now_s:.3f}")

    def let_much_time_pass(self) -> None:
        """As long as deadlines and leases are."""
        self.world.now_s += self.random.choice((1.0, 2.5, 5.0, 11.0, 35.0))
        self._note(f"now {self.world.now_s:.3f}")

    def stand_still(self) -> None:
        """A machine stands still, for longer than some leases are, and all clocks go on."""
        engine = self._any(self.engines)
        if engine is not None:
            for_s = self.random.choice((3.0, 15.0, 50.0))
            self.world.now_s += for_s
            self._note(f"{engine.engine_id} stood still, now {self.world.now_s:.3f}")
            engine.stand_still(for_s)

    def move(self) -> None:
        """Some pieces of a read, or all, leave their source, or land."""
        read = self._any(self.world.wire.reads)
        if read is not None:
            count = self.random.choice((1, 2, 1000, 1000, 1000))
            land = self.random.random() < 0.8
            self._note(f"{'lands' if land else 'leaves'} {read.name} {count}")
            self.world.wire.move(read, count, land=land)

    def copy(self) -> None:
        """A copy out of an arena, or into one, is made."""
        for worker in self._workers():
            copies = worker.memory.copies
            if copies is not None and copies.pending:
                self._note(f"copies {worker.name}")
                copies.make_one()
                return

    def deliver(self) -> None:
        """A notification arrives, whichever it is."""
        message = self._any(self.world.wire.messages)
        if message is not None:
            self._note(f"delivers {message.sender} to {message.receiver.name}")
            self.world.wire.deliver(message)

    def answer(self) -> None:
        """An engine that was asked answers."""
        question = self._any(self.world.questions)
        if question is not None:
            self._answer(question)

    def connect(self) -> None:
        """A connection is made of an answer."""
        workers = [worker for worker in self._workers() if worker.jobs.jobs]
        worker = self._any(workers)
        if worker is not None:
            self._note(f"connects {worker.name}")
            worker.jobs.jobs.popleft()()

    def prefill(self) -> None:
        """A prompt is computed."""
        engine = self._any(self._prefills())
        if engine is not None:
            # Names are used again.
            name = f"p{self.random.randrange(30)}"
            offer = engine.begin(name, self.random.randrange(1, MAX_PROMPT_TOKENS + 1))
            if offer is not None:
                self._note(f"{engine.engine_id} computes {offer.ticket}")

    def offer(self) -> None:
        """A prompt was computed, and is offered or aborted."""
        engine = self._any(self._prefills())
        offers = [] if engine is None else [o for o in engine.offers.values() if not o.offered]
        offer = self._any(offers)
        if engine is None or offer is None:
            return
        if not offer.is_computed:
            if self.random.random() < 0.8:
                # A step takes its time.
                return
            is_preempted = self.random.random() < self.preemptions
            self._note(
                f"{engine.engine_id} {'preempts' if is_preempted else 'goes on with'} "
                f"{offer.ticket.request_id}"
            )
            (engine.preempt if is_preempted else engine.go_on)(offer)
        elif self.random.random() < 0.1:
            self._note(f"{engine.engine_id} withdraws {offer.ticket.request_id}")
            engine.withdraw(offer)
        else:
            self._note(f"{engine.engine_id} offers {offer.ticket.request_id}")
            ticket = engine.offer(offer)
            if ticket is not None:
                self.tickets.append(ticket)

    def begin_step(self) -> None:
        """A worker's engine comes to a step that was scheduled ahead."""
        worker = self._any([worker for worker in self._workers(hung=False) if worker.scheduled])
        if worker is not None:
            self._note(f"{worker.name} begins a step")
            worker.begin_step()

    def apply_announcement(self) -> None:
        """A worker hears of an offer before the step that says so, or too late."""
        worker = self._any([worker for worker in self._workers(hung=False) if worker.announced])
        if worker is not None:
            self._note(f"{worker.name} hears of {worker.announced[0].number}")
            worker.apply_announcement()

    def read(self) -> None:
        """A request is read, as the router has told or otherwise."""
        engine, ticket = self._any(self._decodes()), self._any(self.tickets[-6:])
        if engine is None or ticket is None:
            return
        content, num_tokens, fault = ticket.content, ticket.num_tokens, None
        if self.random.random() < self.confusion:
            ticket, content, num_tokens, fault = self._confuse(ticket)
        elif self.random.random() < 0.8:
            self.tickets.remove(ticket)
        self.num_requests += 1
        request = engine.begin(
            f"d{self.num_requests}",
            ticket,
            content,
            num_tokens,
            cached_blocks=self.random.choice((0, 0, 0, 1, 2, 9)),
            while_computing=self.random.random() < 0.1,
            fault=fault,
        )
        if request is not None:
            self._note(f"{engine.engine_id} reads {request}")

    def park(self) -> None:
        """A request is sent to both engines at once, or is another one than the name says."""
        engine, prefill = self._any(self._decodes()), self._any(self._prefills())
        if engine is None or prefill is None or not prefill.offers:
            return
        if len(engine.parked) == _MOST_PARKED:
            return
        offers = list(prefill.offers.values())
        computed = [offer for offer in offers if not offer.is_computed]
        ticket = self._any(computed if computed and self.random.random() < 0.7 else offers).ticket
        if self.random.random() < 0.1:
            ticket = replace(ticket, request_id="nobody's")
        if self.random.random() < 0.1:
            known = replace(ticket.address, engine_id="before")
            ticket = replace(ticket, address=known)
        elif self.random.random() < self.confusion:
            ticket = replace(ticket, content=self.world.new_content())
        self.num_requests += 1
        self._note(f"{engine.engine_id} waits for e{self.num_requests}: {ticket}")
        engine.park(f"e{self.num_requests}", ticket)

    def admit(self) -> None:
        """A request that has waited has blocks, if there are enough."""
        for engine in self._decodes():
            request_id = self._any(engine.may_have_blocks())
            if request_id is not None and engine.give_blocks(request_id) is not None:
                self._note(f"{engine.engine_id} admits {request_id}")

    def subscribe(self) -> None:
        """A decode engine asks, or hears news."""
        engine = self._any(self._decodes())
        if engine is not None:
            self._note(f"{engine.engine_id} asks or hears")
            self._talk(engine, most=1)

    def cut(self) -> None:
        """A decode engine's connections with side channels are lost."""
        engine = self._any(self._decodes())
        if engine is not None:
            self._note(f"{engine.engine_id} asks again")
            engine.ask_again()

    def _talk(self, engine: DecodeEngine, most: int) -> None:
        """Carry questions of a decode engine, and the news of all prefill engines."""
        engine.ask_in_time()
        for _ in range(min(most, len(engine.questions))):
            ticket, question = engine.questions.pop(0)
            hosts = [each for each in self._prefills() if each.address.host == ticket.address.host]
            if not hosts:
                engine.inbox.append(Gone(question.asker, "its engine has ended"))
                continue
            hosts[0].publisher.ask(engine.engine_id.encode(), question, self.world.now_s)
        decodes = {each.engine_id.encode(): each for each in self._decodes()}
        for prefill in self._prefills():
            prefill.publisher.expire(self.world.now_s, self.world.now_s)
            for connection, news in prefill.publisher.take().items():
                if connection in decodes:
                    decodes[connection].inbox += news
        for _ in range(min(most, len(engine.inbox))):
            engine.note(engine.inbox.pop(0))

    def abort(self) -> None:
        """The client of an early request leaves."""
        engine = self._any(self._decodes())
        if engine is None:
            return
        early = [each for each, request in engine.reading.items() if request.is_early]
        request_id = self._any([*dict.fromkeys([*engine.parked, *early])])
        if request_id is not None:
            self._note(f"{engine.engine_id} aborts {request_id}")
            engine.abort(request_id)

    def refuse(self) -> None:
        """A request is refused by a decode engine, and may be another's that reads."""
        engine, ticket = self._any(self._decodes()), self._any(self.tickets[-6:])
        if engine is None or ticket is None:
            return
        secret = ticket.secret
        if self.random.random() < self.confusion:
            secret = self.random.choice(self.tickets).secret
        elif self.random.random() < 0.8:
            self.tickets.remove(ticket)
        self._note(f"{engine.engine_id} refuses {ticket.request_id}")
        engine.give_up(ticket, secret)

    def compute(self) -> None:
        """A device does what is next on the stream of its engine's steps."""
        busy = [
            (worker, stream)
            for worker, stream in (
                (worker, worker.device.streams[0]) for worker in self._workers() if worker.device
            )
            if stream.pending
        ]
        if chosen := self._any(busy):
            self._note(f"{chosen[0].name} has computed")
            chosen[1].run_one()

    def finish(self) -> None:
        """A request that was received ends, and its blocks are another's."""
        engine = self._any(self._decodes())
        request = None if engine is None else self._any(engine.running)
        if engine is not None and request is not None:
            self._note(f"{engine.engine_id} finishes {request.request_id}")
            engine.finish(request)

    def fail_read(self) -> None:
        """NIXL takes a read for failed, and it goes on."""
        read = self._any([read for read in self.world.wire.reads if not read.failed])
        if read is not None:
            self._note(f"fails {read.name}")
            read.failed = True

    def lose_read(self) -> None:
        """A read gets stuck, and nobody hears of it."""
        read = self._any(self.world.wire.reads)
        if read is not None:
            self._note(f"loses {read.name}")
            read.stuck = True

    def hang(self) -> None:
        """A worker stops, or goes on."""
        worker = self._any(self._workers())
        if worker is not None:
            self._note(f"{worker.name} {'goes on' if worker.is_hung else 'hangs'}")
            worker.set_hung(not worker.is_hung)

    def forge(self) -> None:
        """Somebody says that he has read what he does not know."""
        worker = self._any(
            [worker for worker in self._workers() if isinstance(worker.engine, PrefillEngine)]
        )
        ticket = self._any(self.tickets[-6:])
        if worker is not None and ticket is not None:
            self._note(f"forges a release of {ticket.request_id} at {worker.name}")
            invented = OfferFingerprint(self.random.randrange(12), 1, 2)
            stranger = f"stranger {self.random.randrange(3)}"
            forged: Done | GaveUp = Done(stranger, [DoneEntry.of(ticket.request_id, 1, invented)])
            if self.random.random() < 0.5:
                guess = self.random.getrandbits(64)
                forged = GaveUp(stranger, [GaveUpEntry(ticket.request_id, 1, guess)])
            data = encode_notification(forged)
            self.world.wire.messages.append(Message("stranger", worker.agent, data))

    def restart_prefill(self) -> None:
        """A prefill engine dies or ends, and another one starts in its place."""
        engine = self._any(self._prefills())
        if engine is not None:
            self._end(engine)
            self._start_prefill(engine.address.host)

    def restart_decode(self) -> None:
        """A decode engine dies or ends, and another one starts in its place."""
        engine = self._any(self._decodes())
        if engine is not None:
            self._end(engine)
            self._start_decode(engine.address.host)

    # How it is done.

    def _choose_faults(self) -> tuple[list[Callable[[], None]], list[float]]:
        """The events of this schedule, with the sums of their weights."""
        random = self.random

        def some(weight: float) -> float:
            """A kind of fault that half of all schedules have."""
            return weight * random.random() if random.random() < 0.5 else 0.0

        self.world.wire.faults = Faults(
            at_once=some(1.0),
            refusal=some(0.05),
            doubt=some(0.05),
            loss=some(0.5),
            repetition=some(0.5),
        )
        self.copy_failures, self.confusion = some(0.2), some(0.5)
        self.handshake_failures, self.preemptions = some(0.5), some(0.5)
        for worker in self._workers():
            self._set_copies(worker)
        weights = {
            self.turn: 45.0,
            self.hurry: some(4.0),
            self.let_time_pass: 6.0,
            self.let_much_time_pass: some(1.0),
            self.stand_still: some(0.5),
            self.move: 16.0,
            self.copy: 8.0,
            self.deliver: 6.0,
            self.answer: 6.0,
            self.connect: 6.0,
            self.prefill: 5.0,
            self.offer: 14.0,
            self.begin_step: 12.0,
            self.apply_announcement: random.choice((0.5, 6.0)),
            self.read: 4.5,
            self.park: random.choice((0.0, 4.0)),
            self.admit: 4.0,
            self.subscribe: 12.0,
            self.cut: some(1.0),
            self.abort: some(1.0),
            self.refuse: 0.5,
            self.compute: 2.0,
            self.finish: 3.0,
            self.fail_read: some(2.0),
            self.lose_read: some(1.0),
            self.hang: some(2.0),
            self.forge: some(3.0),
            self.restart_prefill: some(1.0),
            self.restart_decode: some(0.5),
        }
        weights |= {getattr(self, name): weight for name, weight in self._weights.items()}
        return list(weights), list(accumulate(weights.values()))

    def _turn(self, worker: Worker) -> None:
        ticks = self.random.random() < 0.7
        self._note(f"turn {worker.name}{' ticks' if ticks else ''}")
        report = worker.turn(ticks=ticks)
        if report.failed or report.received or report.sent:
            self._note(
                f"    failed {sorted(report.failed)}, received {sorted(report.received)}, "
                f"sent {sorted(report.sent)}"
            )

    def _answer(self, question: Question, *, healed: bool = False) -> None:
        """Answer a question as the engine does that listens there now, if any does."""
        self.world.questions.remove(question)
        answer, address = question.answer, question.address
        if not answer.set_running_or_notify_cancel():
            return
        where = f"{address.host}:{address.port}"
        engine = next((e for e in self.engines if e.address.host == address.host and e.alive), None)
        fails = not healed and self.random.random() < self.handshake_failures
        self._note(f"answers {question.asked_by.name} for {address.engine_id}{' ill' * fails}")
        hung = engine is None or any(worker.is_hung for worker in engine.workers)
        if engine is None or hung or fails:
            answer.set_exception(RemoteUnreachableError(f"{where} does not answer"))
        elif engine.engine_id != address.engine_id:
            changed = RemoteEngineChangedError(
                f"{engine.engine_id} is at {where}", engine.engine_id
            )
            answer.set_exception(changed)
        else:
            answer.set_result(tuple(worker.describe() for worker in engine.workers))

    def _confuse(self, ticket: Ticket) -> tuple[Ticket, int, int, str | None]:
        """What a confused router or a client with other intentions makes of a ticket."""
        random, num_tokens = self.random, ticket.num_tokens
        other = random.choice(self.tickets)
        kind = random.randrange(6)
        if kind == 0:
            return ticket, self.world.new_content(), num_tokens, None
        if kind == 1:
            return ticket, ticket.content, random.randrange(1, MAX_PROMPT_TOKENS + 1), None
        if kind == 2:
            return replace(ticket, blocks=other.blocks), ticket.content, num_tokens, None
        if kind == 3:
            return replace(ticket, request_id=other.request_id), ticket.content, num_tokens, None
        if kind == 4:
            return replace(ticket, address=other.address), ticket.content, num_tokens, None
        return ticket, ticket.content, num_tokens, "its parameters are not understood"

    def _heal(self) -> None:
        """No more faults, and no more requests."""
        self._note("all is healed")
        self.world.wire.faults = Faults()
        for worker in self._workers():
            worker.set_hung(False)
            if worker.memory.copies is not None:
                worker.memory.copies.failure_rate = 0.0

    def _wait_until_over(self) -> None:
        """All that can end does, all that cannot is ended, and nothing is left."""
        while any(not each.is_computed for e in self._prefills() for each in e.offers.values()):
            self._do_all()
            self.world.now_s += 0.01
        for wait_s in _PATIENCE_S:
            self._do_all()
            if all(engine.is_over for engine in self.engines):
                break
            self.world.now_s = max(self.world.now_s + wait_s, self._next_due_s())
            self._note(f"now {self.world.now_s:.3f}")
        for engine in self.engines:
            check(engine.is_over, f"{engine.engine_id} is not over: {_rest(engine)}")
        producers = {worker.agent.name for worker in self._workers()}
        ready = {
            lane.agent.name
            for worker in self._workers()
            for lane in worker.transfer_engine.peers.lanes.ready
        }
        left = self.world.wire.agents.keys() - producers - ready
        check(not left, f"agents are left open: {sorted(left)}")
        check(not self.world.wire.reads, "reads are left, and all who posted them are gone")
        self.num_neighbours_served = self.world.num_neighbours_served
        for engine in list(self.engines):
            self._count(engine)
            engine.close()
        check(not self.world.wire.agents, f"still open: {sorted(self.world.wire.agents)}")

    def _next_due_s(self) -> float:
        """When the first worker wakes, if nobody else has anything to do; else the beginning."""
        if any(engine.is_busy for engine in self.engines):
            return 0.0
        due_s = [each.due_s for each in self._workers() if each.due_s is not None]
        return min((each for each in due_s if each < math.inf), default=0.0)

    def _do_all(self) -> None:
        """Everything that a healed world does by itself."""
        world = self.world
        for read in list(world.wire.reads):
            world.wire.move(read, len(read.pieces))
        for message in list(world.wire.messages):
            world.wire.deliver(message)
        for question in list(world.questions):
            self._answer(question, healed=True)
        for engine in self._prefills():
            for offer in list(engine.offers.values()):
                if not offer.is_computed:
                    if self.random.random() < 0.3:
                        is_preempted = self.random.random() < self.preemptions
                        (engine.preempt if is_preempted else engine.go_on)(offer)
                elif not offer.offered:
                    engine.offer(offer)
        for engine in self._decodes():
            for request in list(engine.running):
                engine.finish(request)
            self._talk(engine, most=1000)
            for request_id in engine.may_have_blocks():
                engine.give_blocks(request_id)
        for worker in self._workers():
            while worker.announced:
                worker.apply_announcement()
            while worker.scheduled:
                worker.begin_step()
            while worker.jobs.jobs:
                worker.jobs.jobs.popleft()()
            if worker.device is not None:
                worker.device.synchronize()
            if worker.memory.copies is not None:
                worker.memory.copies.close()
            self._take_turns(worker)

    def _take_turns(self, worker: Worker) -> None:
        """All turns that a worker takes by itself, as its thread does when there is more to do.

        An engine that holds something takes steps, and its workers hear of them. Others are called
        by nobody, and have to know when they are due.
        """
        if isinstance(worker.engine, PrefillEngine) and worker.engine.offers:
            worker.turn(ticks=True)
        for _ in range(_MOST_TURNS):
            if not worker.is_awake:
                self._check_asleep(worker)
                return
            worker.turn(ticks=False)
            if not worker.transfer_engine.has_backlog:
                return

    def _check_asleep(self, worker: Worker) -> None:
        """A turn of a worker that sleeps posts no read.

        In one schedule of two: the turn could do what should have woken the worker. It may find
        that a read has ended which nobody waits for any more, and is looked at now and then. Who
        has no request has nothing to read.
        """
        if self.seed % 2 and len(worker.transfer_engine.consumer):
            reads = list(self.world.wire.reads)
            worker.turn(ticks=False)
            asleep = f"{worker.name} sleeps though there was something to read"
            check(all(each in reads for each in self.world.wire.reads), asleep)

    def _start_prefill(self, host: str) -> None:
        address = RemoteEngineAddress(self.world.wire.name("prefill"), host, 5600)
        num_blocks = self.random.randrange(6, 13)
        arena_bytes = self.random.choice((0, 32, 64))
        engine = PrefillEngine(
            self.world, address, self.random.choice(LAYOUTS), num_blocks, arena_bytes
        )
        self._add(engine, " ahead of its workers" * engine.is_ahead)

    def _start_decode(self, host: str) -> None:
        address = RemoteEngineAddress(self.world.wire.name("decode"), host, 5600)
        num_blocks = self.random.choice((8, 12, 24))
        arena_bytes = self.random.choice((0, 64, 512))
        engine = DecodeEngine(
            self.world, address, self.random.choice(LAYOUTS), num_blocks, arena_bytes
        )
        self._add(engine)

    def _add(self, engine: Engine, how: str = "") -> None:
        self.engines.append(engine)
        for worker in engine.workers:
            self._set_copies(worker)
        self._note(
            f"starts {engine.engine_id} {engine.layout} of {engine.num_blocks} blocks, "
            f"arena {engine.arena_bytes}{how}"
        )

    def _set_copies(self, worker: Worker) -> None:
        if worker.memory.copies is not None:
            worker.memory.copies.failure_rate = self.copy_failures

    def _end(self, engine: Engine) -> None:
        """A crash, or an end in order."""
        dies = self.random.random() < 0.7
        self._note(f"{engine.engine_id} {'dies' if dies else 'closes'}")
        self._count(engine)
        if dies:
            engine.die()
        else:
            engine.close()
        self.engines.remove(engine)
        self.gone.append(engine)
        for each in self._decodes():
            each.note_end(engine.address)

    def _count(self, engine: Engine) -> None:
        if isinstance(engine, DecodeEngine):
            self.num_received += engine.num_received
            self.num_failed += engine.num_failed
            self.num_early += engine.num_early
            self.num_prefetched += engine.num_prefetched
            self.num_read_packed += engine.num_read_packed

    def _prefills(self) -> list[PrefillEngine]:
        return [engine for engine in self.engines if isinstance(engine, PrefillEngine)]

    def _decodes(self) -> list[DecodeEngine]:
        return [engine for engine in self.engines if isinstance(engine, DecodeEngine)]

    def _workers(self, *, hung: bool = True) -> list[Worker]:
        return [
            worker
            for engine in self.engines
            for worker in engine.workers
            if hung or not worker.is_hung
        ]

    def _any(self, candidates: Sequence[_Each]) -> _Each | None:
        return self.random.choice(candidates) if candidates else None

    def _note(self, line: str) -> None:
        self.trace.append(line)


def _rest(engine: Engine) -> str:
    """What an engine has not ended."""
    workers = [
        f"{name} holds {len(part.producer)}, reads {len(part.consumer)}, moves "
        f"{len(part.transfers)}, knows {len(part.peers)}, drains {len(part.peers.retired)}"
        for name, part in ((worker.name, worker.transfer_engine) for worker in engine.workers)
    ]
    return f"{len(engine.free)} of {engine.num_blocks - 1} blocks are free; {'; '.join(workers)}"
