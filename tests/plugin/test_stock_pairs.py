# SPDX-License-Identifier: Apache-2.0
"""Engines of vLLM as released, with the plugin installed, answer as one engine would."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.pairs import BLOCK_TOKENS, Pair, ask_unaided, text_of
from tests.plugin.stock import install, lay_stock
from tools.pdstack.engine import Device, EngineSpec
from tools.pdstack.layout import Layout, read_model_shape
from tools.pdstack.metrics import NixlCounters
from tools.pdstack.stack import Engine, PDStack
from tools.pdstack.tiny_models import write_tiny_llama

pytestmark = pytest.mark.e2e

FLOAT32_BYTES = 4
RELEASE = "0.32.0"
ONE, STAGES, RANKS = Layout(1, 1), Layout(1, 2), Layout(2, 1)
PROMPT_TOKENS = (12, 2 * BLOCK_TOKENS + 16)
# Prefill, decode, and the reads that fill the decode engine's blocks.
CASES = ((RANKS, ONE, 2), (ONE, RANKS, 2), (STAGES, RANKS, 4))
# Stages need a first run, which eager execution leaves out: compiled, but by nothing that takes
# minutes.
COMPILED = ("--no-enforce-eager", "--compilation-config", json.dumps({"backend": "eager"}))


@pytest.fixture(scope="module")
def stock_site(plugin_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site directory with vLLM as released, for CPU, and the plugin."""
    site = tmp_path_factory.mktemp("stock")
    lay_stock(RELEASE, "cpu", site)
    install(plugin_wheel, site)
    return site


@pytest.fixture(scope="module")
def stack(stock_site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PDStack]:
    """A stack whose engines find that vLLM before the fork."""
    model = write_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama")
    with PDStack(model, tmp_path_factory.mktemp("run"), device=Device.CPU) as stack:
        yield stack


@pytest.fixture(scope="module")
def engines(stack: PDStack, stock_site: Path) -> dict[Layout, Engine]:
    """One running engine of each layout."""
    specs = [
        EngineSpec(
            str(layout),
            layout,
            env={"PYTHONPATH": str(stock_site), "VLLM_LOGGING_LEVEL": "INFO"},
            extra_args=("--num-gpu-blocks-override", "64", *(COMPILED if layout == STAGES else ())),
            max_model_len=1024,
        )
        for layout in (ONE, STAGES, RANKS)
    ]
    return {each.spec.layout: each for each in stack.start_engines(*specs)}


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def case(request: pytest.FixtureRequest) -> tuple[Layout, Layout, int]:
    """One pair of layouts after the other."""
    found: tuple[Layout, Layout, int] = request.param
    return found


@pytest.fixture(scope="module")
def pair(
    stack: PDStack, engines: dict[Layout, Engine], case: tuple[Layout, Layout, int]
) -> Iterator[Pair]:
    """The two engines of a case, behind a router."""
    prefill, decode = engines[case[0]], engines[case[1]]
    router = stack.start_router([prefill], [decode])
    yield Pair(stack.model.name, prefill, decode, router)
    stack.stop(router)


@pytest.mark.parametrize("tokens", PROMPT_TOKENS)
def test_an_answer_equals_one_engines(
    stack: PDStack,
    engines: dict[Layout, Engine],
    case: tuple[Layout, Layout, int],
    pair: Pair,
    tokens: int,
) -> None:
    """All blocks of the prompt are read, and the answer is that of one engine of one rank."""
    text = text_of(f"{tokens} {pair.prefill.name} {pair.decode.name}", tokens)
    right = ask_unaided(engines[ONE], stack.model.name, text)
    before = pair.decode.nixl_counters()
    assert pair.ask(text) == right
    block_bytes = (
        read_model_shape(stack.model.directory).kv_bytes_per_token(FLOAT32_BYTES) * BLOCK_TOKENS
    )
    assert pair.read_since(before, case[2]) == NixlCounters(
        bytes_moved=-(-tokens // BLOCK_TOKENS) * block_bytes, transfers=case[2]
    )


def test_the_log_tells_what_was_found(engines: dict[Layout, Engine], stock_site: Path) -> None:
    """Every engine says which vLLM it is, that it was checked, and nothing of the fork."""
    for engine in engines.values():
        log = engine.child.log_path.read_text(encoding="utf-8")
        assert log.count(f"found vLLM {RELEASE} of vllm, which it is checked with") == 1
        assert "reshard.1" not in log


def test_limits_are_told(engines: dict[Layout, Engine]) -> None:
    """What costs cores without the fork's patches is said by engines of several workers."""
    told = {
        layout
        for layout, engine in engines.items()
        if "rest on CPU" in engine.child.log_path.read_text(encoding="utf-8")
    }
    assert told == {STAGES, RANKS}
