# SPDX-License-Identifier: Apache-2.0
"""A soak over time as a drawing: pools, memory and the length of requests, with the faults."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .checker import Violation
from .history import History

_COLOURS = ("#1b6ca8", "#d1495b", "#e08e1b", "#30915c")
_MIB = 1 << 20


def can_draw() -> bool:
    """Whether matplotlib is installed, which no soak needs."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(history: History, violations: Sequence[Violation], path: Path) -> None:
    """Write a drawing, in the format that the path's suffix names."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(4, 1, figsize=(12, 11), sharex=True, layout="constrained")
    usage, held, memory, requests = axes
    engines = sorted({each.engine for each in history.pools})
    for engine, colour in zip(engines, _COLOURS * len(engines), strict=False):
        pools = sorted(
            (each for each in history.pools if each.engine == engine), key=lambda each: each.at_s
        )
        times_s = [each.at_s for each in pools]
        usage.plot(times_s, [100 * each.usage for each in pools], color=colour, label=engine)
        held.plot(
            times_s, [each.held_blocks + each.blocks_in_doubt for each in pools], color=colour
        )
        sizes = [each for each in history.footprints if each.engine == engine]
        memory.plot(
            [each.at_s for each in sizes],
            [each.rss_bytes / _MIB for each in sizes],
            color=colour,
            marker=".",
        )
    for answered, colour, label in (
        (True, _COLOURS[3], "answered"),
        (False, _COLOURS[1], "not answered"),
    ):
        found = [each for each in history.requests if each.answered is answered and not each.left]
        requests.scatter(
            [each.sent_s for each in found],
            [each.ended_s - each.sent_s for each in found],
            s=6,
            color=colour,
            label=label,
        )
    _label(usage, "% of the pool in use", "upper right")
    _label(held, "blocks held or in doubt", None)
    _label(memory, "RSS, MiB", None)
    _label(requests, "seconds a request took", "upper right")
    requests.set_xlabel("seconds")
    for axis in axes:
        for fault in history.faults:
            axis.axvspan(fault.began_s, fault.healed_s, color="#8d5bb0", alpha=0.12, linewidth=0)
        for violation in violations:
            axis.axvline(violation.at_s, color="#b00020", linewidth=0.8)
    for fault in history.faults:
        usage.annotate(
            f"{fault.kind} {fault.target}",
            (fault.began_s, 100),
            rotation=90,
            fontsize=7,
            verticalalignment="top",
        )
    figure.savefig(path)
    pyplot.close(figure)


def _label(axis: Any, what: str, legend: str | None) -> None:
    axis.set_ylabel(what)
    axis.set_ylim(bottom=0)
    if legend is not None:
        axis.legend(loc=legend, fontsize=8)
