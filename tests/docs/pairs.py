# SPDX-License-Identifier: Apache-2.0
"""The pairs of engines that were run."""

from __future__ import annotations

import csv

from tools.docs.blocks import ROOT


def all_pairs() -> list[dict[str, str]]:
    """Those that are stored, by column."""
    with (ROOT / "docs/results/pairs.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def pairs_of_pages() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Those of the release that pages name, and those of them whose caches are as on GPUs."""
    run = [pair for pair in all_pairs() if pair["vllm"] == "0.32.0"]
    return run, [pair for pair in run if pair["situation"] == "caches as on GPUs"]
