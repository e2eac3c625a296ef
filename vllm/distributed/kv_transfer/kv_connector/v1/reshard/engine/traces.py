# SPDX-License-Identifier: Apache-2.0
"""A request's states in the connector, as spans of the trace that its client has begun.

vLLM passes a request's trace headers on only where it exports traces (`--otlp-traces-endpoint`);
without them nothing is computed here. The spans go to the exporter that vLLM has made in this
process. Attribute names are OpenTelemetry's where it has some
(https://opentelemetry.io/docs/specs/semconv/general/attributes/).

The page of metrics shows what follows (`python -m tools.docs`).

Spans:
    offer: On a prefill worker: from the step that says that the blocks are held, until they are
        free.
    prefetch: From when blocks of a prompt are read while it is computed, until it is offered or
        fails.
    wait: From when the worker hears of the request, until its reads are queued: the handshake, and
        its turn.
    handshake: From when the other engine is asked what it is, until all is prepared; of each
        request that waits for it.
    read: From when its reads are queued, until all bytes are in their places.
    check: From then until it is known that the blocks were still held, and were the right ones.
    drain: From when the request has failed, until nothing writes into its blocks.

Span attributes:
    worker: Engine id and rank.
    blocks: How many blocks are held, or filled.
    end: Of `offer`: `released` by its readers, or `expired` with its lease.
    last_reader: Of `offer`: the worker that was heard last. Empty if the lease expired, or if the
        request was read before it was offered.
    server.address, server.port: Of the others: the side channel of the engine that is read from.
    remote_engine_id, remote_request_id: Of the others: that engine, and the request's id there.
    bytes, strategies: Of `read`: how much was read, and how: `direct`, `staged` or both.
    error.type: Of a span in which the request failed, and of `drain`: a `reason` of failed reads.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from vllm.tracing import SpanKind, extract_trace_context, instrument_manual

from ..protocol.messages import Receive

PREFIX = "vllm.kv_transfer."
"""Prefix of span names, and of attributes that OpenTelemetry has no name for."""

Attributes = Mapping[str, str | int | float | list[str]]


@dataclass(slots=True)
class Trace:
    """The trace of a request that a worker reads or holds. Belongs to the connector's thread.

    Attributes:
        headers: W3C's `traceparent`, and `tracestate` if there is one, as the client sent them.
        attributes: Attributes of each of its spans.
    """

    headers: Mapping[str, str]
    attributes: Attributes

    def span(
        self, name: str, began_s: float, ended_s: float, attributes: Attributes | None = None
    ) -> None:
        """Export a span.

        Args:
            name: Name of the span, without `PREFIX`.
            began_s: When it began, by `time.monotonic`.
            ended_s: When it ended, by `time.monotonic`.
            attributes: Attributes of this span alone.
        """
        # Who is preempted between the two clocks gets less; it took 110 ms on a loaded machine.
        epoch_ns = max(time.time_ns() - time.monotonic_ns() for _ in range(3))
        instrument_manual(
            PREFIX + name,
            epoch_ns + round(1e9 * began_s),
            epoch_ns + round(1e9 * ended_s),
            {**self.attributes, **(attributes or {})},
            extract_trace_context(self.headers),
            SpanKind.INTERNAL,
        )


def what_was_read(num_bytes: int, strategies: Iterable[str]) -> Attributes:
    """Return the attributes of a read."""
    return {PREFIX + "bytes": num_bytes, PREFIX + "strategies": sorted(strategies)}


def trace_of_read(worker: str, receive: Receive) -> Trace | None:
    """Return the trace of a request that a worker reads; None where it has none."""
    if not receive.trace_headers:
        return None
    source = receive.source
    return Trace(
        receive.trace_headers,
        {
            PREFIX + "worker": worker,
            PREFIX + "remote_engine_id": source.engine_id,
            PREFIX + "remote_request_id": receive.remote_request_id,
            PREFIX + "blocks": sum(map(len, receive.local_block_ids)),
            "server.address": source.host,
            "server.port": source.port,
        },
    )


def trace_of_offer(worker: str, headers: Mapping[str, str], num_blocks: int) -> Trace:
    """Return the trace of a request that a worker holds."""
    return Trace(headers, {PREFIX + "worker": worker, PREFIX + "blocks": num_blocks})
