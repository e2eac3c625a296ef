# SPDX-License-Identifier: Apache-2.0
"""Reads over TCP, whose bytes come while engines step: how soon a step reports them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tools.pdstack.errors import NetworkError

from .cases import NetworkCase
from .errors import BenchmarkError
from .network import sites
from .results import Metric, Part, Result
from .specs import OURS, Variant, Watch
from .tables import pool_blocks
from .turns import Plan, take_turns
from .variants import ConnectorPair, Pair, Tables, duration_s, started_pairs

STRATEGIES = ("direct", "staged")


def network_variants(variants: Iterable[Variant]) -> list[Variant]:
    """Both ways of ours, and upstream's where its threads leave a core to others."""
    ours = [Variant(f"{OURS.name} ({name})", OURS.connector, name) for name in STRATEGIES]
    return ours + [variant for variant in variants if variant.at_rest]


def measure_networks(cases: Sequence[NetworkCase], plan: Plan) -> Iterator[Result]:
    """Measure requests; cases of one link are to stand together, and share processes."""
    for link, group in itertools.groupby(cases, lambda case: case.link):
        alike = list(group)
        shape, blocks = alike[0].shape, alike[0].shape.num_blocks(alike[0].tokens)
        plan.say(f"network: starting engines, {link or 'TCP, loopback'}")
        variants = network_variants(plan.variants)
        try:
            with (
                sites(link) as ends,
                started_pairs(variants, shape, pool_blocks(blocks), plan.directory, ends) as pairs,
            ):
                for case in alike:
                    plan.say(f"network: {case.name}")
                    yield _measure(case, pairs, plan.repetitions)
        except (BenchmarkError, NetworkError) as error:
            # No such link, or no engines over it: that is the end of these cases only.
            for case in alike:
                missing = {variant.name: str(error) for variant in variants}
                yield Result(Part.NETWORK, case.name, missing=missing)


def _measure(case: NetworkCase, pairs: list[Pair], repetitions: int) -> Result:
    shape = case.shape
    sizes = {"bytes": shape.bytes_read(case.tokens), "step_s": case.step_s}
    result = Result(Part.NETWORK, case.name, sizes)
    ids = list(range(1, 1 + shape.num_blocks(case.tokens)))
    tables = Tables(ids, ids, case.tokens)
    watch = Watch(step_s=case.step_s, computes=True, arrival_in=tuple(ids))

    def measure(pair: Pair, repetition: int) -> Mapping[Metric, float]:
        assert isinstance(pair, ConnectorPair)
        if repetition == 0:
            pair.check(tables)
        readings = pair.read([tables], watch)
        after = [each.steps_after_arrival for each in readings]
        return {
            Metric.SECONDS: duration_s(readings),
            Metric.STEPS_AFTER_ARRIVAL: max(count for count in after if count is not None),
        }

    take_turns(pairs, repetitions, result, measure)
    return result
