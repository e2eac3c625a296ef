# SPDX-License-Identifier: Apache-2.0
"""Histories in which everything holds, for something to be planted in."""

from __future__ import annotations

from typing import Any

from tools.soak.faults import FaultKind
from tools.soak.history import (
    End,
    FaultSpan,
    Footprint,
    History,
    Lull,
    PoolReading,
    Request,
)
from tools.soak.workload import Manner

ANSWERS = ("the first answer", "another one", "and a third")
ENGINES = ("prefill-1", "decode-1")


def request(**fields: Any) -> Request:
    """Return a request that was answered, with other fields as given."""
    turn = fields.get("turn", 0)
    defaults: dict[str, Any] = {
        "round": 1,
        "manner": Manner.TURN,
        "asked": "router",
        "turn": turn,
        "num_answers": 1,
        "sent_s": 10.0,
        "ended_s": 12.0,
        "deadline_s": 60.0,
        "status": 200,
        "answers": (ANSWERS[turn],),
        "complete": True,
    }
    return Request(**{**defaults, **fields})


def pool(**fields: Any) -> PoolReading:
    """Return the reading of a pool that is whole, with other fields as given."""
    defaults: dict[str, Any] = {
        "at_s": 55.0,
        "engine": ENGINES[0],
        "incarnation": 1,
        "usage": 0.0,
        "held_blocks": 0.0,
        "blocks_in_doubt": 0.0,
        "running": 0.0,
        "waiting": 0.0,
        "preemptions": 3.0,
        "early": 2.0,
        "prefetched_bytes": 4096.0,
    }
    return PoolReading(**{**defaults, **fields})


def footprint(**fields: Any) -> Footprint:
    """Return what an engine takes of the machine, with other fields as given."""
    defaults: dict[str, Any] = {
        "round": 1,
        "at_s": 60.0,
        "engine": ENGINES[0],
        "incarnation": 1,
        "rss_bytes": 1 << 30,
        "descriptors": 200,
        "threads": 80,
    }
    return Footprint(**{**defaults, **fields})


def fault(**fields: Any) -> FaultSpan:
    """Return a fault, with other fields as given."""
    defaults: dict[str, Any] = {
        "round": 1,
        "kind": FaultKind.STOP_PREFILL,
        "target": ENGINES[0],
        "began_s": 20.0,
        "healed_s": 40.0,
    }
    return FaultSpan(**{**defaults, **fields})


def sound_history() -> History:
    """Return a history of one round in which everything holds."""
    return History(
        requests=[
            request(),
            request(turn=1, num_answers=2, answers=(ANSWERS[1],) * 2),
            request(turn=2, answers=(ANSWERS[2][:3],), complete=False, left=True),
            request(status=500, answers=(), complete=False, error="it could not be read"),
            request(status=None, answers=(), complete=False, error="connection lost"),
        ],
        faults=[fault()],
        pools=[
            pool(at_s=30.0, usage=0.8, held_blocks=4.0, running=2.0),
            *(pool(engine=engine) for engine in ENGINES),
        ],
        footprints=[footprint(engine=engine) for engine in ENGINES],
        lulls=[Lull(round=1, began_s=50.0, ended_s=56.0, engines=ENGINES)],
        ends=[End(round=1, at_s=20.0, engine=ENGINES[1], incarnation=1, wanted=True, how="killed")],
    )
