# SPDX-License-Identifier: Apache-2.0
"""What a request goes through in the connector, in its client's trace."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from vllm.tracing import otel

from tests.v1.kv_connector.unit.reshard.engine.producers import LEASE_S, Producer
from tests.v1.kv_connector.unit.reshard.engine.workers import Progress, fill, receive
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine import traces

TRACE_ID = 0x0AF7651916CD43DD8448EB211C80319C
HEADERS = {"traceparent": f"00-{TRACE_ID:032x}-b7ad6b7169203331-01"}


@pytest.fixture
def exported(monkeypatch) -> Iterator[InMemorySpanExporter]:
    """What this process exports."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(otel.trace, "get_tracer", provider.get_tracer)
    yield exporter
    provider.shutdown()


def named(exporter: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    """The spans of a name, all of which are in the client's trace."""
    found = [each for each in exporter.get_finished_spans() if each.name == traces.PREFIX + name]
    for span in found:
        assert span.context.trace_id == TRACE_ID
        assert span.start_time <= span.end_time
    return found


def attribute(span: ReadableSpan, name: str) -> object:
    """An attribute that OpenTelemetry has no name for."""
    return span.attributes[traces.PREFIX + name]


def test_a_request_is_seen_at_both_ends(engines, exported):
    """From the offer of each stage to the check of what was read, with what it took."""
    prefill, decode = engines("prefill", pp=2), engines("decode")
    address = prefill.serve()
    fill(prefill, [5, 2, 9])
    prefill.start(admitted={"p-a"})
    wanted = receive(address, [1, 2, 3], [5, 2, 9])
    progress = Progress(prefill, decode)
    prefill.offer("p-a", trace_headers=HEADERS)
    decode.start(receive={"d-a": replace(wanted, trace_headers=HEADERS)})
    progress.until(decode, received="d-a")
    progress.until(prefill, sent="p-a")
    spans = {
        name: named(exported, name) for name in ("handshake", "wait", "read", "check", "offer")
    }
    assert {name: len(each) for name, each in spans.items()} == {
        "handshake": 1,
        "wait": 1,
        "read": 1,
        "check": 1,
        "offer": 2,
    }
    (read,) = spans["read"]
    assert attribute(read, "worker") == "decode/pp0tp0"
    assert attribute(read, "remote_engine_id") == "prefill"
    assert attribute(read, "remote_request_id") == "p-a"
    assert attribute(read, "blocks") == 3
    assert attribute(read, "bytes") > 0
    assert set(attribute(read, "strategies")) <= {"direct", "staged"}
    assert read.attributes["server.address"] == address.host
    assert read.attributes["server.port"] == address.port
    for offered in spans["offer"]:
        assert attribute(offered, "end") == "released"
        assert attribute(offered, "last_reader") == "decode/pp0tp0"
    workers = {attribute(each, "worker") for each in spans["offer"]}
    assert workers == {"prefill/pp0tp0", "prefill/pp1tp0"}


def test_failure_says_what_it_is(engines, exported):
    """By the reason that is counted, too."""
    prefill, decode = engines("prefill"), engines("decode")
    wanted = replace(receive(prefill.serve(), [1, 2, 3], [5, 2, 9]), trace_headers=HEADERS)
    progress = Progress(prefill, decode)
    decode.start(receive={"d-a": wanted})
    progress.until(decode, received="d-a")
    # Nothing is offered under that name.
    (check,) = named(exported, "check")
    assert check.attributes["error.type"] == "lease"


def test_nothing_is_exported_of_a_request_without_a_trace(engines, exported, monkeypatch):
    """Nor is anything computed for that."""
    monkeypatch.setattr(traces, "Trace", None)
    prefill, decode = engines("prefill"), engines("decode")
    progress = Progress(prefill, decode)
    prefill.offer("p-a")
    decode.start(receive={"d-a": receive(prefill.serve(), [1, 2, 3], [5, 2, 9])})
    progress.until(decode, received="d-a")
    progress.until(prefill, sent="p-a")
    assert exported.get_finished_spans() == ()


def test_offer_that_nobody_reads_ends_with_its_lease(exported):
    """The span is as long as that."""
    producer = Producer()
    producer.offer("a", trace_headers=HEADERS)
    assert producer.side.collect_released(LEASE_S) == {"a"}
    (span,) = named(exported, "offer")
    assert attribute(span, "end") == "expired"
    assert attribute(span, "last_reader") == ""
    assert span.end_time - span.start_time == pytest.approx(1e9 * LEASE_S)


def test_reader_that_is_faster_than_the_offer(exported):
    """It is in the trace all the same."""
    producer = Producer()
    producer.tell(admitted={"a"})
    producer.hear("a")
    assert producer.side.collect_released(1.0) == set()
    producer.offer("a", trace_headers=HEADERS)
    assert producer.side.collect_released(2.0) == {"a"}
    (span,) = named(exported, "offer")
    assert attribute(span, "end") == "released"


def test_process_that_is_preempted_between_two_clocks_puts_no_span_elsewhere(exported, monkeypatch):
    """It was preempted for 110 ms, and an offer seemed to end before it was read."""
    clocks = itertools.count()

    def monotonic_ns() -> int:
        return 1_000 + 10**9 * (next(clocks) == 0)

    monkeypatch.setattr(traces.time, "time_ns", lambda: 5_000_000)
    monkeypatch.setattr(traces.time, "monotonic_ns", monotonic_ns)
    traces.Trace(HEADERS, {}).span("read", 2e-6, 3e-6)
    (read,) = named(exported, "read")
    assert (read.start_time, read.end_time) == (5_001_000, 5_002_000)
