# SPDX-License-Identifier: Apache-2.0
"""One request, in one trace: through the router, the prefill engine and the decode engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.pairs import REQUEST_LIMIT_S, text_of
from tests.tools.pdstack.helpers import wait_until
from tools.pdstack.engine import EngineSpec, KVTransfer
from tools.pdstack.layout import Layout
from tools.pdstack.router import RouterSpec
from tools.pdstack.stack import PDStack, Router
from tools.pdstack.tiny_models import write_tiny_llama
from tools.pdstack.traces import OURS, Span, TraceReceiver, exporting, gantt, new_trace

pytestmark = pytest.mark.e2e

EXPORT_LIMIT_S = 60.0
PROMPT_TOKENS = 300
EXPECTED = Counter(
    {
        # The router's: of all, and of what it has asked each engine.
        "POST /v1/chat/completions": 3,
        # Of both engines, each for the front end that has answered.
        "llm_request": 2,
        # Of two stages that hold it, and one worker that reads from both.
        OURS + "offer": 2,
        OURS + "wait": 1,
        OURS + "handshake": 1,
        OURS + "read": 1,
        OURS + "check": 1,
    }
)


@pytest.fixture
def receiver() -> Iterator[TraceReceiver]:
    """Takes the traces."""
    with TraceReceiver() as receiver:
        yield receiver


@pytest.fixture
def router(receiver: TraceReceiver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    """A router in front of a pair, all of which export traces."""
    model = write_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama", num_layers=2)
    args, env = exporting(receiver.endpoint)
    prefill, decode = (
        EngineSpec(name, layout, KVTransfer(), args, env=env)
        for name, layout in (("prefill", Layout(1, 2)), ("decode", Layout()))
    )
    with PDStack(model, tmp_path_factory.mktemp("run")) as stack:
        engines = stack.start_engines(prefill, decode)
        spec = RouterSpec(traces_endpoint=receiver.endpoint)
        yield stack.start_router([engines[0]], [engines[1]], spec)


def test_one_request_is_one_trace(router: Router, receiver: TraceReceiver) -> None:
    """With all that the connector did for it at both ends, and how much it read."""
    trace_id, headers = new_trace()
    body = {
        "model": "llama",
        "messages": [{"role": "user", "content": text_of("traced", PROMPT_TOKENS)}],
        "max_tokens": 4,
    }
    url = f"{router.url}/v1/chat/completions"
    reply = httpx.post(url, json=body, headers=headers, timeout=REQUEST_LIMIT_S, trust_env=False)
    reply.raise_for_status()

    def counted() -> Counter[str]:
        return Counter(span.name for span in receiver.trace(trace_id))

    wait_until(lambda: counted() >= EXPECTED, f"{counted()}", EXPORT_LIMIT_S)
    spans = receiver.trace(trace_id)
    print(gantt(spans))
    read = _only(spans, "read")
    assert read.attributes[OURS + "bytes"]
    offers = [span for span in spans if span.name == OURS + "offer"]
    assert {span.attributes[OURS + "end"] for span in offers} == {"released"}
    assert all(span.began_ns < read.ended_ns < span.ended_ns for span in offers)


def _only(spans: list[Span], name: str) -> Span:
    (found,) = (span for span in spans if span.name == OURS + name)
    return found
