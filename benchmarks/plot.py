# SPDX-License-Identifier: Apache-2.0
"""Figures as a drawing: a dot for each median, a line for its range, variants side by side."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import report
from .results import Metric, Part, Result
from .samples import Summary

_COLOURS = ("#1b6ca8", "#d1495b", "#e08e1b", "#5f6b7a", "#a5adba", "#30915c", "#8d5bb0")
_ROW_INCHES = 0.17
_GAP_ROWS = 0.9
_LABEL_CHARACTERS = 46
_WIDTH_INCHES = 11.0


@dataclass(frozen=True)
class _Chart:
    """What one chart shows.

    Attributes:
        part: Which results.
        title: What the axis means.
        value: Of a result's variant, to be placed on the axis.
        show: The same in words.
    """

    part: Part
    title: str
    value: Callable[[Result, str], Summary | None]
    show: Callable[[float], str]


def _of(metric: Metric) -> Callable[[Result, str], Summary | None]:
    return lambda result, variant: result.summary(variant, metric)


_CHARTS = (
    _Chart(
        Part.HANDSHAKE,
        "Handshake: seconds from the first request to the first read (less is better)",
        _of(Metric.SECONDS),
        report.seconds,
    ),
    _Chart(
        Part.HANDSHAKE,
        "Handshake: peak memory above what it was before, bytes (less is better)",
        _of(Metric.PEAK_BYTES),
        report.size,
    ),
    _Chart(
        Part.TRANSFER,
        "Transfer: GB/s (more is better)",
        report.speed,
        lambda value: f"{value:.3g}",
    ),
    _Chart(
        Part.REQUEST_PATH,
        "Request path: seconds of CPU time a request (less is better)",
        _of(Metric.REQUEST_CPU_S),
        report.seconds,
    ),
    _Chart(
        Part.PAUSES,
        "Pauses of the engine's thread: seconds of the longest (less is better)",
        _of(Metric.LONGEST_PAUSE_S),
        report.seconds,
    ),
    _Chart(
        Part.NETWORK,
        "Network: seconds from the question to the report (less is better)",
        _of(Metric.SECONDS),
        report.seconds,
    ),
    _Chart(
        Part.END_TO_END,
        "End to end: seconds to the first token (less is better)",
        _of(Metric.TTFT_S),
        report.seconds,
    ),
    _Chart(
        Part.CLIENTS,
        "Clients: seconds of CPU of both engines a request (less is better)",
        _of(Metric.ENGINES_CPU_S),
        report.seconds,
    ),
)


def draw(results: Sequence[Result], path: Path) -> None:
    """Write an SVG file with the charts of all parts that were measured; none without any."""
    import matplotlib

    matplotlib.use("svg")
    # The same figures give the same file.
    matplotlib.rcParams.update({"svg.hashsalt": "benchmarks"})
    from matplotlib import pyplot

    shown = [
        (chart, cases)
        for chart in _CHARTS
        if (cases := [each for each in results if each.part is chart.part and each.samples])
    ]
    if not shown:
        return
    variants = dict.fromkeys(variant for result in results for variant in result.samples)
    colours = dict(zip(variants, _COLOURS * len(variants), strict=False))
    rows = [sum(len(case.samples) + _GAP_ROWS for case in cases) for _, cases in shown]
    figure, axes = pyplot.subplots(
        len(shown),
        1,
        figsize=(_WIDTH_INCHES, _ROW_INCHES * sum(rows) + 0.9 * len(shown)),
        height_ratios=rows,
        squeeze=False,
        layout="constrained",
    )
    for axis, (chart, cases) in zip(axes[:, 0], shown, strict=True):
        _draw(axis, chart, cases, colours)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _draw(axis: Any, chart: _Chart, cases: Sequence[Result], colours: dict[str, str]) -> None:
    """One chart, its cases from top to bottom."""
    named: set[str] = set()
    ticks, labels, row = [], [], 0.0
    for case in cases:
        first = row
        for variant in case.samples:
            value = chart.value(case, variant)
            if value is None:
                continue
            axis.errorbar(
                value.median,
                row,
                xerr=[[value.median - value.min], [value.max - value.median]],
                fmt="o",
                color=colours[variant],
                label="_nolegend_" if variant in named else variant,
                markersize=4,
                elinewidth=1.2,
                capsize=2,
            )
            place = {"xytext": (5, 0), "textcoords": "offset points", "va": "center"}
            axis.annotate(chart.show(value.median), (value.max, row), fontsize=6.5, **place)
            named.add(variant)
            row += 1
        ticks.append((first + row - 1) / 2)
        labels.append(textwrap.fill(case.case, _LABEL_CHARACTERS))
        axis.axhline(row - 0.05, color="#dddddd", lw=0.5)
        row += _GAP_ROWS
    axis.set_xscale("log")
    axis.set_yticks(ticks, labels, fontsize=7)
    axis.set_ylim(row - _GAP_ROWS, -1)
    axis.margins(x=0.1)
    axis.set_title(chart.title, loc="left", fontsize=9)
    axis.tick_params(axis="x", which="both", labelsize=7)
    axis.grid(axis="x", which="both", lw=0.3)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=7, frameon=False)
