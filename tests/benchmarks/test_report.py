# SPDX-License-Identifier: Apache-2.0
"""Tables, JSON and drawing."""

from __future__ import annotations

import io
import json
import xml.etree.ElementTree as ElementTree

import pytest
from rich.console import Console

from benchmarks.errors import ReportError
from benchmarks.report import (
    figures,
    from_json,
    goal_table,
    missing_lines,
    result_tables,
    size,
    to_json,
)
from benchmarks.report import seconds as show_seconds
from benchmarks.results import Metric, Part, Result
from benchmarks.samples import summarize
from benchmarks.targets import goals, judge


@pytest.fixture
def results() -> list[Result]:
    """One result of each part."""
    handshake = Result(Part.HANDSHAKE, "TP2->TP1, 80 layers", {"blocks": 100_000, "layers": 80})
    sizes = {"bytes": 8e9, "chunks": 1e6, "chunk_bytes": 4096}
    transfer = Result(Part.TRANSFER, "TP2->TP1, blocks of 32, contiguous", sizes)
    path = Result(Part.REQUEST_PATH, "TP2->TP1, 256 in flight", {"requests": 256})
    end = Result(Part.END_TO_END, "512+32 tokens, 1 requests/s")
    clients = Result(Part.CLIENTS, "300+24 tokens, 12 clients")
    idle, pause = Result(Part.IDLE, "connected"), Result(Part.PAUSES, "256 in flight")
    peers = Result(Part.PEERS, "TP1->TP1, 200 engines", {"peers": 200})
    network = Result(Part.NETWORK, "TCP, loopback, steps of 10 ms")
    for number, variant in enumerate(("ours", "upstream"), start=1):
        for value in (1.0, 2.0, 4.0):
            both = {Metric.SECONDS: value * number, Metric.PEAK_BYTES: 1e6 * number}
            handshake.add(variant, both)
            transfer.add(variant, {Metric.SECONDS: value * number})
            path.add(
                variant,
                {
                    Metric.REQUEST_CPU_S: value * number,
                    Metric.STEP_CPU_S: value,
                    Metric.OWN_CPU_S: value,
                    Metric.WORKER_CPU_S: value,
                },
            )
            idle.add(variant, {Metric.IDLE_CPU: value / 1000})
            used = (Metric.RESIDENT_BYTES, Metric.DESCRIPTORS, Metric.THREADS, Metric.NIXL_S)
            used += (Metric.PEAK_DESCRIPTORS,)
            peers.add(variant, dict.fromkeys((*used, Metric.SECONDS), value))
            pause.add(variant, {Metric.LONGEST_PAUSE_S: value, Metric.PAUSE_P99_S: value})
            steps = {Metric.SECONDS: value, Metric.STEPS_AFTER_ARRIVAL: 1}
            network.add(f"{variant} (direct)", steps)
            end.add(
                variant,
                {
                    Metric.TTFT_S: value,
                    Metric.ITL_S: value,
                    Metric.ITL_P99_S: value,
                    Metric.TOKENS_PER_S: value,
                },
            )
            measured = (Metric.REQUESTS_PER_S, Metric.ENGINES_CPU_S, Metric.TTFT_S, Metric.ITL_S)
            clients.add(variant, dict.fromkeys(measured, value))
    handshake.give_up("upstream at rest", "it [cannot]")
    return [handshake, transfer, path, idle, peers, pause, network, end, clients]


def printed(*renderables: object) -> str:
    """What a wide console shows."""
    output = io.StringIO()
    Console(file=output, width=200).print(*renderables)
    return output.getvalue()


def test_tables_show_medians_ranges_and_ratios(results):
    """Every part has its table, with GB/s and microseconds a chunk for transfers."""
    text = printed(*result_tables(results))
    assert "2 s [1 s, 4 s]" in text and "2x [2x, 2x]" in text
    assert "0.20% [0.10%, 0.40%]" in text and "4 [2, 8]" in text and "2 [1, 4]" in text
    assert "not measured" in text and "0.5x [0.5x, 0.5x]" in text


def test_reasons_are_told_as_they_are(results):
    """Why a variant is missing is told once, brackets included."""
    assert missing_lines(results) == [
        "Not measured (TP2->TP1, 80 layers): upstream at rest: it [cannot]"
    ]


def test_reason_with_a_traceback_is_told_in_one_line():
    """What a process that failed says of it is kept in the JSON file, and not printed."""
    reason = "decode failed: it broke\nTraceback (most recent call last):\n  File"
    results = [Result(Part.NETWORK, case, missing={"ours": reason}) for case in ("1 ms", "10 ms")]
    assert missing_lines(results) == [
        "Not measured (1 ms; 10 ms): ours: decode failed: it broke (the JSON file has the rest)"
    ]
    written = to_json({}, {}, results, [], [])
    assert [each["missing"]["ours"] for each in written["results"]] == [reason, reason]


def test_goals_are_shown_with_how_many_cases_meet_them(results):
    """What is met and what is not can be seen, each in its unit."""
    text = printed(goal_table(goals(judge(results))))
    assert "0 of 1" in text and "1 of 1" in text and ">= 4x" in text and "<= 0.1x" in text
    assert "<= 1.00%" in text and "<= 1 ms" in text and "not measured" in text


def test_json_has_every_sample(results):
    """Whatever was measured can be read back."""
    written = json.loads(json.dumps(to_json({"cores": "2"}, {}, results, judge(results), [])))
    (transfer,) = [each for each in written["results"] if each["part"] == "transfer"]
    assert transfer["samples"]["upstream"]["seconds"] == [2.0, 4.0, 8.0]
    assert {each["met"] for each in written["targets"]} == {True, False, None}


def test_json_gives_the_same_results(results):
    """Parts, cases, sizes, samples and reasons come back as they were."""
    assert from_json(json.loads(json.dumps(to_json({}, {}, results, [], [])))) == results


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ([], "no format number"),
        ({"format": 1, "results": []}, "has format 1, not 2"),
        ({"format": 2}, "KeyError"),
        ({"format": 2, "results": [{"part": "lunch"}]}, "lunch"),
    ],
)
def test_json_of_another_format_is_refused(written, reason):
    """What cannot be understood is not guessed at."""
    with pytest.raises(ReportError, match=reason):
        from_json(written)


def test_drawing_is_svg_and_the_same_again(results, tmp_path):
    """The same figures give the same file, which is well-formed."""
    pytest.importorskip("matplotlib", reason="installed by `make bench` and `make test-full`")
    from benchmarks.plot import draw

    files = [tmp_path / "one.svg", tmp_path / "other.svg"]
    for file in files:
        draw(results, file)
    assert ElementTree.parse(files[0]).getroot().tag.endswith("svg")
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize(
    ("value", "text"), [(2.0, "2 s"), (0.0213, "21.3 ms"), (4.2e-5, "42 us"), (0.0, "0 us")]
)
def test_durations_have_fitting_units(value, text):
    """Seconds, milliseconds or microseconds."""
    assert show_seconds(value) == text


def test_missing_figures_are_a_dash():
    """What there is no figure for is not 0."""
    assert figures(None, size) == "-"
    assert figures(summarize([3e6, 2e9]), size) == "1 GB [3 MB, 2 GB]"
