# SPDX-License-Identifier: Apache-2.0
"""A wire that moves real bytes when the schedule says so, and agents that read over it.

A posted read is a number of pieces. Each is first taken from the source and lands some time later,
whatever was said of the read meanwhile: only two things end it, that all of it has landed, and the
end of the agent that posted it. That is what was measured of NIXL. The wire knows whose every
target was when a read was posted; a byte that lands in what was given to somebody else since is a
`Violation`.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import (
    InDoubtError,
    TransferError,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.agent import (
    Prepared,
    Transfer,
    TransferState,
)


@dataclass(eq=False, slots=True)
class Owner:
    """Who may use some memory. The next owner of the same memory is another object.

    Attributes:
        name: What the schedule calls it.
        reads: It waits for bytes: nobody but its reads writes into its memory.
        written_at: Where it is written nevertheless: by devices of workers, each named by what
            tells owners of its memory.
        offered: Others may read what is there.
    """

    name: str
    reads: bool = False
    offered: bool = False
    written_at: set[OwnerAt] = field(default_factory=set, repr=False)

    def __str__(self) -> str:
        return self.name


NOBODY = Owner("nobody")

OwnerAt = Callable[[int], "Owner | None"]
"""Whose the byte at an address is; None for what the connector keeps for itself."""


class Violation(BaseException):
    """Something has happened that must not. The connector takes it for no request's exception."""


def check(holds: bool, fault: str) -> None:
    """See that an invariant holds.

    Raises:
        Violation: It does not.
    """
    if not holds:
        raise Violation(fault)


@dataclass(eq=False, slots=True)
class Piece:
    """One descriptor of a read.

    Attributes:
        target: Address where it lands.
        size_bytes: Its size.
        source: Address where it is taken.
        owner: Whose the target was when the read was posted.
        taken: Its bytes, once they have left the source.
    """

    target: int
    size_bytes: int
    source: int
    owner: Owner | None
    taken: bytes | None = None


@dataclass(eq=False, slots=True)
class PostedRead:
    """A read that may write.

    Attributes:
        name: What the schedule calls it.
        agent: Who has posted it.
        source: Whose memory it reads.
        pieces: What has not landed.
        failed: What NIXL says of it; it goes on to land all the same.
        stuck: The wire has lost it. Nobody is told, and nothing more of it lands.
        cut: Part of it was lost with its source: it is never done.
    """

    name: str
    agent: SimulatedAgent
    source: SimulatedAgent
    pieces: list[Piece]
    failed: bool = False
    stuck: bool = False
    cut: bool = False

    @property
    def is_over(self) -> bool:
        """Whether all of it has landed."""
        return not self.pieces and not self.cut


@dataclass(frozen=True, slots=True)
class Telemetry:
    """What is said of a read that is over, as NIXL says it."""

    xferDuration: float = 0.0
    postDuration: float = 0.0
    totalBytes: int = 0
    descCount: int = 0


@dataclass(eq=False, slots=True)
class Message:
    """A notification on its way."""

    sender: str
    receiver: SimulatedAgent
    data: bytes


@dataclass(slots=True)
class Faults:
    """How often the wire misbehaves, or is faster than others, each between 0 and 1.

    Attributes:
        at_once: A read is over when it was posted.
        refusal: A read is refused before it has begun.
        doubt: A read is refused after it has begun.
        loss: A notification is lost.
        repetition: A notification arrives, and arrives again.
    """

    at_once: float = 0.0
    refusal: float = 0.0
    doubt: float = 0.0
    loss: float = 0.0
    repetition: float = 0.0


@dataclass
class Wire:
    """Everything between agents.

    Attributes:
        random: Decides what the schedule leaves open.
        faults: How often it misbehaves.
        agents: Those that are open, by name.
        reads: Those that may write.
        messages: Those that have not arrived.
    """

    random: Random
    faults: Faults = field(default_factory=Faults)
    agents: dict[str, SimulatedAgent] = field(default_factory=dict)
    reads: list[PostedRead] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    _num_named: int = 0

    def open(
        self, role: str, owner_at: OwnerAt, is_at_home: Callable[[], bool] = lambda: True
    ) -> SimulatedAgent:
        """A new agent."""
        agent = SimulatedAgent(self, self.name(role), owner_at, is_at_home)
        self.agents[agent.name] = agent
        return agent

    def name(self, role: str) -> str:
        """A name that nothing else has."""
        self._num_named += 1
        return f"{role}-{self._num_named}"

    def move(self, read: PostedRead, count: int, *, land: bool = True) -> None:
        """Take so many pieces of a read from their source, and let them land or leave them."""
        if read.stuck:
            return
        kept: list[Piece] = []
        for position, piece in enumerate(read.pieces):
            if position >= count:
                kept += read.pieces[position:]
                break
            if piece.taken is None and read.source.answers:
                piece.taken = ctypes.string_at(piece.source, piece.size_bytes)
            if piece.taken is None or not land:
                kept.append(piece)
            else:
                self._land(read, piece)
        read.pieces = kept
        if read.is_over:
            self.reads.remove(read)

    def deliver(self, message: Message) -> None:
        """Let a notification arrive, or get lost, or arrive and go on to arrive again."""
        if self.random.random() < self.faults.loss:
            self.messages.remove(message)
            return
        if self.random.random() >= self.faults.repetition:
            self.messages.remove(message)
        if message.receiver.is_open:
            message.receiver.inbox.append((message.sender, message.data))

    def lose(self, agent: SimulatedAgent) -> None:
        """An agent has left: it writes no more, and what left its memory before may still land."""
        self.agents.pop(agent.name, None)
        self.reads = [read for read in self.reads if read.agent is not agent]
        for read in list(self.reads):
            if read.source is not agent:
                continue
            on_its_way = [
                piece
                for piece in read.pieces
                if piece.taken is not None or self.random.random() < 0.3
            ]
            for piece in on_its_way:
                if piece.taken is None:
                    piece.taken = ctypes.string_at(piece.source, piece.size_bytes)
            read.cut = read.cut or len(on_its_way) < len(read.pieces)
            read.pieces = on_its_way

    def _land(self, read: PostedRead, piece: Piece) -> None:
        owner = read.agent.owner_at(piece.target)
        check(
            owner is piece.owner,
            f"{read.name} by {read.agent.name} lands in memory of {owner}, which was that of "
            f"{piece.owner} when it was posted",
        )
        assert piece.taken is not None
        ctypes.memmove(piece.target, piece.taken, piece.size_bytes)


class SimulatedAgent:
    """`NixlAgent`'s interface over a `Wire`.

    Args:
        wire: Where it is.
        name: Unique.
        owner_at: Whose the memory is that it reads into.
        is_at_home: Whether the running thread has that memory's device.

    Attributes:
        inbox: Notifications that have arrived.
        answers: Its process runs: its memory can be read, and it takes notifications.
        regions: Memory that is known, each from its first address to behind its last.
        heard: Called with each notification that is taken.
    """

    def __init__(
        self, wire: Wire, name: str, owner_at: OwnerAt, is_at_home: Callable[[], bool]
    ) -> None:
        self.name, self.owner_at = name, owner_at
        self._is_at_home = is_at_home
        self.inbox: list[tuple[str, bytes]] = []
        self.answers = self.is_open = True
        self.heard: Callable[[bytes], None] = lambda message: None
        self._wire = wire
        self.regions: list[tuple[int, int]] = []
        self._peers: set[str] = set()
        self._outbox: list[Message] = []

    def register(self, regions: Sequence[tuple[int, int, int]], memory: str | None = None) -> None:
        """Make memory known."""
        if memory is None:
            self._check_thread("registers memory")
        self.regions += [(address, address + size) for address, size, _ in regions]

    def metadata(self) -> bytes:
        """What a peer needs to connect."""
        return self.name.encode()

    def connect(self, metadata: bytes) -> str:
        """Make a peer known."""
        name = metadata.decode()
        self._peer(name)
        self._peers.add(name)
        return name

    def disconnect(self, name: str) -> None:
        """Forget a peer."""
        self._peers.remove(name)
        for read in self._wire.reads:
            over = read.agent is not self or read.source.name != name
            check(over, f"{self.name} forgets {name}, which {read.name} reads from")

    def release_prepared(self, prepared: Prepared) -> None:
        """Give a prepared list back, of which no read is in flight."""
        prepared.handle.is_released = True

    def prepare(
        self, rows: np.ndarray, peer: str | None = None, memory: str | None = None
    ) -> Prepared:
        """Prepare strided descriptors."""
        owner = self if peer is None else self._peer(peer)
        for address, size, _, stride, count in rows.tolist():
            stop = address + (count - 1) * stride + size
            known = any(low <= address and stop <= high for low, high in owner.regions)
            assert known, f"{owner.name} has not registered [{address}, {stop})"
        return Prepared(peer, _Rows(rows))

    def read(
        self,
        local: Prepared,
        local_indices: np.ndarray,
        remote: Prepared,
        remote_indices: np.ndarray,
    ) -> Transfer:
        """Post a read, or refuse it."""
        wire, random, faults = self._wire, self._wire.random, self._wire.faults
        assert self.is_open and remote.peer is not None
        for each in (local, remote):
            check(not each.handle.is_released, f"{self.name} reads with a list that it gave back")
        self._check_thread("reads")
        if random.random() < faults.refusal:
            raise TransferError(f"refused to read from {remote.peer}")
        targets, sources = local.handle.at(local_indices), remote.handle.at(remote_indices)
        pieces = []
        for (target, size), (source, source_size) in zip(targets, sources, strict=True):
            assert size == source_size
            pieces.append(Piece(target, size, source, self.owner_at(target)))
        self._check_targets(pieces)
        random.shuffle(pieces)
        read = PostedRead(wire.name("read"), self, self._peer(remote.peer), pieces)
        wire.reads.append(read)
        if random.random() < faults.doubt:
            raise InDoubtError(f"began to read from {remote.peer}, and failed")
        if random.random() < faults.at_once:
            wire.move(read, len(pieces))
        return Transfer(remote.peer, read, ended_at_once=read.is_over)

    def poll(self, transfer: Transfer) -> TransferState:
        """Look at a posted read."""
        self._send()
        read: PostedRead = transfer.handle
        if read.failed:
            return TransferState.FAILED
        return TransferState.DONE if read.is_over else TransferState.IN_FLIGHT

    def telemetry(self, transfer: Transfer) -> Telemetry:
        """Nothing is measured but that it was read."""
        return Telemetry()

    def release(self, transfer: Transfer) -> None:
        """Give a read back that is done."""
        assert transfer.handle.is_over, f"{transfer.handle.name} is released while it may write"

    def notify(self, peer: str, message: bytes) -> None:
        """Send a peer a message; it leaves when this agent is looked at next."""
        check(peer in self._peers, f"{self.name} notifies {peer}, which it has forgotten")
        self._outbox.append(Message(self.name, self._peer(peer), message))

    def take_notifications(self) -> list[tuple[str, bytes]]:
        """Messages that arrived since the last call."""
        self._send()
        inbox, self.inbox = self.inbox, []
        for _, message in inbox:
            self.heard(message)
        return inbox

    def close(self) -> None:
        """Leave the wire, as when the process ends."""
        if self.is_open:
            self.is_open = self.answers = False
            self._wire.lose(self)

    def _send(self) -> None:
        self._wire.messages += self._outbox
        self._outbox.clear()

    def _peer(self, name: str) -> SimulatedAgent:
        if name not in self._wire.agents:
            raise TransferError(f"{name} has left")
        return self._wire.agents[name]

    def _check_thread(self, does: str) -> None:
        check(self._is_at_home(), f"{self.name} {does} from a thread of another device")

    def _check_targets(self, pieces: list[Piece]) -> None:
        """No two reads may write into the same place, and nobody else may meanwhile."""
        taken = {piece.target: read for read in self._wire.reads for piece in read.pieces}
        for piece in pieces:
            owner, other = piece.owner, taken.get(piece.target)
            writes = owner is not None and (not owner.reads or self.owner_at in owner.written_at)
            if writes:
                raise Violation(f"{self.name} reads into memory of {owner}, who writes there")
            if other is not None:
                raise Violation(
                    f"{self.name} reads into memory of {piece.owner} that {other.name} may write"
                )


class _Rows:
    """Descriptors by their number."""

    def __init__(self, rows: np.ndarray) -> None:
        self._rows = rows.tolist()
        self.is_released = False
        self._firsts = [0]
        for *_, count in self._rows[:-1]:
            self._firsts.append(self._firsts[-1] + count)

    def at(self, indices: np.ndarray) -> list[tuple[int, int]]:
        """Address and size of some descriptors."""
        found = []
        for index in indices.tolist():
            row = bisect_right(self._firsts, index) - 1
            address, size, _, stride, count = self._rows[row]
            offset = index - self._firsts[row]
            assert 0 <= offset < count, f"descriptor {index} is none of this list's"
            found.append((address + offset * stride, size))
        return found
