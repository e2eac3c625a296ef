# SPDX-License-Identifier: Apache-2.0
"""Statistics of workers and scheduler, and their Prometheus metrics.

Upstream's metrics keep their names and meaning; these are added to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, final

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import (
    NixlKVConnectorStats,
    NixlPromMetrics,
)

from ..errors import (
    LocalLayoutError,
    LocalLimitError,
    RemoteEngineChangedError,
    RemoteHandshakeError,
    RemoteIncompatibleError,
    RemoteLayoutError,
    RemoteMisdirectedError,
    RemoteRefusedError,
    RemoteUnreachableError,
    RemoteUntrustedError,
    TransferError,
)
from ..memory.staging import Strategy
from .compat import UPSTREAM_COUNTS_ALL_FAILURES

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT


class HandshakeFailure(str, Enum):
    """Why an engine could not be connected."""

    UNREACHABLE = "unreachable"
    """It does not answer, and is asked again by itself. Look at it and at the network."""

    LIMIT = "limit"
    """This process has no more file descriptors or threads to ask with. Raise its limits."""

    MISDIRECTED = "misdirected"
    """The address leads back to this engine: set `VLLM_NIXL_SIDE_CHANNEL_HOST` at the other one."""

    UNTRUSTED = "untrusted"
    """A request named a host whose address is not in `trusted_peers`."""

    REFUSED = "refused"
    """It does not know what it is asked, as builds differ or another program answers; or it has too
    few file descriptors left."""

    INCOMPATIBLE = "incompatible"
    """What must be equal at both engines is not."""

    ENGINE_CHANGED = "engine_changed"
    """Another engine answers there: mostly it has restarted, and nothing need be done."""

    MALFORMED = "malformed"
    """Another service answers, or another build."""

    LAYOUT = "layout"
    """No plan fits both layouts."""

    TRANSFER = "transfer"
    """NIXL cannot connect the two workers."""

    OTHER = "other"
    """A defect of the connector: report the line in the log."""


_MOST_REQUESTS = 10_000
"""Requests counted until the count is taken; more than begin in any step."""


class ReadFailure(str, Enum):
    """Why the blocks of a request could not be read."""

    PARAMETERS = "parameters"
    """Its `kv_transfer_params` do not locate the blocks, or name blocks that do not exist; or it
    was sent to both engines at once, and the prefill engine did not offer it."""

    HANDSHAKE = "handshake"
    """The engine that holds the blocks could not be connected."""

    TRANSFER = "transfer"
    """NIXL could not read the blocks."""

    COPY = "copy"
    """A part of them could not be posted, or could not be copied out of the staging arena, for a
    fault of this worker's."""

    LEASE = "lease"
    """The lease of the blocks had run out by the time they had been read."""

    FINGERPRINT = "fingerprint"
    """The blocks hold the KV of tokens other than the request's, or are not the offered ones."""

    CONTENT = "content"
    """The blocks have arrived with other bytes than they are held with. See `verify_reads`."""

    DEADLINE = "deadline"
    """The blocks were not read within `kv_read_timeout_s`."""

    DOUBT = "doubt"
    """No read was begun, because earlier reads may still write into too many blocks."""

    UNFORESEEN = "unforeseen"
    """An unexpected exception was raised: report its traceback, which is in the log."""


class RequestParameters(str, Enum):
    """Whether a request concerns another engine, too."""

    YES = "yes"
    """It was to be read from another engine, or held for one."""

    NO = "no"
    """It had no `kv_transfer_params`, or none that ask for either: it is computed here alone."""


# The order matters: the first matching type counts.
_HANDSHAKE_FAILURES: tuple[tuple[type[Exception], HandshakeFailure], ...] = (
    (RemoteUnreachableError, HandshakeFailure.UNREACHABLE),
    (LocalLimitError, HandshakeFailure.LIMIT),
    (RemoteMisdirectedError, HandshakeFailure.MISDIRECTED),
    (RemoteUntrustedError, HandshakeFailure.UNTRUSTED),
    (RemoteRefusedError, HandshakeFailure.REFUSED),
    (RemoteIncompatibleError, HandshakeFailure.INCOMPATIBLE),
    (RemoteEngineChangedError, HandshakeFailure.ENGINE_CHANGED),
    (RemoteHandshakeError, HandshakeFailure.MALFORMED),
    (RemoteLayoutError, HandshakeFailure.LAYOUT),
    (LocalLayoutError, HandshakeFailure.LAYOUT),
    (TransferError, HandshakeFailure.TRANSFER),
)

_FAILED_TRANSFERS = {
    *(ReadFailure.TRANSFER, ReadFailure.COPY, ReadFailure.DEADLINE, ReadFailure.UNFORESEEN),
    # Later releases count a handshake that fails, and not the requests that wait for it.
    *(() if UPSTREAM_COUNTS_ALL_FAILURES else (ReadFailure.HANDSHAKE,)),
}
"""What upstream's metrics count as failed transfers. They have counts of their own for leases that
run out, and none for what upstream's connector does not check."""

_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


def handshake_failure(error: Exception) -> HandshakeFailure:
    """Return the kind of an error that ended a handshake."""
    return next(
        (kind for type_, kind in _HANDSHAKE_FAILURES if isinstance(error, type_)),
        HandshakeFailure.OTHER,
    )


@dataclass
class ReshardStats(NixlKVConnectorStats):
    """Values recorded since the last report: upstream's lists, and these.

        handshake_seconds      duration of each successful handshake
        prefill_wait_seconds   time that each early-dispatched request waited for its offer
        exposed_transfer_seconds
                               delay that transfer added to each request that was read: from its
                               offer, as far as this worker knows, until it is received
        prefetched_bytes       bytes read before their requests were offered; one sum per report
        handshake_failures     a `HandshakeFailure` for each failed handshake
        read_failures          a `ReadFailure` for each request that could not be read
        requests               a `RequestParameters` for each new request
        read_strategies        a `Strategy` for each value of upstream's `transfer_duration`
        notifications_sent     number of notifications; one sum per report
        held_blocks            number of blocks held for other engines; the latest value
        blocks_in_doubt        number of blocks of failed requests that may still be written; the
                               latest value
        open_files             share of the limit of open files that a worker has open; the latest
                               value
        first_tokens           1 for each answer that begins with the prefill engine's token
        factors                digest of the values that peers must have in common, when the
                               scheduler begins to tell them
        num_notifications_after_expiry
                               1 for each reader that finished when nothing was held for it any
                               more; newer releases of upstream count this under the same name

    The values are plain, so that they can be passed between processes. If upstream's connector
    serves a model, only its own values arrive; its reads are direct.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in _OWN:
            self.data.setdefault(name, [])
        missing = len(self.data["transfer_duration"]) - len(self.data["read_strategies"])
        self.data["read_strategies"] += [Strategy.DIRECT.value] * missing

    def reset(self) -> None:
        """Discard all values."""
        super().reset()
        for name in _OWN:
            self.data[name] = []

    def record_transfer(self, res: Any, strategy: Strategy = Strategy.DIRECT) -> None:
        """Record a part that was read."""
        super().record_transfer(res)
        self.data["read_strategies"].append(strategy.value)

    def record_handshake(self, duration_s: float) -> None:
        """Record a successful handshake."""
        self.data["handshake_seconds"].append(duration_s)

    def record_prefill_wait(self, duration_s: float) -> None:
        """Record the wait for an early-dispatched request's offer."""
        self.data["prefill_wait_seconds"].append(duration_s)

    def record_exposed_transfer(self, duration_s: float) -> None:
        """Record the delay that transfer added to a request that is received."""
        self.data["exposed_transfer_seconds"].append(duration_s)

    def record_prefetched(self, num_bytes: int) -> None:
        """Record bytes read of a request that is not offered yet."""
        prefetched = self.data["prefetched_bytes"]
        prefetched[:] = [sum(prefetched) + num_bytes]

    def record_handshake_failure(self, error: Exception) -> None:
        """Record a failed handshake."""
        if UPSTREAM_COUNTS_ALL_FAILURES:
            self.record_failed_handshake()
        self.data["handshake_failures"].append(handshake_failure(error).value)

    def record_request(self, *, has_params: bool) -> None:
        """Record a new request."""
        kind = RequestParameters.YES if has_params else RequestParameters.NO
        # Where workers count nothing, nobody may ever take it.
        if len(self.data["requests"]) < _MOST_REQUESTS:
            self.data["requests"].append(kind.value)

    def record_failed_read(self, failure: ReadFailure) -> None:
        """Record a request that could not be read; among upstream's counts as upstream does."""
        if failure in _FAILED_TRANSFERS:
            self.record_failed_transfer()
        self.data["read_failures"].append(failure.value)

    def record_notification(self) -> None:
        """Record a notification that was sent."""
        sent = self.data["notifications_sent"]
        sent[:] = [sum(sent) + 1]

    def record_late_notification(self) -> None:
        """Record a reader that finished after its blocks were no longer held."""
        self.data["num_notifications_after_expiry"].append(1)

    def record_first_token(self) -> None:
        """Record an answer that begins with the prefill engine's token."""
        self.data["first_tokens"].append(1)

    def record_factors(self, digest: str) -> None:
        """Record a digest of the values that this engine's peers must have in common with it."""
        digests: list[Any] = self.data["factors"]
        digests[:] = [digest]

    def record_held_blocks(self, num_blocks: int) -> None:
        """Record the number of blocks now held for other engines."""
        self.data["held_blocks"][:] = [num_blocks]

    def record_blocks_in_doubt(self, num_blocks: int) -> None:
        """Record the number of failed requests' blocks that may still be written."""
        self.data["blocks_in_doubt"][:] = [num_blocks]

    def record_open_files(self, ratio: float) -> None:
        """Record how much of its limit of open files this process has used."""
        self.data["open_files"][:] = [ratio]

    def take(self) -> ReshardStats:
        """Return the values so far, and reset them."""
        taken = self.clone_and_reset()
        assert isinstance(taken, ReshardStats)
        return taken

    def is_empty(self) -> bool:
        """Return whether there is nothing to report."""
        return bool(super().is_empty()) and not any(self.data[name] for name in _OWN)


@final
class ReshardPromMetrics(NixlPromMetrics):
    """Upstream's metrics and this connector's."""

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
            # Create all series at 0, to distinguish them from missing ones.
            own_values: list[list[Any]] = [[each.value] for each in metric.values]
            for values in per_engine_labelvalues.values():
                for own in own_values if metric.label else [[]]:
                    self._own[key].labels(*values, *own)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Update the metrics from a report of workers and scheduler."""
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
                elif metric.kind is Gauge and metric.label:
                    own.labels(*labels, value).set(1)
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
        values: The values of that label; empty if they are not known before.
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
        "Time from asking another engine what it is until all is prepared, on each worker.",
    ),
    "prefill_wait_seconds": _Metric(
        Histogram,
        "vllm:nixl_prefill_wait_seconds",
        "Time from a request that was sent to both engines until its blocks are offered, on each "
        "decode worker. One that was offered at the first look is not counted.",
    ),
    "exposed_transfer_seconds": _Metric(
        Histogram,
        "vllm:nixl_exposed_transfer_seconds",
        "Time that transfer adds to the first token: from a request's offer, as far as the decode "
        "engine knows, until all of its blocks are read and confirmed, on each decode worker.",
    ),
    "prefetched_bytes": _Metric(
        Counter,
        "vllm:nixl_prefetched_bytes",
        "Bytes read of requests whose prompts were still being computed, also counted as read.",
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
        "Requests whose blocks could not be read, counted by each worker that could not.",
        "reason",
        ReadFailure,
    ),
    "requests": _Metric(
        Counter,
        "vllm:nixl_requests",
        "New requests, by whether their parameters name another engine, or ask to be held for one.",
        "parameters",
        RequestParameters,
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
        "Notifications sent to other engines' workers, with renewals of leases.",
    ),
    "held_blocks": _Metric(
        Gauge, "vllm:nixl_held_blocks", "KV-cache blocks held for other engines to read."
    ),
    "blocks_in_doubt": _Metric(
        Gauge,
        "vllm:nixl_kv_blocks_in_doubt",
        "KV-cache blocks of failed requests, kept from use as reads may still write into them.",
    ),
    "open_files": _Metric(
        Gauge,
        "vllm:nixl_open_files_ratio",
        "Share of a worker's limit of open files that is used; above 0.8 it meets no further "
        "engine.",
    ),
    "first_tokens": _Metric(
        Counter,
        "vllm:nixl_first_tokens_seeded",
        "Answers that begin with the token that the prefill engine has sampled.",
    ),
    "factors": _Metric(
        Gauge,
        "vllm:nixl_factors_info",
        "Always 1, with a digest of the values that two engines must have in common: engines of "
        "one digest are a pair.",
        "digest",
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
