# SPDX-License-Identifier: Apache-2.0
"""Pairs of engines that serve a tiny model: ask them, and see in their metrics what they did."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
import torch
from prometheus_client.parser import text_string_to_metric_families

from tests.tools.pdstack.helpers import wait_until
from tools.pdstack.engine import ServedModel
from tools.pdstack.metrics import NixlCounters
from tools.pdstack.stack import Engine, Router, Server

BLOCK_TOKENS = 128
ANSWER_TOKENS = 24
REQUEST_LIMIT_S = 300.0
# Shorter than the lease of blocks: none of them is given back because of that.
REPORT_LIMIT_S = 20.0


def text_of(label: str, tokens: int) -> str:
    """Return a text that is a prompt of so many tokens.

    Args:
        label: what it begins with; no block of it is that of a text with another label.
        tokens: of the prompt, including the one before the text.
    """
    sentences = (f"{label}: on day {day} it planted {day * 3} tulips. " for day in range(tokens))
    return "".join(sentences)[: tokens - 1]


def post(server: Server, model: str, text: str, **fields: Any) -> httpx.Response:
    """Return what a server says to one message, whatever it is.

    Args:
        fields: what else the request says.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "temperature": 0.0,
        "max_tokens": ANSWER_TOKENS,
        **fields,
    }
    url = f"{server.url}/v1/chat/completions"
    return httpx.post(url, json=body, timeout=REQUEST_LIMIT_S, trust_env=False)


def ask(server: Server, model: str, text: str, **fields: Any) -> str:
    """Return the greedy answer to one message.

    Args:
        fields: what else the request says.

    Raises:
        httpx.HTTPError: the server failed, or was silent for too long.
    """
    reply = post(server, model, text, **fields)
    reply.raise_for_status()
    answer: str = reply.json()["choices"][0]["message"]["content"]
    return answer


def embeddings(model: ServedModel, tokens: int, seed: int = 0) -> torch.Tensor:
    """Return a prompt of so many rows; it begins as no other of another number or seed."""
    config = json.loads((model.directory / "config.json").read_text())
    generator = torch.Generator().manual_seed(1000 * seed + tokens)
    return torch.randn(tokens, config["hidden_size"], generator=generator)


def post_embeddings(
    server: Server, model: str, rows: torch.Tensor, **fields: Any
) -> httpx.Response:
    """Return what a server says to a prompt that is given as embeddings, whatever it is.

    Args:
        rows: one for each token, as long as the model's hidden states.
        fields: what else the request says.
    """
    file = io.BytesIO()
    torch.save(rows, file)
    body = {
        "model": model,
        # vLLM does without; vllm-router refuses a request that has none.
        "prompt": [],
        "prompt_embeds": base64.b64encode(file.getvalue()).decode(),
        "temperature": 0.0,
        "max_tokens": ANSWER_TOKENS,
        **fields,
    }
    url = f"{server.url}/v1/completions"
    return httpx.post(url, json=body, timeout=REQUEST_LIMIT_S, trust_env=False)


def ask_with_embeddings(server: Server, model: str, rows: torch.Tensor, **fields: Any) -> str:
    """Return the greedy answer to a prompt that is given as embeddings.

    Args:
        rows: one for each token, as long as the model's hidden states.
        fields: what else the request says.

    Raises:
        httpx.HTTPError: the server failed, or was silent for too long.
    """
    reply = post_embeddings(server, model, rows, **fields)
    reply.raise_for_status()
    answer: str = reply.json()["choices"][0]["text"]
    return answer


def ask_unaided(engine: Engine, model: str, text: str) -> str:
    """Return an engine's answer for which it reads nothing and uses no block of other requests."""
    # Blocks that were computed under a salt are found by nobody who does not know it.
    return ask(engine, model, text, cache_salt="unaided")


def samples(engine: Engine, name: str, **labels: str) -> list[float]:
    """Return an engine's metric for each of its labels, or of those among them that are given."""
    page = httpx.get(f"{engine.url}/metrics", timeout=REPORT_LIMIT_S, trust_env=False)
    page.raise_for_status()
    return [
        sample.value
        for family in text_string_to_metric_families(page.text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]


def metric(engine: Engine, name: str, **labels: str) -> float:
    """Return the sum of an engine's metric over such labels; 0 where it has none."""
    return sum(samples(engine, name, **labels))


@dataclass(frozen=True)
class Pair:
    """A prefill engine and a decode engine, with a router in front of them.

    Attributes:
        model: name of what they serve.
    """

    model: str
    prefill: Engine
    decode: Engine
    router: Router

    def ask(self, text: str) -> str:
        """Return the pair's answer to a message."""
        return ask(self.router, self.model, text)

    def ask_at_once(self, texts: Sequence[str]) -> list[str]:
        """Return the pair's answers to messages that are sent at the same time."""
        with ThreadPoolExecutor(len(texts)) as pool:
            return list(pool.map(partial(ask, self.router, self.model), texts))

    def read_since(self, before: NixlCounters, transfers: int) -> NixlCounters:
        """Return what the decode engine has read since then, once it tells of enough transfers.

        Its ranks report with one of their next steps, each by itself.
        """

        def read() -> NixlCounters:
            return self.decode.nixl_counters() - before

        what = f"the report of {transfers} transfers"
        wait_until(lambda: read().transfers >= transfers, what, REPORT_LIMIT_S)
        return read()

    def wait_until_free(self) -> None:
        """Wait until no block of the prefill engine is in use."""

        def free() -> bool:
            # An engine hears that its blocks were read when it computes its next step.
            ask(self.prefill, self.model, "next", max_tokens=1)
            return metric(self.prefill, "vllm:kv_cache_usage_perc") == 0.0

        wait_until(free, "the return of all blocks", REPORT_LIMIT_S)

    def assert_nothing_is_left(self) -> None:
        """Once its requests were read, no block is in use, none expired, and no read failed."""
        self.wait_until_free()
        assert self.prefill.nixl_counters().expired_requests == 0
        counters = self.decode.nixl_counters()
        assert (counters.failed_reads, counters.failed_notifications) == (0, 0)
