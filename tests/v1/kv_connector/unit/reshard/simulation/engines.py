# SPDX-License-Identifier: Apache-2.0
"""Engines of real exchanges: what their schedulers know, and what they may expect.

A block belongs to one owner at a time, and whoever gets it next writes into it at once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from itertools import count
from random import Random

from tests.v1.kv_connector.unit.reshard.simulation.device import Device, Thread, set_device
from tests.v1.kv_connector.unit.reshard.simulation.memory import CacheMemory, Layout, WorkerMemory
from tests.v1.kv_connector.unit.reshard.simulation.wire import (
    NOBODY,
    Owner,
    SimulatedAgent,
    Wire,
    check,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.connecting.dialer import (
    Answer,
    Dialer,
    LocalEndpoint,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.connecting.peers import PeerTable
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.metadata import (
    ReshardConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.producer import ProducerSide
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.reading.consumer import (
    ConsumerSide,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.reading.notifier import (
    Notifier,
    Renewals,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.stats import ReshardStats
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.transfer_engine import (
    Event,
    Incoming,
    SchedulerStep,
    TransferEngine,
    WorkerReport,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.worker import CacheDevice
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.packing import PackedCache
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.staging import StagingPolicy
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import Shard
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.description import (
    WorkerDescription,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.lifetimes import PEER_GRACE_S
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    Announcement,
    RemoteEngineAddress,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.tasks import Tasks
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.budget import Budget
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.connection import PeerConnection
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.lane import (
    MAX_DRAINING_LANES,
    Lane,
    Lanes,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.pack_area import PackArea
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.remote import (
    LocalCache,
    LoweredEngine,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.transfers import Transfers


@dataclass(frozen=True)
class Limits:
    """Deadlines and graces of all engines, in seconds."""

    read_timeout_s: float
    hung_grace_s: float
    lease_s: float
    idle_limit_s: float


@dataclass(eq=False)
class Question:
    """A handshake that was not answered.

    Attributes:
        address: Who is asked.
        answer: Where the answer goes.
        asked_by: Who asks.
    """

    address: RemoteEngineAddress
    answer: Future[Answer]
    asked_by: Worker


class Later(Executor):
    """In place of a pool of threads: what is submitted runs when the schedule says so.

    Args:
        thread: The one that it has.
    """

    def __init__(self, thread: Thread) -> None:
        self.thread = thread
        self.jobs: deque[Callable[[], object]] = deque()

    def submit(self, function: Callable[..., object], *arguments: object) -> Future:
        """Run something later."""
        done: Future = Future()
        self.jobs.append(partial(self._run, done, function, *arguments))
        return done

    def _run(self, done: Future, function: Callable[..., object], *arguments: object) -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            with self.thread.running():
                result = function(*arguments)
            done.set_result(result)
        except Exception as error:
            done.set_exception(error)


class World:
    """What engines share: a wire, a clock, and handshakes on their way.

    Args:
        random: Decides everything.
        limits: Of all engines.
    """

    def __init__(self, random: Random, limits: Limits) -> None:
        self.random, self.limits = random, limits
        self.now_s = 1000.0
        self.wire = Wire(random)
        self.questions: list[Question] = []
        # Connections whose requests have ended over a lane that another peer has broken.
        self.num_neighbours_served = 0
        self._num_contents = 0

    def new_content(self) -> int:
        """A prompt that nobody had."""
        self._num_contents += 1
        return self._num_contents


class Worker:
    """One worker of an engine: a real transfer engine over simulated memory.

    Args:
        world: Where it is.
        engine: Its engine.
        shard: What it holds.

    Attributes:
        steps: What its engine's thread has handed over, and it has not taken up.
        scheduled: Steps that its engine's thread has not come to.
        announced: Offers on their way past these.
        due_s: Until when the connector's thread sleeps, if nothing wakes it.
    """

    def __init__(self, world: World, engine: Engine, shard: Shard) -> None:
        random = world.random
        self.world, self.engine, self.shard = world, engine, shard
        self.name = f"{engine.engine_id}/{shard.rank.pp_rank}.{shard.rank.tp_rank}"
        self.device = Device() if engine.on_device else None
        # As in the worker of vLLM's.
        self._cache_device = CacheDevice(on_cpu=self.device is None)
        self._cache_device.place = self.device
        self._engines_thread, self._connectors_thread = Thread(), Thread()
        if self.device is not None:
            with self._engines_thread.running():
                set_device(self.device)
        cache = CacheMemory(
            shard,
            engine.layout.block_tokens,
            engine.num_blocks,
            token_major=random.random() < 0.5,
        )
        self.memory = WorkerMemory(
            cache,
            engine.arena_bytes,
            engine.policy,
            random,
            lambda block: engine.owners[block],
            self.device,
            packs=engine.packs,
        )
        self.incoming: list[Incoming] = []
        self.scheduled: deque[SchedulerStep] = deque()
        self.announced: deque[Announcement] = deque()
        self.jobs = Later(Thread())
        self._woken = False
        # It begins with a poll.
        self.due_s: float | None = world.now_s
        # Peers that others have cost their lane, while requests were read from them.
        self._draining: dict[PeerConnection, None] = {}
        # In pieces of work, one for each time that somebody asks.
        self._budget = random.choice((math.inf, 1, 2, 5))
        agent, stats = self._open("producer"), ReshardStats()
        self.agent = agent
        with self._engines_thread.running():
            agent.register([(cache.address, cache.size_bytes, 0)])
        self.prepare_thread()
        dialer = Dialer(
            lambda name: self._open("lane"),
            lambda: world.now_s,
            self._cache_device.choose,
            self.jobs,
        )
        area = self.memory.area

        def waking(future: Future) -> Future:
            future.add_done_callback(lambda _: self._wake())
            return future

        def connect(lane: Lane, lowered: LoweredEngine) -> PeerConnection:
            return PeerConnection(lane, lowered, world.limits.hung_grace_s, lambda: world.now_s)

        lanes = Lanes(lambda: waking(dialer.make_lane()))
        peers = PeerTable(
            lambda address: waking(dialer.dial(address)), connect, lanes, world.limits.idle_limit_s
        )
        transfers, tasks = Transfers(area), Tasks()
        notifier = Notifier(self.name, stats, peers, tasks)
        reads = ConsumerSide(peers, transfers, notifier, stats, tasks, world.limits.read_timeout_s)
        local_cache = LocalCache(shard.rank, cache.cache, frozenset())
        reads.set_local_cache(local_cache)
        dialer.begin(
            LocalEndpoint(
                local_cache, engine.layout.shards, [(cache.address, cache.size_bytes, 0)], area, 0
            ),
            self._ask,
        )
        producer = ProducerSide(agent, world.limits.lease_s, stats)
        if engine.packs and self.memory.arena is not None:
            with self._engines_thread.running():
                producer.packs = PackArea(
                    self.memory.arena, self.memory.copies, PackedCache(cache.cache), agent
                )
        self.transfer_engine = TransferEngine(
            agent,
            producer,
            peers,
            transfers,
            reads,
            notifier,
            Renewals(world.limits.lease_s),
            stats,
            lambda: Budget(self._budget, partial(next, count())),
        )

    def prepare_thread(self) -> None:
        """Have the connector's thread work with this worker's device."""
        with self._connectors_thread.running():
            self._cache_device.choose()

    def describe(self) -> WorkerDescription:
        """What it says of itself."""
        return WorkerDescription(
            self.engine.engine_id,
            self.shard,
            self.memory.cache.cache,
            self.transfer_engine.producer.table_address,
            self.agent.metadata(),
            self.transfer_engine.producer.packing_address,
        )

    def turn(self, *, ticks: bool) -> WorkerReport:
        """One turn of the connector's thread."""
        incoming, self.incoming = self.incoming, []
        if ticks and not incoming:
            incoming = [SchedulerStep()]
        self.engine.taken_up(self, [each for each in incoming if isinstance(each, SchedulerStep)])
        self._woken = False
        with self._connectors_thread.running():
            report = self.transfer_engine.poll(incoming, self.world.now_s)
        self.engine.hear(self, report)
        lanes = self.transfer_engine.peers.lanes
        waited_for = {lane: self._waits_until_s(lane) for lane in lanes.draining}
        self._draining |= {each: None for lane in lanes.draining for each in _neighbours(lane)}
        with self._connectors_thread.running():
            self.transfer_engine.tell_producers(self.world.now_s)
        for lane, until_s in waited_for.items():
            if not lane.agent.is_open:
                early = (
                    f"{self.name} ends {lane.agent.name}, which others read with, before its time"
                )
                check(self.world.now_s >= until_s, early)
        self._count_served()
        self.due_s = self.transfer_engine.next_due_s(self.world.now_s)
        return report

    def _waits_until_s(self, lane: Lane) -> float:
        """Until when a retired lane has to stay for those of its peers that did not fail."""
        assert lane.retired_at_s is not None
        until_s = max(
            (
                each.lifetime.retired_at_s + self.world.limits.hung_grace_s
                for each in lane.connections
                if not each.is_drained and not each.lifetime.in_doubt
            ),
            default=lane.retired_at_s,
        )
        is_crowded = len(self.transfer_engine.peers.lanes.draining) > MAX_DRAINING_LANES
        if is_crowded or lane.is_forced:
            return min(until_s, lane.retired_at_s + PEER_GRACE_S)
        return until_s

    def _count_served(self) -> None:
        """Count those whose requests have ended, over a lane that is still there."""
        for each in list(self._draining):
            if not each.lane.agent.is_open or each.lifetime.in_doubt:
                del self._draining[each]
            elif not each.lifetime.requests:
                del self._draining[each]
                self.world.num_neighbours_served += 1

    def computed_before(self, metadata: ReshardConnectorMetadata) -> Event | None:
        """What the engine's thread takes down of its device when it comes to a step."""
        with self._engines_thread.running():
            return self._cache_device.computed_before(metadata)

    def write_late(self, owner: Owner) -> None:
        """Launch, from the engine's thread, what writes into the blocks that an owner then has."""
        if self.device is None:
            return
        owner.written_at.add(self.memory.owner_at)

        def run() -> None:
            blocks = [block for block, each in enumerate(self.engine.owners) if each is owner]
            self.memory.cache.spoil(blocks, 0xC0FFEE)
            owner.written_at.remove(self.memory.owner_at)

        with self._engines_thread.running():
            self.device.launch(run, [owner])

    def _open(self, role: str) -> SimulatedAgent:
        """Make an agent over this worker's memory."""
        device = self.device
        is_at_home = (lambda: True) if device is None else (lambda: device.is_chosen)
        return self.world.wire.open(role, self.memory.owner_at, is_at_home)

    def begin_step(self) -> None:
        """Its engine's thread comes to the next step."""
        self.incoming.append(self.scheduled.popleft())

    def apply_announcement(self) -> None:
        """The next announcement arrives."""
        self.incoming.append(self.announced.popleft())

    @property
    def is_awake(self) -> bool:
        """Whether the connector's thread takes another turn by itself."""
        transfer_engine = self.transfer_engine
        if self._woken or self.incoming:
            return True
        if transfer_engine.has_backlog or transfer_engine.is_moving or transfer_engine.is_packing:
            return True
        return self.due_s is not None and self.due_s <= self.world.now_s

    def _wake(self) -> None:
        self._woken = True

    def set_hung(self, hung: bool) -> None:
        """Stop the process, or let it go on."""
        self.agent.answers = not hung

    @property
    def is_hung(self) -> bool:
        """Whether its process is stopped."""
        return not self.agent.answers

    def die(self) -> None:
        """End the process: the system closes everything that it had."""
        wire = self.world.wire
        for agent in list(wire.agents.values()):
            if agent.owner_at == self.memory.owner_at:
                agent.close()
        self._forget_questions()

    def close(self) -> None:
        """End in order."""
        self.transfer_engine.close(self.world.now_s)
        # Who is not asked any more answers nobody.
        while self.jobs.jobs:
            self.jobs.jobs.popleft()()
        self._forget_questions()

    @property
    def is_idle(self) -> bool:
        """Whether it has nothing of anybody's, and remembers nobody."""
        transfer_engine, area = self.transfer_engine, self.memory.area
        return (
            not self.incoming
            and not self.scheduled
            and not self.announced
            and not len(transfer_engine.producer)
            and not len(transfer_engine.consumer)
            and not len(transfer_engine.transfers)
            and not len(transfer_engine.peers)
            and not transfer_engine.peers.retired
            and not transfer_engine.peers.lanes.draining
            and not any(lane.connections for lane in transfer_engine.peers.lanes.ready)
            and not transfer_engine.is_packing
            and transfer_engine.next_due_s(self.world.now_s) is None
            and (area is None or area.spans.free_bytes == area.spans.size_bytes)
        )

    def _ask(self, address: RemoteEngineAddress) -> Future[Answer]:
        question = Question(address, Future(), self)
        self.world.questions.append(question)
        return question.answer

    def _forget_questions(self) -> None:
        self.world.questions = [
            question for question in self.world.questions if question.asked_by is not self
        ]


def _neighbours(lane: Lane) -> list[PeerConnection]:
    """Connections over a lane that another one has broken, with requests that are being read."""
    if not any(each.lifetime.in_doubt for each in lane.connections):
        return []
    return [
        each for each in lane.connections if each.lifetime.requests and not each.lifetime.in_doubt
    ]


_POLICIES = (
    None,
    StagingPolicy(packs_all=True),
    StagingPolicy(1 << 20, min_merge_factor=0, min_descriptors=0, packs_all=True),
)
"""With the last two all is packed that may be; the rest is read direct, or staged."""


class Engine:
    """An engine: its workers and its pool of blocks. What it serves, subclasses tell.

    Attributes:
        is_ahead: Whether steps are scheduled while earlier ones are computed.
        packs: Whether it packs windows for others, in its workers' arenas.
        on_device: Whether its caches are on devices.
        policy: Decides which reads go through its workers' arenas; None for all.

    Args:
        world: Where it is.
        address: Where it listens, and who it is.
        layout: How it is split.
        num_blocks: Size of its pool.
        arena_bytes: Size of its workers' arenas; 0 for none.
    """

    is_ahead = False
    packs = False

    def __init__(
        self,
        world: World,
        address: RemoteEngineAddress,
        layout: Layout,
        num_blocks: int,
        arena_bytes: int = 0,
    ) -> None:
        self.world, self.address, self.layout = world, address, layout
        self.engine_id, self.num_blocks = address.engine_id, num_blocks
        self.arena_bytes = arena_bytes
        self.on_device = world.random.random() < 0.5
        self.policy = world.random.choice(_POLICIES)
        # Block 0 is nobody's, as in vLLM.
        self.owners = [NOBODY] * num_blocks
        self.free = deque(range(1, num_blocks))
        self.alive = True
        self._num_spoiled = 0
        self.workers = [Worker(world, self, shard) for shard in layout.shards]

    def allocate(self, count: int, owner: Owner) -> list[int] | None:
        """Give blocks to an owner, if there are so many."""
        if count > len(self.free):
            return None
        blocks = [self.free.popleft() for _ in range(count)]
        for block in blocks:
            self.owners[block] = owner
        return blocks

    def give_back(self, blocks: Sequence[int]) -> None:
        """Take blocks from their owner; whoever comes next writes into them."""
        self._num_spoiled += 1
        for block in blocks:
            self.owners[block] = NOBODY
        for worker in self.workers:
            worker.memory.cache.spoil(blocks, 0xDEAD0000 | self._num_spoiled)
        # Most recently used first or last: both happen, as in a prefix cache.
        if self.world.random.random() < 0.5:
            self.free.extend(blocks)
        else:
            self.free.extendleft(blocks)

    def hand_over(self, **asked: object) -> None:
        """Have all workers do something."""
        metadata = ReshardConnectorMetadata(**asked)
        for worker in self.workers:
            step = SchedulerStep(metadata, worker.computed_before(metadata))
            (worker.scheduled if self.is_ahead else worker.incoming).append(step)

    def stand_still(self, for_s: float) -> None:
        """Its workers have not come round for so long, and see that."""
        for worker in self.workers:
            worker.transfer_engine.extend_deadlines(for_s)

    def die(self) -> None:
        """End all processes at once."""
        self.alive = False
        for worker in self.workers:
            worker.die()

    def close(self) -> None:
        """End in order."""
        self.alive = False
        for worker in self.workers:
            worker.close()

    def taken_up(self, worker: Worker, steps: Sequence[SchedulerStep]) -> None:
        """A worker begins a turn with these steps."""

    def hear(self, worker: Worker, report: WorkerReport) -> None:
        """A worker has ended a turn."""

    @property
    def is_busy(self) -> bool:
        """Whether it has requests, which it serves in steps."""
        raise NotImplementedError

    @property
    def is_over(self) -> bool:
        """Whether all blocks are free and no worker has anything left."""
        return len(self.free) == self.num_blocks - 1 and all(
            worker.is_idle for worker in self.workers
        )
