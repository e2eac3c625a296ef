# SPDX-License-Identifier: Apache-2.0
"""The metrics of an engine with our connector."""

from __future__ import annotations

from types import SimpleNamespace

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.connector import NixlConnector


def families():
    """The families of metrics that an engine with our connector shows, by the name of a series."""
    registry = CollectorRegistry()

    def registered(cls):
        return lambda **arguments: cls(registry=registry, **arguments)

    NixlConnector.build_prom_metrics(
        SimpleNamespace(kv_transfer_config=None),
        {cls: registered(cls) for cls in (Gauge, Counter, Histogram)},
        ["model_name", "engine"],
        {0: ["model", "0"]},
    )
    return {
        f"{family.name}{'_total' * (family.type == 'counter')}": family
        for family in registry.collect()
    }
