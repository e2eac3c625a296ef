# SPDX-License-Identifier: Apache-2.0
"""What the engines' Prometheus metrics say about transfers over NIXL."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields

import httpx
from prometheus_client.parser import text_string_to_metric_families

_SAMPLES = {
    "vllm:nixl_bytes_transferred_sum": "bytes_moved",
    "vllm:nixl_bytes_transferred_count": "transfers",
    "vllm:nixl_read_failures_total": "failed_reads",
    "vllm:nixl_num_failed_notifications_total": "failed_notifications",
    "vllm:nixl_num_kv_expired_reqs_total": "expired_requests",
    "vllm:nixl_prefill_wait_seconds_count": "prefill_waits",
    "vllm:nixl_prefetched_bytes_total": "prefetched_bytes",
    "vllm:nixl_first_tokens_seeded_total": "first_tokens",
    "vllm:nixl_read_bytes_total": "staged_bytes",
}
_LABELS = {"vllm:nixl_read_bytes_total": ("strategy", "staged")}
"""What a sample has to be labelled with to count, where not all of a name do."""


@dataclass(frozen=True)
class NixlCounters:
    """Counters of one engine since it started, summed over its ranks.

    Attributes:
        prefill_waits: prompts computed elsewhere that it has waited for.
        prefetched_bytes: what they have read while these were computed.
        first_tokens: answers that begin with the prefill engine's token.
        staged_bytes: what they have read by way of their staging arenas.
    """

    bytes_moved: int = 0
    transfers: int = 0
    failed_reads: int = 0
    failed_notifications: int = 0
    expired_requests: int = 0
    prefill_waits: int = 0
    prefetched_bytes: int = 0
    first_tokens: int = 0
    staged_bytes: int = 0

    def __add__(self, other: NixlCounters) -> NixlCounters:
        return NixlCounters(
            *(getattr(self, each.name) + getattr(other, each.name) for each in fields(self))
        )

    def __sub__(self, other: NixlCounters) -> NixlCounters:
        return NixlCounters(
            *(getattr(self, each.name) - getattr(other, each.name) for each in fields(self))
        )


def parse_nixl_counters(text: str) -> NixlCounters:
    """Read the counters from the text of a ``/metrics`` page; what it lacks is 0."""
    totals = dict.fromkeys(_SAMPLES.values(), 0)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            label, value = _LABELS.get(sample.name, ("", None))
            if sample.name in _SAMPLES and sample.labels.get(label) == value:
                totals[_SAMPLES[sample.name]] += int(sample.value)
    return NixlCounters(**totals)


def fetch_nixl_counters(base_url: str, timeout_s: float = 30.0) -> NixlCounters:
    """Read the counters of the engine that serves at ``base_url``."""
    response = httpx.get(f"{base_url}/metrics", timeout=timeout_s, trust_env=False)
    response.raise_for_status()
    return parse_nixl_counters(response.text)


def settled(read: Callable[[], NixlCounters], before: NixlCounters, limit_s: float) -> NixlCounters:
    """Read counters until they have moved on from ``before``, or the time is over.

    An engine reports a transfer with one of its next steps, which can be a moment after the
    answer of the request is complete.
    """
    deadline = time.monotonic() + limit_s
    while (now := read()) == before and time.monotonic() < deadline:
        time.sleep(0.1)
    return now
