# SPDX-License-Identifier: Apache-2.0
"""Tables of docs/performance.md from JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Collection

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
    samples = {
        variant.replace("_", " "): {Metric.SECONDS: values} for variant, values in seconds.items()
    }
    return Result(Part.TRANSFER, case, sizes, samples)


def handshake(
    layouts: str, blocks: int, missing: dict[str, str], **values: tuple[float, float]
) -> Result:
    """A handshake of 80 layers, with seconds and bytes of each variant."""
    made = Result(
        Part.HANDSHAKE,
        f"{layouts}, 80 layers x {blocks // 1000}k blocks",
        {"blocks": blocks, "layers": 80},
        missing=missing,
    )
    for variant, (seconds, peak) in values.items():
        both = {Metric.SECONDS: seconds, Metric.PEAK_BYTES: peak}
        made.add(variant.replace("_", " "), both)
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
    for variant, value in (("ours", 0.003), ("upstream", 0.004), ("upstream at rest", 0.0024)):
        made.add(
            variant,
            {
                Metric.REQUEST_CPU_S: value,
                Metric.OWN_CPU_S: value / 10,
                Metric.WORKER_CPU_S: value * 2,
            },
        )
    return made


def idle() -> Result:
    """Workers that have nothing to do."""
    made = Result(Part.IDLE, "TP2->TP1, connected")
    for variant, value in (("ours", 0.002), ("upstream", 1.0)):
        made.add(variant, {Metric.IDLE_CPU: value})
    return made


def peers(count: int) -> Result:
    """A worker that knows so many engines."""
    made = Result(Part.PEERS, f"TP1->TP1, {count} engines", {"peers": count})
    for variant, descriptors in (("ours", 400), ("ours, no UCX threads", 160)):
        made.add(
            variant,
            {
                Metric.RESIDENT_BYTES: 590e6,
                Metric.DESCRIPTORS: descriptors,
                Metric.PEAK_DESCRIPTORS: 2 * descriptors,
                Metric.THREADS: 72,
                Metric.SECONDS: 4e-3,
                Metric.NIXL_S: 2e-3,
            },
        )
    return made


def pauses() -> Result:
    """Requests that wait for a handshake."""
    made = Result(Part.PAUSES, "TP2->TP1, 1000 waiting for a handshake")
    for variant, value in (("ours", 0.002), ("upstream", 1.0), ("upstream at rest", 0.5)):
        made.add(variant, {Metric.LONGEST_PAUSE_S: value, Metric.PAUSE_P99_S: value / 2})
    return made


def network() -> Result:
    """A request over TCP."""
    made = Result(Part.NETWORK, "TP2->TP1, 8 MiB, TCP, loopback, steps of 10 ms")
    for variant, steps in (("ours (direct)", 1), ("ours (staged)", 2), ("upstream at rest", 1)):
        made.add(variant, {Metric.SECONDS: 0.02, Metric.STEPS_AFTER_ARRIVAL: steps})
    return made


STACKS = {
    "one engine": 0.25,
    "upstream": 0.4,
    "upstream at rest": 0.5,
    "ours": 0.3,
    "ours, early": 0.25,
}


def end_to_end(rate: float, link: str = "", stacks: Collection[str] = STACKS) -> Result:
    """A request rate."""
    made = Result(Part.END_TO_END, f"512+32 tokens, {rate:g} requests/s{link}", {"rate": rate})
    for variant in stacks:
        value = STACKS[variant]
        made.add(
            variant,
            {
                Metric.TTFT_S: value,
                Metric.ITL_S: value / 10,
                Metric.ITL_P99_S: value / 5,
                Metric.TOKENS_PER_S: 5 / value,
            },
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
        *(idle(), peers(200), peers(8), pauses(), network()),
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
        "| 1 | 3.00 ms, 0.30 ms, 6.00 ms | 4.00 ms, 0.40 ms, 8.00 ms | 2.40 ms, 0.24 ms, 4.80 ms |",
        "| 256 | 3.00 ms, 0.30 ms, 6.00 ms | 4.00 ms, 0.40 ms, 8.00 ms "
        "| 2.40 ms, 0.24 ms, 4.80 ms |",
    ]


def test_shares_pauses_and_steps_have_their_units(results):
    """Per cent of a core, time, and time with steps after the last byte."""
    page = rewrite(page_of(*NAMES), results)
    assert table(page, "peers") == [
        f"| {count} | {variant} | 590 MB | {descriptors} | {2 * descriptors} | 72 | 4 ms | 2 ms |"
        for count in (8, 200)
        for variant, descriptors in (("ours", 400), ("ours, no UCX threads", 160))
    ]
    assert table(page, "idle") == [
        "| TP2->TP1, connected | 0.20% [0.20%, 0.20%] | 100.00% [100.00%, 100.00%] | not measured |"
    ]
    assert table(page, "pauses") == [
        "| TP2->TP1, 1000 waiting for a handshake | 2 ms, 1 ms | 1 s, 500 ms | 500 ms, 250 ms |"
    ]
    assert table(page, "network") == [
        "| TP2->TP1, 8 MiB, TCP, loopback, steps of 10 ms | 20 ms, 1 | 20 ms, 2 | 20 ms, 1 |"
    ]


def test_end_to_end_has_a_row_for_each_rate_and_stack(results):
    """Times and tokens a second are those of one engine, both of upstream's, and ours."""
    assert table(rewrite(page_of("end-to-end"), results), "end-to-end") == [
        f"| shared memory | {rate} | {figures} |"
        for rate in ("0.25", "0.5")
        for figures in (
            "one engine | 250 ms | 25 ms | 50 ms | 20.0",
            "upstream | 400 ms | 40 ms | 80 ms | 12.5",
            "upstream at rest | 500 ms | 50 ms | 100 ms | 10.0",
            "ours | 300 ms | 30 ms | 60 ms | 16.7",
            "ours, early | 250 ms | 25 ms | 50 ms | 20.0",
            "ours, early, seeded | not measured | not measured | not measured | not measured",
        )
    ]


def test_link_has_rows_for_what_was_to_be_measured_over_it():
    """Two connectors, one after the other; also where a link could not be had."""
    over, missing = end_to_end(0.5, ", TCP, 10 Gbit/s", ("ours",)), end_to_end(0.5, ", a wire", ())
    over.missing["upstream at rest"] = missing.missing["ours"] = "no such device"
    results = [over, missing]
    assert table(rewrite(page_of("end-to-end"), results), "end-to-end") == [
        "| TCP, 10 Gbit/s | 0.5 | upstream at rest | not measured | not measured | not measured "
        "| not measured |",
        "| TCP, 10 Gbit/s | 0.5 | ours | 300 ms | 30 ms | 60 ms | 16.7 |",
        "| a wire | 0.5 | ours | not measured | not measured | not measured | not measured |",
    ]


def test_targets_are_worded_for_readers(results):
    """Every target has what is wanted, how often it is met, and the case that is farthest."""
    many = "TP1->TP1, 80 layers x 100k blocks"
    cpu = "our CPU time a request / that of"
    peers_variants, crowd = ("ours", "ours, no UCX threads"), "TP1->TP1, 200 engines"
    assert table(rewrite(page_of("targets"), results), "targets") == [
        "| handshake | upstream's time / ours | at least 100x | 1 of 1 | 250x [250x, 250x] "
        f"| {many} |",
        "| handshake | upstream's memory / ours | at least 100x | 1 of 1 "
        f"| 1.2e+03x [1.2e+03x, 1.2e+03x] | {many} |",
        "| handshake | our time / that for the fewest blocks | at most 1.5x | 1 of 1 "
        f"| 1.25x [1.25x, 1.25x] | {many} |",
        "| handshake | our memory / that for the fewest blocks | at most 1.5x | 1 of 1 "
        f"| 1x [1x, 1x] | {many} |",
        "| transfer | our GB/s / that of upstream at rest | at least 1x | 2 of 2 "
        f"| 1.25x [1.25x, 1.25x] | {TP1} |",
        "| transfer | our GB/s / raw NIXL's, contiguous | at least 0.9x | 0 of 1 "
        f"| 0.8x [0.8x, 0.8x] | {TP1} |",
        "| transfer | our GB/s / upstream's, mergeable chunks of 4 KiB | at least 4x | 1 of 1 "
        f"| 5x [2x, 5x] | {TP2} |",
        f"| request-path | {cpu} upstream, engine's thread | at most 0.1x | 0 of 1 "
        "| 0.75x [0.75x, 0.75x] | TP2->TP1, 256 in flight |",
        f"| request-path | {cpu} upstream at rest, engine's thread | at most 0.7x | 0 of 1 "
        "| 1.25x [1.25x, 1.25x] | TP2->TP1, 256 in flight |",
        f"| request-path | {cpu} upstream at rest, whole worker | at most 1x | 0 of 1 "
        "| 1.25x [1.25x, 1.25x] | TP2->TP1, 256 in flight |",
        "| idle | share of a core of an idle worker | at most 1.00% | 1 of 1 "
        "| 0.20% [0.20%, 0.20%] | TP2->TP1, connected |",
        *(
            f"| peers | handshake with a further engine, {variant} | at most 10 ms | 2 of 2 "
            f"| 4 ms [4 ms, 4 ms] | {crowd} |"
            for variant in peers_variants
        ),
        *(
            f"| peers | {what} / that for 8 engines, {variant} | at most 1.5x | 1 of 1 "
            f"| 1x [1x, 1x] | {crowd} |"
            for variant in peers_variants
            for what in (
                "memory",
                "descriptors at rest",
                "descriptors after the last read",
                "threads",
            )
        ),
        "| pauses | longest pause of the engine's thread | at most 1 ms | 0 of 1 "
        "| 2 ms [2 ms, 2 ms] | TP2->TP1, 1000 waiting for a handshake |",
        "| network | engine steps from the last byte to the report | at most 1 | 1 of 2 "
        "| 2 [2, 2] | TP2->TP1, 8 MiB, TCP, loopback, steps of 10 ms |",
        "| end-to-end | our time to first token / that of upstream at rest | at most 0.9x | 2 of 2 "
        "| 0.6x [0.6x, 0.6x] | 512+32 tokens, 0.5 requests/s |",
        "| end-to-end | our 99th percentile of the time between tokens / that of upstream at rest "
        "| at most 1x | 2 of 2 | 0.6x [0.6x, 0.6x] | 512+32 tokens, 0.5 requests/s |",
        "| end-to-end | time to first token, ours, early / ours | at most 0.95x | 2 of 2 "
        "| 0.833x [0.833x, 0.833x] | 512+32 tokens, 0.5 requests/s |",
        "| end-to-end | tokens a second, ours, early / ours | at least 0.97x | 2 of 2 "
        "| 1.2x [1.2x, 1.2x] | 512+32 tokens, 0.5 requests/s |",
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
        ({**written(), "format": 1}, "1.json has format 1, not 2"),
        (written(complete=False), "did not come to its end"),
        (written(strategies=["staged"]), "transfer_strategy staged"),
        ({"format": 2, "results": []}, "did not come to its end"),
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
