# SPDX-License-Identifier: Apache-2.0
"""A plan as a drawing: both engines side by side, layers downwards and KV heads to the right.

A layer is at the same height in both engines. Each prefill rank is one rectangle in its own colour,
hatched if no rank reads from it. Each read is one rectangle within its decode rank, in the colour
of the rank that it reads from. Hues distinguish tensor-parallel ranks, and shades distinguish
stages. The colours suit colour-blind readers, and labels repeat them in words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree as Tree

from ..plan.mesh import MeshRank, ParallelMesh
from ..plan.reshard import ReshardPlan
from ..plan.shards import Shard, UnitInterval

# Okabe and Ito's palette, without black.
_HUES = (
    (230, 159, 0),
    (86, 180, 233),
    (0, 158, 115),
    (240, 228, 66),
    (0, 114, 178),
    (213, 94, 0),
    (204, 121, 167),
    (153, 153, 153),
)
_SHADES = (1.0, 0.62, 0.82, 0.45)
"""Fraction of the hue in each stage's colour; the rest is white."""

_MARGIN, _TOP, _GUTTER, _COLUMN_GAP = 24.0, 110.0, 110.0, 8.0
_LINE, _LETTER = 14.0, 7.4
_MIN_COLUMN, _MAX_COLUMN, _MIN_SIDE = 70.0, 360.0, 290.0
_HEIGHT, _MAX_HEIGHT = 480.0, 2400.0


@dataclass(frozen=True, slots=True)
class _Side:
    """One engine's half of the drawing: the left edge of its columns, and their width."""

    left: float
    column: float
    heads: int
    mesh: ParallelMesh

    @property
    def width(self) -> float:
        return self.mesh.tp_size * (self.column + _COLUMN_GAP) - _COLUMN_GAP

    def x(self, tp_rank: int, local_head: int = 0) -> float:
        """Return the left edge of one of a rank's heads."""
        start = self.left + tp_rank * (self.column + _COLUMN_GAP)
        return start + local_head * self.column / self.heads


@dataclass(frozen=True, slots=True)
class _Rows:
    """The axis of layers: the top edge of the first one, and the height of each."""

    top: float
    layer: float

    def y(self, layer: int) -> float:
        return self.top + layer * self.layer


def draw_plan(
    prefill: ParallelMesh,
    decode: ParallelMesh,
    src: Sequence[Shard],
    dst: Sequence[Shard],
    plan: ReshardPlan,
) -> str:
    """Draw a plan as SVG.

    Args:
        prefill: Mesh of the prefill engine, which is read from.
        decode: Mesh of the decode engine, which reads.
        src: Shards of the prefill engine; layers are indices.
        dst: Shards of the decode engine.
        plan: The plan between the two.

    Returns:
        The document. It has one rectangle of class `source` per prefill rank, and one of class
        `read` per read.
    """
    num_layers = 1 + max(int(layer) for shard in dst for layer in shard.holdings)
    num_heads = max(each.num_units for shard in dst for each in shard.holdings.values())
    lowest = min(len(read.layers) for read in plan.reads)
    height = min(max(_HEIGHT, num_layers * (_LINE + 6) / lowest), _MAX_HEIGHT)
    rows = _Rows(_TOP, height / num_layers)
    left = _side(_MARGIN + 46, prefill, src)
    narrowest = min(read.num_units for read in plan.reads)
    right = _side(left.left + left.width + _GUTTER, decode, dst, narrowest)
    left_heading = f"prefill {prefill}: what each rank holds"
    right_heading = f"decode {decode}: from whom each rank reads"
    width = right.left + max(right.width, len(right_heading) * _LETTER) + _MARGIN
    svg = Tree.Element(
        "svg",
        xmlns="http://www.w3.org/2000/svg",
        width=f"{width:g}",
        height=f"{_TOP + height + 62:g}",
        viewBox=f"0 0 {width:g} {_TOP + height + 62:g}",
        attrib={"font-family": "Helvetica, Arial, sans-serif", "font-size": "12"},
    )
    _hatching(svg)
    Tree.SubElement(svg, "rect", width="100%", height="100%", fill="white")
    _text(svg, _MARGIN, 30, f"KV cache: prefill {prefill} to decode {decode}", size=17, bold=True)
    sizes = f"{_count(num_layers, 'layer')}, {_count(num_heads, 'KV head')} (global numbers)"
    _text(svg, _MARGIN, 50, sizes, fill="#555")
    _engine_heading(svg, left, left_heading, src)
    _engine_heading(svg, right, right_heading, dst)
    _layer_axis(svg, left, rows, src)
    _layer_axis(svg, right, rows, dst)
    read_from = {read.src_rank for read in plan.reads}
    for shard in src:
        _draw_source(svg, left, rows, shard, is_read=shard.rank in read_from)
    for read in plan.reads:
        layers = [int(layer) for layer in read.layers]
        x = right.x(read.dst_rank.tp_rank, read.dst_unit_offset)
        _cell(
            svg,
            (x, right.x(read.dst_rank.tp_rank, read.dst_unit_offset + read.num_units)),
            (rows.y(layers[0]), rows.y(layers[-1] + 1)),
            read.src_rank,
            [str(read.src_rank), *_slice_lines(layers, read.units)],
            kind="read",
            title=f"{read.dst_rank} reads",
        )
    for shard in dst:
        _outline(svg, right, rows, shard)
    _legend(svg, _TOP + height + 34, all_read=len(read_from) == len(src))
    Tree.indent(svg)
    return Tree.tostring(svg, encoding="unicode") + "\n"


def _side(
    left: float, mesh: ParallelMesh, shards: Sequence[Shard], narrowest: int | None = None
) -> _Side:
    """Return a side, wide enough within limits for the labels of its narrowest cell."""
    heads = max(len(each.units) for shard in shards for each in shard.holdings.values())
    column = _MIN_COLUMN * heads / (narrowest or heads)
    if mesh.tp_size * (column + _COLUMN_GAP) < _MIN_SIDE:
        column = _MIN_SIDE / mesh.tp_size
    return _Side(left, min(column, _MAX_COLUMN), heads, mesh)


def _engine_heading(svg: Tree.Element, side: _Side, heading: str, shards: Sequence[Shard]) -> None:
    """Write the engine's heading, and the heads of each column."""
    _text(svg, side.left, 76, heading, bold=True)
    for shard in shards:
        if shard.rank.pp_rank == 0:
            heads = next(iter(shard.holdings.values())).units
            x = side.x(shard.rank.tp_rank) + side.column / 2
            text = f"tp{shard.rank.tp_rank}: {heads}"
            _text(svg, x, _TOP - 10, text, size=10.5, anchor="middle", fill="#333")


def _layer_axis(svg: Tree.Element, side: _Side, rows: _Rows, shards: Sequence[Shard]) -> None:
    """Write the stages and their layers to the left of the engine."""
    for shard in shards:
        if shard.rank.tp_rank == 0:
            layers = [int(layer) for layer in shard.holdings]
            middle = (rows.y(layers[0]) + rows.y(layers[-1] + 1)) / 2
            _text(
                svg, side.left - 8, middle - 1, f"pp{shard.rank.pp_rank}", anchor="end", bold=True
            )
            span = f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else str(layers[0])
            _text(svg, side.left - 8, middle + 12, span, size=10.5, anchor="end", fill="#333")


def _draw_source(
    svg: Tree.Element, side: _Side, rows: _Rows, shard: Shard, *, is_read: bool
) -> None:
    """Draw one prefill rank, hatched if no rank reads from it."""
    layers = [int(layer) for layer in shard.holdings]
    heads = next(iter(shard.holdings.values())).units
    x_range = side.x(shard.rank.tp_rank), side.x(shard.rank.tp_rank) + side.column
    y_range = rows.y(layers[0]), rows.y(layers[-1] + 1)
    _cell(
        svg,
        x_range,
        y_range,
        shard.rank,
        [str(shard.rank), *(_slice_lines(layers, heads) if is_read else ["only notified"])],
        kind="source",
        title="holds" if is_read else "only notified: holds",
        hatched=not is_read,
    )


def _cell(
    svg: Tree.Element,
    x_range: tuple[float, float],
    y_range: tuple[float, float],
    source: MeshRank,
    lines: Sequence[str],
    *,
    kind: str,
    title: str,
    hatched: bool = False,
) -> None:
    """Draw a rectangle in the colour of a prefill rank, with as many lines of text as fit."""
    red, green, blue = _colour(source)
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
    Tree.SubElement(cell, "title").text = f"{title} {', '.join(lines)}"
    dark = 0.299 * red + 0.587 * green + 0.114 * blue < 130 and not hatched
    fitting = lines[: int((height - 4) // _LINE)]
    middle, first = sum(x_range) / 2, sum(y_range) / 2 - _LINE * (len(fitting) - 1) / 2 + 4
    for position, line in enumerate(fitting):
        size = min(11.5 if position == 0 else 10.0, 1.55 * (width - 4) / len(line))
        if size >= 6:
            _text(
                svg,
                middle,
                first + position * _LINE,
                line,
                size=size,
                anchor="middle",
                bold=position == 0,
                fill="white" if dark else "#111",
            )


def _slice_lines(layers: Sequence[int], heads: UnitInterval) -> list[str]:
    first, last = layers[0], layers[-1]
    return [f"layers {first}-{last}" if last > first else f"layer {first}", f"heads {heads}"]


def _outline(svg: Tree.Element, side: _Side, rows: _Rows, shard: Shard) -> None:
    """Draw a frame around everything that one decode rank reads."""
    layers = [int(layer) for layer in shard.holdings]
    x, y = side.x(shard.rank.tp_rank), rows.y(layers[0])
    stop = rows.y(layers[-1] + 1)
    path = f"M{x:.2f} {y:.2f}h{side.column:.2f}V{stop:.2f}h{-side.column:.2f}Z"
    frame = Tree.SubElement(svg, "path", d=path, fill="none", stroke="#222")
    frame.set("stroke-width", "1.6")


def _legend(svg: Tree.Element, y: float, *, all_read: bool) -> None:
    text = (
        "Colour: the prefill rank that is read from; hue for its tensor-parallel rank, shade for "
        "its stage. Frame: a decode rank."
    )
    _text(svg, _MARGIN, y, text, size=10.5, fill="#333")
    if not all_read:
        text = "Hatched: no rank reads from it, it is only notified."
        _text(svg, _MARGIN, y + 15, text, size=10.5, fill="#333")


def _hatching(svg: Tree.Element) -> None:
    pattern = Tree.SubElement(
        Tree.SubElement(svg, "defs"),
        "pattern",
        id="hatching",
        width="7",
        height="7",
        patternUnits="userSpaceOnUse",
    )
    Tree.SubElement(pattern, "path", d="M0 0h7v7h-7z", fill="#f6f6f6")
    Tree.SubElement(pattern, "path", d="M0 7L7 0", stroke="#d4d4d4")


def _colour(rank: MeshRank) -> tuple[int, int, int]:
    """Return a rank's colour: hue by TP rank, shade by stage; both repeat in a large mesh."""
    shade = _SHADES[rank.pp_rank % len(_SHADES)]
    red, green, blue = (
        round(255 - shade * (255 - part)) for part in _HUES[rank.tp_rank % len(_HUES)]
    )
    return red, green, blue


def _text(
    svg: Tree.Element,
    x: float,
    y: float,
    text: str,
    *,
    size: float = 12,
    anchor: str = "start",
    fill: str = "#111",
    bold: bool = False,
) -> None:
    element = Tree.SubElement(svg, "text", x=f"{x:.2f}", y=f"{y:.2f}", fill=fill)
    element.set("font-size", f"{size:.3g}")
    element.set("text-anchor", anchor)
    if bold:
        element.set("font-weight", "bold")
    element.text = text


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
