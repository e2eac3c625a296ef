# SPDX-License-Identifier: Apache-2.0
"""Whether a stack answers as one engine does: token for token, and with the same confidence."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path

import httpx

from .errors import PDStackError

SHORTEST_TOKENS, LONGEST_TOKENS = 8, 900
ANSWER_TOKENS = 16
CONCURRENCY = 8
REQUEST_LIMIT_S = 300.0

LOGPROB_BOUND = 1e-3
"""How far log-probabilities of equal tokens may lie apart at float32. Layouts sum in other orders,
which was seen to move them by less than a tenth of this; a wrong block moves them by far more."""


CLEAR_MARGIN = 2 * LOGPROB_BOUND
"""By how much log-probability a token must be likelier than the next one. Where it is less, each
may move to the other's place."""


@dataclass(frozen=True)
class Completion:
    """A greedy answer.

    Attributes:
        tokens: its tokens, each as `token_id:` and a number.
        logprobs: of each token; empty where they were not asked for.
        ttft_s: until the first of them had come.
        others: of each token, the likeliest other one, and its log-probability; without either
            where there was none.
    """

    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    ttft_s: float
    others: tuple[tuple[str, float] | None, ...] = ()


@dataclass(frozen=True)
class Accuracy:
    """How the answers of a stack compare with those of one engine.

    Attributes:
        requests: how many there were.
        equal: how many were the same, token for token.
        tied: how many were not, and part at a token that was likelier than the other one by less
            than `CLEAR_MARGIN`.
        agreement: share of tokens before the first one that differs, over all answers.
        logprob_gap: the largest difference of a log-probability among those tokens.
        ttft_p50_s: median time to the first token, of the stack.
        reference_ttft_p50_s: the same of one engine.
    """

    requests: int
    equal: int
    tied: int
    agreement: float
    logprob_gap: float
    ttft_p50_s: float
    reference_ttft_p50_s: float


def make_prompts(vocabulary: int, count: int, *, seed: int = 0) -> list[list[int]]:
    """Make prompts of 8 to 900 tokens, of which every other one begins like the one before it.

    Args:
        vocabulary: token ids below this exist.
        count: how many.
        seed: other prompts for another number.

    Returns:
        Token ids of each. Low ids, which are often special, are left out.
    """
    rng = random.Random(seed)
    growth = (LONGEST_TOKENS / SHORTEST_TOKENS) ** (1 / max(count - 1, 1))
    lengths = [round(SHORTEST_TOKENS * growth**number) for number in range(count)]
    rng.shuffle(lengths)
    prompts: list[list[int]] = []
    for number, length in enumerate(lengths):
        shared = prompts[-1] if number % 2 else []
        fresh = [rng.randrange(vocabulary // 10, vocabulary) for _ in range(length)]
        kept = min(len(shared), length - 1)
        prompts.append(shared[:kept] + fresh[kept:])
    return prompts


def vocabulary_size(model: Path) -> int:
    """Return how many token ids a model directory's model has."""
    config = json.loads((model / "config.json").read_text())
    size: int = config.get("text_config", config)["vocab_size"]
    return size


def complete_all(
    url: str,
    model: str,
    prompts: Sequence[Sequence[int]],
    *,
    salt: str | None = None,
    logprobs: bool = True,
) -> list[Completion]:
    """Send all prompts to a server, eight at a time, and return its answers in their order.

    Args:
        url: base URL, without a path.
        salt: keeps what is computed for these apart from other requests' prefixes.
        logprobs: whether log-probabilities are asked for.

    Raises:
        PDStackError: an answer is none.
        httpx.HTTPError: the server failed, or was silent for too long.
    """
    return asyncio.run(_complete_all(url, model, prompts, salt, logprobs))


def compare(references: Sequence[Completion], answers: Sequence[Completion]) -> Accuracy:
    """Compare a stack's answers with those of one engine; equally many, at least one."""
    equal = tied = agreeing = total = 0
    gap = 0.0
    for reference, answer in zip(references, answers, strict=True):
        equal += reference.tokens == answer.tokens
        total += len(reference.tokens)
        pairs = zip(reference.tokens, answer.tokens, strict=False)
        common = next(
            (number for number, (one, other) in enumerate(pairs) if one != other),
            min(len(reference.tokens), len(answer.tokens)),
        )
        agreeing += common
        tied += _is_tie(reference, answer, common)
        told = common if answer.logprobs else 0
        gaps = [
            abs(one - other)
            for one, other in zip(reference.logprobs[:told], answer.logprobs[:told], strict=True)
        ]
        gap = max([gap, *gaps])
    return Accuracy(
        len(references),
        equal,
        tied,
        agreeing / total,
        gap,
        statistics.median(each.ttft_s for each in answers),
        statistics.median(each.ttft_s for each in references),
    )


def _is_tie(reference: Completion, answer: Completion, number: int) -> bool:
    """Whether a token of an answer is one that might as well have been the reference's."""
    if number >= min(len(reference.others), len(answer.tokens)):
        return False
    other = reference.others[number]
    return (
        other is not None
        and other[0] == answer.tokens[number]
        and reference.logprobs[number] - other[1] < CLEAR_MARGIN
    )


async def _complete_all(
    url: str, model: str, prompts: Sequence[Sequence[int]], salt: str | None, logprobs: bool
) -> list[Completion]:
    at_once = asyncio.Semaphore(CONCURRENCY)
    async with httpx.AsyncClient(timeout=REQUEST_LIMIT_S, trust_env=False) as client:

        async def one(prompt: Sequence[int]) -> Completion:
            async with at_once:
                return await complete(client, url, model, prompt, salt, logprobs=logprobs)

        return list(await asyncio.gather(*map(one, prompts)))


async def complete(
    client: httpx.AsyncClient,
    url: str,
    model: str,
    prompt: Sequence[int],
    salt: str | None,
    *,
    logprobs: bool = True,
) -> Completion:
    """Send one prompt to a server, and return its answer.

    Args:
        url: base URL, without a path.
        salt: keeps what is computed for it apart from other requests' prefixes.
        logprobs: whether log-probabilities are asked for.

    Raises:
        PDStackError: the answer is none, or not whole.
        httpx.HTTPError: the server failed, or was silent for too long.
    """
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0.0,
        **({"logprobs": 2, "return_tokens_as_token_ids": True} if logprobs else {}),
        "return_token_ids": not logprobs,
        "ignore_eos": True,
        "stream": True,
        **({} if salt is None else {"cache_salt": salt}),
    }
    answer, began = _Answer(), time.monotonic()
    async with client.stream("POST", f"{url}/v1/completions", json=body) as reply:
        if reply.is_error:
            text = (await reply.aread()).decode(errors="replace")
            raise PDStackError(f"{url} answered with status {reply.status_code}: {text[:300]}")
        async for line in reply.aiter_lines():
            answer.add(line, time.monotonic() - began)
    if len(answer.tokens) != ANSWER_TOKENS or answer.ttft_s is None:
        raise PDStackError(
            f"{url} answered with {len(answer.tokens)} tokens instead of {ANSWER_TOKENS} to a "
            f"prompt of {len(prompt)}"
        )
    return Completion(
        tuple(answer.tokens), tuple(answer.logprobs), answer.ttft_s, tuple(answer.others)
    )


@dataclass
class _Answer:
    """What has come of an answer so far."""

    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ttft_s: float | None = None
    others: list[tuple[str, float] | None] = field(default_factory=list)

    def add(self, line: str, after_s: float) -> None:
        """Take one line of the stream."""
        payload = line.removeprefix("data:").strip()
        if not line.startswith("data:") or payload == "[DONE]":
            return
        for choice in json.loads(payload).get("choices", ()):
            logprobs = choice.get("logprobs")
            ids = choice.get("token_ids")
            if (logprobs or ids) and self.ttft_s is None:
                self.ttft_s = after_s
            if logprobs is None:
                self.tokens += [f"token_id:{each}" for each in ids or ()]
                continue
            self.tokens += logprobs["tokens"]
            self.logprobs += logprobs["token_logprobs"]
            for token, likeliest in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
                rest = [each for each in likeliest.items() if each[0] != token]
                self.others.append(max(rest, key=itemgetter(1), default=None))
