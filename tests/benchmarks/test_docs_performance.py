# SPDX-License-Identifier: Apache-2.0
"""Files of docs/results/ from JSON, and tables of docs/performance.md from those."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks.docs_performance import PAGE, RESULTS, main, rewrite, store
from benchmarks.report import to_json
from benchmarks.results import Metric, Part, Result

SHOWN = ("handshake", "transfer", "peers", "end-to-end")
TP1 = "TP1->TP1, blocks of 32, 4 KiB chunks, 1 heads of 32"
TP2 = "TP2->TP1, blocks of 32, 4 KiB chunks, 2 heads of 32"


def measured(
    part: Part, case: str, sizes: Mapping[str, float], values: Mapping[str, Mapping[Metric, float]]
) -> Result:
    """A case of which each variant was measured once."""
    made = Result(part, case, sizes)
    for variant, metrics in values.items():
        made.add(variant, metrics)
    return made


def transfer(case: str, **seconds: list[float]) -> Result:
    """A request of 2 GB."""
    sizes = {"bytes": 2e9, "chunks": 1e6, "chunk_bytes": 4096}
    samples = {
        variant.replace("_", " "): {Metric.SECONDS: values} for variant, values in seconds.items()
    }
    return Result(Part.TRANSFER, case, sizes, samples)


def handshake(blocks: int, **values: tuple[float, float]) -> Result:
    """A handshake of 80 layers, with seconds and bytes of each variant."""
    case = f"TP1->TP1, 80 layers x {blocks // 1000}k blocks"
    return measured(
        Part.HANDSHAKE,
        case,
        {"blocks": blocks, "layers": 80},
        {
            variant: {Metric.SECONDS: seconds, Metric.PEAK_BYTES: peak}
            for variant, (seconds, peak) in values.items()
        },
    )


def peers(count: int, descriptors: int) -> Result:
    """A worker that knows so many engines."""
    metrics = {
        Metric.RESIDENT_BYTES: 590e6,
        Metric.DESCRIPTORS: descriptors,
        Metric.PEAK_DESCRIPTORS: 2 * descriptors,
        Metric.THREADS: 72,
        Metric.SECONDS: 4e-3,
        Metric.NIXL_S: 2e-3,
    }
    case = f"TP1->TP1, {count} engines"
    return measured(Part.PEERS, case, {"peers": count}, {"ours": metrics})


def end_to_end(rate: float, ttft_s: float) -> Result:
    """A request rate, over a link that upstream's was not measured over."""
    metrics = {
        Metric.TTFT_S: ttft_s,
        Metric.ITL_S: 0.025,
        Metric.ITL_P99_S: 0.06,
        Metric.TOKENS_PER_S: 16.66,
    }
    made = measured(
        Part.END_TO_END,
        f"512+32 tokens, {rate:g} requests/s, TCP",
        {"rate": rate},
        {"ours": metrics},
    )
    made.missing["upstream at rest"] = "no such device"
    return made


@pytest.fixture
def results() -> list[Result]:
    """Something of every part."""
    cpu = {Metric.REQUEST_CPU_S: 0.003, Metric.OWN_CPU_S: 3e-4, Metric.WORKER_CPU_S: 0.006}
    pauses = {Metric.LONGEST_PAUSE_S: 0.002, Metric.PAUSE_P99_S: 0.001}
    arrived = {Metric.SECONDS: 0.02, Metric.STEPS_AFTER_ARRIVAL: 1}
    asked = {
        Metric.REQUESTS_PER_S: 13.23,
        Metric.ENGINES_CPU_S: 0.1258,
        Metric.TTFT_S: 0.234,
        Metric.ITL_S: 0.026,
    }
    return [
        handshake(1_000, ours=(0.016, 2e6), upstream=(0.14, 28e6)),
        handshake(100_000, ours=(0.02, 2e6)),
        transfer(
            f"{TP1}, 8k tokens, contiguous",
            ours=[1.0, 0.5, 2.0],
            upstream=[5.0, 2.5, 4.0],
            upstream_at_rest=[2.0, 1.0, 4.0],
            memcpy=[0.2],
        ),
        transfer(f"{TP2}, 8k tokens, reversed", ours=[1.0]),
        measured(Part.REQUEST_PATH, "TP2->TP1, 16 in flight", {"requests": 16}, {"ours": cpu}),
        measured(Part.IDLE, "TP2->TP1, connected", {}, {"ours": {Metric.IDLE_CPU: 0.002}}),
        *(peers(8, 400), peers(200, 800)),
        measured(Part.PAUSES, "TP2->TP1, 1000 held", {}, {"upstream": pauses}),
        measured(Part.NETWORK, "TP2->TP1, 8 MiB, TCP", {}, {"ours (direct)": arrived}),
        end_to_end(0.5, 0.3),
        measured(Part.CLIENTS, "300+24 tokens, 12 clients", {}, {"ours": asked}),
    ]


def stored(folder: Path, name: str) -> list[list[str]]:
    """The cells of a file."""
    with (folder / f"bench-{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def page_of(*names: str) -> str:
    """A page with prose around tables that hold nothing yet."""
    blocks = (f"## {name}\n\n<!-- bench: {name} -->\n<!-- /bench -->\n" for name in names)
    return "Before.\n\n" + "\nBetween | them.\n\n".join(blocks) + "\nAfter.\n"


def table(page: str, name: str) -> list[str]:
    """The lines of a table."""
    block = re.search(rf"<!-- bench: {name} -->\n\n(.*?)\n\n<!-- /bench -->", page, re.DOTALL)
    assert block, f"{name} is empty"
    return block[1].splitlines()


@pytest.fixture
def run(tmp_path, capsys):
    """Runs the tool on measurements; returns the exit status, the page and what it said."""

    def run(page, *files):
        paths = []
        for number, written in enumerate(files):
            paths.append(tmp_path / f"{number}.json")
            if written is not None:
                paths[-1].write_text(written if isinstance(written, str) else json.dumps(written))
        path = tmp_path / "page.md"
        path.write_text(page)
        status = main([str(each) for each in paths], path, tmp_path)
        return status, path.read_text(), capsys.readouterr().err

    return run


def written(*results: Result, **settings: object) -> dict:
    """What `make bench` writes."""
    return to_json({}, {"complete": True, "strategies": [], **settings}, results, [], [])


def test_files_have_a_row_for_each_case_and_variant(results, tmp_path):
    """With medians and their units; what was not measured has no row."""
    store(results, tmp_path)
    assert stored(tmp_path, "handshake") == [
        ["case", "variant", "time", "peak memory"],
        ["TP1->TP1, 80 layers x 1k blocks", "ours", "16 ms", "2 MB"],
        ["TP1->TP1, 80 layers x 1k blocks", "upstream", "140 ms", "28 MB"],
        ["TP1->TP1, 80 layers x 100k blocks", "ours", "20 ms", "2 MB"],
    ]
    case = f"{TP1}, 8k tokens, contiguous"
    assert stored(tmp_path, "transfer")[1:] == [
        [case, "ours", "2.00", "5.00 [2.00, 5.00]", "2.00 [2.00, 2.00]"],
        [case, "upstream", "0.50", "", ""],
        [case, "upstream at rest", "1.00", "", ""],
        [case, "memcpy", "10.00", "", ""],
        [f"{TP2}, 8k tokens, reversed", "ours", "2.00", "", ""],
    ]
    for name, figures in {
        "request-path": ["ours", "3.00 ms", "0.30 ms", "6.00 ms"],
        "idle": ["ours", "0.20% [0.20%, 0.20%]"],
        "pauses": ["upstream", "2 ms", "1 ms"],
        "network": ["ours (direct)", "20 ms", "1"],
        "end-to-end": ["ours", "300 ms", "25 ms", "60 ms", "16.7"],
        "clients": ["ours", "13.2", "126 ms", "234 ms", "26 ms"],
    }.items():
        _, row = stored(tmp_path, name)
        assert row[1:] == figures


def test_page_shows_cases_variants_and_figures(results, tmp_path):
    """A column for each variant, or for each figure of a single one."""
    store(results, tmp_path)
    page = rewrite(page_of(*SHOWN), tmp_path)
    assert table(page, "handshake") == [
        "| case (time, peak memory) | ours | upstream |",
        "| --- | ---: | ---: |",
        "| TP1->TP1, 80 layers x 1k blocks | 16 ms, 2 MB | 140 ms, 28 MB |",
        "| TP1->TP1, 80 layers x 100k blocks | 20 ms, 2 MB | - |",
    ]
    assert table(page, "transfer")[2:] == [f"| {TP1} | 2.00, 2.00 [2.00, 2.00] | 0.50 | 1.00 |"]
    assert table(page, "peers")[2:] == [
        "| 8 engines | 590 MB | 400 | 800 | 4 ms | 2 ms |",
        "| 200 engines | 590 MB | 800 | 1600 | 4 ms | 2 ms |",
    ]
    assert table(page, "end-to-end")[2:] == ["| 0.5 requests/s, TCP | 300 ms, 60 ms | - |"]


def test_targets_are_worded_for_readers(results, tmp_path):
    """What is wanted, how often it is met, and the case that is farthest; if it was measured."""
    store(results, tmp_path)
    rows = {row[1]: row for row in stored(tmp_path, "targets")}
    of_rest = "our GB/s / that of upstream at rest"
    assert rows[of_rest] == [
        *("transfer", of_rest, "at least 1x", "1 of 1", "2x [2x, 2x]"),
        f"{TP1}, 8k tokens, contiguous",
    ]
    assert rows["descriptors at rest / that for 8 engines, ours"][2:5] == [
        *("at most 1.5x", "0 of 1", "2x [2x, 2x]"),
    ]
    assert rows["share of a core of an idle worker"][2:4] == ["at most 1.00%", "1 of 1"]
    assert "our time to first token / that of upstream at rest" not in rows


@pytest.mark.parametrize("part", list(Part))
def test_parts_that_were_not_measured_stay_as_they_are(results, tmp_path, part):
    """Their files stay, and so do their targets, in the order of the parts."""
    store(results, tmp_path)
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    store([each for each in results if each.part is part], tmp_path)
    store([], tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before


def test_prose_is_untouched(results, tmp_path):
    """What is not between markers stays; to write the same again changes nothing."""
    page = page_of(*SHOWN)
    store(results, tmp_path)
    tables = re.compile(r"(<!-- bench: \S+ -->\n).*?(?=<!-- /bench -->)", re.DOTALL)
    rewritten = rewrite(page, tmp_path)
    assert rewritten != page and tables.sub(r"\1", rewritten) == page
    assert rewrite(rewritten, tmp_path) == rewritten


def test_later_file_wins(run):
    """Of a case that two measurements have, the later one is shown, and other cases of both."""
    one, other = (f"{name}, 8k tokens, contiguous" for name in (TP1, TP2))
    first = written(transfer(one, ours=[1.0]), transfer(other, ours=[1.0]))
    status, page, _ = run(page_of("transfer"), first, written(transfer(one, ours=[0.5])))
    rows = table(page, "transfer")[2:]
    assert (status, rows) == (0, [f"| {TP1} | 4.00 | - | - |", f"| {TP2} | 2.00 | - | - |"])


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        ({**written(), "format": 1}, "1.json has format 1, not 2"),
        (written(complete=False), "did not come to its end"),
        (written(strategies=["staged"]), "transfer_strategy staged"),
        ({"format": 2, "results": []}, "did not come to its end"),
        ("no JSON", "is not JSON"),
        (None, "No such file"),
    ],
)
def test_files_that_cannot_be_shown_are_refused(run, tmp_path, refused, reason):
    """One line says which file and why, and nothing is written."""
    before = page_of("transfer")
    status, page, said = run(before, written(transfer(TP1, ours=[1.0])), refused)
    assert (status, page, said.count("\n")) == (2, before, 1)
    assert reason in said and "1.json" in said and not list(tmp_path.glob("*.csv"))


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        ("<!-- bench: lunch -->\n<!-- /bench -->\n", "lunch is not one table"),
        ("<!-- bench: transfer -->\n", "transfer --> is neither"),
        ("<!-- /bench -->\n", "/bench --> is neither"),
        ("<!-- bench: transfer -->\n<!-- bench: peers -->\n<!-- /bench -->\n", "transfer is not"),
        ("<!--bench: transfer-->\n", "is neither"),
    ],
)
def test_markers_without_a_table_are_refused(run, tmp_path, page, reason):
    """A page that would be rewritten in the wrong place is left alone, and nothing is written."""
    status, after, said = run(page, written(transfer(TP1, ours=[1.0])))
    assert (status, after) == (2, page) and reason in said
    assert not list(tmp_path.glob("*.csv"))


def test_page_is_that_of_the_stored_files():
    """Each table is there once, as it would be written, and each file has a link."""
    page = PAGE.read_text(encoding="utf-8")
    assert sorted(re.findall(r"<!-- bench: (\S+) -->", page)) == sorted(SHOWN)
    assert rewrite(page) == page
    names = {f"bench-{part.value}.csv" for part in Part} | {"bench-targets.csv"}
    assert names == {path.name for path in RESULTS.glob("bench-*.csv")}
    assert all(f"(results/{name})" in page for name in names)


def test_first_table_has_figures_of_the_stored_files():
    """Whoever measures anew is told to look at the answers at the top of the page."""
    first = PAGE.read_text(encoding="utf-8").partition("\n## ")[0]
    cells = re.findall(r"(?<=\| )[^|]*\d[^|]*?(?= \|)", re.sub(r"(?m)^\| .*? \|", "|", first))
    assert len(cells) > 20
    texts = [path.read_text(encoding="utf-8") for path in RESULTS.glob("*.csv")]
    for figure in (figure for cell in cells for figure in cell.split(", ")):
        number = re.escape(figure.replace(",", "").replace(" %", "%").removesuffix(" GB/s"))
        assert any(re.search(rf"\b{number}", text) for text in texts), figure
