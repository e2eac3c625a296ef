# SPDX-License-Identifier: Apache-2.0
"""How fast a request is read, beside raw NIXL and memcpy of the same bytes."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence

from .cases import TransferCase
from .results import Metric, Part, Result
from .tables import block_table, pool_blocks
from .turns import Plan, take_turns
from .variants import Pair, Tables, duration_s, started_pairs

_READS = 3
"""In each turn, of which the median counts: a process that was stopped until then, as no engine's
is, finds nothing of its own in the processor's caches."""


def measure_transfers(cases: Sequence[TransferCase], plan: Plan) -> Iterator[Result]:
    """Measure requests; cases of one shape are to stand together, and share processes."""
    for shape, group in itertools.groupby(cases, lambda case: case.shape):
        alike = list(group)
        pool = pool_blocks(max(shape.num_blocks(case.tokens) for case in alike))
        plan.say(f"transfer: starting engines for {shape}")
        with started_pairs(plan.variants, shape, pool, plan.directory) as pairs:
            for case in alike:
                plan.say(f"transfer: {case.name}")
                yield _measure(case, pool, pairs, plan.repetitions)


def _measure(case: TransferCase, pool: int, pairs: list[Pair], repetitions: int) -> Result:
    shape = case.shape
    result = Result(
        Part.TRANSFER,
        case.name,
        {
            "bytes": shape.bytes_read(case.tokens),
            "chunk_bytes": shape.chunk_bytes,
            "chunks": shape.num_chunks(case.tokens),
            "tokens": case.tokens,
            "layers": shape.num_layers,
        },
    )
    rng = random.Random(case.name)
    blocks = shape.num_blocks(case.tokens)

    def other_blocks() -> Tables:
        source = block_table(
            case.order, shape.prefill_blocks(blocks), shape.prefill_blocks(pool), rng
        )
        return Tables(source, block_table(case.order, blocks, pool, rng), case.tokens)

    # The same for all variants.
    checked = other_blocks()
    tables = [[other_blocks() for _ in range(_READS)] for _ in range(repetitions)]

    def measure(pair: Pair, repetition: int) -> Mapping[Metric, float]:
        if repetition == 0:
            # Nothing is measured that is wrong; and the handshake is over.
            pair.check(checked)
        each_s = [duration_s(pair.read([wanted])) for wanted in tables[repetition]]
        return {Metric.SECONDS: statistics.median(each_s)}

    take_turns(pairs, repetitions, result, measure)
    return result
