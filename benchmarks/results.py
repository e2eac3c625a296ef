# SPDX-License-Identifier: Apache-2.0
"""What was measured: samples of each variant, repetition by repetition."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from .samples import Summary, paired_ratio, summarize


class Part(Enum):
    """A part of the benchmark."""

    HANDSHAKE = "handshake"
    TRANSFER = "transfer"
    REQUEST_PATH = "request-path"
    IDLE = "idle"
    PEERS = "peers"
    PAUSES = "pauses"
    NETWORK = "network"
    END_TO_END = "end-to-end"
    CLIENTS = "clients"

    @property
    def has_engines(self) -> bool:
        """Whether engines are started for it, and not only connectors."""
        return self in (Part.END_TO_END, Part.CLIENTS)


class Metric(Enum):
    """What is measured, in its unit."""

    SECONDS = "seconds"
    PEAK_BYTES = "peak_bytes"
    REQUEST_CPU_S = "cpu_s_per_request"
    STEP_CPU_S = "cpu_s_per_step"
    OWN_CPU_S = "cpu_s_per_request_outside_nixl_transfer"
    WORKER_CPU_S = "worker_cpu_s_per_request"
    IDLE_CPU = "cpu_s_per_idle_second"
    RESIDENT_BYTES = "resident_bytes"
    DESCRIPTORS = "file_descriptors"
    PEAK_DESCRIPTORS = "file_descriptors_after_the_last_read"
    THREADS = "threads"
    NIXL_S = "seconds_in_nixl"
    LONGEST_PAUSE_S = "longest_pause_s"
    PAUSE_P99_S = "pause_p99_s"
    STEPS_AFTER_ARRIVAL = "engine_steps_after_the_last_byte"
    TTFT_S = "time_to_first_token_s"
    ITL_S = "inter_token_latency_s"
    ITL_P99_S = "inter_token_latency_p99_s"
    TOKENS_PER_S = "output_tokens_per_s"
    REQUESTS_PER_S = "requests_per_s"
    ENGINES_CPU_S = "cpu_s_of_both_engines_per_request"


@dataclass
class Result:
    """One case, measured in several variants that took turns.

    Attributes:
        part: Of what.
        case: Its name, unique within the part.
        sizes: What the case amounts to, with units in the names.
        samples: Values by variant and metric, one for each repetition.
        missing: Why variants were not measured.
    """

    part: Part
    case: str
    sizes: Mapping[str, float] = field(default_factory=dict)
    samples: dict[str, dict[Metric, list[float]]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def add(self, variant: str, values: Mapping[Metric, float]) -> None:
        """Add a repetition of a variant."""
        for metric, value in values.items():
            self.samples.setdefault(variant, {}).setdefault(metric, []).append(value)

    def give_up(self, variant: str, reason: str) -> None:
        """Take a variant out, with what was measured of it."""
        self.samples.pop(variant, None)
        self.missing[variant] = reason

    def summary(self, variant: str, metric: Metric) -> Summary | None:
        """A variant's values; None where there are none."""
        values = self.samples.get(variant, {}).get(metric)
        return summarize(values) if values else None

    def ratio(self, over: str, under: str, metric: Metric) -> Summary | None:
        """Values of one variant over another's of the same repetitions; None without."""
        values = [self.samples.get(variant, {}).get(metric, []) for variant in (over, under)]
        if not all(values) or len(values[0]) != len(values[1]):
            return None
        return paired_ratio(*values)
