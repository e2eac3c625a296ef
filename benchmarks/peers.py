# SPDX-License-Identifier: Apache-2.0
"""What it costs a decode worker to know many prefill engines, and one more."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

from .cases import PeersCase
from .children import call_all
from .errors import BenchmarkError
from .results import Metric, Part, Result
from .specs import NO_UCX_THREADS, PeersUsage, Variant
from .tables import pool_blocks
from .turns import Plan
from .variants import ConnectorPair

_SOURCE_PROCESSES = 4
"""All agents that are read from are theirs: each costs memory and threads there, not here."""

_FURTHER = 4
"""Engines that are connected one by one, at each number, to be timed."""


class PeersPair(ConnectorPair):
    """A decode worker, and a few processes that are as many engines as are wanted."""

    factory = "benchmarks.peers_host:PeersHost"

    def start_engines(self, count: int) -> None:
        """Start everything; the decode worker has yet to hear of the engines."""
        self.start_prefill(_SOURCE_PROCESSES)
        self.start_decode()
        shares = [count // _SOURCE_PROCESSES] * _SOURCE_PROCESSES
        shares[0] += count - sum(shares)
        described = []
        for child, share in zip(self.prefill, shares, strict=True):
            described += call_all([child], "be_many", share)[0]
        call_all(self.decode, "hear_of", described)

    def read_from(self, count: int) -> PeersUsage:
        """Read a block from so many engines more, one after another."""
        (usage,) = call_all(self.decode, "read_from", count)
        assert isinstance(usage, PeersUsage)
        return usage


def measure_peers(cases: Sequence[PeersCase], plan: Plan) -> Iterator[Result]:
    """Measure a worker that comes to know ever more engines, and read from each once.

    With UCX's threads in its agents, which is the default, and without.
    """
    if not cases:
        return
    results = [Result(Part.PEERS, case.name, {"peers": case.num_peers}) for case in cases]
    variants = [variant for variant in plan.connectors() if variant.connector == "ours"][:1]
    for variant in (
        *variants,
        *(replace(NO_UCX_THREADS, strategy=each.strategy) for each in variants),
    ):
        try:
            for _ in range(plan.repetitions):
                for result, usage in zip(results, _measure(variant, cases, plan), strict=True):
                    result.add(
                        variant.name,
                        {
                            Metric.RESIDENT_BYTES: usage.resident_bytes,
                            Metric.DESCRIPTORS: usage.num_descriptors,
                            Metric.PEAK_DESCRIPTORS: usage.peak_descriptors,
                            Metric.THREADS: usage.num_threads,
                            Metric.SECONDS: statistics.median(usage.handshakes_s),
                            Metric.NIXL_S: statistics.median(usage.nixl_s),
                        },
                    )
        except BenchmarkError as error:
            for result in results:
                result.give_up(variant.name, str(error))
    yield from results


def _measure(variant: Variant, cases: Sequence[PeersCase], plan: Plan) -> Iterator[PeersUsage]:
    """One worker, with more and more engines; each number but the first includes those before."""
    counts = [case.num_peers for case in cases]
    shape = cases[0].shape
    pair = PeersPair(variant, shape, pool_blocks(1), plan.directory)
    try:
        pair.start_engines(max(counts) + _FURTHER * len(counts))
        known = 0
        for case in cases:
            plan.say(f"peers: {case.name}, {variant.name}")
            usage = pair.read_from(max(case.num_peers - known, 0))
            # What is timed are those after it.
            further = pair.read_from(_FURTHER)
            known = max(case.num_peers, known) + _FURTHER
            yield replace(usage, handshakes_s=further.handshakes_s, nixl_s=further.nixl_s)
    finally:
        pair.end()
