# SPDX-License-Identifier: Apache-2.0
"""What can be done to a stack, as values: kinds of faults, and one fault on one target."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from tools.pdstack.errors import UsageError
from tools.pdstack.layout import Layout

from .forgery import Forgery


class FaultKind(str, Enum):
    """A kind of fault; the value is its name on the command line."""

    STOP_PREFILL_WORKER = "stop-prefill-worker"
    STOP_DECODE_WORKER = "stop-decode-worker"
    STOP_PREFILL = "stop-prefill"
    STOP_DECODE = "stop-decode"
    KILL_PREFILL = "kill-prefill"
    KILL_DECODE = "kill-decode"
    RELAYOUT_PREFILL = "relayout-prefill"
    RELAYOUT_DECODE = "relayout-decode"
    DROP_FRAMES = "drop-frames"
    DUPLICATE_FRAMES = "duplicate-frames"
    FORGED_PARAMS = "forged-params"
    MIXED_PARAMS = "mixed-params"
    KILL_ROUTER = "kill-router"
    ROLL = "roll"
    EARLY_STOP_KNOWN = "early-stop-known"
    EARLY_STOP_COMPUTING = "early-stop-computing"
    EARLY_STOP_OFFERED = "early-stop-offered"
    EARLY_KILL_KNOWN = "early-kill-known"
    EARLY_KILL_COMPUTING = "early-kill-computing"
    EARLY_KILL_OFFERED = "early-kill-offered"
    EARLY_RESTART_KNOWN = "early-restart-known"
    EARLY_RESTART_COMPUTING = "early-restart-computing"
    EARLY_RESTART_OFFERED = "early-restart-offered"

    def __str__(self) -> str:
        return self.value


class Role(str, Enum):
    """What an engine is there for."""

    PREFILL = "prefill"
    DECODE = "decode"

    def __str__(self) -> str:
        return self.value


class PromptState(str, Enum):
    """How far P is with a prompt that a decode engine waits for."""

    KNOWN = "known"
    COMPUTING = "computing"
    OFFERED = "offered"

    def __str__(self) -> str:
        return self.value


class Blow(str, Enum):
    """What is done to P while it is that far."""

    STOP = "stop"
    KILL = "kill"
    RESTART = "restart"

    def __str__(self) -> str:
        return self.value


DESCRIPTIONS: Mapping[FaultKind, str] = {
    FaultKind.STOP_PREFILL_WORKER: "a worker of P is stopped while decode engines read from it",
    FaultKind.STOP_DECODE_WORKER: "a worker of D is stopped, and goes on",
    FaultKind.STOP_PREFILL: "all processes of P are stopped, and go on",
    FaultKind.STOP_DECODE: "all processes of D are stopped, and go on",
    FaultKind.KILL_PREFILL: "P is killed, and started again",
    FaultKind.KILL_DECODE: "D is killed, and started again",
    FaultKind.RELAYOUT_PREFILL: "P is killed, and started with another layout",
    FaultKind.RELAYOUT_DECODE: "D is killed, and started with another layout",
    FaultKind.DROP_FRAMES: "handshakes whose requests or replies are lost",
    FaultKind.DUPLICATE_FRAMES: "handshakes whose requests or replies come twice",
    FaultKind.FORGED_PARAMS: "kv_transfer_params that nobody returned",
    FaultKind.MIXED_PARAMS: "kv_transfer_params of another request",
    FaultKind.KILL_ROUTER: "the router is killed, and started again",
    FaultKind.ROLL: "each engine is taken out, ends, and is followed, and no request may fail",
    FaultKind.EARLY_STOP_KNOWN: "P is stopped while prompts wait there to be computed",
    FaultKind.EARLY_STOP_COMPUTING: "P is stopped while it computes, and preempts, prompts",
    FaultKind.EARLY_STOP_OFFERED: "P is stopped while decode engines have yet to see its offers",
    FaultKind.EARLY_KILL_KNOWN: "P is killed while prompts wait there, and started later",
    FaultKind.EARLY_KILL_COMPUTING: "P is killed while it computes prompts, and started later",
    FaultKind.EARLY_KILL_OFFERED: "P is killed before its offers are seen, and started later",
    FaultKind.EARLY_RESTART_KNOWN: "P is killed while prompts wait there, and started at once",
    FaultKind.EARLY_RESTART_COMPUTING: "P is killed while it computes prompts, and started at once",
    FaultKind.EARLY_RESTART_OFFERED: "P is killed before its offers are seen, and started at once",
}

EARLY: Mapping[FaultKind, tuple[Blow, PromptState]] = {
    FaultKind(f"early-{blow}-{state}"): (blow, state) for blow in Blow for state in PromptState
}
"""Faults of an engine whose requests are sent to it and to a decode engine at once."""

TARGET_ROLES: Mapping[FaultKind, Role] = {
    FaultKind.STOP_PREFILL_WORKER: Role.PREFILL,
    FaultKind.STOP_DECODE_WORKER: Role.DECODE,
    FaultKind.STOP_PREFILL: Role.PREFILL,
    FaultKind.STOP_DECODE: Role.DECODE,
    FaultKind.KILL_PREFILL: Role.PREFILL,
    FaultKind.KILL_DECODE: Role.DECODE,
    FaultKind.RELAYOUT_PREFILL: Role.PREFILL,
    FaultKind.RELAYOUT_DECODE: Role.DECODE,
    FaultKind.DROP_FRAMES: Role.PREFILL,
    FaultKind.DUPLICATE_FRAMES: Role.PREFILL,
    FaultKind.FORGED_PARAMS: Role.PREFILL,
    FaultKind.MIXED_PARAMS: Role.PREFILL,
    **dict.fromkeys(EARLY, Role.PREFILL),
}
"""Whom a fault strikes; of those that are not here, one strikes the router, and one all engines."""

STOPS = frozenset(
    {
        FaultKind.STOP_PREFILL_WORKER,
        FaultKind.STOP_DECODE_WORKER,
        FaultKind.STOP_PREFILL,
        FaultKind.STOP_DECODE,
        *(kind for kind, (blow, _) in EARLY.items() if blow is Blow.STOP),
    }
)
"""Faults after which the very same processes go on: who needs them has to wait until then."""

RELAYOUTS = frozenset({FaultKind.RELAYOUT_PREFILL, FaultKind.RELAYOUT_DECODE})
KILLS = RELAYOUTS | {FaultKind.KILL_PREFILL, FaultKind.KILL_DECODE}
MEDDLING = frozenset({FaultKind.FORGED_PARAMS, FaultKind.MIXED_PARAMS})
FRAMES = frozenset({FaultKind.DROP_FRAMES, FaultKind.DUPLICATE_FRAMES})

ROUTER = "router"
"""The target of a fault that strikes no engine."""

FLEET = "fleet"
"""The target of one that strikes all of them."""


@dataclass(frozen=True, order=True)
class Placement:
    """How an engine is laid out.

    Attributes:
        layout: its parallel sizes.
        stage_layers: layers of each pipeline stage, as vLLM is told; empty for its own choice.
    """

    layout: Layout
    stage_layers: tuple[int, ...] = ()

    def __str__(self) -> str:
        uneven = f" ({','.join(map(str, self.stage_layers))})" if self.stage_layers else ""
        return f"{self.layout}{uneven}"


@dataclass(frozen=True)
class Fault:
    """One fault, as it is planned.

    Attributes:
        target: name of an engine, or `ROUTER`.
        hold_s: how long it lasts before it is healed.
        worker: of a stopped worker: which one, counted round and round.
        placement: of a restart: how the engine is laid out afterwards; `None` for as before.
        forgeries: what is done to parameters, one request for each.
    """

    kind: FaultKind
    target: str
    hold_s: float
    worker: int = 0
    placement: Placement | None = None
    forgeries: tuple[Forgery, ...] = ()


def parse_kinds(text: str) -> tuple[FaultKind, ...]:
    """Understand a list of faults: names with commas between them, or beginnings of names.

    Raises:
        UsageError: a word is the beginning of no name.
    """
    found: dict[FaultKind, None] = {}
    for word in filter(None, (each.strip() for each in text.split(","))):
        kinds = [kind for kind in FaultKind if word == kind.value]
        kinds = kinds or [kind for kind in FaultKind if kind.value.startswith(word)]
        if not kinds:
            known = ", ".join(kind.value for kind in FaultKind)
            raise UsageError(f"no fault begins with {word!r}; there are {known}")
        found.update(dict.fromkeys(kinds))
    if not found:
        raise UsageError("no fault was named; leave --faults out for all of them")
    return tuple(found)


def names_of(kinds: Iterable[FaultKind]) -> str:
    """Return what `parse_kinds` understands as these faults."""
    return ",".join(kind.value for kind in kinds)
