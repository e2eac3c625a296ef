# SPDX-License-Identifier: Apache-2.0
"""DeepSeek V4: five kinds of cache, all of which a prompt's next tokens depend on.

Stages compute what one rank computes, number for number, so that answers and log-probabilities are
equal. Where a TP size changes, sums are rounded in another order; the sweep has these pairs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.layouts import ONE, STAGES
from tests.e2e.pairs import Pair
from tools.pdstack.accuracy import Completion, complete_all, vocabulary_size
from tools.pdstack.engine import EngineSpec, KVTransfer, why_no_deepseek4
from tools.pdstack.layout import Layout
from tools.pdstack.stack import PDStack
from tools.pdstack.tiny_deepseek4 import write_tiny_deepseek4

WHY_NOT = why_no_deepseek4()
MODULES = Path(__file__).with_name("modules")
MAX_MODEL_LEN = 3072
CACHE_BLOCKS = 4096
# A part of a block, some windows and groups of 128 tokens, and more than the index selects, which
# is 512 states of 4 tokens.
PROMPT_TOKENS = (5, 389, 2600)
_, MIDDLE, LONG = PROMPT_TOKENS

# Of each stage, one for each kind of cache; of two kinds, layers of 4 and of 128 tokens differ.
READS = 2 * 7

CACHES = {
    "windows": (r"\.swa_cache$", MIDDLE),
    "states of 4 and 128 tokens": (r"\.attn$", MIDDLE),
    "what is to be compressed": (r"\.attn\.compressor\.state_cache$", MIDDLE),
    "index": (r"\.indexer\.k_cache$", LONG),
    "what is to be indexed": (r"\.indexer\.compressor\.state_cache$", LONG),
}
"""The kinds of cache, by what their layers' names end with, and a prompt that needs them."""

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]


@dataclass(frozen=True)
class Spoiled:
    """A pair whose decode engine can lose what it has read.

    Attributes:
        pattern: the file that says of which layers.
        prompts: token ids, by how many there are.
        right: what one engine answers to each.
    """

    pair: Pair
    pattern: Path
    prompts: dict[int, list[int]]
    right: dict[int, Completion]

    def ask(self, tokens: int, pattern: str = "") -> Completion:
        """Return the pair's answer to the prompt of so many tokens.

        Args:
            tokens: of the prompt.
            pattern: of the layers whose blocks are lost.
        """
        self.pattern.write_text(pattern, encoding="utf-8")
        return _answer(self.pair.router.url, self.pair.model, self.prompts[tokens])


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spoiled]:
    """Start two stages that prefill, and one rank that decodes and says what is right."""
    model = write_tiny_deepseek4(tmp_path_factory.mktemp("tiny") / "deepseek4")
    pattern = tmp_path_factory.mktemp("pattern") / "layers"
    pattern.write_text("", encoding="utf-8")
    vocabulary = vocabulary_size(model.directory)
    rng = random.Random(0)
    prompts = {
        tokens: [rng.randrange(vocabulary // 10, vocabulary) for _ in range(tokens)]
        for tokens in PROMPT_TOKENS
    }

    def spec(layout: Layout, kv_transfer: KVTransfer, env: dict[str, str]) -> EngineSpec:
        blocks = ("--num-gpu-blocks-override", str(CACHE_BLOCKS))
        return EngineSpec(
            str(layout),
            layout,
            kv_transfer,
            extra_args=blocks,
            env=env,
            max_model_len=MAX_MODEL_LEN,
        )

    spoiler = KVTransfer(module_path="spoils_caches", module_dir=MODULES)
    with PDStack(model, tmp_path_factory.mktemp("run")) as stack:
        prefill, decode = stack.start_engines(
            spec(STAGES, KVTransfer(), {}),
            spec(ONE, spoiler, {"SPOILED_LAYERS_FILE": str(pattern)}),
        )
        right = {
            tokens: _answer(decode.url, model.name, prompt) for tokens, prompt in prompts.items()
        }
        router = stack.start_router([prefill], [decode])
        yield Spoiled(Pair(model.name, prefill, decode, router), pattern, prompts, right)


@pytest.mark.parametrize("tokens", PROMPT_TOKENS)
def test_an_answer_equals_one_engines(spoiled: Spoiled, tokens: int) -> None:
    """Tokens and log-probabilities, to the last bit, from both stages."""
    before = spoiled.pair.decode.nixl_counters()
    answer = spoiled.ask(tokens)
    read = spoiled.pair.read_since(before, READS)
    assert (answer.tokens, answer.logprobs) == _said(spoiled.right[tokens])
    assert (read.transfers, read.failed_reads) == (READS, 0)


@pytest.mark.parametrize("kind", CACHES)
def test_a_lost_cache_is_seen(spoiled: Spoiled, kind: str) -> None:
    """Without what was read of any one kind, an answer is another one."""
    pattern, tokens = CACHES[kind]
    assert _said(spoiled.ask(tokens, pattern)) != _said(spoiled.right[tokens])


def test_all_blocks_come_back(spoiled: Spoiled) -> None:
    """Once its requests were read, no block of the prefill engine is in use, and none expired."""
    spoiled.pair.assert_nothing_is_left()


def _answer(url: str, model: str, prompt: Sequence[int]) -> Completion:
    (answer,) = complete_all(url, model, [prompt])
    return answer


def _said(answer: Completion) -> tuple[tuple[str, ...], tuple[float, ...]]:
    return answer.tokens, answer.logprobs
