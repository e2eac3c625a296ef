# SPDX-License-Identifier: Apache-2.0
"""A model whose layers attend to windows or to everything, with pipeline stages on one side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.e2e.pairs import (
    BLOCK_TOKENS,
    REPORT_LIMIT_S,
    Pair,
    ask_unaided,
    ask_with_embeddings,
    embeddings,
    metric,
    text_of,
)
from tests.tools.pdstack.helpers import wait_until
from tools.pdstack.engine import EngineSpec, KVTransfer, ServedModel
from tools.pdstack.layout import Layout, read_model_shape
from tools.pdstack.metrics import NixlCounters
from tools.pdstack.stack import PDStack
from tools.pdstack.tiny_models import write_tiny_gemma3

pytestmark = pytest.mark.e2e

WINDOW_TOKENS = 256
FLOAT32_BYTES = 4
READS = 2


@dataclass(frozen=True)
class Hybrid:
    """Two engines that keep of windowed layers only the windows.

    Attributes:
        block_bytes: size of a block of the whole model.
        model: what they serve.
    """

    pair: Pair
    block_bytes: int
    model: ServedModel


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hybrid]:
    """Start them with a router."""
    model = write_tiny_gemma3(
        tmp_path_factory.mktemp("tiny") / "gemma3", sliding_window=WINDOW_TOKENS
    )
    per_token = read_model_shape(model.directory).kv_bytes_per_token(FLOAT32_BYTES)
    args = (
        "--no-disable-hybrid-kv-cache-manager",
        "--enable-prompt-embeds",
        "--num-gpu-blocks-override",
        "64",
    )
    with PDStack(model, tmp_path_factory.mktemp("run")) as stack:
        prefill, decode = stack.start_engines(
            EngineSpec("prefill", Layout(1, 2), KVTransfer(role="kv_producer"), args),
            EngineSpec("decode", kv_transfer=KVTransfer(role="kv_consumer"), extra_args=args),
        )
        router = stack.start_router([prefill], [decode])
        pair = Pair(model.name, prefill, decode, router)
        yield Hybrid(pair, per_token * BLOCK_TOKENS, model)


@pytest.mark.parametrize(
    "tokens",
    [
        pytest.param(BLOCK_TOKENS - 28, id="within-a-block"),
        pytest.param(WINDOW_TOKENS, id="a-window"),
        # The last token's window begins with a block.
        pytest.param(WINDOW_TOKENS + BLOCK_TOKENS - 1, id="a-window-at-a-block"),
        pytest.param(WINDOW_TOKENS + BLOCK_TOKENS, id="a-window-past-a-block"),
        pytest.param(2 * WINDOW_TOKENS + BLOCK_TOKENS + 61, id="beyond-two-windows"),
        pytest.param(4 * WINDOW_TOKENS + BLOCK_TOKENS - 1, id="in-several-steps"),
    ],
)
def test_an_answer_equals_one_engines(hybrid: Hybrid, tokens: int) -> None:
    """Twice the pair answers as the decode engine does by itself."""
    pair, text = hybrid.pair, text_of(f"{tokens} hybrid", tokens)
    right = ask_unaided(pair.decode, pair.model, text)
    assert [pair.ask(text), pair.ask(text)] == [right, right]


def test_only_windows_are_read(hybrid: Hybrid) -> None:
    """Of a long prompt, less moves than the blocks of all its layers."""
    pair, blocks = hybrid.pair, 9
    before = pair.decode.nixl_counters()
    pair.ask(text_of("only windows", blocks * BLOCK_TOKENS))
    moved = pair.read_since(before, READS)
    assert moved.transfers == READS
    # Half of the layers have windows, which lie in three blocks or two.
    assert (blocks + 2) / 2 * hybrid.block_bytes <= moved.bytes_moved
    assert moved.bytes_moved <= (blocks + 3) / 2 * hybrid.block_bytes


@pytest.mark.parametrize("tokens", [5, BLOCK_TOKENS, 200, 300])
def test_prompts_given_as_embeddings_are_read(hybrid: Hybrid, tokens: int) -> None:
    """All of them but the last token, which is all that the decode engine computes."""
    pair, rows = hybrid.pair, embeddings(hybrid.model, tokens)
    right = ask_with_embeddings(pair.decode, pair.model, rows, cache_salt="unaided")
    before, computed = pair.decode.nixl_counters(), prompt_tokens_computed(pair)
    assert ask_with_embeddings(pair.router, pair.model, rows) == right
    # These prompts have no block that is out of all windows.
    blocks = -(-(tokens - 1) // BLOCK_TOKENS)
    assert pair.read_since(before, READS) == NixlCounters(
        bytes_moved=blocks * hybrid.block_bytes, transfers=READS
    )
    wait_until(
        lambda: prompt_tokens_computed(pair) == computed + 1,
        "the report of one prompt token that was computed",
        REPORT_LIMIT_S,
    )


def prompt_tokens_computed(pair: Pair) -> float:
    """How many tokens of prompts the decode engine has computed by itself."""
    return metric(pair.decode, "vllm:prompt_tokens_by_source_total", source="local_compute")


def test_all_blocks_come_back(hybrid: Hybrid) -> None:
    """Once its requests were read, no block of the prefill engine is in use, and none expired."""
    hybrid.pair.assert_nothing_is_left()
