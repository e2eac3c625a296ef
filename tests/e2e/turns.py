# SPDX-License-Identifier: Apache-2.0
"""Engines that token ids are sent to one after the other, without a router."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx

from tests.e2e.pairs import REQUEST_LIMIT_S
from tools.pdstack.stack import Engine, PDStack, Router

OFFER = {"do_remote_decode": True, "do_remote_prefill": False}


@dataclass(frozen=True)
class Answer:
    """What an engine answers.

    Attributes:
        tokens: Ids.
        params: What the next engine is told.
    """

    tokens: list[int]
    params: dict[str, Any] | None


@dataclass(frozen=True)
class Turns:
    """Two engines, none of which a router is in front of.

    Attributes:
        answer_tokens: How long answers are.
    """

    pdstack: PDStack
    prefill: Engine
    decode: Engine
    answer_tokens: int

    def ask(self, engine: Engine | Router, prompt: list[int], **fields: Any) -> Answer:
        """Return the answer to token ids of an engine, or of those behind a router."""
        body = {
            "model": self.pdstack.model.name,
            "prompt": prompt,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
            "max_tokens": self.answer_tokens,
            **fields,
        }
        url = f"{engine.url}/v1/completions"
        reply = httpx.post(url, json=body, timeout=REQUEST_LIMIT_S, trust_env=False)
        reply.raise_for_status()
        said = reply.json()
        return Answer(said["choices"][0]["token_ids"], said.get("kv_transfer_params"))

    def unaided(self, prompt: list[int], **fields: Any) -> list[int]:
        """Return what the decode engine answers by itself."""
        return self.ask(self.decode, prompt, cache_salt="unaided", **fields).tokens

    def prefilled(
        self, prompt: list[int], last: dict[str, Any] | None = None, prefill: Engine | None = None
    ) -> dict[str, Any]:
        """Return what is handed over of a prompt.

        Args:
            last: What was handed over of the last turn.
            prefill: Who prefills, where it is not the usual one.
        """
        answer = self.ask(
            prefill or self.prefill, prompt, max_tokens=1, kv_transfer_params=last or OFFER
        )
        assert answer.params is not None
        return answer.params

    def assert_nothing_failed(self) -> None:
        """No read did, nor was any offer forgotten."""
        for engine in (self.prefill, self.decode):
            counters = engine.nixl_counters()
            assert counters.failed_reads == counters.failed_notifications == 0
            assert counters.expired_requests == 0


def prompt_of(label: int, num_tokens: int) -> list[int]:
    """Token ids of characters, of which no block is that of another label's."""
    return [
        1,
        *(
            (label * 31 + position * (position % 7 + label)) % 90 + 4
            for position in range(num_tokens - 1)
        ),
    ]
