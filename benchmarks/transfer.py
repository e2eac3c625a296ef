# SPDX-License-Identifier: Apache-2.0
"""How fast a request is read, beside raw NIXL and memcpy of the same bytes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence

from .cases import TransferCase
from .lanes import Pair, Tables, duration_s, started_pairs
from .results import Metric, Part, Result
from .tables import block_table, pool_blocks
from .turns import Plan, take_turns


def measure_transfers(cases: Sequence[TransferCase], plan: Plan) -> Iterator[Result]:
    """Measure requests; cases of one shape are to stand together, and share processes."""
    for shape, group in itertools.groupby(cases, lambda case: case.shape):
        alike = list(group)
        pool = pool_blocks(max(shape.num_blocks(case.tokens) for case in alike))
        plan.say(f"transfer: starting engines for {shape}")
        with started_pairs(plan.lanes, shape, pool, plan.directory) as pairs:
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
    # Other blocks each time, the same for all lanes.
    rng = random.Random(case.name)
    blocks = shape.num_blocks(case.tokens)
    tables = []
    for _ in range(repetitions + 1):
        source, destination = (block_table(case.order, blocks, pool, rng) for _ in range(2))
        tables.append(Tables(source, destination, case.tokens))

    def measure(pair: Pair, repetition: int) -> Mapping[Metric, float]:
        if repetition == 0:
            # Nothing is measured that is wrong; and the handshake is over.
            pair.check(tables[-1])
        return {Metric.SECONDS: duration_s(pair.read([tables[repetition]]))}

    take_turns(pairs, repetitions, result, measure)
    return result
