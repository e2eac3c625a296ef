# SPDX-License-Identifier: Apache-2.0
"""Small cases for real: connectors, processes, NIXL."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchmarks import pauses
from benchmarks.answers import AnswersHost
from benchmarks.asynchronous import measure_networks
from benchmarks.cases import (
    AnswersCase,
    HandshakeCase,
    HoldingCase,
    IdleCase,
    NetworkCase,
    PauseCase,
    PeersCase,
    RequestPathCase,
    Shape,
    TransferCase,
)
from benchmarks.errors import BenchmarkError, NotEnoughMemoryError
from benchmarks.handshake import NO_STAGES, measure_handshakes, refuse_upstream
from benchmarks.idle import measure_idle
from benchmarks.network import Link
from benchmarks.pauses import measure_pauses
from benchmarks.peers import measure_peers
from benchmarks.request_path import measure_request_paths
from benchmarks.results import Metric
from benchmarks.specs import MEMCPY, OURS, RAW, UPSTREAM, UPSTREAM_AT_REST, Watch
from benchmarks.tables import TableOrder
from benchmarks.transfer import measure_transfers
from benchmarks.turns import Plan
from benchmarks.variants import ConnectorPair, RawPair, Tables
from tools.pdstack.layout import Layout

LANES = [OURS, UPSTREAM_AT_REST, RAW, MEMCPY]
# Blocks as CPU attention has them: a multiple of 32 tokens.
SHAPE = Shape(Layout(2, 1), Layout(1, 1), 2, 4, 64, 32)
CPU_TIMES = Metric.REQUEST_CPU_S, Metric.OWN_CPU_S
MLA = Shape(Layout(2, 1), Layout(1, 1), 2, 1, 576, 32, mla=True)
MIXED = replace(SHAPE, prefill_block_tokens=16, nhd=(True, False))


@pytest.fixture
def plan(server, tmp_path) -> Plan:
    """Two repetitions; of upstream's, the variant that leaves the cores to other tests."""
    return Plan(LANES, 2, tmp_path, print)


def test_transfers_are_measured_in_all_variants(plan):
    """Both connectors and both limits read the right bytes, and none is missing."""
    cases = [TransferCase(SHAPE, 100, TableOrder.SHUFFLED)]
    for result in measure_transfers(cases, plan):
        assert result.missing == {}
        assert list(result.samples) == [variant.name for variant in LANES]
        for metrics in result.samples.values():
            assert len(metrics[Metric.SECONDS]) == 2 and min(metrics[Metric.SECONDS]) > 0


@pytest.mark.parametrize("kind", [ConnectorPair, RawPair])
@pytest.mark.parametrize("shape", [SHAPE, MLA, MIXED], ids=["heads", "MLA", "mixed"])
def test_wrong_bytes_are_found(plan, tmp_path, kind, shape):
    """What was read from other blocks than it should have been is no measurement."""
    pair = kind(OURS if kind is ConnectorPair else RAW, shape, 16, tmp_path)
    try:
        pair.start()
        pair.fill()
        of_block, tokens = shape.blocks_tokens[0], 2 * shape.block_tokens
        source, other = [3, 5, 1, 2], [3, 6, 1, 2]
        count = tokens // of_block
        pair.check(Tables(source[:count], [7, 2], tokens))
        pair.read([Tables(other[:count], [7, 2], tokens)])
        pair.decode[0].post("check", [7, 2], source[:count], of_block)
        with pytest.raises(BenchmarkError, match="wrong bytes"):
            pair.decode[0].result()
    finally:
        pair.end()


def test_handshakes_and_requests_are_measured(plan):
    """Both connectors tell time and memory of a handshake, and CPU time of requests."""
    (handshake,) = measure_handshakes([HandshakeCase(SHAPE, 2000)], plan)
    assert handshake.missing == {} and RAW.name not in handshake.samples
    assert handshake.ratio(UPSTREAM_AT_REST.name, OURS.name, Metric.SECONDS) is not None
    assert all(min(each[Metric.PEAK_BYTES]) > 0 for each in handshake.samples.values())
    (path,) = measure_request_paths([RequestPathCase(SHAPE, 3, 32)], plan)
    assert path.missing == {}
    for variant, metrics in path.samples.items():
        for whole_s, own_s in zip(*(metrics[each] for each in CPU_TIMES), strict=True):
            # Ours posts on a thread of its own: the engine's spends nothing in NIXL.
            assert own_s == whole_s if variant == OURS.name else 0 < own_s < whole_s


def test_idle_workers_pauses_and_late_bytes_are_measured(plan):
    """Who has nothing to do, waits for a handshake, holds; and a report after the last byte."""
    plan = replace(plan, repetitions=1)
    (idle,) = measure_idle([IdleCase(SHAPE)], plan)
    read, held = measure_pauses(
        [PauseCase(SHAPE, 4, 32, connected=False, num_peers=2), HoldingCase(SHAPE, 3)], plan
    )
    (network,) = measure_networks([NetworkCase(SHAPE, 100, None, 1e-3)], plan)
    for result, metric in (
        (idle, Metric.IDLE_CPU),
        (read, Metric.LONGEST_PAUSE_S),
        (held, Metric.PAUSE_P99_S),
        (network, Metric.SECONDS),
    ):
        assert result.missing == {} and len(result.samples) >= 2
        assert all(samples[metric][0] > 0 for samples in result.samples.values())
    assert all(each[Metric.STEPS_AFTER_ARRIVAL][0] >= 0 for each in network.samples.values())


def test_worker_that_knows_many_engines_is_measured(plan):
    """With UCX's threads and without; engines are connected, and NIXL's part is in the whole."""
    shape = replace(SHAPE, prefill=Layout(1, 1))
    cases = [PeersCase(shape, count) for count in (1, 6)]
    few, more = measure_peers(cases, replace(plan, repetitions=1))
    for result in (few, more):
        assert result.missing == {} and len(result.samples) == 2
        for samples in result.samples.values():
            assert 0 < samples[Metric.NIXL_S][0] < samples[Metric.SECONDS][0]
            assert samples[Metric.THREADS][0] > 0 and samples[Metric.RESIDENT_BYTES][0] > 0
    for variant in few.samples:
        known = [result.samples[variant][Metric.DESCRIPTORS][0] for result in (few, more)]
        assert known[1] > known[0]


def test_answers_of_engines_with_stages_are_read(plan):
    """By ours; upstream's is not asked for what it cannot do."""
    vast = replace(SHAPE, prefill=Layout(4, 2), decode=Layout(2, 2))
    (result,) = measure_pauses([AnswersCase(vast, 3)], replace(plan, repetitions=1))
    assert list(result.samples) == [OURS.name]
    assert result.samples[OURS.name][Metric.PAUSE_P99_S][0] > 0
    assert set(result.missing.values()) == {NO_STAGES}


def test_answers_that_cannot_be_read_are_a_reason(plan, monkeypatch):
    """That variant is missing and says why, and the bench goes on."""
    monkeypatch.setattr(pauses, "_ANSWERS_HOST", "benchmarks.answers:Nobody")
    (result,) = measure_pauses([AnswersCase(SHAPE, 3)], plan)
    assert result.samples == {}
    assert "Nobody" in result.missing[OURS.name]


def test_answers_that_nothing_is_read_for_are_an_error(monkeypatch):
    """Nobody has measured a handshake then."""
    host = AnswersHost(SHAPE)
    nothing = SimpleNamespace(plan=SimpleNamespace(reads_of=lambda _: ()))
    monkeypatch.setattr(host._planner, "plan", lambda _: nothing)
    with pytest.raises(BenchmarkError, match="2 engines are read from with 0 legs"):
        host.read_answers(2, Watch())


def test_network_that_cannot_be_made_is_a_reason(plan, monkeypatch, tmp_path):
    """All variants are missing and say why; nothing is started."""
    monkeypatch.setenv("PATH", str(tmp_path))
    (result,) = measure_networks([NetworkCase(SHAPE, 100, Link(1), 1e-3)], plan)
    assert result.samples == {} and len(result.missing) == 3
    assert all("needs ip" in reason for reason in result.missing.values())


def test_upstream_is_spared_what_it_cannot_do():
    """Stages, and more descriptors than memory holds, are refused before anything starts."""
    shape = Shape(Layout(8, 1), Layout(1, 1), 80, 8, 128, 32, attention_planes=2)
    huge = HandshakeCase(shape, 100_000)
    with pytest.raises(NotEnoughMemoryError, match=r"16\.0 million descriptors"):
        refuse_upstream(UPSTREAM, huge, 16 << 30)
    refuse_upstream(OURS, huge, 1 << 30)
    stages = HandshakeCase(Shape(Layout(1, 2), Layout(1, 1), 2, 2, 64, 32), 100)
    with pytest.raises(BenchmarkError, match="pipeline"):
        refuse_upstream(UPSTREAM, stages, 16 << 30)


@pytest.mark.parametrize(
    ("version", "fits"), [("0.22.1+reshard.1.cpu", False), ("0.32.0+reshard.1.cpu", True)]
)
def test_upstream_needs_less_where_it_keeps_arrays(monkeypatch, version, fits):
    """Eight million descriptors take lists more than 4 GiB, and arrays less."""
    monkeypatch.setattr("importlib.metadata.version", lambda _: version)
    shape = Shape(Layout(1, 1), Layout(1, 1), 80, 8, 128, 32, attention_planes=1)
    case = HandshakeCase(shape, 100_000)
    if fits:
        refuse_upstream(UPSTREAM, case, 4 << 30)
        return
    with pytest.raises(NotEnoughMemoryError, match=r"8\.0 million descriptors"):
        refuse_upstream(UPSTREAM, case, 4 << 30)
