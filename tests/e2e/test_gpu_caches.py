# SPDX-License-Identifier: Apache-2.0
"""Engines whose caches are filled as on GPUs, in other orders and blocks at the two ends.

Attention of vLLM's for CPU has one order and equal blocks: it could neither start nor be read so.
`tools/pdstack/modules/gpu_caches` takes its place. The sweep has more pairs.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.layouts import ONE, RANKS, STAGES
from tests.e2e.pairs import REPORT_LIMIT_S, Pair, ask_unaided, post, text_of
from tests.e2e.turns import Turns, prompt_of
from tests.faults.logs import Log
from tests.tools.pdstack.helpers import wait_until
from tools.pdstack.caches import Caches, why_no_caches
from tools.pdstack.engine import EngineSpec, KVTransfer
from tools.pdstack.layout import Layout
from tools.pdstack.stack import Engine, PDStack
from tools.pdstack.tiny_models import write_tiny_llama

WHY_NOT = why_no_caches()
PREFILL, DECODE, OPAQUE = Caches("NHD", 48), Caches("HND", 32), Caches("NHD", 32, "Scrambled")
# A part of a block, some of which no end of one is another's, and blocks that end together.
PROMPT_TOKENS = (20, 101, 3 * 96, 5 * 96 + 1)
TO_AND_FRO = KVTransfer(
    extra_config={
        "kv_lease_duration": 120,
        "bidirectional_kv_xfer": True,
        "kv_recompute_threshold": 1,
    }
)

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]


def spec(
    name: str, layout: Layout, caches: Caches, kv_transfer: KVTransfer | None = None
) -> EngineSpec:
    """An engine with such caches."""
    blocks = ("--num-gpu-blocks-override", str(8192 // caches.block_tokens))
    return EngineSpec(
        name,
        layout,
        kv_transfer or KVTransfer(),
        (*blocks, *caches.args),
        caches.env,
        max_model_len=1024,
        module_dirs=caches.module_dirs,
    )


@pytest.fixture(scope="module")
def turns(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Turns]:
    """Start two ranks with heads behind tokens, and one rank with tokens behind heads."""
    model = write_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama")
    with PDStack(model, tmp_path_factory.mktemp("run")) as stack:
        prefill, decode = stack.start_engines(
            spec("prefill", RANKS, PREFILL, TO_AND_FRO), spec("decode", ONE, DECODE, TO_AND_FRO)
        )
        yield Turns(stack, prefill, decode, 24)


@pytest.mark.parametrize("tokens", PROMPT_TOKENS)
def test_an_answer_equals_one_engines(turns: Turns, tokens: int) -> None:
    """Heads are cut, blocks do not fit, and tokens are in another order: all of it is right."""
    prompt = prompt_of(tokens, tokens)
    right = turns.unaided(prompt)
    before = turns.decode.nixl_counters()
    answer = turns.ask(turns.decode, prompt, kv_transfer_params=turns.prefilled(prompt))
    assert answer.tokens == right
    wait_until(
        lambda: (turns.decode.nixl_counters() - before).transfers >= 2,
        "what was read from both ranks",
        REPORT_LIMIT_S,
    )


def test_turns_go_to_and_fro(turns: Turns) -> None:
    """What an engine of small blocks has answered is read back into larger ones, twice."""
    prompt, last, before = prompt_of(7, 131), None, turns.prefill.nixl_counters()
    for turn in range(3):
        handed = turns.prefilled(prompt, last)
        answer = turns.ask(turns.decode, prompt, kv_transfer_params=handed)
        assert answer.tokens == turns.unaided(prompt)
        prompt, last = [*prompt, *answer.tokens, *prompt_of(8 + turn, 77)], answer.params
    wait_until(
        lambda: (turns.prefill.nixl_counters() - before).transfers >= 4,
        "what both prefill ranks have read back",
        REPORT_LIMIT_S,
    )


def test_nothing_failed(turns: Turns) -> None:
    """Neither on the way there, nor on the way back."""
    turns.assert_nothing_failed()


@pytest.fixture(scope="module")
def opaque(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[PDStack, list[Engine]]]:
    """Start engines of three layouts, blocks of which nobody can look into."""
    model = write_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama")
    with PDStack(model, tmp_path_factory.mktemp("run")) as stack:
        specs = (spec(str(layout), layout, OPAQUE) for layout in (STAGES, ONE, RANKS))
        yield stack, stack.start_engines(*specs)


def test_blocks_that_are_opaque_are_read_whole(opaque: tuple[PDStack, list[Engine]]) -> None:
    """From two stages, as their TP sizes are equal."""
    stack, (stages, one, _) = opaque
    router = stack.start_router([stages], [one])
    pair = Pair(stack.model.name, stages, one, router)
    for tokens in PROMPT_TOKENS:
        text = text_of(f"{tokens} whole", tokens)
        assert pair.ask(text) == ask_unaided(one, pair.model, text)
    pair.assert_nothing_is_left()
    stack.stop(router)


def test_blocks_that_are_opaque_are_not_cut(opaque: tuple[PDStack, list[Engine]]) -> None:
    """Another TP size is refused at the handshake, by the layer's name, and nothing is answered."""
    stack, (stages, _, ranks) = opaque
    router, log = stack.start_router([stages], [ranks]), Log(ranks)
    reply = post(router, stack.model.name, text_of("cut", 100))
    assert reply.status_code == 500
    (line,) = log.complaints()
    assert "layer model.layers.0.self_attn.attn mean something else: specification is" in line
    assert "the same --tensor-parallel-size" in line
    assert ask_unaided(ranks, stack.model.name, text_of("cut", 100))
    stack.stop(router)
