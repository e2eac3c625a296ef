# SPDX-License-Identifier: Apache-2.0
"""What the options of an engine in the examples have to say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.config import KVTransferConfig

from tools.docs.metrics import families
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.settings import (
    read_settings,
    remarks,
)

EXAMPLES = Path(__file__).parents[2] / "examples"
ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


def check_kv_transfer(config: Any, side: str) -> None:
    """Check that an engine's connector is ours, in its role, and that it understands all options.

    Args:
        side: `prefill` or `decode`.
    """
    assert isinstance(config, KVTransferConfig)
    assert (config.kv_connector, config.kv_role) == ("NixlConnector", ROLES[side])
    assert remarks(config, read_settings(config), "prefill.example") == []


def exported_samples() -> dict[str, set[str]]:
    """Return the samples that an engine with our connector shows, each with its reasons."""
    reasons: dict[str, set[str]] = {}
    for family in families().values():
        for sample in family.samples:
            reasons.setdefault(sample.name, set()).add(sample.labels.get("reason", ""))
    return reasons
