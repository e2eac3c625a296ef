# SPDX-License-Identifier: Apache-2.0
"""Tables of docs/performance.md from JSON."""

from __future__ import annotations

import json
import re

import pytest

from benchmarks.cases import Depth, handshake_cases
from benchmarks.docs_performance import PAGE, check_markers, main, rewrite
from benchmarks.errors import BenchmarkError
from benchmarks.handshake import refuse_upstream
from benchmarks.report import to_json
from benchmarks.results import Metric, Part, Result
from benchmarks.specs import UPSTREAM

NAMES = ("targets", *(part.value for part in Part))
TP2 = "TP2->TP1, blocks of 32, 4 KiB chunks, 2 heads of 32, 8k tokens, contiguous"
TP1 = "TP1->TP1, blocks of 32, 4 KiB chunks, 1 heads of 32, 8k tokens, contiguous"


def page_of(*names: str) -> str:
    """A page with prose around tables that hold nothing yet."""
    blocks = (f"## {name}\n\n<!-- bench: {name} -->\n<!-- /bench -->\n" for name in names)
    return "Before.\n\n" + "\nBetween | them.\n\n".join(blocks) + "\nAfter.\n"


def table(page: str, name: str) -> list[str]:
    """The rows of a table, without its head."""
    block = re.search(rf"<!-- bench: {name} -->\n\n(.*?)\n\n<!-- /bench -->", page, re.DOTALL)
    assert block, f"{name} is empty"
    return block[1].splitlines()[2:]


def transfer(case: str, **seconds: list[float]) -> Result:
    """A request of 2 GB."""
    sizes = {"bytes": 2e9, "chunks": 1e6, "chunk_bytes": 4096}
    samples = {lane.replace("_", " "): {Metric.SECONDS: values} for lane, values in seconds.items()}
    return Result(Part.TRANSFER, case, sizes, samples)


def handshake(
    layouts: str, blocks: int, missing: dict[str, str], **values: tuple[float, float]
) -> Result:
    """A handshake of 80 layers, with seconds and bytes of each lane."""
    made = Result(
        Part.HANDSHAKE,
        f"{layouts}, 80 layers x {blocks // 1000}k blocks",
        {"blocks": blocks, "layers": 80},
        missing=missing,
    )
    for lane, (seconds, peak) in values.items():
        both = {Metric.SECONDS: seconds, Metric.PEAK_BYTES: peak}
        made.add(lane.replace("_", " "), both)
    return made


def handshakes() -> list[Result]:
    """Few blocks, many blocks, and pipeline stages, the last of which comes first."""
    (stages,) = (case for case in handshake_cases(Depth.DEFAULT) if "PP" in case.name)
    with pytest.raises(BenchmarkError) as refusal:
        refuse_upstream(UPSTREAM, stages, 1 << 50)
    no_stages = dict.fromkeys(("upstream", "upstream at rest"), str(refusal.value))
    left_out = {"upstream at rest": "left out, because it takes minutes: --full"}
    return [
        handshake("TP1xPP2->TP1", 100_000, no_stages, ours=(0.023, 2.3e6)),
        handshake("TP2->TP1", 10_000, {}, ours=(0.022, 2e6)),
        handshake("TP1->TP1", 100_000, left_out, ours=(0.02, 2e6), upstream=(5.0, 2.4e9)),
        handshake(
            "TP1->TP1",
            *(1_000, {}),
            ours=(0.016, 2e6),
            upstream=(0.14, 28e6),
            upstream_at_rest=(0.08, 28e6),
        ),
    ]


def request_path(requests: int) -> Result:
    """Requests in flight."""
    made = Result(Part.REQUEST_PATH, f"TP2->TP1, {requests} in flight", {"requests": requests})
    for lane, value in (("ours", 0.003), ("upstream", 0.004), ("upstream at rest", 0.0024)):
        made.add(lane, {Metric.REQUEST_CPU_S: value, Metric.OWN_CPU_S: value / 10})
    return made


def end_to_end(rate: float) -> Result:
    """A request rate."""
    made = Result(Part.END_TO_END, f"512+32 tokens, {rate:g} requests/s", {"rate": rate})
    for lane, value in (("ours", 0.3), ("upstream", 0.4), ("one engine", 0.25)):
        made.add(
            lane, {Metric.TTFT_S: value, Metric.ITL_S: value / 10, Metric.TOKENS_PER_S: 5 / value}
        )
    return made


@pytest.fixture
def results() -> list[Result]:
    """Something of every part."""
    return [
        *handshakes(),
        transfer(
            TP1, ours=[1.0], upstream=[1.5], upstream_at_rest=[1.25], raw_NIXL=[0.8], memcpy=[0.2]
        ),
        transfer(
            TP2, ours=[1.0, 0.5, 2.0], upstream=[5.0, 2.5, 4.0], upstream_at_rest=[2.0, 1.0, 4.0]
        ),
        *(request_path(256), request_path(1)),
        *(end_to_end(0.5), end_to_end(0.25)),
    ]


@pytest.fixture
def run(tmp_path, capsys):
    """Runs the tool on files; returns the exit status, the page and what it said."""

    def run(page, *files):
        paths = []
        for number, written in enumerate(files):
            paths.append(tmp_path / f"{number}.json")
            if written is not None:
                paths[-1].write_text(written if isinstance(written, str) else json.dumps(written))
        path = tmp_path / "page.md"
        path.write_text(page)
        status = main([str(each) for each in paths], path)
        return status, path.read_text(), capsys.readouterr().err

    return run


def written(*results: Result, **settings: object) -> dict:
    """What `make bench` writes."""
    return to_json({}, {"complete": True, "strategies": [], **settings}, results, [], [])


def test_handshakes_are_medians_in_the_order_of_layouts(results):
    """Few blocks come before many, and pipeline stages, which upstream's has not, last."""
    assert table(rewrite(page_of("handshake"), results), "handshake") == [
        "| TP1->TP1, 80 layers x 1k blocks | 16 ms, 2 MB | 140 ms, 28 MB | 80 ms, 28 MB |",
        "| TP1->TP1, 80 layers x 100k blocks | 20 ms, 2 MB | 5 s, 2.4 GB | not measured |",
        "| TP2->TP1, 80 layers x 10k blocks | 22 ms, 2 MB | not measured | not measured |",
        "| TP1xPP2->TP1, 80 layers x 100k blocks | 23 ms, 2.3 MB | not supported | not supported |",
    ]


def test_transfers_are_speeds_and_ratios_of_turns(results):
    """Speeds are medians in GB/s, and ratios have their range."""
    assert table(rewrite(page_of("transfer"), results), "transfer") == [
        f"| {TP1} | 2.00 | 1.33 | 1.60 | 2.50 | 10.00 | 1.50 [1.50, 1.50] | 1.25 [1.25, 1.25] |",
        f"| {TP2} | 2.00 | 0.50 | 1.00 | not measured | not measured "
        "| 5.00 [2.00, 5.00] | 2.00 [2.00, 2.00] |",
    ]


def test_request_path_has_a_row_for_each_number_in_flight(results):
    """CPU time is in milliseconds with two decimals, whatever it is."""
    assert table(rewrite(page_of("request-path"), results), "request-path") == [
        "| 1 | 3.00 ms, 0.30 ms | 4.00 ms, 0.40 ms | 2.40 ms, 0.24 ms |",
        "| 256 | 3.00 ms, 0.30 ms | 4.00 ms, 0.40 ms | 2.40 ms, 0.24 ms |",
    ]


def test_end_to_end_has_a_row_for_each_rate(results):
    """Times and tokens a second are those of one engine, upstream's and ours."""
    figures = "250 ms | 400 ms | 300 ms | 25 ms | 40 ms | 30 ms | 20.0 | 12.5 | 16.7 |"
    assert table(rewrite(page_of("end-to-end"), results), "end-to-end") == [
        f"| 0.25 | {figures}",
        f"| 0.5 | {figures}",
    ]


def test_targets_are_worded_for_readers(results):
    """Every target has what is wanted, measured and met, and against what is at rest."""
    first_token = "our time to first token / upstream's: 512+32 tokens,"
    assert table(rewrite(page_of("targets"), results), "targets") == [
        "| handshake, TP1->TP1, 80 layers x 100k blocks: upstream's time / ours "
        "| 100 | 250 [250, 250] | yes | not measured |",
        "| the same: memory | 100 | 1200 [1200, 1200] | yes | not measured |",
        "| the same: ours against 1k blocks, time and memory | flat | 1.25, 1.00 | yes | |",
        f"| our GB/s / raw NIXL's: {TP1} | at least 0.9 | 0.80 [0.80, 0.80] | no | |",
        f"| our GB/s / memcpy's: {TP1} | at least 0.6 | 0.20 [0.20, 0.20] | no | |",
        f"| our GB/s / upstream's: {TP2} | at least 4 | 5.00 [2.00, 5.00] | yes | 2.00 |",
        "| our CPU time a request / upstream's: TP2->TP1, 256 in flight "
        "| at most 0.5 | 0.75 [0.75, 0.75] | no | 1.25 |",
        f"| {first_token} 0.5 requests/s | at most 1 | 0.75 [0.75, 0.75] | yes | |",
        f"| {first_token} 0.25 requests/s | at most 1 | 0.75 [0.75, 0.75] | yes | |",
    ]


def test_prose_is_untouched(results):
    """What is not between markers stays, byte for byte."""
    page = page_of(*NAMES)
    tables = re.compile(r"(<!-- bench: \S+ -->\n).*?(?=<!-- /bench -->)", re.DOTALL)
    rewritten = rewrite(page, results)
    assert rewritten != page and tables.sub(r"\1", rewritten) == page


def test_writing_the_same_again_changes_nothing(results):
    """Tables that were written are found again."""
    once = rewrite(page_of(*NAMES), results)
    assert rewrite(once, results) == once


@pytest.mark.parametrize("part", list(Part))
def test_parts_that_no_file_has_stay_as_they_are(results, part):
    """Their tables stay, and so do their rows of the targets."""
    before = rewrite(page_of(*NAMES), results)
    assert rewrite(before, [each for each in results if each.part is part]) == before
    assert rewrite(before, []) == before


def test_later_file_wins(run):
    """Of a case that two files have, the later one is shown, and other cases of both."""
    first = written(transfer(TP1, ours=[1.0]), transfer(TP2, ours=[1.0]))
    status, page, _ = run(page_of("transfer"), first, written(transfer(TP1, ours=[0.5])))
    rows = table(page, "transfer")
    assert status == 0 and len(rows) == 2
    assert rows[0].startswith(f"| {TP1} | 4.00 |") and rows[1].startswith(f"| {TP2} | 2.00 |")


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        ({**written(), "format": 2}, "1.json has format 2, not 1"),
        (written(complete=False), "did not come to its end"),
        (written(strategies=["staged"]), "transfer_strategy staged"),
        ({"format": 1, "results": []}, "did not come to its end"),
        ("no JSON", "is not JSON"),
        (None, "No such file"),
    ],
)
def test_files_that_cannot_be_shown_are_refused(run, refused, reason):
    """One line says which file and why, and the page stays as it was."""
    before = page_of("transfer")
    status, page, said = run(before, written(transfer(TP1, ours=[1.0])), refused)
    assert (status, page, said.count("\n")) == (2, before, 1)
    assert reason in said and "1.json" in said


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        ("<!-- bench: lunch -->\n<!-- /bench -->\n", "lunch --> is unknown"),
        ("<!-- bench: transfer -->\n", "has no <!-- /bench -->"),
        ("<!-- /bench -->\n", "comes alone"),
        ("<!-- bench: transfer -->\n<!-- bench: targets -->\n", "before the end of"),
        ("<!--bench: transfer-->\n", "is neither"),
        ("<!-- bench: targets -->\n|a|\n|-|\n| lunch |\n<!-- /bench -->\n", "no known part"),
    ],
)
def test_markers_without_a_table_are_refused(run, page, reason):
    """A page that would be rewritten in the wrong place is left alone."""
    status, after, said = run(page, written(transfer(TP1, ours=[1.0])))
    assert (status, after) == (2, page) and reason in said


def test_page_has_every_table_once(results):
    """The markers of docs/performance.md are known and closed, and its columns are these."""
    page = PAGE.read_text(encoding="utf-8")
    check_markers(page)
    assert sorted(re.findall(r"<!-- bench: (\S+) -->", page)) == sorted(NAMES)
    head = re.compile(r"<!-- bench: (\S+) -->\n\n(\|.*\n\|.*\n)")
    after = dict(head.findall(rewrite(page, results)))
    assert set(after) == set(NAMES)
    for name, lines in head.findall(page):
        assert after[name] == lines


def test_targets_of_the_page_are_all_recognized():
    """Rows that were written before are kept where nothing was measured."""
    page = PAGE.read_text(encoding="utf-8")
    assert rewrite(page, []) == page
