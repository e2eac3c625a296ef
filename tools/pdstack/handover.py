# SPDX-License-Identifier: Apache-2.0
"""What lies between a prompt's end and the answer's first token, in all the ways that there are.

    serial    the prefill engine is asked, and when it has answered, the decode engine
    early     both are asked at once, as with `early_dispatch`
    seeded    the answer begins with the prefill engine's token, as with `seed_first_token`

One pair of engines has both options on, and each request says in which way it goes: what asks them
stands in a router's place. So the ways take turns, and share whatever else the machine does. The
handover of a request is the time from the prefill engine's answer, which has its token, to the
decode engine's first token, both as the router sees them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from .errors import PDStackError

ANSWER_TOKENS = 4
REQUEST_LIMIT_S = 300.0
_NUM_WARM_ROUNDS = 2
"""Rounds that do not count: kernels are compiled, and engines connected."""
_SENTENCE_TOKENS = 24
"""Of `_sentence`, with the tokenizer of SmolLM2; what the prompts came to is measured."""


@dataclass(frozen=True)
class Way:
    """How a request goes.

    Attributes:
        is_early: it is sent to both engines at once.
        is_seeded: its answer may begin with the prefill engine's token.
    """

    is_early: bool = False
    is_seeded: bool = False

    def __str__(self) -> str:
        how = "early" if self.is_early else "serial"
        return f"{how}, seeded" if self.is_seeded else how


WAYS = tuple(Way(*each) for each in itertools.product((False, True), repeat=2))


@dataclass(frozen=True)
class Sample:
    """A request that was answered.

    Attributes:
        way: how it went.
        clients: how many asked at the same time.
        prefill_s: from sending it until the prefill engine had answered.
        ttft_s: from sending it until the decode engine's first token had come.
        prompt_tokens: of its prompt.
    """

    way: Way
    clients: int
    prefill_s: float
    ttft_s: float
    prompt_tokens: int

    @property
    def handover_s(self) -> float:
        """From the prompt's end until the answer's beginning."""
        return self.ttft_s - self.prefill_s


@dataclass(frozen=True)
class Row:
    """Medians of the requests that went one way.

    Attributes:
        way: how they went.
        clients: how many asked at the same time.
        requests: how many there were.
        prefill_s: until the prefill engine had answered.
        handover_s: from then until the first token.
        ttft_s: until the first token.
        of_serial: the handover as a share of that of serial requests.
        ttft_of_serial: the time to the first token, as a share of theirs.
    """

    way: str
    clients: int
    requests: int
    prefill_s: float
    handover_s: float
    ttft_s: float
    of_serial: float
    ttft_of_serial: float


def rows(samples: Sequence[Sample]) -> list[Row]:
    """Return a row for each number of clients and each way."""
    made: list[Row] = []
    for clients in dict.fromkeys(each.clients for each in samples):
        of_clients = [each for each in samples if each.clients == clients]
        went = {way: [each for each in of_clients if each.way == way] for way in WAYS}
        medians = {
            way: {
                name: statistics.median(getattr(each, name) for each in samples_of_way)
                for name in ("prefill_s", "handover_s", "ttft_s")
            }
            for way, samples_of_way in went.items()
        }
        serial = medians[WAYS[0]]
        made += [
            Row(
                str(way),
                clients,
                len(went[way]),
                **own,
                of_serial=own["handover_s"] / serial["handover_s"],
                ttft_of_serial=own["ttft_s"] / serial["ttft_s"],
            )
            for way, own in medians.items()
        ]
    return made


class Pair:
    """A prefill engine and a decode engine, and requests for both.

    Args:
        prefill_url: base URL of the one.
        decode_url: base URL of the other.
        model: what they serve.
        num_tokens: of a prompt, roughly.
        client: what asks; it has no connection limit.
        seed: other prompts for another number.
    """

    def __init__(
        self,
        prefill_url: str,
        decode_url: str,
        model: str,
        num_tokens: int,
        client: httpx.AsyncClient,
        *,
        seed: int = 0,
    ) -> None:
        self._prefill = f"{prefill_url}/v1/completions"
        self._decode = f"{decode_url}/v1/completions"
        self._model = model
        self._num_tokens = num_tokens
        self._client = client
        self._random = random.Random(seed)
        self._coordinates: dict[str, Any] = {}

    async def measure(
        self, clients: int, rounds: int, on_round: Callable[[int], None] = lambda _: None
    ) -> list[Sample]:
        """Ask in all ways, one after the other, so many rounds.

        Args:
            clients: how many ask at the same time, each once a round and way.
            rounds: how many count.
            on_round: told of each, from 1, once it is over.

        Raises:
            PDStackError: an engine has not answered as it should.
            httpx.HTTPError: it failed, or was silent for too long.
        """
        if not self._coordinates:
            await self._ask(WAYS[0], clients)
        samples: list[Sample] = []
        for number in range(_NUM_WARM_ROUNDS + rounds):
            # Each way comes first equally often.
            first = number % len(WAYS)
            for way in (*WAYS[first:], *WAYS[:first]):
                asked = await asyncio.gather(*(self._ask(way, clients) for _ in range(clients)))
                if number >= _NUM_WARM_ROUNDS:
                    samples += asked
            if number >= _NUM_WARM_ROUNDS:
                on_round(number - _NUM_WARM_ROUNDS + 1)
        return samples

    async def _ask(self, way: Way, clients: int) -> Sample:
        """Ask as a router does, with a prompt that was never sent before."""
        router_id = uuid.UUID(int=self._random.getrandbits(128)).hex
        body = {
            "model": self._model,
            "prompt": self._prompt(),
            "temperature": 0.0,
            "ignore_eos": True,
        }
        headers = {"X-Request-Id": router_id}
        began_s = time.monotonic()
        prefill = asyncio.create_task(self._ask_prefill(body, headers))
        if way.is_early:
            params = {**self._coordinates, "remote_request_id": router_id}
            decode = asyncio.create_task(self._ask_decode(body, headers, params, way))
            (prefilled_s, reply), answered_s = await asyncio.gather(prefill, decode)
        else:
            prefilled_s, reply = await prefill
            answered_s = await self._ask_decode(body, headers, reply["kv_transfer_params"], way)
        names = ("do_remote_prefill", "remote_engine_id", "remote_host", "remote_port")
        self._coordinates = {name: reply["kv_transfer_params"][name] for name in names}
        num_tokens = reply["usage"]["prompt_tokens"]
        return Sample(way, clients, prefilled_s - began_s, answered_s - began_s, num_tokens)

    async def _ask_prefill(
        self, body: dict[str, Any], headers: dict[str, str]
    ) -> tuple[float, dict[str, Any]]:
        """Have a prompt computed; returns when that was, and what the engine said."""
        asked = {
            **body,
            "max_tokens": 1,
            "min_tokens": 1,
            "kv_transfer_params": {"do_remote_decode": True},
        }
        reply = await self._client.post(self._prefill, json=asked, headers=headers)
        ended_s = time.monotonic()
        reply.raise_for_status()
        said: dict[str, Any] = reply.json()
        if not said.get("kv_transfer_params"):
            raise PDStackError(f"{self._prefill} has answered without kv_transfer_params")
        return ended_s, said

    async def _ask_decode(
        self, body: dict[str, Any], headers: dict[str, str], params: dict[str, Any], way: Way
    ) -> float:
        """Have a request answered; returns when its first token had come."""
        asked = {
            **body,
            "max_tokens": ANSWER_TOKENS,
            "stream": True,
            "kv_transfer_params": params,
            # An argument that nobody reads, and for which no token of another engine is taken.
            **({} if way.is_seeded else {"vllm_xargs": {"unseeded": 1}}),
        }
        first_s: float | None = None
        async with self._client.stream("POST", self._decode, json=asked, headers=headers) as reply:
            if reply.is_error:
                await reply.aread()
            reply.raise_for_status()
            async for line in reply.aiter_lines():
                if first_s is None and _has_token(line):
                    first_s = time.monotonic()
        if first_s is None:
            raise PDStackError(f"{self._decode} has answered without a token")
        return first_s

    def _prompt(self) -> str:
        """A text of about so many tokens, which begins as no other."""
        sentences = max(self._num_tokens // _SENTENCE_TOKENS, 1)
        return " ".join(_sentence(self._random) for _ in range(sentences))


def _sentence(numbers: random.Random) -> str:
    day, tulips, roses = (numbers.randrange(100, 1000) for _ in range(3))
    return f"On day {day} it planted {tulips} tulips and {roses} roses by the wall."


def _has_token(line: str) -> bool:
    """Whether a line of a stream has something of the answer."""
    payload = line.removeprefix("data:").strip()
    if not line.startswith("data:") or payload == "[DONE]":
        return False
    return any(choice.get("text") for choice in json.loads(payload).get("choices", ()))
