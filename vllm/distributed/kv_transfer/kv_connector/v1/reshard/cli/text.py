# SPDX-License-Identifier: Apache-2.0
"""Prints a report as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..plan.text import ranges_text, ranks_text
from .advice import advise, bytes_text
from .caches import CacheRow
from .figures import SourceFigures
from .layouts import EngineLayout
from .report import PlanReport, UpstreamReport
from .verdicts import Note

_UNKNOWN = "?"
_WAYS_NOTE = (
    "Merged: what is left where the blocks of a request adjoin at both ends; for a read by way of "
    "an arena, it is enough that they do at the source. How: what `auto` chooses for {tokens} "
    "tokens by its default thresholds."
)


def print_report(report: PlanReport | UpstreamReport, console: Console) -> None:
    """Print meshes, kinds of cache, reads, their cost for each rank, notes and warnings."""
    _print_heading(report, console)
    if isinstance(report, UpstreamReport):
        console.print()
        console.print(_caches(report.caches))
        _print_notes(report.notes, console)
        return
    if report.has_kinds:
        console.print()
        console.print(_caches(report.caches))
    console.print()
    console.print(_reads(report))
    console.print()
    console.print(_ways(report))
    console.print()
    console.print(Text(_WAYS_NOTE.format(tokens=f"{report.prompt_tokens:,}")))
    state = (_state(report),) if report.state else ()
    for table in (*state, _decode_ranks(report), _prefill_ranks(report)):
        console.print()
        console.print(table)
    _print_notes(report.notes, console)
    # Caches that replace heads have blocks that `--block-size` does not change.
    is_chosen = report.knows_bytes and report.keeps_main
    cache_sizes = report.cache_sizes if is_chosen else None
    warnings = list(
        advise(report.figures, report.src, report.dst, cache_sizes, is_mla=report.is_mla)
    )
    if not report.knows_bytes:
        console.print(
            "\nSizes in bytes are unknown: give --model DIR, or --head-size and --dtype.",
            highlight=False,
        )
    if warnings:
        console.print()
        console.print(Text("Warnings", style="bold yellow"))
        items = Table.grid(padding=(0, 1))
        for warning in warnings:
            items.add_row(Text("-"), Text(f"{warning}."))
        console.print(items)


def _print_notes(notes: Sequence[Note], console: Console) -> None:
    """Print how engines would treat the model, one note per line."""
    if not notes:
        return
    console.print()
    console.print(Text("What engines make of it", style="bold"))
    items = Table.grid(padding=(0, 1))
    for note in notes:
        items.add_row(Text("-"), Text(f"{note.verdict.value}, {note.where}: {note.why}."))
    console.print(items)


def _print_heading(report: PlanReport | UpstreamReport, console: Console) -> None:
    rows = [
        ("prefill", _layout(report.prefill)),
        ("decode", _layout(report.decode)),
        ("model", report.model),
    ]
    if isinstance(report, PlanReport) and report.keeps_main:
        cache_sizes = report.cache_sizes
        tokens = cache_sizes.src_block_tokens, cache_sizes.dst_block_tokens
        rows.append(
            ("cache", f"blocks of {_tokens(tokens)}, heads before tokens within a block (HND)")
        )
    grid = Table.grid(padding=(0, 2))
    for name, text in rows:
        grid.add_row(Text(name, style="bold"), Text(text))
    console.print(grid)


def _layout(layout: EngineLayout) -> str:
    """Describe an engine's layout, and which of its ranks are read from."""
    text = f"{layout}, {_count(layout.num_ranks, 'rank')}"
    return text if layout.num_replicas == 1 else f"{text}, the first of each PCP group read from"


def _tokens(block_tokens: tuple[int, int]) -> str:
    """Describe the number of tokens in a block at both ends."""
    src_tokens, dst_tokens = block_tokens
    if src_tokens == dst_tokens:
        return f"{src_tokens} tokens"
    return f"{src_tokens} tokens at prefill and {dst_tokens} at decode"


def _caches(rows: Sequence[CacheRow]) -> Table:
    """Return the table of the kinds of cache that layers keep."""
    table = _table("Caches")
    for name in ("cache", "layers", "moved as", "blocks of", "kept"):
        table.add_column(name)
    table.add_column("a token\nof a layer", justify="right")
    for row in rows:
        layers = f"{len(row.layers)}: {ranges_text(row.layers)}"
        kept = f"last {row.window_tokens} tokens" if row.window_tokens else "all"
        if row.state_tokens > 1:
            kept += f", {row.state_tokens} as one"
        table.add_row(
            *_cells(
                row.name,
                layers,
                row.moved,
                "-" if row.block_tokens is None else _tokens(row.block_tokens),
                "-" if row.block_tokens is None else kept,
                "-" if row.token_bytes is None else bytes_text(row.token_bytes),
            )
        )
    return table


def _reads(report: PlanReport) -> Table:
    table = _table("Reads")
    has_kinds, has_shares = report.has_kinds, report.has_shares
    kinds, shares = ("cache",) * has_kinds, ("tokens",) * has_shares
    for name in ("decode", "reads from", *kinds, "layers", "heads", "offsets", *shares):
        table.add_column(name)
    table.add_column("a token", justify="right")
    for reader in report.figures.readers:
        parts = [(each.read, part) for each in reader.reads for part in report.parts(each)]
        for position, (read, part) in enumerate(parts):
            table.add_row(
                *_cells(
                    "" if position else str(reader.rank),
                    str(read.src_rank),
                    *((part.name,) * has_kinds),
                    ranges_text(part.layers),
                    str(read.units),
                    f"{read.src_unit_offset} -> {read.dst_unit_offset}",
                    *((f"{read.src_tokens} -> {read.dst_tokens}",) * has_shares),
                    _bytes(report, part.token_bytes),
                ),
                end_section=position == len(parts) - 1,
            )
    return table


def _state(report: PlanReport) -> Table:
    """Return the table of the reads of recurrent state, with bytes per request."""
    table = _table("State")
    for name in ("decode", "reads from", "layers", "components", "units"):
        table.add_column(name)
    table.add_column("a request", justify="right")
    last = None
    for each in report.state:
        read = each.read
        table.add_row(
            *_cells(
                "" if read.dst_rank == last else str(read.dst_rank),
                str(read.src_rank),
                ranges_text(each.layers),
                ", ".join(each.components),
                str(read.units),
                bytes_text(each.num_elements * report.state_element_bytes),
            )
        )
        last = read.dst_rank
    return table


def _ways(report: PlanReport) -> Table:
    """Return the table of each read's strategy and descriptors, in the order of `_reads`."""
    table = _table("Direct or staged")
    for name in ("decode", "reads from"):
        table.add_column(name)
    for name in ("descriptors\nper 1k tokens", "of size", "merged", "merged\nin arena"):
        table.add_column(name, justify="right")
    table.add_column("how")
    for reader in report.figures.readers:
        for position, figures in enumerate(reader.reads):
            table.add_row(
                *_cells(
                    "" if position else str(reader.rank),
                    str(figures.read.src_rank),
                    f"{figures.descriptors:,}",
                    _bytes(report, figures.descriptor_bytes),
                    f"{figures.merged_descriptors:,}",
                    f"{figures.staged_descriptors:,}",
                    figures.strategy.value if report.knows_bytes else _UNKNOWN,
                ),
                end_section=position == len(reader.reads) - 1,
            )
    return table


def _decode_ranks(report: PlanReport) -> Table:
    table = _table("Decode ranks")
    table.add_column("rank")
    request = f"a request of\n{report.prompt_tokens:,} tokens"
    for name in ("fan-in", "reads", "a token", request, "descriptors\nper 1k tokens"):
        table.add_column(name, justify="right")
    table.add_column("only notifies")
    for reader in report.figures.readers:
        table.add_row(
            *_cells(
                str(reader.rank),
                str(reader.fan_in),
                str(len(reader.reads)),
                _bytes(report, reader.token_bytes),
                _bytes(report, reader.request_bytes),
                f"{reader.descriptors:,}",
                ranks_text(reader.only_notifies) or "-",
            )
        )
    if len(report.figures.readers) > 1:
        readers = report.figures.readers
        table.add_section()
        table.add_row(
            *_cells(
                "all",
                "",
                str(sum(len(reader.reads) for reader in readers)),
                _bytes(report, sum(reader.token_bytes for reader in readers)),
                _bytes(report, sum(reader.request_bytes for reader in readers)),
                f"{sum(reader.descriptors for reader in readers):,}",
                "",
            )
        )
    return table


def _prefill_ranks(report: PlanReport) -> Table:
    num_reads = Counter(read.src_rank for read in report.plan.reads)
    table = _table("Prefill ranks")
    table.add_column("rank")
    for name in ("fan-out", "reads", "a token"):
        table.add_column(name, justify="right")
    for name in ("how", "released by"):
        table.add_column(name)
    for source in report.figures.sources:
        table.add_row(
            *_cells(
                str(source.rank),
                str(source.fan_out),
                str(num_reads[source.rank]),
                _bytes(report, source.token_bytes) if source.fan_out else "-",
                _how(report, source),
                ranks_text(source.notifiers),
            ),
            style=None if source.fan_out else "dim",
        )
    return table


def _how(report: PlanReport, source: SourceFigures) -> str:
    """Return the strategies of the reads from a source rank."""
    if not source.fan_out:
        return "only notified"
    if not report.knows_bytes:
        return _UNKNOWN
    ways = {
        figures.strategy.value
        for reader in report.figures.readers
        for figures in reader.reads
        if figures.read.src_rank == source.rank
    }
    return ", ".join(sorted(ways))


def _table(title: str) -> Table:
    return Table(
        title=Text(title, style="bold"),
        title_justify="left",
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        header_style="cyan",
    )


def _cells(*texts: str) -> list[Text]:
    """Return cells with literal text, so that rich does not take `[0, 4)` for markup."""
    return [Text(text) for text in texts]


def _bytes(report: PlanReport, num_bytes: float) -> str:
    return bytes_text(num_bytes) if report.knows_bytes else _UNKNOWN


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
