# SPDX-License-Identifier: Apache-2.0
"""Everything that was seen, as values: what the checker judges and what a report tells.

Times are seconds since the history began.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from .faults import FaultKind
from .workload import Manner


@dataclass(frozen=True)
class Request:
    """A request, once it has ended or its client has given up.

    Attributes:
        round: in which round it was sent.
        asked: name of who was asked.
        turn: index of what was asked for.
        num_answers: how many answers were wanted.
        sent_s: when it was sent.
        ended_s: when the client heard the end, or left.
        deadline_s: how long it may take, but for the time in which engines were stopped.
        status: of the reply; `None` where there was none.
        answers: the text of each answer, as far as it came.
        complete: the server has said of each answer that it is complete.
        left: the client went away of its own accord.
        gave_up: nothing had ended when the client's patience did.
        error: what was said in place of an answer.
        strict: stopped engines are no excuse.
        must_answer: nothing is wrong any more, so that only an answer is right.
        label: what else is to be told.
    """

    round: int
    manner: Manner
    asked: str
    turn: int
    num_answers: int
    sent_s: float
    ended_s: float
    deadline_s: float
    status: int | None = None
    answers: tuple[str, ...] = ()
    complete: bool = False
    left: bool = False
    gave_up: bool = False
    error: str = ""
    strict: bool = False
    must_answer: bool = False
    label: str = ""

    @property
    def answered(self) -> bool:
        """Whether all of it was answered."""
        return self.status == 200 and self.complete


@dataclass(frozen=True)
class FaultSpan:
    """A fault that happened.

    Attributes:
        round: in which round.
        began_s: when it struck.
        healed_s: when everything ran again.
        detail: which process, which layout, what exactly.
    """

    round: int
    kind: FaultKind
    target: str
    began_s: float
    healed_s: float
    detail: str = ""


@dataclass(frozen=True)
class Strike:
    """A prefill engine was struck, while decode engines had requests that it was to compute.

    Attributes:
        round: in which round.
        label: of the requests.
        at_s: when.
        limit_s: how much later they have to have ended.
    """

    round: int
    label: str
    at_s: float
    limit_s: float


@dataclass(frozen=True)
class PoolReading:
    """What an engine's metrics say of its blocks.

    Attributes:
        incarnation: how many engines have had this seat, with this one.
        usage: share of its blocks that are in use.
        held_blocks: held for others to read.
        blocks_in_doubt: kept because a read may still write into them.
        running: requests that run.
        waiting: requests that wait.
        preemptions: since it started.
        early: prompts that it has waited for since it started.
        prefetched_bytes: that were read of prompts before they were offered, since it started.
    """

    at_s: float
    engine: str
    incarnation: int
    usage: float
    held_blocks: float
    blocks_in_doubt: float
    running: float
    waiting: float
    preemptions: float
    early: float
    prefetched_bytes: float

    @property
    def unfinished(self) -> float:
        """Requests that have not ended."""
        return self.running + self.waiting

    @property
    def is_whole(self) -> bool:
        """Whether every block is free."""
        return not (self.usage or self.held_blocks or self.blocks_in_doubt or self.unfinished)


@dataclass(frozen=True)
class Footprint:
    """What the processes of an engine take of the machine, added up."""

    round: int
    at_s: float
    engine: str
    incarnation: int
    rss_bytes: int
    descriptors: int
    threads: int


@dataclass(frozen=True)
class Lull:
    """A time without load, after a fault has been healed.

    Attributes:
        engines: that were to be whole at its end.
    """

    round: int
    began_s: float
    ended_s: float
    engines: tuple[str, ...]


@dataclass(frozen=True)
class End:
    """An engine has ended.

    Attributes:
        wanted: the nemesis killed it.
        how: in words.
    """

    round: int
    at_s: float
    engine: str
    incarnation: int
    wanted: bool
    how: str = ""


@dataclass(frozen=True)
class Work:
    """What engines of a seat went through, as their metrics have it; 0 of one that says nothing.

    Attributes:
        preemptions: requests that lost their blocks to others.
        early: prompts that engines have waited for.
        prefetched_bytes: that were read of prompts before they were offered.
    """

    preemptions: float = 0.0
    early: float = 0.0
    prefetched_bytes: float = 0.0


@dataclass
class History:
    """What was seen, in the order in which it was noted down; any thread may note something."""

    requests: list[Request] = field(default_factory=list)
    faults: list[FaultSpan] = field(default_factory=list)
    strikes: list[Strike] = field(default_factory=list)
    pools: list[PoolReading] = field(default_factory=list)
    footprints: list[Footprint] = field(default_factory=list)
    lulls: list[Lull] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)

    def work(self) -> dict[str, Work]:
        """Return what engines went through, by their seats."""
        # Counters begin anew with each engine that has the seat.
        last = {(each.engine, each.incarnation): each for each in self.pools}
        found: dict[str, Work] = {}
        for each in last.values():
            before = found.get(each.engine, Work())
            found[each.engine] = Work(
                before.preemptions + each.preemptions,
                before.early + each.early,
                before.prefetched_bytes + each.prefetched_bytes,
            )
        return found

    def as_json(self) -> dict[str, Any]:
        """Return it in terms of JSON."""
        return {name: [asdict(each) for each in entries] for name, entries in vars(self).items()}


class Recorder:
    """A history that is being written, with the clock that it goes by.

    Attributes:
        history: what was noted down; appending to a list is atomic.
        round: which one it is.
        began_at: the wall clock when the history began, which logs go by.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time
    ) -> None:
        self.history = History()
        self.round = 0
        self._clock = clock
        self._wall = wall
        self.restart_clock()

    def restart_clock(self) -> None:
        """Let the history begin now; nothing may have been noted down."""
        self.began_at = self._wall()
        self._began_s = self._clock()

    def now_s(self) -> float:
        """Return the time."""
        return self._clock() - self._began_s
