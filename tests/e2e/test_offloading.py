# SPDX-License-Identifier: Apache-2.0
"""Engines that offload to host memory beside ours, within `MultiConnector`."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.e2e.layouts import FLOAT32_BYTES, ONE, STAGES
from tests.e2e.pairs import BLOCK_TOKENS, REPORT_LIMIT_S, metric
from tests.e2e.turns import Turns, prompt_of
from tests.tools.pdstack.helpers import wait_until
from tools.pdstack.engine import EngineSpec, KVTransfer, beside_offloading
from tools.pdstack.layout import read_model_shape
from tools.pdstack.stack import Engine, PDStack
from tools.pdstack.tiny_models import write_tiny_llama

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

ANSWER_TOKENS = 8
PROMPT_BLOCKS = 4
PROMPT_TOKENS = PROMPT_BLOCKS * BLOCK_TOKENS + 16
NUM_PROMPTS = 4
# One is vLLM's null block. No more than two prompts are in it: a third evicts one.
CACHE_BLOCKS = 13
OURS = KVTransfer(
    extra_config={"kv_lease_duration": 120, "seed_first_token": False},
    load_failure_policy="recompute",
)
LOADED = "vllm:kv_offload_load_bytes_total"


@dataclass(frozen=True)
class Offloading(Turns):
    """Both engines offload.

    Attributes:
        run: Where loads are told to fail.
        block_bytes: Of the whole model.
        is_first: Whether ours is asked before the child that offloads.
    """

    run: Path
    block_bytes: int
    is_first: bool

    def handed_over(self, prompt: list[int]) -> list[int]:
        """Return the decode engine's answer to what the prefill engine has computed or loaded."""
        params = self.prefilled(prompt)
        return self.ask(self.decode, prompt, kv_transfer_params=params).tokens

    def from_host(self, prompt: list[int]) -> list[int]:
        """Return the decode engine's answer to a prompt that nobody hands over."""
        return self.ask(self.decode, prompt).tokens

    @contextmanager
    def loads(self, engine: Engine, fault: str) -> Iterator[None]:
        """Within this block an engine's loads fail so."""
        file = self.run / f"loads-{engine.spec.name}"
        file.write_text(fault)
        try:
            yield
        finally:
            file.unlink()

    def assert_loaded(self, engine: Engine, before: float, num_blocks: int) -> None:
        """See that an engine has loaded so many blocks from its host since then."""

        def loaded() -> float:
            return metric(engine, LOADED) - before

        right = num_blocks * self.block_bytes
        wait_until(lambda: loaded() >= right, "the report of loads", REPORT_LIMIT_S)
        assert loaded() == right

    def assert_nothing_is_held(self) -> None:
        """Each block that the prefill engine offered was read or given up."""

        def is_free() -> bool:
            # It hears of that with its next step.
            self.ask(self.prefill, prompt_of(90, 2), max_tokens=1)
            return metric(self.prefill, "vllm:kv_cache_usage_perc") == 0.0

        wait_until(is_free, "the return of all blocks", REPORT_LIMIT_S)


@pytest.fixture(scope="module", params=[True, False], ids=["first", "last"])
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """Start a pair, a prefill engine of two stages and a decode engine, with either order."""
    both = beside_offloading(OURS, is_first=request.param)
    model = write_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama")
    run = tmp_path_factory.mktemp("run")
    with PDStack(model, run) as pdstack:
        prefill, decode = pdstack.start_engines(
            *(
                EngineSpec(
                    name,
                    layout,
                    both,
                    ("--num-gpu-blocks-override", str(CACHE_BLOCKS)),
                    env={"LOADS_FILE": str(run / f"loads-{name}")},
                    max_model_len=PROMPT_TOKENS + 2 * BLOCK_TOKENS,
                )
                for name, layout in (("prefill", STAGES), ("decode", ONE))
            )
        )
        per_token = read_model_shape(model.directory).kv_bytes_per_token(FLOAT32_BYTES)
        yield Offloading(
            pdstack,
            prefill,
            decode,
            ANSWER_TOKENS,
            run,
            per_token * BLOCK_TOKENS,
            request.param,
        )


@pytest.fixture(scope="module")
def right(stack: Offloading) -> dict[int, list[int]]:
    """Return answers, once each prompt was handed over and has left both caches for the hosts."""
    answers = {label: stack.unaided(stored(label)) for label in range(NUM_PROMPTS)}
    for label, answer in answers.items():
        assert stack.handed_over(stored(label)) == answer
    return answers


def stored(label: int) -> list[int]:
    """Return a prompt that both hosts have."""
    return prompt_of(label, PROMPT_TOKENS)


def test_prompts_that_were_evicted_are_loaded_and_handed_over(
    stack: Offloading, right: dict[int, list[int]]
) -> None:
    """By both stages; the decode engine reads them where ours comes first, else it loads them."""
    loaded = [metric(engine, LOADED) for engine in (stack.prefill, stack.decode)]
    before = stack.decode.nixl_counters()
    for label, answer in right.items():
        assert stack.handed_over(stored(label)) == answer
        # With what it has loaded, which the decode engine does not always read.
        assert stack.ask(stack.prefill, stored(label)).tokens == answer
    num_blocks = NUM_PROMPTS * PROMPT_BLOCKS
    stack.assert_loaded(stack.prefill, loaded[0], num_blocks)
    stack.assert_loaded(stack.decode, loaded[1], 0 if stack.is_first else num_blocks)
    stack.assert_nothing_is_held()
    reads = 2 * NUM_PROMPTS * stack.is_first
    assert (stack.decode.nixl_counters() - before).transfers == reads
    stack.assert_nothing_failed()


def test_prompt_of_which_the_host_has_the_beginning_is_answered(
    stack: Offloading, right: dict[int, list[int]]
) -> None:
    """Whichever child has it, and the offer of all of it is given up where it is not read."""
    longer = prompt_of(0, PROMPT_TOKENS + BLOCK_TOKENS)
    answer = stack.unaided(longer)
    assert answer != right[0]
    assert stack.handed_over(longer) == answer
    stack.assert_nothing_is_held()
    stack.assert_nothing_failed()


def test_reads_and_loads_at_once_are_right(stack: Offloading, right: dict[int, list[int]]) -> None:
    """More than either cache has room for."""
    fresh = {label: prompt_of(label, PROMPT_TOKENS) for label in range(10, 14)}
    answers = {label: stack.unaided(prompt) for label, prompt in fresh.items()}
    loaded = metric(stack.decode, LOADED)
    with ThreadPoolExecutor(8) as pool:
        loads = [pool.submit(stack.from_host, stored(label)) for label in right]
        reads = [pool.submit(stack.handed_over, prompt) for prompt in fresh.values()]
        assert [each.result() for each in reads] == list(answers.values())
        assert [each.result() for each in loads] == list(right.values())
    assert metric(stack.decode, LOADED) > loaded
    stack.assert_nothing_is_held()
    stack.assert_nothing_failed()


def test_load_that_hangs_holds_up_no_read(stack: Offloading, right: dict[int, list[int]]) -> None:
    """The request that waits for it is answered once it is done, and others before."""
    prompt = prompt_of(20, PROMPT_TOKENS)
    answer = stack.unaided(prompt)
    loaded = metric(stack.decode, LOADED)
    with ThreadPoolExecutor(1) as pool:
        with stack.loads(stack.decode, "hang"):
            waiting = pool.submit(stack.from_host, stored(1))
            assert stack.handed_over(prompt) == answer
            assert not waiting.done()
        assert waiting.result() == right[1]
    stack.assert_loaded(stack.decode, loaded, PROMPT_BLOCKS)
    stack.assert_nothing_failed()


def test_read_that_fails_costs_no_load(stack: Offloading, right: dict[int, list[int]]) -> None:
    """Its prompt is computed, while what the host has is loaded."""
    prompt = prompt_of(30, PROMPT_TOKENS)
    answer = stack.unaided(prompt)
    of_another = stack.prefilled(prompt_of(31, PROMPT_TOKENS))
    before, loaded = stack.decode.nixl_counters(), metric(stack.decode, LOADED)
    with ThreadPoolExecutor(3) as pool:
        read = pool.submit(stack.ask, stack.decode, prompt, kv_transfer_params=of_another)
        loads = [pool.submit(stack.from_host, stored(label)) for label in (0, 1)]
        assert [each.result() for each in loads] == [right[0], right[1]]
        assert read.result().tokens == answer
    wait_until(
        lambda: (stack.decode.nixl_counters() - before).failed_reads,
        "the report of the failed read",
        REPORT_LIMIT_S,
    )
    assert metric(stack.decode, LOADED) > loaded


def test_prefill_engine_that_dies_of_a_load_costs_its_own_requests(
    stack: Offloading, right: dict[int, list[int]]
) -> None:
    """The decode engine goes on loading and computing; it comes last."""
    prompt = prompt_of(40, PROMPT_TOKENS)
    answer = stack.unaided(prompt)
    # So that it has left the prefill engine's cache.
    for label in (2, 3):
        stack.ask(stack.prefill, stored(label))
    with stack.loads(stack.prefill, "raise"), pytest.raises(httpx.HTTPError):
        stack.prefilled(stored(0))
    assert stack.from_host(stored(0)) == right[0]
    assert stack.from_host(prompt) == answer
