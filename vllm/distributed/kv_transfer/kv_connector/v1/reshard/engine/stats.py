# SPDX-License-Identifier: Apache-2.0
"""What workers and scheduler count, and how Prometheus names it.

Upstream's metrics keep their names and meaning; these stand beside them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import (
    NixlKVConnectorStats,
    NixlPromMetrics,
)

from ..errors import (
    LocalLayoutError,
    RemoteEngineChangedError,
    RemoteHandshakeError,
    RemoteIncompatibleError,
    RemoteLayoutError,
    RemoteRefusedError,
    RemoteUnreachableError,
    RemoteUntrustedError,
    TransferError,
)
from ..memory.strategy import Strategy
from .compat import UPSTREAM_COUNTS_ALL_FAILURES

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT


class HandshakeFailure(str, Enum):
    """Why an engine could not be connected."""

    UNREACHABLE = "unreachable"
    UNTRUSTED = "untrusted"
    REFUSED = "refused"
    INCOMPATIBLE = "incompatible"
    ENGINE_CHANGED = "engine_changed"
    MALFORMED = "malformed"
    LAYOUT = "layout"
    TRANSFER = "transfer"
    OTHER = "other"


class ReadFailure(str, Enum):
    """Why the blocks of a request could not be read."""

    PARAMETERS = "parameters"
    """Its kv_transfer_params do not say where they are, or name blocks that are not there."""

    PREFILL = "prefill"
    """It was sent to both engines at once, and the prefill engine has not offered it."""

    HANDSHAKE = "handshake"
    """The engine that holds them could not be connected."""

    TRANSFER = "transfer"
    """NIXL could not read them."""

    COPY = "copy"
    """They were read, and could not be brought from the staging arena to their places."""

    LEASE = "lease"
    """Their lease had run out when they had been read."""

    FINGERPRINT = "fingerprint"
    """They hold the KV of other tokens than the request's, or are others than were offered."""

    DEADLINE = "deadline"
    """They had not been read in time."""

    DOUBT = "doubt"
    """So much memory may still be written by the reads before that no more were begun."""

    UNFORESEEN = "unforeseen"
    """An exception came up that was not foreseen; the log has its traceback."""


# The order matters: the first type that fits.
_HANDSHAKE_FAILURES: tuple[tuple[type[Exception], HandshakeFailure], ...] = (
    (RemoteUnreachableError, HandshakeFailure.UNREACHABLE),
    (RemoteUntrustedError, HandshakeFailure.UNTRUSTED),
    (RemoteRefusedError, HandshakeFailure.REFUSED),
    (RemoteIncompatibleError, HandshakeFailure.INCOMPATIBLE),
    (RemoteEngineChangedError, HandshakeFailure.ENGINE_CHANGED),
    (RemoteHandshakeError, HandshakeFailure.MALFORMED),
    (RemoteLayoutError, HandshakeFailure.LAYOUT),
    (LocalLayoutError, HandshakeFailure.LAYOUT),
    (TransferError, HandshakeFailure.TRANSFER),
)

_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


def handshake_failure(error: Exception) -> HandshakeFailure:
    """The kind of an error that ended a handshake."""
    return next(
        (kind for type_, kind in _HANDSHAKE_FAILURES if isinstance(error, type_)),
        HandshakeFailure.OTHER,
    )


@dataclass
class ReshardStats(NixlKVConnectorStats):
    """What happened since the last report: upstream's lists of values, and these.

        handshake_seconds      duration of each handshake that succeeded
        prefill_wait_seconds   how long each request that was dispatched early was waited for
        handover_seconds       how long each request that was read waited for its first token once
                               it was here and its prompt offered
        exposed_transfer_seconds
                               what transfer added to each request that was read: from being
                               offered, as far as this worker knows, until it is received
        prefetched_bytes       how many were read of requests before they were offered, as often as
                               they were counted
        handshake_failures     a `HandshakeFailure` for each that did not
        read_failures          a `ReadFailure` for each request that could not be read
        read_strategies        a `Strategy` for each value of upstream's `transfer_duration`
        notifications_sent     how many, as often as they were counted
        held_blocks            blocks held for other engines, each time that they changed
        blocks_in_doubt        blocks of failed requests that may still be written, each time that
                               they changed
        first_tokens           1 for each answer that begins with the prefill engine's token
        num_notifications_after_expiry
                               1 for each reader that was through when nothing was held for it any
                               more; newer releases of upstream count this under the same name

    They travel from process to process as plain values. Where upstream's connector was left to
    serve a model, its values come without ours; its reads are direct.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in _OWN:
            self.data.setdefault(name, [])
        missing = len(self.data["transfer_duration"]) - len(self.data["read_strategies"])
        self.data["read_strategies"] += [Strategy.DIRECT.value] * missing

    def reset(self) -> None:
        """Begin anew."""
        super().reset()
        for name in _OWN:
            self.data[name] = []

    def record_transfer(self, res: Any, strategy: Strategy = Strategy.DIRECT) -> None:
        """A part of a read has ended well."""
        super().record_transfer(res)
        self.data["read_strategies"].append(strategy.value)

    def record_handshake(self, duration_s: float) -> None:
        """An engine was connected."""
        self.data["handshake_seconds"].append(duration_s)

    def record_prefill_wait(self, duration_s: float) -> None:
        """A request that was dispatched early is offered now."""
        self.data["prefill_wait_seconds"].append(duration_s)

    def record_handover(self, duration_s: float) -> None:
        """A request that was read has its first token."""
        self.data["handover_seconds"].append(duration_s)

    def record_exposed_transfer(self, duration_s: float) -> None:
        """A request is received."""
        self.data["exposed_transfer_seconds"].append(duration_s)

    def record_prefetched(self, num_bytes: int) -> None:
        """So many bytes were read of a request that is not offered yet."""
        prefetched = self.data["prefetched_bytes"]
        prefetched[:] = [sum(prefetched) + num_bytes]

    def record_handshake_failure(self, error: Exception) -> None:
        """An engine could not be connected."""
        if UPSTREAM_COUNTS_ALL_FAILURES:
            self.record_failed_handshake()
        self.data["handshake_failures"].append(handshake_failure(error).value)

    def record_failed_read(self, failure: ReadFailure) -> None:
        """A request could not be read."""
        self.record_failed_transfer()
        self.data["read_failures"].append(failure.value)

    def record_notification(self) -> None:
        """A notification was sent."""
        sent = self.data["notifications_sent"]
        sent[:] = [sum(sent) + 1]

    def record_late_notification(self) -> None:
        """A reader was through when its blocks were not held for it any more."""
        self.data["num_notifications_after_expiry"].append(1)

    def record_first_token(self) -> None:
        """An answer begins with the prefill engine's token."""
        self.data["first_tokens"].append(1)

    def record_held_blocks(self, num_blocks: int) -> None:
        """So many blocks are held for other engines from now on."""
        self.data["held_blocks"][:] = [num_blocks]

    def record_blocks_in_doubt(self, num_blocks: int) -> None:
        """So many blocks of failed requests may still be written from now on."""
        self.data["blocks_in_doubt"][:] = [num_blocks]

    def take(self) -> ReshardStats:
        """What was counted so far; what follows begins anew."""
        taken = self.clone_and_reset()
        assert isinstance(taken, ReshardStats)
        return taken

    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return bool(super().is_empty()) and not any(self.data[name] for name in _OWN)


class ReshardPromMetrics(NixlPromMetrics):
    """Upstream's metrics, and ours."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        types: dict[Any, Any] = dict(metric_types)
        self._own: dict[str, Any] = {}
        for key, metric in _METRICS.items():
            labels = [*labelnames, metric.label] if metric.label else labelnames
            self._own[key] = types[metric.kind](
                name=metric.name,
                documentation=metric.documentation,
                labelnames=labels,
                **_OPTIONS.get(metric.kind, {}),
            )
            # Series that begin at 0 can be told from series that are missing.
            own_values: list[list[Any]] = [[each.value] for each in metric.values]
            for values in per_engine_labelvalues.values():
                for own in own_values or [[]]:
                    self._own[key].labels(*values, *own)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record what workers and scheduler have reported."""
        super().observe(transfer_stats_data, engine_idx)
        data: dict[str, Sequence[Any]] = ReshardStats(data=transfer_stats_data).data
        labels = self.per_engine_labelvalues[engine_idx]
        for key, values in data.items():
            if (metric := _METRICS.get(key)) is None:
                continue
            own = self._own[key]
            for value in values[-1:] if metric.kind is Gauge else values:
                if metric.kind is Histogram:
                    own.labels(*labels).observe(value)
                elif metric.kind is Gauge:
                    own.labels(*labels).set(value)
                elif metric.label:
                    own.labels(*labels, value).inc()
                else:
                    own.labels(*labels).inc(value)
        reads = (data["read_strategies"], data["transfer_duration"], data["bytes_transferred"])
        for strategy, duration_s, num_bytes in zip(*reads, strict=True):
            self._own["read_seconds"].labels(*labels, strategy).observe(duration_s)
            self._own["read_bytes"].labels(*labels, strategy).inc(num_bytes)


@dataclass(frozen=True, slots=True)
class _Metric:
    """A metric of ours.

    Attributes:
        kind: Its type, a class of Prometheus' client.
        name: Its name.
        documentation: What it counts.
        label: Its own label; empty where it has none.
        values: The values of that label.
    """

    kind: type[Counter | Gauge | Histogram]
    name: str
    documentation: str
    label: str = ""
    values: Iterable[Enum] = ()


_OPTIONS: dict[Any, dict[str, Any]] = {
    Histogram: {"buckets": _BUCKETS_S},
    Gauge: {"multiprocess_mode": "mostrecent"},
}

_METRICS = {
    "handshake_seconds": _Metric(
        Histogram,
        "vllm:nixl_handshake_seconds",
        "Time from asking another engine what it is until all is prepared.",
    ),
    "prefill_wait_seconds": _Metric(
        Histogram,
        "vllm:nixl_prefill_wait_seconds",
        "Time from a request dispatched early until its blocks are offered.",
    ),
    "handover_seconds": _Metric(
        Histogram,
        "vllm:nixl_handover_seconds",
        "Time from a request's blocks being offered until its first token.",
    ),
    "exposed_transfer_seconds": _Metric(
        Histogram,
        "vllm:nixl_exposed_transfer_seconds",
        "Time from a request's blocks being offered until all have been read.",
    ),
    "prefetched_bytes": _Metric(
        Counter,
        "vllm:nixl_prefetched_bytes",
        "Bytes read of requests whose prompts were still being computed.",
    ),
    "handshake_failures": _Metric(
        Counter,
        "vllm:nixl_handshake_failures",
        "Handshakes with other engines that failed.",
        "reason",
        HandshakeFailure,
    ),
    "read_failures": _Metric(
        Counter,
        "vllm:nixl_read_failures",
        "Requests whose blocks could not be read, on one worker.",
        "reason",
        ReadFailure,
    ),
    "read_seconds": _Metric(
        Histogram,
        "vllm:nixl_read_seconds",
        "Duration of reads from one rank of another engine.",
        "strategy",
        Strategy,
    ),
    "read_bytes": _Metric(
        Counter, "vllm:nixl_read_bytes", "Bytes read from other engines.", "strategy", Strategy
    ),
    "notifications_sent": _Metric(
        Counter,
        "vllm:nixl_notifications_sent",
        "Notifications sent to other engines' workers.",
    ),
    "held_blocks": _Metric(
        Gauge, "vllm:nixl_held_blocks", "KV-cache blocks held for other engines to read."
    ),
    "blocks_in_doubt": _Metric(
        Gauge,
        "vllm:nixl_kv_blocks_in_doubt",
        "KV-cache blocks of failed requests that reads may still write into.",
    ),
    "first_tokens": _Metric(
        Counter,
        "vllm:nixl_first_tokens_seeded",
        "Answers that begin with the token that the prefill engine has sampled.",
    ),
}
"""Our metrics, by the list of `ReshardStats` that each is made of. Those of reads are made of the
strategies there and upstream's lists."""

if not UPSTREAM_COUNTS_ALL_FAILURES:
    _METRICS["num_notifications_after_expiry"] = _Metric(
        Counter,
        "vllm:nixl_num_notifications_after_expiry",
        "Readers that were through when nothing was held for them any more.",
    )

_OWN = (
    *(key for key in _METRICS if key not in ("read_seconds", "read_bytes")),
    "read_strategies",
    "num_notifications_after_expiry",
)
