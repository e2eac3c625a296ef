# SPDX-License-Identifier: Apache-2.0
"""The agents that a worker reads with: a few lanes, each shared by many peers.

An agent registers the whole cache and holds file descriptors, threads and, with some backends, a
core. So the number of agents does not grow with the number of peers. But only closing the agent
fences reads that never end by themselves (see `agent`), so all peers of a lane end with it. When a
peer breaks, its lane is retired: it posts what its other peers have begun, drains, and is closed,
while new reads go to its successor.

Every peer begins in the lane of newcomers, which is all that most workers ever have. Once that
breaks, peers that have given a good read (proven ones) connect over a lane of their own, which
neither newcomers nor peers that broke a short while ago (suspects) can make them leave.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeGuard

from vllm.logger import init_logger

from ..errors import TransferError, one_line
from ..memory.leg import Rows
from ..protocol.lifetimes import PEER_GRACE_S
from ..protocol.packing import TABLE_BYTES
from .agent import NixlAgent, Prepared
from .agent_metadata import with_own_name
from .lease_check import RowBuffer, check_buffer

if TYPE_CHECKING:
    from .connection import PeerConnection

logger = init_logger(__name__)

_NEWCOMERS, _PROVEN = 0, 1
"""Slots of `Lanes`."""

_NUM_PACK_LOOKS = 16
"""Tables of packed windows that are read at the same time, each of a worker that packs."""

MAX_DRAINING_LANES = 4
"""While more lanes drain, the oldest is closed after `PEER_GRACE_S`, and none is made for suspects.
Each holds an agent of 5 to 25 MB and 15 to 50 descriptors: nixl 1.5.1, without threads and with."""

#: interval next lane: a worker that could not make a lane tries again.
_RETRY_S = 5.0
"""Wait after a lane could not be made, for example because file descriptors ran out."""

_LEAVES_S = 0.25
"""How long the agent of a retired lane stays open for its last message."""


class Lane:
    """An agent, with the buffers and descriptor lists that its peers share.

    The dialer's thread makes it; from then on it belongs to the connector's thread.

    Args:
        agent: An agent with which all memory to read into is registered. Only the lane polls it.

    Attributes:
        checks: Buffer for lease table rows that are read.
        packs: Buffer for tables of packed windows that are read.
        connections: Open connections over this lane.
        num_made: Connections made over this lane, closed ones included: NIXL releases a peer's
            descriptors only with the agent (1.5.1, over TCP).
        retired_at_s: When it was retired; None while reads may begin on it.
        is_forced: Whether to close it once it is retired, even with reads in flight.
        sent_by_s: When its last message has left, at the latest.
    """

    def __init__(self, agent: NixlAgent) -> None:
        self.agent = agent
        self.checks = check_buffer(agent)
        self.packs = RowBuffer(agent, _NUM_PACK_LOOKS, TABLE_BYTES // 8)
        self.connections: dict[PeerConnection, None] = {}
        self.num_made = 0
        self.retired_at_s: float | None = None
        self.sent_by_s = 0.0
        self.is_forced = False
        # Connections with the same geometry share lists of our own memory.
        self._local: dict[bytes, Prepared] = {}
        self._num_users: Counter[bytes] = Counter()
        self._num_connections: Counter[str] = Counter()

    @property
    def is_retired(self) -> bool:
        """Whether no further reads may begin on it."""
        return self.retired_at_s is not None

    @property
    def is_drained(self) -> bool:
        """Whether no read over it can write any more."""
        return all(each.is_drained for each in self.connections)

    def connect(self, metadata: bytes) -> str:
        """Connect a worker of another engine; return its agent's name here. See `disconnect`.

        Raises:
            TransferError: NIXL does not accept it.
        """
        try:
            own = with_own_name(metadata)
        except ValueError as error:
            raise TransferError(
                f"its NIXL metadata is not as NIXL writes it ({one_line(error)})"
            ) from error
        name = self.agent.connect(own)
        self._num_connections[name] += 1
        return name

    def disconnect(self, name: str) -> None:
        """Undo one `connect` of a worker without a read in flight; the last one disconnects it."""
        self._num_connections[name] -= 1
        if not self._num_connections[name]:
            del self._num_connections[name]
            self.agent.disconnect(name)

    def local_list(self, rows: Rows) -> Prepared:
        """Return the list of some rows of our own memory. See `release_local_list`.

        Raises:
            TransferError: The memory is not registered.
        """
        key = rows.tobytes()
        if key not in self._local:
            self._local[key] = self.agent.prepare(rows)
        self._num_users[key] += 1
        return self._local[key]

    def release_local_list(self, rows: Rows) -> None:
        """Undo one `local_list`; the last one releases the list. No read of it may write."""
        key = rows.tobytes()
        self._num_users[key] -= 1
        if not self._num_users[key]:
            del self._num_users[key]
            self.agent.release_prepared(self._local.pop(key))

    def notify(self, name: str, message: bytes, now_s: float) -> None:
        """Send a message to a worker.

        Raises:
            TransferError: It cannot be reached.
        """
        self.agent.notify(name, message)
        self.sent_by_s = now_s + _LEAVES_S

    def summary(self, now_s: float) -> str:
        """Return a log line on its peers, the reads under way, and when it was retired."""
        num_parts = sum(
            each.lifetime.in_flight + each.lifetime.in_doubt for each in self.connections
        )
        retired_s = now_s - (now_s if self.retired_at_s is None else self.retired_at_s)
        return (
            f"The lane of {len(self.connections)} peers was retired {retired_s:.1f} s ago, with "
            f"{num_parts} reads under way."
        )

    def force(self) -> None:
        """Close it as soon as it is retired, even with reads in flight."""
        self.is_forced = True

    def close_at_s(self, *, is_crowded: bool = False) -> float | None:
        """Return when to close it, perhaps in the past; None while it is open.

        Args:
            is_crowded: Whether too many lanes drain, and this is the oldest of them.
        """
        if self.retired_at_s is None or self.is_forced:
            return self.retired_at_s
        ends_s = [each.close_at_s for each in self.connections]
        # The last notifications to producers may still have to leave.
        at_s = max([self.sent_by_s, *(end_s for end_s in ends_s if end_s is not None)])
        return min(at_s, self.retired_at_s + PEER_GRACE_S) if is_crowded else at_s

    def close(self) -> None:
        """Close the agent: no read over it writes any more."""
        self.agent.close()
        for connection in list(self.connections):
            connection.close()


class Lanes:
    """All lanes of a worker. They belong to the connector's thread.

    Args:
        make: Makes a lane in another thread, without blocking.
    """

    def __init__(self, make: Callable[[], Future[Lane]]) -> None:
        self._make = make
        # By `_NEWCOMERS`, which suspects share, and `_PROVEN`.
        self._slots: list[Future[Lane] | None] = [None, None]
        self._draining: list[Lane] = []
        self._retry_at_s = 0.0

    def __len__(self) -> int:
        """Return the number of lanes that are not closed, draining ones included."""
        return len(self._draining) + len(self.ready)

    @property
    def ready(self) -> tuple[Lane, ...]:
        """Lanes on which reads may begin."""
        return tuple(each.result() for each in self._slots if _is_made(each))

    @property
    def draining(self) -> tuple[Lane, ...]:
        """Retired lanes, oldest first."""
        return tuple(self._draining)

    @property
    def is_making(self) -> bool:
        """Whether a lane is being made."""
        return any(each is not None and not each.done() for each in self._slots)

    @property
    def next_due_s(self) -> float:
        """When the next lane is to be closed; infinite without one."""
        due_s = (lane.close_at_s(is_crowded=self._is_crowded(lane)) for lane in self._draining)
        return min((at_s for at_s in due_s if at_s is not None), default=math.inf)

    @property
    def next_try_s(self) -> float:
        """When to `pick` again after None; infinite if it has to wait for a lane's start or end."""
        is_waiting = self.is_making or len(self._draining) > MAX_DRAINING_LANES
        return math.inf if is_waiting else self._retry_at_s

    def prepare(self, now_s: float) -> None:
        """Begin to make the lane that every peer begins with."""
        self._fill(_NEWCOMERS, now_s)

    def pick(self, now_s: float, *, is_proven: bool, is_suspect: bool) -> Lane | None:
        """Return the lane for a peer's next connection.

        Args:
            now_s: The time.
            is_proven: Whether the peer has given a good read.
            is_suspect: Whether the peer broke a short while ago.

        Returns:
            A lane; None where the peer has to wait for one.

        Raises:
            TransferError: None can be made.
        """
        slot = _PROVEN if is_proven and not is_suspect else _NEWCOMERS
        if not is_suspect or len(self._draining) <= MAX_DRAINING_LANES:
            self._fill(slot, now_s)
        made = self._slots[slot]
        return made.result() if _is_made(made) else None

    def retire(self, lane: Lane, now_s: float) -> None:
        """Begin no more reads on a lane; may be called repeatedly."""
        if not lane.is_retired:
            slots = [
                None if _is_made(each) and each.result() is lane else each for each in self._slots
            ]
            lane.retired_at_s, self._slots = now_s, slots
            self._draining.append(lane)
            logger.debug("New reads go to another lane. %s", one_line(lane.summary(now_s)))

    def take_due(self, now_s: float) -> list[Lane]:
        """Forget the lanes that are due, and return them for the caller to close."""
        due = [
            lane
            for lane in self._draining
            if (at_s := lane.close_at_s(is_crowded=self._is_crowded(lane))) is not None
            and now_s >= at_s
        ]
        for lane in due:
            summary = one_line(lane.summary(now_s))
            # Failed reads and forced lanes were logged before.
            if any(each.lifetime.in_flight for each in lane.connections) and not lane.is_forced:
                logger.warning(
                    "Closing a lane whose reads have not ended in time. %s Check that the engines "
                    "it reads from run and can be reached; one that runs may have to be restarted.",
                    summary,
                )
            else:
                logger.debug("A lane is closed. %s", summary)
        self._draining = [lane for lane in self._draining if lane not in due]
        return due

    def close(self, now_s: float) -> list[Lane]:
        """Make no more lanes; return all existing ones, for the caller to close."""
        for lane in self.ready:
            self.retire(lane, now_s)
        for each in self._slots:
            if each is not None and not each.cancel():
                each.add_done_callback(_close_made)
        self._slots = [None] * len(self._slots)
        lanes, self._draining = self._draining, []
        return lanes

    def _fill(self, slot: int, now_s: float) -> None:
        """Begin to make a lane for an empty slot, unless one could not be made a moment ago.

        Raises:
            TransferError: The lane could not be made.
        """
        making = self._slots[slot]
        try:
            if making is None and now_s >= self._retry_at_s:
                self._slots[slot] = self._make()
            elif making is not None and making.done():
                making.result()
        except BaseException as error:
            # The dialer's thread passes on whatever ends its task, or no thread can be started.
            self._slots[slot] = None
            self._retry_at_s = now_s + _RETRY_S
            raise TransferError(
                f"no NIXL agent can be made to read with: {one_line(error)}"
            ) from error

    def _is_crowded(self, lane: Lane) -> bool:
        return lane is self._draining[0] and len(self._draining) > MAX_DRAINING_LANES


def _is_made(making: Future[Lane] | None) -> TypeGuard[Future[Lane]]:
    if making is None or not making.done() or making.cancelled():
        return False
    return making.exception() is None


def _close_made(making: Future[Lane]) -> None:
    """Close a lane that was made too late."""
    if not making.cancelled() and making.exception() is None:
        making.result().close()
