# SPDX-License-Identifier: Apache-2.0
"""A plan as a drawing: both engines side by side, layers downwards and units to the right.

A row is one cache of one layer, at the same height in both engines. Each prefill rank is one
rectangle in its own colour, hatched if no rank reads from it. Reads are rectangles within their
decode rank, in the colour of the rank that is read from, as wide as their part of what the decode
rank holds. Hues distinguish tensor-parallel ranks, and shades distinguish stages. The colours suit
colour-blind readers, and labels repeat them in words.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree as Tree

from ..plan.reshard import ranges_text
from ..plan.shards import Layer, MeshRank, Shard
from .engines import Answer, Engine
from .planning import Planned

# Okabe and Ito's palette, without black.
_HUES = (
    *((230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66)),
    *((0, 114, 178), (213, 94, 0), (204, 121, 167), (153, 153, 153)),
)
_SHADES = (1.0, 0.62, 0.82, 0.45)
"""Fraction of the hue in each stage's colour; the rest is white."""

_MARGIN, _TOP, _GUTTER, _GAP, _LINE = 24.0, 110.0, 110.0, 8.0, 14.0
_MIN_COLUMN, _MAX_COLUMN, _MIN_SIDE = 70.0, 360.0, 290.0
_HEIGHT, _MAX_HEIGHT = 480.0, 2400.0


@dataclass(frozen=True, slots=True)
class _Side:
    """One engine's half: the left edge of its columns, and the width of each."""

    left: float
    column: float
    engine: Engine

    @property
    def right(self) -> float:
        return self.x(self.engine.layout.mesh.tp_size) - _GAP

    def x(self, tp_rank: int, fraction: float = 0) -> float:
        """Return where a fraction of a rank's column begins."""
        return self.left + tp_rank * (self.column + _GAP) + fraction * self.column


@dataclass(frozen=True, slots=True)
class _Rows:
    """The axis of layers: the caches in their order, and the height of each."""

    position: dict[Layer, int]
    indices: list[int]
    height: float

    def runs(self, layers: Sequence[Layer]) -> list[tuple[int, int]]:
        """Return the runs of adjoining rows of some caches, from the first to behind the last."""
        found: list[tuple[int, int]] = []
        for row in sorted(self.position[layer] for layer in layers):
            if found and found[-1][1] == row:
                found[-1] = found[-1][0], row + 1
            else:
                found.append((row, row + 1))
        return found

    def y(self, run: tuple[int, int]) -> tuple[float, float]:
        return _TOP + run[0] * self.height, _TOP + run[1] * self.height

    def layers(self, run: tuple[int, int]) -> str:
        """Name the layers of a run."""
        indices = sorted({*self.indices[run[0] : run[1]]})
        return f"layer{'s' * (len(indices) > 1)} {ranges_text(indices)}"


def draw_plan(answer: Answer, planned: Planned) -> str:
    """Draw a plan as SVG.

    Returns:
        The document. It has one rectangle of class `source` per prefill rank, and of class `read`
        one for each run of layers that a decode rank reads from one prefill rank in one width.
    """
    prefill, decode = answer.engines
    layers = {layer for shard in decode.shards for layer in shard.holdings}
    keys = {layer: re.findall(r"\d+", str(layer)) for layer in layers}
    order = sorted(
        layers, key=lambda layer: (int(keys[layer][0]) if keys[layer] else 0, str(layer))
    )
    indices = [int(keys[layer][0]) if keys[layer] else 0 for layer in order]
    held = {shard.rank: shard.holdings for shard in decode.shards}
    slots = [
        (read, layer, (read.dst_rank, layer, read.dst_unit_offset))
        for read in planned.plan.reads
        for layer in read.layers
    ]
    # Reads of the same units have other tokens, and stand side by side.
    beside, seen = Counter(slot for _, _, slot in slots), Counter[object]()
    cells: dict[tuple[MeshRank, MeshRank, float, float, str], list[Layer]] = {}
    for read, layer, slot in slots:
        whole = len(held[read.dst_rank][layer].units)
        # Units that are not counted are those of both engines' ranks, several of them on each.
        part = min(read.num_units / whole, 1) / beside[slot]
        start = min(read.dst_unit_offset / whole, 1 - part) + seen[slot] * part
        seen[slot] += 1
        cell = read.dst_rank, read.src_rank, start, part, f"units {read.units}"
        cells.setdefault(cell, []).append(layer)
    height = max(_HEIGHT, min(len(order) * (_LINE + 6), _MAX_HEIGHT) if len(order) < 40 else 0)
    rows = _Rows({layer: row for row, layer in enumerate(order)}, indices, height / len(order))
    narrowest = min(width for _, _, _, width, _ in cells)
    left = _side(_MARGIN + 46, prefill, 1)
    right = _side(left.right + _GUTTER, decode, narrowest)
    width, bottom = max(right.right, right.left + 300) + _MARGIN, _TOP + height
    svg = Tree.Element(
        "svg",
        xmlns="http://www.w3.org/2000/svg",
        width=f"{width:g}",
        height=f"{bottom + 62:g}",
        viewBox=f"0 0 {width:g} {bottom + 62:g}",
        attrib={"font-family": "Helvetica, Arial, sans-serif", "font-size": "12"},
    )
    _hatching(svg)
    Tree.SubElement(svg, "rect", width="100%", height="100%", fill="white")
    meshes = prefill.layout.mesh, decode.layout.mesh
    title = f"KV cache: prefill {meshes[0]} to decode {meshes[1]}"
    _text(svg, _MARGIN, 30, title, size=17, bold=True)
    _text(svg, _MARGIN, 50, answer.model, fill="#555")
    _axes(svg, left, rows, f"prefill {meshes[0]}: what each rank holds")
    _axes(svg, right, rows, f"decode {meshes[1]}: whom each reads from")
    read_from = {read.src_rank for read in planned.plan.reads}
    for shard in prefill.shards:
        known = [layer for layer in shard.holdings if layer in layers]
        x = left.x(shard.rank.tp_rank), left.x(shard.rank.tp_rank, 1)
        labels = _held(shard) if shard.rank in read_from else ["only notified"]
        for run in rows.runs(known)[:1]:
            span = run[0], rows.runs(known)[-1][1]
            _cell(svg, x, rows.y(span), shard.rank, [rows.layers(span), *labels], "source")
    for (dst, src, start, part, units), of_cell in cells.items():
        x = right.x(dst.tp_rank, start), right.x(dst.tp_rank, start + part)
        for run in rows.runs(of_cell):
            _cell(svg, x, rows.y(run), src, [rows.layers(run), units], "read")
    for shard in decode.shards:
        runs = rows.runs([*shard.holdings])
        top, end = rows.y((runs[0][0], runs[-1][1]))
        path = f"M{right.x(shard.rank.tp_rank):.2f} {top:.2f}h{right.column:.2f}V{end:.2f}"
        path += f"h{-right.column:.2f}Z"
        Tree.SubElement(svg, "path", d=path, fill="none", stroke="#222").set("stroke-width", "1.6")
    legend = "Colour: the prefill rank that is read from; hue for its tensor-parallel rank, shade "
    _text(svg, _MARGIN, bottom + 34, legend + "for its stage. Frame: a decode rank.", size=10.5)
    if len(read_from) < len(prefill.shards):
        hatched = "Hatched: no rank reads from it, it is only notified."
        _text(svg, _MARGIN, bottom + 49, hatched, size=10.5)
    Tree.indent(svg)
    return Tree.tostring(svg, encoding="unicode") + "\n"


def _side(left: float, engine: Engine, narrowest: float) -> _Side:
    """Return a side, wide enough within limits for the labels of its narrowest cell."""
    tp_size = engine.layout.mesh.tp_size
    column = min(max(_MIN_COLUMN / narrowest, _MIN_SIDE / tp_size - _GAP), _MAX_COLUMN)
    return _Side(left, column, engine)


def _axes(svg: Tree.Element, side: _Side, rows: _Rows, heading: str) -> None:
    """Write the engine's heading, the units of each column, and the layers of each stage."""
    _text(svg, side.left, 76, heading, bold=True)
    for shard in side.engine.shards:
        rank = shard.rank
        if rank.pp_rank == 0:
            text = ": ".join([f"tp{rank.tp_rank}", *(each[6:] for each in _held(shard))])
            _text(svg, side.x(rank.tp_rank, 0.5), _TOP - 10, text, size=10.5, anchor="middle")
        known = [layer for layer in shard.holdings if layer in rows.position]
        if rank.tp_rank == 0 and known:
            runs = rows.runs(known)
            whole = runs[0][0], runs[-1][1]
            middle = sum(rows.y(whole)) / 2
            _text(svg, side.left - 8, middle - 1, f"pp{rank.pp_rank}", anchor="end", bold=True)
            span = rows.layers(whole).split(" ")
            text = span[1] if len(span) == 2 else f"{span[1].strip(',')} ... {span[-1]}"
            _text(svg, side.left - 8, middle + 12, text, size=10.5, anchor="end")


def _held(shard: Shard) -> list[str]:
    """Name the units that a rank holds, if they are the same of all its layers."""
    units = {str(each.units) for each in shard.holdings.values()}
    return [f"units {each}" for each in units] if len(units) == 1 else []


def _cell(
    svg: Tree.Element,
    x_range: tuple[float, float],
    y_range: tuple[float, float],
    rank: MeshRank,
    lines: Sequence[str],
    kind: str,
) -> None:
    """Draw a rectangle in the colour of a rank, with as many lines as fit."""
    hue, shade = _HUES[rank.tp_rank % len(_HUES)], _SHADES[rank.pp_rank % len(_SHADES)]
    red, green, blue = (round(255 - shade * (255 - part)) for part in hue)
    hatched = "only notified" in lines
    width, height = x_range[1] - x_range[0], y_range[1] - y_range[0]
    cell = Tree.SubElement(
        svg,
        "rect",
        x=f"{x_range[0]:.2f}",
        y=f"{y_range[0] + 1:.2f}",
        width=f"{width:.2f}",
        height=f"{max(height - 2, 1):.2f}",
        fill="url(#hatching)" if hatched else f"rgb({red},{green},{blue})",
        stroke="#999" if hatched else "white",
        attrib={"class": kind, "stroke-width": "1"},
    )
    Tree.SubElement(cell, "title").text = ", ".join([str(rank), *lines])
    dark = 0.299 * red + 0.587 * green + 0.114 * blue < 130 and not hatched
    fitting = [str(rank), *lines][: int((height - 4) // _LINE)]
    first = sum(y_range) / 2 - _LINE * (len(fitting) - 1) / 2 + 4
    for number, line in enumerate(fitting):
        size = min(10.0 if number else 11.5, 1.55 * (width - 4) / len(line))
        if size >= 6:
            place = sum(x_range) / 2, first + number * _LINE
            fill = "white" if dark else "#111"
            _text(svg, *place, line, size=size, anchor="middle", bold=not number, fill=fill)


def _hatching(svg: Tree.Element) -> None:
    pattern = Tree.SubElement(Tree.SubElement(svg, "defs"), "pattern", id="hatching")
    for name, value in (("width", "7"), ("height", "7"), ("patternUnits", "userSpaceOnUse")):
        pattern.set(name, value)
    Tree.SubElement(pattern, "path", d="M0 0h7v7h-7z", fill="#f6f6f6")
    Tree.SubElement(pattern, "path", d="M0 7L7 0", stroke="#d4d4d4")


def _text(
    svg: Tree.Element,
    x: float,
    y: float,
    text: str,
    *,
    size: float = 12,
    anchor: str = "start",
    fill: str = "#333",
    bold: bool = False,
) -> None:
    element = Tree.SubElement(svg, "text", x=f"{x:.2f}", y=f"{y:.2f}", fill=fill)
    element.set("font-size", f"{size:.3g}")
    element.set("text-anchor", anchor)
    if bold:
        element.set("font-weight", "bold")
    element.text = text
