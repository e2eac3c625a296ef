# SPDX-License-Identifier: Apache-2.0
"""Receive the traces of a router and its engines, and show where the time of one request went."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from .ports import HOST

Value = str | int | float | bool | list[str]
OURS = "vllm.kv_transfer."


@dataclass(frozen=True)
class Span:
    """What a process did for a request.

    Attributes:
        trace_id: The trace's, in hexadecimal digits.
        name: What it did.
        began_ns: When, since 1970.
        ended_ns: Until when.
        attributes: What else it says.
    """

    trace_id: str
    name: str
    began_ns: int
    ended_ns: int
    attributes: dict[str, Value]

    @property
    def place(self) -> str:
        """The process that says so, as far as it says who it is."""
        if not self.name.startswith(OURS):
            return "router" if "http.route" in self.attributes else "engines"
        rank = str(self.attributes[OURS + "worker"]).rpartition("/")[2]
        return f"prefill {rank}" if self.name == OURS + "offer" else f"decode {rank}"

    @property
    def label(self) -> str:
        """What it did, in a word or two."""
        phase = self.attributes.get("vllm.request_phase", "all")
        return str(phase) if self.place == "router" else self.name.removeprefix(OURS)


class TraceReceiver(TraceServiceServicer):
    """Takes what OTLP exporters send to it, within its context.

    Attributes:
        endpoint: Where it listens.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._server = grpc.server(ThreadPoolExecutor(4))
        add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        port = self._server.add_insecure_port(f"{HOST}:0")
        self.endpoint = f"http://{HOST}:{port}"

    def __enter__(self) -> TraceReceiver:
        self._server.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.stop(None).wait()

    def Export(
        self, request: ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> ExportTraceServiceResponse:
        """Take some spans; called by gRPC's threads."""
        spans = [
            Span(
                span.trace_id.hex(),
                span.name,
                span.start_time_unix_nano,
                span.end_time_unix_nano,
                _attributes(span.attributes),
            )
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        with self._lock:
            self._spans += spans
        return ExportTraceServiceResponse()

    def trace(self, trace_id: str) -> list[Span]:
        """What has come of a trace so far, in the order in which it began."""
        with self._lock:
            spans = [span for span in self._spans if span.trace_id == trace_id]
        return sorted(spans, key=lambda span: (span.began_ns, -span.ended_ns))


def new_trace() -> tuple[str, dict[str, str]]:
    """A trace's id, and the headers of a request that belongs to it (W3C Trace Context)."""
    trace_id = secrets.token_hex(16)
    return trace_id, {"traceparent": f"00-{trace_id}-{secrets.token_hex(8)}-01"}


def exporting(endpoint: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """Arguments and environment of an engine that sends its traces there, soon after they end."""
    return ("--otlp-traces-endpoint", endpoint), {"OTEL_BSP_SCHEDULE_DELAY": "200"}


def gantt(spans: Sequence[Span]) -> str:
    """Draw a trace as a chart of Mermaid's, in milliseconds since its first span began."""
    began_ns = min(span.began_ns for span in spans)
    sections: dict[str, list[str]] = {}
    for span in spans:
        start_ms, end_ms = (
            round((each - began_ns) / 1e6) for each in (span.began_ns, span.ended_ns)
        )
        # A bar of no width is not drawn.
        bar = f"    {span.label} :{start_ms}, {max(end_ms, start_ms + 1)}"
        sections.setdefault(span.place, []).append(bar)
    lines = ["gantt", "    dateFormat x", "    axisFormat %Q"]
    for place, bars in sections.items():
        lines += [f"    section {place}", *bars]
    return "\n".join(lines)


def _attributes(pairs: Iterable[KeyValue]) -> dict[str, Value]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Value:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [str(_value(each)) for each in value.array_value.values]
    found: Value = getattr(value, kind) if kind else ""
    return found
