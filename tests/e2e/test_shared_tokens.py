# SPDX-License-Identifier: Apache-2.0
"""Decode context parallelism: engines whose ranks share tokens out, and engines that do not.

vLLM has no attention for CPU that can. `tools/pdstack/modules/gpu_caches` takes its place, and that
of the two kernels which are missing beside it. The sweep has more pairs.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.layouts import RANKS
from tests.e2e.pairs import REPORT_LIMIT_S
from tests.e2e.turns import Turns, prompt_of
from tests.tools.pdstack.helpers import wait_until
from tools.pdstack.caches import Caches, why_no_caches
from tools.pdstack.engine import EngineSpec, KVTransfer
from tools.pdstack.stack import PDStack
from tools.pdstack.tiny_models import write_tiny_llama

WHY_NOT = why_no_caches()
WHOLE, SHARED = Caches("NHD", 48), Caches("HND", 32, shares=2, run_tokens=8)
# What the first rank has alone, what both have, and several blocks of both.
PROMPT_TOKENS = (7, 20, 101, 5 * 96 + 1)
TO_AND_FRO = KVTransfer(
    extra_config={
        "kv_lease_duration": 120,
        "bidirectional_kv_xfer": True,
        "kv_recompute_threshold": 1,
    }
)

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]


def spec(name: str, caches: Caches) -> EngineSpec:
    """An engine of two ranks with such caches."""
    blocks = ("--num-gpu-blocks-override", str(8192 // caches.block_tokens))
    return EngineSpec(
        name,
        RANKS,
        TO_AND_FRO,
        (*blocks, *caches.args),
        caches.env,
        max_model_len=1024,
        module_dirs=caches.module_dirs,
    )


@pytest.fixture(scope="module")
def turns(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Turns]:
    """Start ranks that are replicas of each other, and ranks that share the same head out."""
    model = write_tiny_llama(
        tmp_path_factory.mktemp("tiny") / "llama", num_layers=4, num_heads=4, num_kv_heads=1
    )
    with PDStack(model, tmp_path_factory.mktemp("run")) as stack:
        prefill, decode = stack.start_engines(spec("whole", WHOLE), spec("shared", SHARED))
        yield Turns(stack, prefill, decode, 24)


def right_answer(turns: Turns, prompt: list[int]) -> list[int]:
    """What the engine answers by itself whose ranks are replicas."""
    return turns.ask(turns.prefill, prompt, cache_salt="unaided").tokens


@pytest.mark.parametrize("tokens", PROMPT_TOKENS)
def test_an_answer_equals_that_of_replicas(turns: Turns, tokens: int) -> None:
    """Each rank has read its share of the prompt, and nobody else's."""
    prompt = prompt_of(tokens, tokens)
    right = right_answer(turns, prompt)
    assert turns.unaided(prompt) == right
    before = turns.decode.nixl_counters()
    handed = turns.prefilled(prompt)
    assert turns.ask(turns.decode, prompt, kv_transfer_params=handed).tokens == right
    readers = 1 if tokens <= 8 else 2
    wait_until(
        lambda: (turns.decode.nixl_counters() - before).transfers >= readers,
        "what every rank has read that has a token",
        REPORT_LIMIT_S,
    )


def test_turns_go_to_and_fro(turns: Turns) -> None:
    """What ranks have shared out among them is read back by replicas; prefixes are found."""
    prompt, last, before = prompt_of(7, 131), None, turns.prefill.nixl_counters()
    for turn in range(3):
        right = right_answer(turns, prompt)
        handed = turns.prefilled(prompt, last)
        answer = turns.ask(turns.decode, prompt, kv_transfer_params=handed)
        assert answer.tokens == right
        prompt, last = [*prompt, *answer.tokens, *prompt_of(8 + turn, 77)], answer.params
    wait_until(
        lambda: (turns.prefill.nixl_counters() - before).transfers >= 4,
        "what replicas have read back of both shares",
        REPORT_LIMIT_S,
    )


def test_nothing_failed(turns: Turns) -> None:
    """Neither on the way there, nor on the way back."""
    turns.assert_nothing_failed()
