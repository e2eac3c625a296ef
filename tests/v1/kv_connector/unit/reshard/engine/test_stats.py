# SPDX-License-Identifier: Apache-2.0
"""What is counted, how it is joined over workers, and what Prometheus makes of it."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats

from vllm.distributed.kv_transfer.kv_connector.v1.reshard import errors
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.connector import NixlConnector
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine import compat
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.stats import (
    HandshakeFailure,
    ReadFailure,
    ReshardPromMetrics,
    ReshardStats,
    handshake_failure,
)

TELEMETRY = SimpleNamespace(xferDuration=2000.0, postDuration=10.0, totalBytes=4096, descCount=3)

RECORDS = {
    "transfer": lambda stats: stats.record_transfer(TELEMETRY),
    "handshake": lambda stats: stats.record_handshake(0.25),
    "prefill wait": lambda stats: stats.record_prefill_wait(1.5),
    "exposed transfer": lambda stats: stats.record_exposed_transfer(0.25),
    "failed handshake": lambda stats: stats.record_handshake_failure(
        errors.RemoteRefusedError("no")
    ),
    "failed read": lambda stats: stats.record_failed_read(ReadFailure.LEASE),
    "notification": lambda stats: stats.record_notification(),
    "request": lambda stats: stats.record_request(has_params=True),
    "held blocks": lambda stats: stats.record_held_blocks(5),
    "expired lease": lambda stats: stats.record_kv_expired_req(),
    "factors": lambda stats: stats.record_factors("5ca1ab1e"),
    "late notification": lambda stats: stats.record_late_notification(),
}


@pytest.fixture
def prometheus(monkeypatch) -> tuple[ReshardPromMetrics, CollectorRegistry]:
    """Metrics of one engine, in a registry of their own."""
    registry = CollectorRegistry()

    def registered(cls):
        return lambda **arguments: cls(registry=registry, **arguments)

    metric_types = {cls: registered(cls) for cls in (Gauge, Counter, Histogram)}
    config = SimpleNamespace(kv_transfer_config=None)
    labels = {0: ["model", "0"]}
    metrics = NixlConnector.build_prom_metrics(
        config, metric_types, ["model_name", "engine"], labels
    )
    assert isinstance(metrics, ReshardPromMetrics)
    return metrics, registry


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    """A sample of the engine."""
    return registry.get_sample_value(name, {"model_name": "model", "engine": "0", **labels})


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS.keys())
def test_whatever_was_recorded_is_reported_once(record):
    """No report with something in it is empty, and what was reported is not reported again."""
    stats = ReshardStats()
    assert stats.is_empty()
    record(stats)
    assert not stats.is_empty()
    reported = stats.clone_and_reset()
    assert not reported.is_empty()
    assert stats.is_empty()


@given(st.lists(st.lists(st.sampled_from(sorted(RECORDS)))))
def test_workers_add_up(workers):
    """Counts over all workers are the sums of each; values survive the way as JSON."""
    total = ReshardStats()
    for names in workers:
        stats = ReshardStats()
        for name in names:
            RECORDS[name](stats)
        received = NixlConnector.build_kv_connector_stats(json.loads(json.dumps(stats.data)))
        total = total.aggregate(received)
    names = [name for worker in workers for name in worker]
    assert sum(total.data["notifications_sent"]) == names.count("notification")
    assert len(total.data["handshake_seconds"]) == names.count("handshake")
    assert len(total.data["handshake_failures"]) == names.count("failed handshake")
    assert len(total.data["read_failures"]) == names.count("failed read")
    late = names.count("late notification")
    assert len(total.data["num_notifications_after_expiry"]) == late
    assert total.num_successful_transfers == names.count("transfer")
    assert len(total.data["read_strategies"]) == names.count("transfer")


def test_prometheus_shows_every_kind(prometheus):
    """Each thing that happened is in the metric that is named after it, under its reason."""
    metrics, registry = prometheus
    stats = ReshardStats()
    for record in RECORDS.values():
        record(stats)
        record(stats)
    metrics.observe(stats.data)
    assert value(registry, "vllm:nixl_handshake_seconds_count") == 2
    assert value(registry, "vllm:nixl_prefill_wait_seconds_count") == 2
    assert value(registry, "vllm:nixl_exposed_transfer_seconds_sum") == 0.5
    assert value(registry, "vllm:nixl_handshake_failures_total", reason="refused") == 2
    assert value(registry, "vllm:nixl_handshake_failures_total", reason="layout") == 0
    assert value(registry, "vllm:nixl_read_failures_total", reason="lease") == 2
    assert value(registry, "vllm:nixl_read_seconds_count", strategy="direct") == 2
    assert value(registry, "vllm:nixl_read_bytes_total", strategy="direct") == 8192
    assert value(registry, "vllm:nixl_notifications_sent_total") == 2
    assert value(registry, "vllm:nixl_held_blocks") == 5
    assert value(registry, "vllm:nixl_requests_total", parameters="yes") == 2
    assert value(registry, "vllm:nixl_requests_total", parameters="no") == 0
    assert value(registry, "vllm:nixl_factors_info", digest="5ca1ab1e") == 1
    # Upstream's names and meanings stay.
    assert value(registry, "vllm:nixl_bytes_transferred_sum") == 8192
    # Two handshakes, where upstream counts them; a lease that ran out is no failed transfer.
    assert value(registry, "vllm:nixl_num_failed_transfers_total") == (
        2 if compat.UPSTREAM_COUNTS_ALL_FAILURES else 0
    )
    assert value(registry, "vllm:nixl_num_kv_expired_reqs_total") == 2
    assert value(registry, "vllm:nixl_num_notifications_after_expiry_total") == 2


def test_late_notifications_are_counted_as_upstreams_are(prometheus):
    """Readers that were through too late may have read what was somebody else's by then."""
    metrics, registry = prometheus
    stats = ReshardStats()
    stats.record_late_notification()
    assert not stats.is_empty()
    metrics.observe(stats.data)
    assert value(registry, "vllm:nixl_num_notifications_after_expiry_total") == 1


def test_series_begin_at_zero(prometheus):
    """A dashboard can tell that nothing has failed from nobody having looked."""
    _, registry = prometheus
    for reason in HandshakeFailure:
        assert value(registry, "vllm:nixl_handshake_failures_total", reason=reason.value) == 0
    for failure in ReadFailure:
        assert value(registry, "vllm:nixl_read_failures_total", reason=failure.value) == 0


def test_values_of_upstreams_connector_are_understood(prometheus):
    """A model that is left to upstream's connector has metrics, too."""
    metrics, registry = prometheus
    upstream = NixlKVConnectorStats()
    upstream.record_transfer(TELEMETRY)
    joined = NixlConnector.build_kv_connector_stats(upstream.data)
    metrics.observe(joined.aggregate(ReshardStats()).data)
    assert value(registry, "vllm:nixl_read_bytes_total", strategy="direct") == 4096


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (errors.RemoteUnreachableError(""), HandshakeFailure.UNREACHABLE),
        (errors.RemoteIncompatibleError(""), HandshakeFailure.INCOMPATIBLE),
        (errors.RemoteEngineChangedError(""), HandshakeFailure.ENGINE_CHANGED),
        (errors.RemoteHandshakeError(""), HandshakeFailure.MALFORMED),
        (errors.RemoteLayoutError(""), HandshakeFailure.LAYOUT),
        (errors.LocalLayoutError(""), HandshakeFailure.LAYOUT),
        (errors.TransferError(""), HandshakeFailure.TRANSFER),
        (ZeroDivisionError(), HandshakeFailure.OTHER),
    ],
)
def test_errors_have_a_kind(error, expected):
    """Each type of error that can end a handshake is told apart."""
    assert handshake_failure(error) is expected
