# SPDX-License-Identifier: Apache-2.0
"""Prints a plan as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..plan.reshard import only_notified_by, ranges_text, ranks_text
from .engines import Answer
from .planning import CacheRow, Part, Planned

_NOTE = (
    "Merged: what is left of a request's descriptors where its blocks adjoin at both ends; by way "
    "of an arena, it is enough that they do at the source. How: what `auto` chooses by its default "
    "thresholds."
)


def bytes_text(num_bytes: float) -> str:
    """Return a size as readable text, such as 320 KiB."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.4g} {unit}"


def print_plan(answer: Answer, planned: Planned, console: Console, *, is_summary: bool) -> None:
    """Print engines, totals, kinds of cache, reads, and their cost for each rank."""
    _print_heading(answer, planned, console)
    printed: list[Table | Text] = [_caches(planned)]
    if not is_summary:
        has_shares = any(each.layout.num_shares > 1 for each in answer.engines)
        printed += [_reads(planned, has_shares=has_shares), _ways(planned)]
        printed += [_decode_ranks(answer, planned), _prefill_ranks(planned), Text(_NOTE)]
    for each in printed:
        console.print()
        console.print(each)


def _print_heading(answer: Answer, planned: Planned, console: Console) -> None:
    prefill, decode = answer.engines
    num_bytes, state, descriptors = planned.totals
    ranks = [shard.rank for shard in decode.shards]
    largest = max(ranks, key=lambda rank: sum(part.num_bytes for part in planned.of(rank)))
    most = sum(part.num_bytes for part in planned.of(largest))
    sources = {part.read.src_rank for part in planned.of(largest)}
    grid = Table.grid(padding=(0, 2))
    request = f"{planned.num_tokens:,} tokens: {bytes_text(num_bytes)}"
    request += f", {bytes_text(state)} of it state" * bool(state)
    request += f", in {_count(len(planned.plan.reads), 'read')} of {descriptors:,} descriptors"
    rank = f"reads up to {bytes_text(most)} from {_count(len(sources), 'prefill rank')}"
    said = {"prefill": str(prefill.layout), "decode": str(decode.layout), "model": answer.model}
    said |= {"sizes": answer.source, "request": request, "a rank": rank}
    for name, text in said.items():
        grid.add_row(Text(name, style="bold"), Text(text))
    console.print(grid)


def _caches(planned: Planned) -> Table:
    """Return the table of the kinds of cache that layers keep."""
    names = ("cache", "layers", "units", "kept as", "blocks of", "tokens", "a unit")
    return _table("Caches", names, [_row_cells(row) for row in planned.rows], right=("a unit",))


def _row_cells(row: CacheRow) -> list[str]:
    tokens = "-"
    if row.block_tokens is not None:
        tokens = " to ".join(map(str, dict.fromkeys(row.block_tokens)))
    per = "request" if row.block_tokens is None else "token"
    layers = f"{len(row.layers)}: {ranges_text(row.layers)}"
    each = f"{bytes_text(row.unit_bytes)} a {per}"
    return [row.kind, layers, str(row.units), row.kept_as, tokens, row.kept, each]


def _reads(planned: Planned, *, has_shares: bool) -> Table:
    shares = ("tokens",) * has_shares
    names = ("decode", "reads from", "cache", "layers", "units", "offsets", *shares, "a request")

    def cells(part: Part) -> list[str]:
        read = part.read
        offsets = f"{read.src_unit_offset} -> {read.dst_unit_offset}"
        tokens = [f"{read.src_tokens} -> {read.dst_tokens}"] * has_shares
        layers, num_bytes = ranges_text(part.layers), bytes_text(part.num_bytes)
        return [layers, str(read.units), offsets, *tokens, num_bytes]

    return _table("Reads", names, _by_reader(planned, cells), right=("a request",))


def _ways(planned: Planned) -> Table:
    """Return the table of each read's strategy and descriptors, in the order of `_reads`."""
    names = ("decode", "reads from", "cache", "descriptors", "of size", "merged", "in arena", "how")

    def cells(part: Part) -> list[str]:
        size, counts = bytes_text(part.descriptor_bytes), (part.merged, part.staged)
        return [f"{part.descriptors:,}", size, *(f"{each:,}" for each in counts), part.how]

    return _table("Direct, staged or packed", names, _by_reader(planned, cells), right=names[3:7])


def _by_reader(planned: Planned, cells: Callable[[Part], list[str]]) -> list[list[str]]:
    """Return one row for each part of a read; a reader is named in its first one."""
    rows, last = [], None
    for part in sorted(planned.parts, key=lambda each: each.read.dst_rank):
        rank = part.read.dst_rank
        name = "" if rank == last else str(rank)
        rows.append([name, str(part.read.src_rank), part.kind, *cells(part)])
        last = rank
    return rows


def _decode_ranks(answer: Answer, planned: Planned) -> Table:
    rows = []
    for shard in answer.engines[1].shards:
        parts = planned.of(shard.rank)
        fan_in = str(len({part.read.src_rank for part in parts}))
        num_bytes = bytes_text(sum(part.num_bytes for part in parts))
        descriptors = f"{sum(part.descriptors for part in parts):,}"
        notifies = ranks_text(only_notified_by(planned.plan, shard.rank)) or "-"
        rows.append([str(shard.rank), fan_in, num_bytes, descriptors, notifies])
    names = ("rank", "fan-in", "a request", "descriptors", "only notifies")
    return _table("Decode ranks", names, rows, right=names[1:4])


def _prefill_ranks(planned: Planned) -> Table:
    rows = []
    for release in planned.plan.releases:
        readers = planned.readers_of(release.src_rank)
        served = [str(len(readers)), bytes_text(sum(readers.values()))]
        rank, notifiers = str(release.src_rank), ranks_text(release.notifiers)
        rows.append([rank, *(served if readers else ["only notified", "-"]), notifiers])
    names = ("rank", "fan-out", "a request", "released by")
    return _table("Prefill ranks", names, rows, right=names[1:3])


def _table(
    title: str, names: Iterable[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()
) -> Table:
    """Return a table of literal text, so that rich does not take `[0, 4)` for markup."""
    table = Table(title=Text(title, style="bold"), title_justify="left", box=None)
    table.pad_edge, table.padding, table.header_style = False, (0, 2, 0, 0), "cyan"
    for name in names:
        table.add_column(name, justify="right" if name in right else "left")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"
