# SPDX-License-Identifier: Apache-2.0
"""Engines of different layouts hand requests to one another, and answer as one engine would."""

from __future__ import annotations

from functools import partial

import pytest

from tests.e2e.layouts import (
    BOTH,
    ONE,
    RANKS,
    STAGES,
    Case,
    Engines,
    assert_read,
    assert_read_and_right,
)
from tests.e2e.pairs import BLOCK_TOKENS, REPORT_LIMIT_S, Pair, metric, text_of
from tests.faults.stage import Stage, spec
from tests.selection import chosen
from tests.tools.pdstack.helpers import wait_until

# A part of a block, exactly one, one token more, and several with a part.
PROMPT_TOKENS = (12, BLOCK_TOKENS, BLOCK_TOKENS + 1, 3 * BLOCK_TOKENS + 16)

CASES = (
    Case(STAGES, ONE, reads=2),
    Case(ONE, STAGES, reads=2),
    Case(STAGES, RANKS, reads=4, is_seeded=True, is_packed=True),
    Case(ONE, RANKS, reads=2, is_packed=True),
    Case(RANKS, ONE, reads=2),
    # An engine of four workers more, for no kind of read that the others have not.
    pytest.param(Case(BOTH, ONE, reads=4), marks=pytest.mark.nightly),
    # Layer 2 is at the first stage there, and at the second here.
    pytest.param(Case(STAGES, BOTH, reads=6, is_seeded=True), marks=pytest.mark.nightly),
)

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.parametrize("case", CASES, ids=str, scope="module"),
]


@pytest.fixture(scope="module")
def engines(request: pytest.FixtureRequest, stage: Stage) -> Engines:
    """One of each layout; one of one rank says what is right."""
    by_layout = {STAGES: stage.prefill, ONE: stage.decode, RANKS: stage.recomputing}
    if any(BOTH in case.sides for case in chosen(request, "case")):
        (by_layout[BOTH],) = stage.stack.start_engines(spec("both", layout=BOTH))
    return Engines.of(stage.stack, by_layout)


@pytest.mark.parametrize("tokens", PROMPT_TOKENS)
def test_an_answer_equals_one_engines(
    engines: Engines, case: Case, pair: Pair, tokens: int
) -> None:
    """The first answer is right with all blocks read, the second with those that were not kept."""
    text = text_of(f"{tokens} {case}", tokens)
    right = assert_read_and_right(engines, case, pair, text, tokens)

    before = pair.decode.nixl_counters()
    hits = metric(pair.decode, "vllm:prefix_cache_hits_total")
    assert pair.ask(text) == right
    assert_read(case, pair.read_since(before, case.reads), engines.block_bytes)
    # The last token is computed again in any case, and with it comes its block.
    kept = hits + (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    wait_until(
        lambda: metric(pair.decode, "vllm:prefix_cache_hits_total") == kept,
        f"{kept} tokens found in the prefix cache",
        REPORT_LIMIT_S,
    )


def test_requests_at_once_do_not_mix(engines: Engines, case: Case, pair: Pair) -> None:
    """Six requests that begin differently and go on alike get six answers, each the right one."""
    texts = [text_of(f"{number} {case}", 60 * number) for number in range(1, 7)]
    answers = pair.ask_at_once(texts)
    assert answers == [engines.right_answer(text) for text in texts]
    assert len(set(answers)) == len(texts)


def test_ranks_read_packed(engines: Engines, case: Case, pair: Pair) -> None:
    """Where the decode engine is told to, the prefill engine packs what it reads."""
    if case.decode != RANKS:
        pytest.skip("reads as it chooses")
    packed = partial(metric, pair.decode, "vllm:nixl_read_bytes_total", strategy="packed")
    before = packed()
    texts = iter(text_of(f"packed {number} {case}", 60) for number in range(20))
    # What it has not heard in time is read direct.
    wait_until(lambda: pair.ask(next(texts)) and packed() > before, "a packed read")


def test_all_blocks_come_back(pair: Pair) -> None:
    """Once its requests were read, no block of the prefill engine is in use, and none expired."""
    pair.assert_nothing_is_left()
