# SPDX-License-Identifier: Apache-2.0
"""A worker's connection with another engine, over one of the worker's lanes.

A failed connection is not repaired. It is retired, and drains while the next one is in use: see
`lifetimes` and `lane`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from vllm.logger import init_logger

from ..errors import InDoubtError, LocalLayoutError, TransferError, one_line, quote
from ..memory.leg import Indices, Rows, side_by_side
from ..memory.packing import PACK_UNIT_BYTES
from ..memory.staging import MAX_WINDOW_BYTES
from ..protocol.description import WorkerDescription
from ..protocol.lifetimes import Lifetime
from ..protocol.packing import TABLE_BYTES
from .agent import Prepared, Transfer, TransferState
from .lane import Lane
from .lease_check import LeaseChecker, PreparedTable, prepare_table
from .packed_windows import PackedWindows
from .remote import LoweredEngine, LoweredLeg, PreparedLeg, PreparedPacking, PreparedStaging

logger = init_logger(__name__)


class PeerConnection:
    """A connection with another engine, which this worker reads from or notifies.

    It belongs to the connector's thread. The engine's workers are connected one by one, because
    each takes NIXL 1 to 2 ms; reads from other engines go on in between.

    Args:
        lane: Lane to read over.
        lowered: The engine's legs, and the workers to notify.
        hung_grace_s: How long a retired connection waits for reads that neither complete nor fail.
        clock: Monotonic clock, in seconds.

    Attributes:
        lane: Lane that it reads over.
        lifetime: Counts of what is in flight, and when it may be closed.
        leases: Lease checks of blocks that were read over it.
        legs: Legs to read for every request.
        lease_tables: Lease table of each worker, by the agent's name.
        releases: Workers to notify when a request was read, with the number of notifiers.
        num_verified: Requests that were verified.
        num_in_vain: Requests that were to be verified, and could not be.
        mistake: What has arrived otherwise than it is held; None for nothing.
    """

    def __init__(
        self, lane: Lane, lowered: LoweredEngine, hung_grace_s: float, clock: Callable[[], float]
    ) -> None:
        self.lane = lane
        self.lifetime = Lifetime(hung_grace_s)
        self.leases = LeaseChecker(lane.checks, self, clock)
        self.legs: list[PreparedLeg] = []
        self.lease_tables: dict[str, PreparedTable] = {}
        self.releases: list[tuple[str, int]] = []
        self.num_verified = self.num_in_vain = 0
        self.mistake: str | None = None
        self._clock = clock
        self._area = lowered.area
        self._unconnected = deque(lowered.workers)
        self._names: list[str] = []
        # Tables of packed windows.
        self._tables: list[Prepared] = []
        # Legs with the same rows at one end share its list, as most staged legs do.
        self._remote: dict[tuple[str, bytes], Prepared] = {}
        self._local: dict[bytes, tuple[Rows, Prepared]] = {}
        # Workers that a read of has completed.
        self._reached: set[str | None] = set()
        self._is_connected = True
        lane.connections[self] = None
        lane.num_made += 1

    def connect_next(self) -> bool:
        """Connect one more worker of the engine; return whether all are connected.

        Raises:
            TransferError: NIXL does not accept it.
        """
        if self._unconnected:
            worker = self._unconnected.popleft()
            name = self.lane.connect(worker.description.agent_metadata)
            self._names.append(name)
            table = prepare_table(self.lane.agent, worker.description.lease_table, name)
            self.lease_tables[name] = table
            packs = any(each.packed is not None for each in worker.legs)
            windows = self._windows_of(worker.description, name) if packs else None
            self.legs += [self._prepare(each, name, windows) for each in worker.legs]
            if worker.num_notifiers:
                self.releases.append((name, worker.num_notifiers))
        return not self._unconnected

    def read(
        self,
        local: Prepared,
        local_indices: Indices,
        remote: Prepared,
        remote_indices: Indices,
    ) -> Transfer:
        """Post a read; see `NixlAgent.read`.

        Raises:
            InDoubtError: The read was refused, but may write until the lane is closed.
            TransferError: The read was refused.
        """
        try:
            transfer = self.lane.agent.read(local, local_indices, remote, remote_indices)
        except InDoubtError:
            self.lifetime.refuse(self._clock())
            raise
        self.lifetime.begin()
        return transfer

    def doubt(self) -> None:
        """Count a read in doubt: its post raised, so it may write until the lane is closed."""
        self.lifetime.refuse(self._clock())

    def poll(self, transfer: Transfer) -> TransferState:
        """Return a posted read's state; count its end once."""
        if transfer.ended_in is not None:
            return transfer.ended_in
        state = self.lane.agent.poll(transfer)
        if state is TransferState.IN_FLIGHT:
            return state
        if state is TransferState.DONE:
            self.lifetime.done()
            self._reached.add(transfer.peer)
        else:
            self.lifetime.fail(self._clock())
        transfer.ended_in = state
        return state

    def telemetry(self, transfer: Transfer) -> object:
        """Return NIXL's measurements of a completed read; None if it has none."""
        return self.lane.agent.telemetry(transfer)

    def release(self, transfer: Transfer) -> None:
        """Release a completed read."""
        self.lane.agent.release(transfer)

    @property
    def unreached(self) -> list[PreparedTable]:
        """Lease tables of the workers to notify that no read of has completed.

        NIXL may keep a message until the worker's first answer, and an agent without threads then
        has to be polled. After a read the call that sends a message sends it: none of 300 was late
        without a poll, over shared memory and over TCP (nixl 1.5.1).
        """
        names = (name for name, _ in self.releases if name not in self._reached)
        return [self.lease_tables[name] for name in names]

    def notify(self, peer: str, message: bytes) -> None:
        """Send a message to one of the engine's workers. See `unreached`.

        Raises:
            TransferError: The worker cannot be reached.
        """
        self.lane.notify(peer, message, self._clock())

    @property
    def is_connected(self) -> bool:
        """True until it is closed."""
        return self._is_connected

    @property
    def close_at_s(self) -> float | None:
        """When its lane may be closed as far as it is concerned; None until it is retired."""
        return self.lifetime.close_at_s(wanted=self.leases.is_busy)

    @property
    def is_drained(self) -> bool:
        """True if it can be closed without its lane: no reads or checks are under way."""
        return self.lifetime.is_drained and not self.leases.is_busy

    def close(self) -> None:
        """Close it. It must be drained or its lane closed, so that no read writes any more."""
        if not self._is_connected:
            return
        self._is_connected = False
        del self.lane.connections[self]
        if self.lane.agent.is_open:
            assert self.is_drained, "what may still write ends with its lane"
            self._release_all()
        self.lifetime.close()

    def _release_all(self) -> None:
        """Release everything to the lane."""
        agent = self.lane.agent
        for prepared in self._remote.values():
            agent.release_prepared(prepared)
        for prepared in (*self._tables, *(each.buckets for each in self.lease_tables.values())):
            agent.release_prepared(prepared)
        for rows, _ in self._local.values():
            self.lane.release_local_list(rows)
        for name in self._names:
            self.lane.disconnect(name)

    def _windows_of(self, description: WorkerDescription, name: str) -> PackedWindows | None:
        """Return the windows that a worker packs; None if it packs none, or not for us."""
        address, area, agent = description.packing, self._area, self.lane.agent
        # Windows may be of the largest size, and have to fit both arenas.
        if area is None or min(area.memory.nbytes, address.arena_bytes) < MAX_WINDOW_BYTES:
            return None
        device_id, count = description.cache.device_id, address.arena_bytes // PACK_UNIT_BYTES
        rows = side_by_side(address.arena, PACK_UNIT_BYTES, device_id, count)
        try:
            table_row = side_by_side(address.table, TABLE_BYTES, 0, 1)
            self._tables.append(agent.prepare(table_row, name, "DRAM"))
            return PackedWindows(
                self.lane.packs,
                self,
                self._tables[-1],
                self._remote_list(rows, name),
                self._local_list(area.rows(PACK_UNIT_BYTES)),
                partial(self.notify, name),
            )
        except (LocalLayoutError, TransferError) as error:
            logger.warning("Nothing is packed by %s: %s", quote(name), one_line(error))
            return None

    def _prepare(
        self, lowered: LoweredLeg, name: str, windows: PackedWindows | None
    ) -> PreparedLeg:
        leg, staged = lowered.leg, lowered.staged
        staging = packing = None
        if staged is not None and self._area is not None:
            try:
                arena = self._local_list(self._area.rows(staged.descriptor_bytes))
                staging = PreparedStaging(staged, arena, self._remote_list(staged.src.rows, name))
            except TransferError as error:
                logger.warning(
                    "Reads from %s go direct, and are not staged: %s", quote(name), one_line(error)
                )
            else:
                if lowered.packed is not None and windows is not None:
                    packing = PreparedPacking(lowered.packed, windows)
        local, remote = self._local_list(leg.dst.rows), self._remote_list(leg.src.rows, name)
        return PreparedLeg(leg, local, remote, staging, packing)

    def _local_list(self, rows: Rows) -> Prepared:
        key = rows.tobytes()
        if key not in self._local:
            self._local[key] = rows, self.lane.local_list(rows)
        return self._local[key][1]

    def _remote_list(self, rows: Rows, name: str) -> Prepared:
        key = name, rows.tobytes()
        if key not in self._remote:
            self._remote[key] = self.lane.agent.prepare(rows, name)
        return self._remote[key]
