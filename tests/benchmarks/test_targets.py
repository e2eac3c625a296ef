# SPDX-License-Identifier: Apache-2.0
"""Targets and verdicts."""

from __future__ import annotations

import pytest

from benchmarks.results import Metric, Part, Result
from benchmarks.targets import goals, judge

LARGE = {"chunk_bytes": 4096, "bytes": 4 << 20}
METRICS = {
    Part.REQUEST_PATH: Metric.REQUEST_CPU_S,
    Part.IDLE: Metric.IDLE_CPU,
    Part.PAUSES: Metric.LONGEST_PAUSE_S,
    Part.PEERS: Metric.SECONDS,
    Part.NETWORK: Metric.STEPS_AFTER_ARRIVAL,
}


def result(part, case, sizes, missing=None, **samples) -> Result:
    """A result with one metric, its variants as keywords."""
    made = Result(part, case, sizes, missing=missing or {})
    for variant, values in samples.items():
        for value in values:
            made.add(variant.replace("_", " "), {METRICS.get(part, Metric.SECONDS): value})
    return made


def judged(*results: Result) -> dict[str, bool | None]:
    """Which targets are met, by what they say."""
    return {each.target: each.met for each in judge(results)}


@pytest.mark.parametrize(("ours", "met"), [(1.0, True), (1.1, False)])
@pytest.mark.parametrize(("chunk_bytes", "wanted"), [(4096, 4.0), (8192, 2.0)])
def test_transfer_is_held_against_upstreams(chunk_bytes, wanted, ours, met):
    """Four times upstream's speed is asked for with chunks of 4 KiB, and twice with 8 KiB."""
    case = "TP2->TP1, blocks of 32, 8k tokens, contiguous"
    size = {**LARGE, "chunk_bytes": chunk_bytes}
    _, verdict = judge([result(Part.TRANSFER, case, size, ours=[ours], upstream=[wanted])])
    assert (verdict.wanted, verdict.met) == (wanted, met)
    assert verdict.measured.median == pytest.approx(wanted / ours)


@pytest.mark.parametrize(("at_rest", "met"), [(1.0, True), (0.9, False)])
@pytest.mark.parametrize("order", ["contiguous", "shuffled"])
def test_no_row_may_be_slower_than_upstream_at_rest(at_rest, met, order):
    """Every transfer is compared with what upstream's does where its threads rest."""
    case = f"TP1->TP2, blocks of 32, 1k tokens, {order}"
    small = {**LARGE, "bytes": 1 << 20}
    samples = dict(ours=[1.0], upstream_at_rest=[at_rest])
    assert judged(result(Part.TRANSFER, case, small, **samples)) == {
        "our GB/s / that of upstream at rest": met
    }


def test_shuffled_tables_and_small_reads_have_no_other_target():
    """Where nothing can be merged, or little is read, being as fast is enough."""
    for case, size in (
        ("TP4->TP1, blocks of 32, 8k tokens, shuffled", LARGE),
        ("TP4->TP1, blocks of 32, 1k tokens, contiguous", {**LARGE, "bytes": 1 << 20}),
    ):
        assert len(judge([result(Part.TRANSFER, case, size, ours=[1.0], upstream=[1.0])])) == 1


def test_limit_is_that_of_nixl():
    """Without a difference of layouts, the limit is raw NIXL."""
    case = "TP1->TP1, blocks of 32, 8k tokens, contiguous"
    samples = dict(ours=[1.0], upstream_at_rest=[1.0], raw_NIXL=[0.85])
    _, raw = judge([result(Part.TRANSFER, case, LARGE, **samples)])
    assert (raw.wanted, raw.met) == (0.9, False)


def test_less_cpu_time_is_better():
    """A tenth of upstream's CPU time is asked for with 256 requests in flight, not with fewer."""
    few, many = (
        result(
            Part.REQUEST_PATH,
            f"{n} in flight",
            {"requests": n},
            ours=[0.2],
            upstream=[1.0],
            upstream_at_rest=[0.5],
        )
        for n in (16, 256)
    )
    engine, at_rest, worker = judge([few, many])
    assert {engine.case, at_rest.case, worker.case} == {many.case}
    assert (engine.wanted, engine.met, at_rest.met, worker.met) == (0.1, False, True, None)


@pytest.mark.parametrize(
    ("part", "variant", "good", "bad"),
    [
        (Part.IDLE, "ours", 0.009, 0.011),
        (Part.PAUSES, "ours", 0.9e-3, 1.1e-3),
        (Part.PEERS, "ours", 9e-3, 11e-3),
        (Part.NETWORK, "ours (staged)", 1, 2),
    ],
)
def test_some_figures_have_a_limit_of_their_own(part, variant, good, bad):
    """An idle worker, a pause and a report are compared with nobody's."""
    for value, met in ((good, True), (bad, False)):
        (verdict,) = judge([result(part, "a case", {}, **{variant: [value]}, upstream=[0.0])])
        assert verdict.met is met


def test_many_engines_are_to_cost_what_few_do():
    """Memory, descriptors and threads, for each setting of UCX's threads; others are not judged."""
    results = []
    for count, descriptors in ((1, 1.0), (8, 100.0), (200, 160.0)):
        made = Result(Part.PEERS, f"TP1->TP1, {count} engines", {"peers": count})
        for variant, times in (("ours", 1.0), ("ours, no UCX threads", 0.5)):
            value = descriptors * (times if count == 200 else 1.0)
            made.add(variant, {Metric.DESCRIPTORS: value, Metric.RESIDENT_BYTES: 1.0})
        results.append(made)
    verdicts = {each.target: each for each in judge(results)}
    ours = verdicts["descriptors at rest / that for 8 engines, ours"]
    other = verdicts["descriptors at rest / that for 8 engines, ours, no UCX threads"]
    assert (ours.measured.median, ours.met) == (1.6, False)
    assert (other.measured.median, other.met) == (0.8, True)
    assert verdicts["memory / that for 8 engines, ours"].met is True
    assert verdicts["threads / that for 8 engines, ours"].met is None
    assert not any("that for 8" in each.target for each in judge(results[:2]))


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
    flat_time, flat_memory = judge([few, many])
    assert flat_memory.met is None
    assert (flat_time.measured.median, flat_time.met) == (2.0, False)


def test_what_was_not_measured_is_not_judged():
    """A variant that is missing makes no verdict, but a reason."""
    size = {"bytes": 1 << 20, "chunk_bytes": 4 << 10}
    missing = {"upstream at rest": "no memory\nmore"}
    verdicts = judge([result(Part.TRANSFER, "TP1->TP1, shuffled", size, missing, ours=[1.0])])
    assert [(each.met, each.reason) for each in verdicts] == [(None, "no memory")]
    (goal,) = goals(verdicts)
    assert goal.judged == [] and goal.worst is verdicts[0]


def test_first_tokens_are_to_be_earlier_and_others_no_later():
    """End to end, the time to first token is compared, and the longest times between tokens."""
    made = Result(Part.END_TO_END, "1 request/s")
    for variant, first_s, between_s in (("ours", 0.9, 1.1), ("upstream at rest", 1.0, 1.0)):
        made.add(variant, {Metric.TTFT_S: first_s, Metric.ITL_P99_S: between_s})
    assert [each.met for each in judge([made])] == [True, False]


def test_early_requests_are_held_against_serial_ones():
    """Earlier first tokens, and hardly fewer of all; where neither was tried, nothing is said."""
    made = Result(Part.END_TO_END, "1 request/s")
    for variant, first_s, tokens_s in (("ours", 1.0, 10.0), ("ours, early", 0.9, 9.6)):
        made.add(variant, {Metric.TTFT_S: first_s, Metric.TOKENS_PER_S: tokens_s})
    judged = {each.target: each for each in judge([made])}
    assert judged["time to first token, ours, early / ours"].met is True
    assert judged["tokens a second, ours, early / ours"].met is False
    assert not any("seeded" in target for target in judged)
    made.give_up("ours, early, seeded", "no first tokens")
    reasons = [each.reason for each in judge([made]) if "seeded" in each.target]
    assert reasons == ["no first tokens"] * 2


@pytest.mark.parametrize(
    ("part", "values", "worst"), [(Part.TRANSFER, (2.0, 0.5, 1.0), 0.5), (Part.IDLE, (0, 1), 1)]
)
def test_goal_shows_the_case_that_is_farthest_from_it(part, values, worst):
    """The least of what ought to be much, the most of what ought to be little."""
    cases = [
        result(part, f"case {value}", LARGE, ours=[1.0], upstream_at_rest=[value])
        if part is Part.TRANSFER
        else result(part, f"case {value}", {}, ours=[value])
        for value in values
    ]
    unmeasured = result(part, "nothing", LARGE)
    (goal,) = goals(judge([*cases, unmeasured]))
    assert goal.worst.case == f"case {worst}"
    assert (len(goal.verdicts), len(goal.judged)) == (len(values) + 1, len(values))
    assert goal.num_met == sum(each >= 1 if part is Part.TRANSFER else each <= 0 for each in values)
