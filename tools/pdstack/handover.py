# SPDX-License-Identifier: Apache-2.0
"""What lies between a prompt's end and the answer's first token, in all the ways that there are.

    serial    the prefill engine is asked, and when it has answered, the decode engine
    early     both are asked at once, as with `early_dispatch`
    seeded    the answer begins with the prefill engine's token, as with `seed_first_token`
    sampled   that token and the answer are sampled, and not greedy

One pair of engines has both options on, and each request says in which way it goes: what asks them
stands in a router's place. So the ways take turns, and share whatever else the machine does. The
handover of a request is the time from the prefill engine's answer, which has its token, to the
decode engine's first token, both as the router sees them.

Of each turn it is known as well how many requests were answered a second, and how many blocks the
decode engine held for how long.
"""

from __future__ import annotations

import asyncio
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
_COORDINATES = (
    *("do_remote_prefill", "do_remote_decode", "remote_engine_id"),
    *("remote_host", "remote_port", "tp_size"),
)
"""What routers keep of an answer that says that its engine pushes."""
_SAMPLED = {"temperature": 0.7, "top_p": 0.95}
_SENTENCE_TOKENS = 24
"""Of `_sentence`, with the tokenizer of SmolLM2; what the prompts came to is measured."""


@dataclass(frozen=True)
class Way:
    """How a request goes.

    Attributes:
        is_early: it is sent to both engines at once.
        is_seeded: its answer may begin with the prefill engine's token.
        is_sampled: it is answered with tokens that are drawn.
    """

    is_early: bool = False
    is_seeded: bool = False
    is_sampled: bool = False

    def __str__(self) -> str:
        how = "early" if self.is_early else "serial"
        seeded = ", seeded" if self.is_seeded else ""
        return f"{how}{seeded}{', sampled' if self.is_sampled else ''}"


WAYS = tuple(
    Way(is_early, *seeded)
    for is_early in (False, True)
    for seeded in ((False, False), (True, False), (True, True))
)
UNSEEDED_WAYS = tuple(each for each in WAYS if not each.is_seeded)


@dataclass(frozen=True)
class Sample:
    """A request that was answered.

    Attributes:
        prefill_s: from sending it until the prefill engine had answered.
        ttft_s: from sending it until the decode engine's first token had come.
        prompt_tokens: of its prompt.
    """

    prefill_s: float
    ttft_s: float
    prompt_tokens: int

    @property
    def handover_s(self) -> float:
        """From the prompt's end until the answer's beginning."""
        return self.ttft_s - self.prefill_s


@dataclass(frozen=True)
class Turn:
    """Requests that went one way, before it was another one's turn.

    Attributes:
        way: how they went.
        clients: how many asked at the same time.
        samples: one for each request.
        began_s: when the first was sent, by `time.monotonic`.
        ended_s: when the last answer had ended.
        connector: what the engines had.
        block_s: how many blocks of the decode engine's cache were in use, times for how long.
    """

    way: Way
    clients: int
    samples: Sequence[Sample]
    began_s: float
    ended_s: float
    connector: str = ""
    block_s: float = 0.0

    @property
    def requests_s(self) -> float:
        """How many requests were answered a second."""
        return len(self.samples) / (self.ended_s - self.began_s)


@dataclass(frozen=True)
class Row:
    """Medians of the requests that went one way, and of its turns.

    Attributes:
        connector: what the engines had.
        way: how they went.
        clients: how many asked at the same time.
        requests: how many there were.
        prefill_s: until the prefill engine had answered.
        handover_s: from then until the first token.
        ttft_s: until the first token.
        requests_s: how many were answered a second.
        block_s: blocks of the decode engine's cache times seconds, for each request.
        of_serial: the handover as a share of that of serial requests.
        ttft_of_serial: the time to the first token, as a share of theirs.
        prefill_of_serial: the time to the prefill engine's answer, as a share of theirs.
        requests_of_serial: requests a second, as a share of theirs.
        of_last: the handover as a share of that of the last connector, for the same way.
        blocks_of_last: blocks times seconds, as a share of its.
    """

    connector: str
    way: str
    clients: int
    requests: int
    prefill_s: float
    handover_s: float
    ttft_s: float
    requests_s: float
    block_s: float
    of_serial: float
    ttft_of_serial: float
    prefill_of_serial: float
    requests_of_serial: float
    of_last: float
    blocks_of_last: float


_MEDIANS = ("prefill_s", "handover_s", "ttft_s")


def rows(turns: Sequence[Turn]) -> list[Row]:
    """Return a row for each number of clients, each way and each connector.

    Args:
        turns: of all of them; serial ones and those of the last connector are what others are
            compared with.
    """
    alike: dict[tuple[int, Way, str], list[Turn]] = {}
    for turn in turns:
        alike.setdefault((turn.clients, turn.way, turn.connector), []).append(turn)
    found = {key: _figures(of_key) for key, of_key in alike.items()}
    connectors = list(dict.fromkeys(turn.connector for turn in turns))
    made: list[Row] = []
    for clients, way, connector in sorted(
        found, key=lambda each: (each[0], connectors.index(each[2]), WAYS.index(each[1]))
    ):
        own = found[clients, way, connector]
        serial = found[clients, WAYS[0], connector]
        last = found[clients, way, connectors[-1]]
        made.append(
            Row(
                connector,
                str(way),
                clients,
                sum(len(turn.samples) for turn in alike[clients, way, connector]),
                **own,
                of_serial=own["handover_s"] / serial["handover_s"],
                ttft_of_serial=own["ttft_s"] / serial["ttft_s"],
                prefill_of_serial=own["prefill_s"] / serial["prefill_s"],
                requests_of_serial=own["requests_s"] / serial["requests_s"],
                of_last=own["handover_s"] / last["handover_s"],
                blocks_of_last=own["block_s"] / last["block_s"],
            )
        )
    return made


def _figures(turns: Sequence[Turn]) -> dict[str, float]:
    """What the turns of one way came to."""
    samples = [each for turn in turns for each in turn.samples]
    medians = {
        name: statistics.median(getattr(each, name) for each in samples) for name in _MEDIANS
    }
    return {
        **medians,
        "requests_s": statistics.median(turn.requests_s for turn in turns),
        "block_s": statistics.median(turn.block_s / len(turn.samples) for turn in turns),
    }


class Pair:
    """A prefill engine and a decode engine, and requests for both.

    Args:
        prefill_url: base URL of the one.
        decode_url: base URL of the other.
        model: what they serve.
        num_tokens: of a prompt, roughly.
        client: what asks; it has no connection limit.
        ways: those that they know, serial first.
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
        ways: Sequence[Way] = WAYS,
        seed: int = 0,
    ) -> None:
        self._prefill = f"{prefill_url}/v1/completions"
        self._decode = f"{decode_url}/v1/completions"
        self._model = model
        self._num_tokens = num_tokens
        self._client = client
        self._ways = ways
        self._random = random.Random(seed)
        self._coordinates: dict[str, Any] = {}

    async def measure(
        self,
        clients: int,
        rounds: int,
        on_round: Callable[[int], None] = lambda _: None,
        *,
        each: int = 1,
    ) -> list[Turn]:
        """Ask in all ways, one after the other, so many rounds.

        Args:
            clients: how many ask at the same time.
            rounds: how many count.
            on_round: told of each, from 1, once it is over.
            each: requests that a client sends in a round and way, one when the last is answered.

        Raises:
            PDStackError: an engine has not answered as it should.
            httpx.HTTPError: it failed, or was silent for too long.
        """
        if not self._coordinates:
            await self._ask(WAYS[0])
        turns: list[Turn] = []
        for number in range(_NUM_WARM_ROUNDS + rounds):
            # Each way comes first equally often.
            first = number % len(self._ways)
            for way in (*self._ways[first:], *self._ways[:first]):
                turn = await self._turn(way, clients, each)
                if number >= _NUM_WARM_ROUNDS:
                    turns.append(turn)
            if number >= _NUM_WARM_ROUNDS:
                on_round(number - _NUM_WARM_ROUNDS + 1)
        return turns

    async def _turn(self, way: Way, clients: int, each: int) -> Turn:
        """Let all clients ask in one way."""

        async def ask() -> list[Sample]:
            return [await self._ask(way) for _ in range(each)]

        began_s = time.monotonic()
        asked = await asyncio.gather(*(ask() for _ in range(clients)))
        samples = [sample for of_client in asked for sample in of_client]
        return Turn(way, clients, samples, began_s, time.monotonic())

    async def _ask(self, way: Way) -> Sample:
        """Ask as a router does, with a prompt that was never sent before."""
        router_id = uuid.UUID(int=self._random.getrandbits(128)).hex
        body = {
            "model": self._model,
            "prompt": self._prompt(),
            **(_SAMPLED if way.is_sampled else {"temperature": 0.0}),
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
        self._coordinates = {name: reply["kv_transfer_params"][name] for name in _COORDINATES}
        num_tokens = reply["usage"]["prompt_tokens"]
        return Sample(prefilled_s - began_s, answered_s - began_s, num_tokens)

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
