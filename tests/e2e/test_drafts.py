# SPDX-License-Identifier: Apache-2.0
"""Engines that draft hand requests to one another, to and fro, and answer as one engine would.

The draft is the model itself, over again: it is right whenever it has seen the prompt. So what is
accepted tells whether its KV was read. Other drafts are run by `make sweep`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.e2e.layouts import ONE, RANKS, STAGES
from tests.e2e.pairs import BLOCK_TOKENS, REPORT_LIMIT_S, metric
from tests.e2e.turns import Turns, prompt_of
from tests.tools.pdstack.helpers import wait_until
from tools.pdstack.engine import EngineSpec, KVTransfer, Speculation
from tools.pdstack.stack import PDStack
from tools.pdstack.tiny_models import write_tiny_llama

pytestmark = pytest.mark.e2e

DRAFTED = 3
ITSELF = Speculation("draft_model", DRAFTED, ".")
# After the first token, which nobody drafted, come three drafts and one more in each step.
STEPS = 5
ANSWER_TOKENS = 1 + STEPS * (DRAFTED + 1)
TO_AND_FRO = KVTransfer(
    extra_config={
        "kv_lease_duration": 120,
        "bidirectional_kv_xfer": True,
        "kv_recompute_threshold": 1,
        "missing_draft_layers": "compute",
    }
)


@dataclass(frozen=True)
class Stack(Turns):
    """Engines that draft."""

    def accepted(self, prompt: list[int], params: dict[str, Any]) -> tuple[list[int], int]:
        """Return the decode engine's answer, and how many of its tokens were drafts."""
        name = "vllm:spec_decode_num_accepted_tokens_total"
        before = metric(self.decode, name)
        answer = self.ask(self.decode, prompt, kv_transfer_params=params)
        return answer.tokens, int(metric(self.decode, name) - before)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Start two engines that draft alike, of other layouts."""
    model = write_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama")
    with PDStack(model, tmp_path_factory.mktemp("run")) as pdstack:
        prefill, decode = pdstack.start_engines(
            *(
                EngineSpec(
                    name,
                    layout,
                    TO_AND_FRO,
                    ("--num-gpu-blocks-override", "64"),
                    max_model_len=1024,
                    speculation=ITSELF,
                )
                for name, layout in (("prefill", RANKS), ("decode", ONE))
            )
        )
        yield Stack(pdstack, prefill, decode, ANSWER_TOKENS)


@pytest.mark.parametrize("num_tokens", [BLOCK_TOKENS - 28, 3 * BLOCK_TOKENS + 16])
def test_drafts_that_were_read_are_right(stack: Stack, num_tokens: int) -> None:
    """The answer is one engine's, and every draft is accepted: it has seen the whole prompt."""
    prompt = prompt_of(1, num_tokens)
    right = stack.unaided(prompt)
    tokens, accepted = stack.accepted(prompt, stack.prefilled(prompt))
    assert tokens == right
    assert accepted == STEPS * DRAFTED


def test_turns_go_to_and_fro(stack: Stack) -> None:
    """An answer that stops among accepted drafts is read back, and what comes next is right."""
    prompt = prompt_of(2, 2 * BLOCK_TOKENS + 5)
    right = stack.unaided(prompt)
    # A draft behind which its step accepts another one, and a token that has not come before.
    last = next(
        number
        for number in range(1, ANSWER_TOKENS)
        if (number - 1) % (DRAFTED + 1) < DRAFTED - 1 and right[number] not in right[:number]
    )
    before = stack.prefill.nixl_counters()
    for label, stop in enumerate(({"max_tokens": last + 1}, {"stop_token_ids": [right[last]]})):
        handed = stack.prefilled(prompt)
        answer = stack.ask(stack.decode, prompt, kv_transfer_params=handed, **stop)
        assert answer.tokens == right[: last + 1]
        turn = [*prompt, *answer.tokens, *prompt_of(3 + label, BLOCK_TOKENS)]
        tokens, _ = stack.accepted(turn, stack.prefilled(turn, answer.params))
        assert tokens == stack.unaided(turn)
    wait_until(
        lambda: (stack.prefill.nixl_counters() - before).bytes_moved > 0,
        "what the prefill engine has read back",
        REPORT_LIMIT_S,
    )


def test_drafts_that_were_not_read_cost_no_answer(stack: Stack) -> None:
    """Where the prefill engine does not draft, the answer is the same, and fewer are accepted."""
    (plain,) = stack.pdstack.start_engines(
        EngineSpec(
            "plain",
            STAGES,
            TO_AND_FRO,
            ("--num-gpu-blocks-override", "64"),
            max_model_len=1024,
        )
    )
    prompt = prompt_of(5, 3 * BLOCK_TOKENS + 16)
    right = stack.unaided(prompt)
    tokens, accepted = stack.accepted(prompt, stack.prefilled(prompt, prefill=plain))
    assert tokens == right
    assert accepted < STEPS * DRAFTED


def test_nothing_failed(stack: Stack) -> None:
    """No read did, nor was any offer forgotten."""
    for engine in (stack.prefill, stack.decode):
        counters = engine.nixl_counters()
        assert counters.failed_reads == counters.failed_notifications == 0
        assert counters.expired_requests == 0
