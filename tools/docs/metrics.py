# SPDX-License-Identifier: Apache-2.0
"""The tables of metrics, of the values of their labels, and of spans in traces."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.connector import NixlConnector
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine import stats, traces

from .blocks import code, table
from .docstrings import members, section


def families() -> dict[str, Metric]:
    """The metrics that an engine with our connector shows, by the name of a series."""
    registry = CollectorRegistry()

    def registered(cls: Any) -> Any:
        return lambda **arguments: cls(registry=registry, **arguments)

    NixlConnector.build_prom_metrics(
        SimpleNamespace(kv_transfer_config=None),
        {cls: registered(cls) for cls in (Gauge, Counter, Histogram)},
        ["model_name", "engine"],
        {0: ["model", "0"]},
    )
    return {_series(family): family for family in registry.collect()}


def metric_lines() -> list[str]:
    """A row for each metric: first ours, then upstream's."""
    known = families()
    names = {metric.name for metric in stats._METRICS.values()}
    ours = {name: family.documentation for name, family in known.items() if family.name in names}
    # What follows the first sentence is of upstream's way to read.
    upstreams = {
        name: " ".join(family.documentation.partition(". ")[0].split()).rstrip(".") + "."
        for name, family in known.items()
        if name not in ours
    }

    def rows(told: dict[str, str]) -> list[str]:
        return table(
            ("metric", "kind", "meaning"),
            ((code(name), known[name].type, meaning) for name, meaning in told.items()),
        )

    return [
        *rows(ours),
        "",
        "Those of upstream's connector keep their names and meaning:",
        "",
        *rows(upstreams),
    ]


def label_lines() -> list[str]:
    """A table for each label of our metrics whose values are known, with a row for each."""
    by_values: dict[Any, list[str]] = {}
    names = {family.name: name for name, family in families().items()}
    for metric in stats._METRICS.values():
        if metric.values:
            by_values.setdefault((metric.label, metric.values), []).append(names[metric.name])
    lines = []
    for (label, values), metrics in by_values.items():
        rows = ((code(value), text) for value, text in members(values).items())
        of = " and ".join(code(name) for name in metrics)
        lines += ["", f"Of {of}:", "", *table((code(label), "meaning"), rows)]
    return lines[1:]


def told_spans() -> dict[str, str]:
    """What each span is of, by its name without the prefix."""
    return section(traces.__doc__, "Spans")


def span_lines() -> list[str]:
    """A table of spans, and one of their attributes."""
    spans = ((code(traces.PREFIX + name), text) for name, text in told_spans().items())
    return [
        *table(("span", "what it is of"), spans),
        "",
        f"Names of attributes are OpenTelemetry's, or begin with `{traces.PREFIX}`:",
        "",
        *table(
            ("attribute", "what it is"),
            (
                (", ".join(map(code, names.split(", "))), text)
                for names, text in section(traces.__doc__, "Span attributes").items()
            ),
        ),
    ]


def _series(family: Metric) -> str:
    return f"{family.name}{'_total' * (family.type == 'counter')}"
