# SPDX-License-Identifier: Apache-2.0
"""Targets and verdicts."""

from __future__ import annotations

import pytest

from benchmarks.results import Metric, Part, Result
from benchmarks.targets import judge

FOUR_KIB = {"chunk_bytes": 4096}


def result(part, case, sizes, missing=None, **samples) -> Result:
    """A result with one metric, its lanes as keywords."""
    made = Result(part, case, sizes, missing=missing or {})
    metric = {Part.REQUEST_PATH: Metric.REQUEST_CPU_S, Part.END_TO_END: Metric.TTFT_S}
    for lane, values in samples.items():
        for value in values:
            made.add(lane.replace("_", " "), {metric.get(part, Metric.SECONDS): value})
    return made


@pytest.mark.parametrize(("ours", "met"), [(1.0, True), (1.1, False)])
@pytest.mark.parametrize(("chunk_bytes", "wanted"), [(4096, 4.0), (8192, 2.0)])
def test_transfer_is_held_against_upstreams(chunk_bytes, wanted, ours, met):
    """Four times upstream's speed is asked for with chunks of 4 KiB, and twice with 8 KiB."""
    case = "TP2->TP1, blocks of 32, 8k tokens, contiguous"
    size = {"chunk_bytes": chunk_bytes}
    (verdict,) = judge([result(Part.TRANSFER, case, size, ours=[ours], upstream=[wanted])])
    assert (verdict.wanted, verdict.met) == (wanted, met)
    assert verdict.measured.median == pytest.approx(wanted / ours)


def test_shuffled_tables_need_not_be_faster():
    """Where nothing can be merged, as fast as upstream's is enough."""
    case = "TP4->TP1, blocks of 32, 8k tokens, shuffled"
    (verdict,) = judge([result(Part.TRANSFER, case, FOUR_KIB, ours=[1.0], upstream=[1.0])])
    assert (verdict.wanted, verdict.met) == (1.0, True)


def test_limits_are_those_of_the_machine():
    """Without a difference of layouts, the limits are raw NIXL and memcpy."""
    case = "TP1->TP1, blocks of 32, 8k tokens, contiguous"
    samples = dict(ours=[1.0], upstream=[1.0], raw_NIXL=[0.95], memcpy=[0.5])
    raw, memcpy = judge([result(Part.TRANSFER, case, FOUR_KIB, **samples)])
    assert (raw.wanted, raw.met) == (0.9, True)
    assert (memcpy.wanted, memcpy.met) == (0.6, False)


def test_less_cpu_time_is_better():
    """Half of upstream's CPU time is asked for with 256 requests in flight, not with fewer."""
    few, many = (
        result(Part.REQUEST_PATH, f"{n} in flight", {"requests": n}, ours=[0.6], upstream=[1.0])
        for n in (16, 256)
    )
    (verdict,) = judge([few, many])
    assert (verdict.case, verdict.wanted, verdict.met) == (many.case, 0.5, False)


def test_handshakes_of_many_blocks_are_to_be_flat():
    """Time for many blocks is compared with that for few, in the same layout and model."""
    sizes = [{"blocks": blocks, "layers": 80} for blocks in (1_000, 100_000)]
    few, many = (
        result(
            Part.HANDSHAKE,
            f"TP1->TP1, 80 layers x {size['blocks']} blocks",
            size,
            ours=[value],
            upstream=[300.0],
        )
        for size, value in zip(sizes, (1.0, 2.0), strict=True)
    )
    time, memory, flat_time, flat_memory = judge([few, many])
    assert (time.case, time.met) == (many.case, True)
    assert memory.met is None and flat_memory.met is None
    assert (flat_time.measured.median, flat_time.met) == (2.0, False)


def test_what_was_not_measured_is_not_judged():
    """A lane that is missing makes no verdict, but a reason."""
    size = {"blocks": 100_000, "layers": 80}
    missing = {"upstream": "no memory\nmore"}
    verdicts = judge([result(Part.HANDSHAKE, "TP1->TP1", size, missing, ours=[1.0])])
    assert [(each.met, each.reason) for each in verdicts] == [(None, "no memory")] * 2


def test_first_tokens_are_to_be_no_later():
    """End to end, the time to first token is compared."""
    (verdict,) = judge([result(Part.END_TO_END, "1 request/s", {}, ours=[1.0], upstream=[1.1])])
    assert verdict.met
