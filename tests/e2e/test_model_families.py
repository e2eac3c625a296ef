# SPDX-License-Identifier: Apache-2.0
"""Models whose layers differ, end to end: one engine of each layout serves all pairs of a family.

Which families run on a CPU, and which are compared byte by byte instead, stands in docs/models.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from tests.bases import requires_base
from tests.e2e.layouts import ONE, RANKS, STAGES, Case, Engines, running
from tests.e2e.pairs import text_of
from tools.pdstack.engine import ServedModel
from tools.pdstack.tiny_checkpoints import (
    write_tiny_mimo2,
    write_tiny_nemotron_nas,
    write_tiny_step3p5,
)
from tools.pdstack.tiny_models import write_tiny_falcon_h1, write_tiny_gemma4

pytestmark = pytest.mark.e2e

WINDOW_TOKENS = 256
FAMILIES: dict[str, Callable[..., ServedModel]] = {
    # Other heads and head sizes in layers with a window.
    "gemma4": partial(write_tiny_gemma4, sliding_window=WINDOW_TOKENS),
    # Other heads there, of the same size, and sinks.
    "mimo2": partial(write_tiny_mimo2, sliding_window=WINDOW_TOKENS),
    "step3p5": partial(write_tiny_step3p5, sliding_window=WINDOW_TOKENS),
    # Each layer its own, and some without attention.
    "nemotron": write_tiny_nemotron_nas,
    # State beside the KV cache of every layer.
    "falcon h1": write_tiny_falcon_h1,
}
CASES = [Case(RANKS, ONE, 2), Case(ONE, RANKS, 2), Case(STAGES, ONE, 2), Case(STAGES, RANKS, 4)]


@pytest.fixture(scope="module", params=FAMILIES.values(), ids=FAMILIES.keys())
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    """Start an engine of each layout for a family."""
    model = request.param(tmp_path_factory.mktemp("tiny") / "model")
    run_dir = tmp_path_factory.mktemp("run")
    with running(model, run_dir, CASES, also=[ONE]) as started:
        yield started


@requires_base("0.32.0", "0.33.0", reason="0.22.1 does not know the models")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_answer_equals_one_engines(engines: Engines, case: Case) -> None:
    """Twice a pair answers as one engine does, within a window and beyond it."""
    with engines.pair(case) as pair:
        for tokens in (WINDOW_TOKENS // 2, 3 * WINDOW_TOKENS + 61):
            text = text_of(f"{tokens} of {case}", tokens)
            right = engines.right_answer(text)
            assert [pair.ask(text), pair.ask(text)] == [right, right]
