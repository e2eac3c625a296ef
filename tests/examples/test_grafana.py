# SPDX-License-Identifier: Apache-2.0
"""The dashboard shows metrics that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.examples.checks import exported_samples

DASHBOARD = Path(__file__).parents[2] / "examples/grafana/kv-transfer.json"


def test_every_panel_shows_something_that_is_exported():
    """No expression names a metric that engines do not have."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    used = {
        name
        for panel in panels
        for target in panel["targets"]
        for name in re.findall(r"vllm:[a-z_]+", target["expr"])
    }
    assert used
    assert used <= set(exported_samples())


def test_every_reason_metric_is_shown():
    """What fails by reason is broken down by reason."""
    expressions = [
        target["expr"]
        for panel in json.loads(DASHBOARD.read_text())["panels"]
        for target in panel["targets"]
    ]
    for name in ("vllm:nixl_read_failures_total", "vllm:nixl_handshake_failures_total"):
        assert any(name in each and "reason" in each for each in expressions)


def test_what_early_dispatch_and_seeding_do_is_shown():
    """How long requests wait, what transfer adds, and how much of either was saved."""
    text = DASHBOARD.read_text()
    for name in (
        "vllm:nixl_prefill_wait_seconds_bucket",
        "vllm:nixl_exposed_transfer_seconds_bucket",
        "vllm:nixl_prefetched_bytes_total",
        "vllm:nixl_first_tokens_seeded_total",
    ):
        assert name in text


def test_panels_do_not_overlap():
    """Each panel has a place of its own in the grid."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not taken & cells
        taken |= cells
    assert len({panel["id"] for panel in panels}) == len(panels)
