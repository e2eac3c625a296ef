# SPDX-License-Identifier: Apache-2.0
"""A model that keeps one latent for all heads, which every tensor-parallel rank has as a whole."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.layouts import ONE, RANKS, STAGES, Case, Engines, assert_read_and_right, running
from tests.e2e.pairs import Pair, text_of
from tests.selection import chosen
from tools.pdstack.engine import why_no_mla
from tools.pdstack.metrics import NixlCounters
from tools.pdstack.tiny_models import write_tiny_deepseek2

WHY_NOT = why_no_mla()
BLOCK_TOKENS = 16
# A part of a block, exactly one, one token more, and many with a part.
PROMPT_TOKENS = (5, BLOCK_TOKENS, BLOCK_TOKENS + 1, 25 * BLOCK_TOKENS + 3)

CASES = (
    # Of two ranks that have the same, one is read from.
    Case(RANKS, ONE, reads=1),
    # Each rank reads all of it.
    Case(ONE, RANKS, reads=2),
    # Stages read as those of any other model.
    Case(STAGES, ONE, reads=2),
)

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
    pytest.mark.parametrize("case", CASES, ids=str, scope="module"),
]


@pytest.fixture(scope="module")
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    """Start one of each layout."""
    model = write_tiny_deepseek2(tmp_path_factory.mktemp("tiny") / "deepseek2")
    with running(model, tmp_path_factory.mktemp("run"), chosen(request, "case")) as engines:
        assert engines.block_tokens == BLOCK_TOKENS
        yield engines


@pytest.mark.parametrize("tokens", PROMPT_TOKENS)
def test_latents_are_read_once_for_each_rank_that_decodes(
    engines: Engines, case: Case, pair: Pair, tokens: int
) -> None:
    """All blocks, from one of the ranks that have the same, and no block twice."""
    text = text_of(f"{tokens} {case}", tokens)
    assert_read_and_right(engines, case, pair, text, tokens, copies=case.decode.tp_size)


def test_requests_at_once_are_all_read(engines: Engines, case: Case, pair: Pair) -> None:
    """Six requests of different lengths are answered, with as much read as they have blocks."""
    sizes_tokens = [60 * number for number in range(1, 7)]
    texts = [text_of(f"{size} {case}", size) for size in sizes_tokens]
    right = [engines.right_answer(text) for text in texts]
    before = pair.decode.nixl_counters()
    assert pair.ask_at_once(texts) == right
    assert len(set(right)) == 6
    blocks = sum(-(-size // BLOCK_TOKENS) for size in sizes_tokens)
    assert pair.read_since(before, 6 * case.reads) == NixlCounters(
        bytes_moved=blocks * engines.block_bytes * case.decode.tp_size, transfers=6 * case.reads
    )


def test_all_blocks_come_back(pair: Pair) -> None:
    """Once its requests were read, no block of the prefill engine is in use, and none expired."""
    pair.assert_nothing_is_left()
