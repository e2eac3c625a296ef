# SPDX-License-Identifier: Apache-2.0
"""The planner of the nemesis: from a seed to rounds of faults, without any I/O.

A round is: load, a fault that is healed, then a lull in which everything must come back. How long a
restart takes is the machine's matter, so rounds have no times, but lengths: the seed says which
rounds follow one another, and the clock how many of them there is time for.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tools.pdstack.layout import Layout

from .faults import (
    EARLY,
    FLEET,
    RELAYOUTS,
    ROUTER,
    TARGET_ROLES,
    Fault,
    FaultKind,
    Placement,
    Role,
)
from .forgery import Forgery

HELD_READ_LIMIT_S = 60.0
"""Within this time a request ends whose blocks are at an engine that does not answer, and that is
then computed: longer than the read's own deadline, by as much as a slow machine needs."""

LONGEST_HOLD_S = 27.0
"""So long a worker is stopped that others read from: until their reads have run out of time, and
not until they cut the connection where those keep too many blocks in doubt, 10 s later. Over that,
UCX ends a worker that goes on."""

FAILED_READ_LIMIT_S = LONGEST_HOLD_S - 1.0
"""Within this time a request ends that fails: because of its deadline, and not because the worker
goes on. One that is computed may have to wait for blocks until then."""

_SHORT_HOLDS_S = (2.0, 15.0)
_LEADS_S = (3.0, 8.0)
_FORGERIES_A_ROUND = 4

PLACEMENTS: tuple[Placement, ...] = (
    Placement(Layout(tp_size=1, pp_size=2)),
    Placement(Layout(tp_size=2, pp_size=1)),
    Placement(Layout(tp_size=1, pp_size=1)),
    Placement(Layout(tp_size=1, pp_size=2), stage_layers=(1, 3)),
)
"""The layouts that engines have; each of the four that a soak starts has another one."""


@dataclass(frozen=True)
class Seat:
    """A place in the stack for an engine, which others may follow.

    Attributes:
        placement: how the first one is laid out.
        early: whether requests may be sent to it and another engine at once.
        strategy: its `transfer_strategy`.
        seeded: whether its answers begin with the prefill engine's token.
        offloads: whether it also keeps blocks in host memory, and loads them from there.
    """

    name: str
    role: Role
    placement: Placement
    early: bool = True
    strategy: str = "auto"
    seeded: bool = True
    offloads: bool = False


SEATS: tuple[Seat, ...] = (
    Seat("prefill-1", Role.PREFILL, PLACEMENTS[0]),
    Seat("prefill-2", Role.PREFILL, PLACEMENTS[1], early=False, offloads=True),
    Seat("decode-1", Role.DECODE, PLACEMENTS[2]),
    Seat("decode-2", Role.DECODE, PLACEMENTS[3], strategy="packed", seeded=False),
)


@dataclass(frozen=True)
class Round:
    """A stretch of load with a fault in it.

    Attributes:
        number: from 1; round 0 is the one without a fault, which nobody plans.
        lead_s: how long there is load before the fault.
        tail_s: how long there is load after it has been healed.
    """

    number: int
    fault: Fault
    lead_s: float
    tail_s: float


def plan(seed: int, kinds: Sequence[FaultKind], seats: Sequence[Seat]) -> Iterator[Round]:
    """Yield rounds for ever: each kind of fault once, in some order, then each once more.

    Args:
        seed: other rounds for another number.
        kinds: faults to choose from, at least one.
        seats: the engines at the start, of each role at least one.
    """
    rng = random.Random(f"rounds {seed}")
    placements = {seat.name: seat.placement for seat in seats}
    numbers = itertools.count(1)
    while True:
        for kind in rng.sample(sorted(kinds, key=list(FaultKind).index), len(kinds)):
            fault = _fault(rng, kind, seats, placements)
            if fault.placement is not None:
                placements[fault.target] = fault.placement
            yield Round(next(numbers), fault, rng.uniform(*_LEADS_S), rng.uniform(*_LEADS_S))


def _fault(
    rng: random.Random,
    kind: FaultKind,
    seats: Sequence[Seat],
    placements: Mapping[str, Placement],
) -> Fault:
    role = TARGET_ROLES.get(kind)
    targets = [
        seat.name for seat in seats if seat.role is role and (seat.early or kind not in EARLY)
    ]
    everybody = FLEET if kind is FaultKind.ROLL else ROUTER
    target = rng.choice(targets) if targets else everybody
    # Who reads from a stopped worker has to give up while it is still stopped.
    holds_reads = kind is FaultKind.STOP_PREFILL_WORKER
    hold_s = LONGEST_HOLD_S if holds_reads else rng.uniform(*_SHORT_HOLDS_S)
    placement = None
    if kind in RELAYOUTS:
        placement = rng.choice([each for each in PLACEMENTS if each != placements[target]])
    forgeries: tuple[Forgery, ...] = ()
    if kind is FaultKind.FORGED_PARAMS:
        forgeries = tuple(rng.sample(list(Forgery), _FORGERIES_A_ROUND))
    return Fault(kind, target, hold_s, rng.randrange(4), placement, forgeries)
