# SPDX-License-Identifier: Apache-2.0
"""Engines that publish what is in their prefix caches, beside what they then serve from them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest

from tests.e2e.kv_events import Subscriber, published_at
from tests.e2e.layouts import ONE, STAGES, Case, Options, running
from tests.e2e.pairs import BLOCK_TOKENS, REPORT_LIMIT_S, REQUEST_LIMIT_S, metric
from tests.e2e.turns import Turns, prompt_of
from tests.tools.pdstack.helpers import wait_until
from tools.pdstack.engine import KVTransfer, why_no_first_tokens
from tools.pdstack.stack import Engine, Router
from tools.pdstack.tiny_models import write_tiny_llama

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

ANSWER_TOKENS = 8
PROMPT_BLOCKS = 4
PROMPT_TOKENS = PROMPT_BLOCKS * BLOCK_TOKENS + 16
# One is vLLM's null block. No more than two prompts are in it: a third evicts one.
CACHE_BLOCKS = 13
SERIAL = KVTransfer(load_failure_policy="fail")
AT_ONCE = KVTransfer(
    extra_config={"kv_lease_duration": 120, "early_dispatch": True, "seed_first_token": None},
    load_failure_policy="recompute",
)


@dataclass(frozen=True)
class Publishing(Turns):
    """Both engines publish, behind a router that sends to one after the other or to both at once.

    Attributes:
        is_early: Whether it sends to both at once.
        heard: What either engine has published, by its name.
    """

    router: Router
    is_early: bool
    heard: dict[str, Subscriber]
    labels: Iterator[int]

    def fresh(self) -> list[int]:
        """Return a prompt that no other one begins like."""
        return prompt_of(next(self.labels), PROMPT_TOKENS)

    def routed(self, prompt: list[int]) -> list[int]:
        """Return the pair's answer."""
        return self.ask(self.router, prompt).tokens

    def num_published(self, engine: Engine, prompt: list[int]) -> int:
        """Return how many of a prompt's first blocks an engine says that it has."""
        heard = self.heard[engine.name]
        # What was published before it is known, once it is.
        marker = prompt_of(next(self.labels), BLOCK_TOKENS + 1)
        self.ask(engine, marker, max_tokens=1)
        while not heard.num_blocks(marker):
            assert heard.hear(REPORT_LIMIT_S), "an engine has not published what it has computed"
        return heard.num_blocks(prompt)

    def num_served(self, engine: Engine, prompt: list[int]) -> int:
        """Return how many blocks of its prefix cache an engine answers a prompt with."""
        name = "vllm:prefix_cache_hits_total"
        asked, before = metric(engine, "vllm:prefix_cache_queries_total"), metric(engine, name)
        self.ask(engine, prompt, max_tokens=1)
        wait_until(
            lambda: metric(engine, "vllm:prefix_cache_queries_total") > asked,
            "the report of a request",
            REPORT_LIMIT_S,
        )
        return int(metric(engine, name) - before) // BLOCK_TOKENS

    def assert_told_right(self, prompt: list[int], num_blocks: int) -> None:
        """See that both engines publish so many of a prompt's blocks, and serve them."""
        for engine in (self.prefill, self.decode):
            self.assert_tells(engine, prompt, num_blocks)

    def assert_tells(self, engine: Engine, prompt: list[int], num_blocks: int) -> None:
        """See that an engine publishes so many of a prompt's blocks, and serves them."""
        assert self.num_published(engine, prompt) == num_blocks
        assert self.num_served(engine, prompt) == num_blocks


@pytest.fixture(scope="module", params=[SERIAL, AT_ONCE], ids=["serial", "at_once"])
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """Start a prefill engine of two stages, and a decode engine of one rank."""
    run = tmp_path_factory.mktemp("run")
    model = write_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama")
    few = ("--num-gpu-blocks-override", str(CACHE_BLOCKS))
    sockets = {layout: run / f"events-{layout}" for layout in (STAGES, ONE)}
    options = {
        layout: Options(args=(*few, *published_at(socket))) for layout, socket in sockets.items()
    }
    case = Case(STAGES, ONE, reads=2)
    with (
        running(model, run, [case], options=options, kv_transfer=request.param) as engines,
        engines.pair(case) as pair,
    ):
        heard = {
            engines.by_layout[layout].name: Subscriber(socket, BLOCK_TOKENS)
            for layout, socket in sockets.items()
        }
        stack = Publishing(
            engines.stack,
            pair.prefill,
            pair.decode,
            ANSWER_TOKENS,
            pair.router,
            request.param is AT_ONCE,
            heard,
            itertools.count(1),
        )
        for engine in (pair.prefill, pair.decode):
            # A subscription takes a moment; what is published before is not heard.
            wait_until(lambda e=engine: is_heard(stack, e), "a first event", REQUEST_LIMIT_S)
        yield stack
        for subscriber in heard.values():
            subscriber.close()


def is_heard(stack: Publishing, engine: Engine) -> bool:
    """Whether an event comes of a prompt that is asked now."""
    stack.ask(engine, prompt_of(next(stack.labels), BLOCK_TOKENS + 1), max_tokens=1)
    return stack.heard[engine.name].hear(limit_s=1.0)


def test_prompts_that_were_read_are_published_and_served(stack: Publishing) -> None:
    """By both engines, from when the answer begins; the router may send to both at once."""
    prompts = [stack.fresh() for _ in range(3)]
    before = stack.decode.nixl_counters()
    for prompt in prompts:
        right = stack.unaided(prompt)
        assert stack.routed(prompt) == right
        stack.assert_told_right(prompt, PROMPT_BLOCKS)
    counted = stack.decode.nixl_counters() - before
    assert counted.transfers >= 2 * len(prompts)
    assert (counted.prefill_waits > 0) == stack.is_early
    is_seeded = stack.is_early and not why_no_first_tokens()
    assert counted.first_tokens == is_seeded * len(prompts)
    stack.assert_nothing_failed()


def test_prompts_that_were_evicted_are_taken_back(stack: Publishing) -> None:
    """Block by block: what is left of them is served, and no more."""
    prompts = [stack.fresh() for _ in range(4)]
    for prompt in prompts:
        stack.routed(prompt)
    for engine in (stack.prefill, stack.decode):
        left = []
        for prompt in prompts:
            left.append(stack.num_published(engine, prompt))
            assert stack.num_served(engine, prompt) == left[-1]
        assert left[0] == 0


def test_prompt_whose_read_failed_is_published_once_it_is_computed(stack: Publishing) -> None:
    """And never, where the request fails."""
    prompt, other = stack.fresh(), stack.fresh()
    right = stack.unaided(prompt)
    params = stack.prefilled(other)
    before = stack.decode.nixl_counters()
    if stack.is_early:
        answer = stack.ask(stack.decode, prompt, kv_transfer_params=params)
        assert answer.tokens == right
        stack.assert_tells(stack.decode, prompt, PROMPT_BLOCKS)
    else:
        with pytest.raises(httpx.HTTPStatusError):
            stack.ask(stack.decode, prompt, kv_transfer_params=params)
        stack.assert_tells(stack.decode, prompt, 0)
        assert stack.ask(stack.decode, prompt).tokens == right
    wait_until(
        lambda: (stack.decode.nixl_counters() - before).failed_reads,
        "the report of the failed read",
        REPORT_LIMIT_S,
    )
