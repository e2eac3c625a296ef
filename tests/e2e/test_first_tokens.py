# SPDX-License-Identifier: Apache-2.0
"""Sampled answers that begin with the prefill engine's token, beside those of one engine.

Where `top_k` is 1, sampling has one outcome: such an answer is compared token by token.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.e2e.layouts import ONE, STAGES, Case, Engines, running
from tests.e2e.pairs import REQUEST_LIMIT_S, Pair, post, text_of
from tools.pdstack.engine import KVTransfer, why_no_first_tokens
from tools.pdstack.tiny_models import write_tiny_llama

ONE_OUTCOME = {"temperature": 0.9, "top_k": 1}
BY_DEFAULT = KVTransfer(extra_config={"seed_first_token": None})
UNSEEDED = {"vllm_xargs": {"unseeded": 1}}
NUM_DRAWS = 1_000
AT_ONCE = 16

WHY_NOT = why_no_first_tokens()

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
    pytest.mark.parametrize("case", [Case(STAGES, ONE, reads=2)], ids=str, scope="module"),
]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Start one of each layout."""
    model = write_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama")
    run, case = tmp_path_factory.mktemp("run"), Case(STAGES, ONE, reads=2)
    with running(model, run, [case], kv_transfer=BY_DEFAULT) as engines:
        yield engines


def num_seeded(pair: Pair) -> int:
    """How many answers have begun with the prefill engine's token."""
    return pair.decode.nixl_counters().first_tokens


def said(reply: httpx.Response) -> tuple[Any, ...]:
    """What a client sees of an answer: texts, reasons and usage."""
    reply.raise_for_status()
    body = reply.json()
    choices = [
        (each["message"]["content"], each["finish_reason"], each["stop_reason"])
        for each in body["choices"]
    ]
    usage = body["usage"]
    return choices, usage["prompt_tokens"], usage["completion_tokens"]


@pytest.mark.parametrize(
    "asked_for",
    [
        {},
        {"presence_penalty": 1.5, "frequency_penalty": 1.5},
        {"repetition_penalty": 1.8},
        {"temperature": 0.0, "repetition_penalty": 1.8, "frequency_penalty": 1.0},
        {"logit_bias": {"70": 5.0, "71": 5.0}},
        {"allowed_token_ids": [70, 71, 72, 73, 74]},
        {"min_p": 0.2, "top_p": 0.8},
        {"max_tokens": 2},
        {"stop": ["e", "a", "o"]},
        {"stop_token_ids": list(range(100, 160))},
        {"structured_outputs": {"regex": "[abc]{3}[0-9]+"}},
    ],
    ids=str,
)
def test_sampled_answer_equals_one_engines(pair: Pair, asked_for: dict[str, Any]) -> None:
    """Texts, reasons and usage; and what the first token counts for the penalties of others."""
    how = {**ONE_OUTCOME, **asked_for}
    text = text_of(f"sampled {asked_for}", 100)
    right = said(post(pair.decode, pair.model, text, **how, cache_salt="unaided"))
    before = num_seeded(pair)
    assert said(post(pair.router, pair.model, text, **how)) == right
    assert num_seeded(pair) == before + 1


def test_token_that_ends_the_answer_ends_it(pair: Pair) -> None:
    """With nothing before it, and the reason that it is."""
    text = text_of("ends", 100)
    how: dict[str, Any] = {**ONE_OUTCOME, "return_token_ids": True}
    reply = post(pair.decode, pair.model, text, **how, cache_salt="unaided").json()
    first = reply["choices"][0]["token_ids"][0]
    before = num_seeded(pair)
    choices, _, completion_tokens = said(
        post(pair.router, pair.model, text, **ONE_OUTCOME, stop_token_ids=[first])
    )
    assert choices == [("", "stop", first)]
    assert completion_tokens == 1
    assert num_seeded(pair) == before


@pytest.mark.parametrize("asked_for", [{"seed": 3}, {"min_tokens": 2}, UNSEEDED], ids=str)
def test_what_more_than_a_draw_decides_is_computed(pair: Pair, asked_for: dict[str, Any]) -> None:
    """By the decode engine, which says what one engine does."""
    text = text_of(f"computed {asked_for}", 100)
    how = {**ONE_OUTCOME, **asked_for}
    right = said(post(pair.decode, pair.model, text, **how, cache_salt="unaided"))
    before = num_seeded(pair)
    assert said(post(pair.router, pair.model, text, **how)) == right
    assert num_seeded(pair) == before


@pytest.mark.parametrize("ends", [False, True])
def test_log_probabilities_are_one_engines(pair: Pair, ends: bool) -> None:
    """Of each token and of the likeliest ones, also where the first one ends the answer."""
    text = text_of(f"ranked {ends}", 100)
    how: dict[str, Any] = {**ONE_OUTCOME, "logprobs": True, "top_logprobs": 3}
    alone = post(pair.decode, pair.model, text, **how, return_token_ids=True, cache_salt="unaided")
    if ends:
        how["stop_token_ids"] = alone.json()["choices"][0]["token_ids"][:1]
        alone = post(pair.decode, pair.model, text, **how, cache_salt="unaided")
    before = num_seeded(pair)
    answered = post(pair.router, pair.model, text, **how)
    assert num_seeded(pair) == before + (not ends)
    assert said(answered) == said(alone)
    right, found = (ranked(each) for each in (alone, answered))
    assert right
    assert [each[:-1] for each in found] == [each[:-1] for each in right]
    assert [each[-1] for each in found] == pytest.approx([each[-1] for each in right], abs=1e-3)


def ranked(reply: httpx.Response) -> list[tuple[Any, ...]]:
    """Place, token and log-probability of each token, and of the likeliest ones at each place."""
    places = reply.json()["choices"][0]["logprobs"]["content"]
    return [
        (place, each["token"], each["bytes"], each["logprob"])
        for place, token in enumerate(places)
        for each in (token, *token["top_logprobs"])
    ]


def test_stream_begins_with_the_token(pair: Pair) -> None:
    """Its pieces are the answer, and the last one has the reason."""
    text = text_of("streams", 100)
    unaided = post(pair.decode, pair.model, text, **ONE_OUTCOME, cache_salt="unaided")
    ((right, reason, _),), *_ = said(unaided)
    before = num_seeded(pair)
    reply = post(pair.router, pair.model, text, **ONE_OUTCOME, stream=True)
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    chunks = [json.loads(line)["choices"][0] for line in lines if line != "[DONE]"]
    assert "".join(each["delta"].get("content") or "" for each in chunks) == right
    assert chunks[-1]["finish_reason"] == reason
    assert num_seeded(pair) == before + 1


def test_one_of_several_answers_is_seeded(pair: Pair) -> None:
    """The others compute the prompt."""
    text = text_of("several", 100)
    right = said(post(pair.decode, pair.model, text, **ONE_OUTCOME, n=2, cache_salt="unaided"))
    before = num_seeded(pair)
    assert said(post(pair.router, pair.model, text, **ONE_OUTCOME, n=2)) == right
    assert num_seeded(pair) == before + 1


@pytest.mark.parametrize("temperature", [0.05, 2.0], ids=["peaked", "flat"])
def test_distribution_of_first_tokens_is_the_same(pair: Pair, temperature: float) -> None:
    """Seeded and not, by chi-squared at 0.001; of eight tokens, some of which end the answer."""
    body = {
        "model": pair.model,
        # Less than a block, so that no prompt is found in the prefix cache.
        "prompt": text_of("drawn", 40),
        "temperature": temperature,
        "allowed_token_ids": list(range(70, 78)),
        "stop_token_ids": [71, 74],
        "max_tokens": 2,
        "return_token_ids": True,
    }

    with httpx.Client(timeout=REQUEST_LIMIT_S, trust_env=False) as client:

        def draw(more: dict[str, Any]) -> int:
            reply = client.post(f"{pair.router.url}/v1/completions", json={**body, **more})
            reply.raise_for_status()
            token: int = reply.json()["choices"][0]["token_ids"][0]
            return token

        with ThreadPoolExecutor(AT_ONCE) as pool:
            before = num_seeded(pair)
            one, other = (Counter(pool.map(draw, [more] * NUM_DRAWS)) for more in ({}, UNSEEDED))
    ended = one[71] + one[74]
    assert num_seeded(pair) - before == NUM_DRAWS - ended
    kinds = one.keys() | other.keys()
    assert len(kinds) > 1
    # The value that a thousandth exceeds, of seven degrees of freedom: no fewer have more.
    assert sum((one[k] - other[k]) ** 2 / (one[k] + other[k]) for k in kinds) < 24.3
