# SPDX-License-Identifier: Apache-2.0
"""Engines of vLLM as released, with the plugin installed, answer as one engine would."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.layouts import (
    ONE,
    RANKS,
    STAGES,
    Case,
    Engines,
    Options,
    assert_read_and_right,
    running,
)
from tests.e2e.pairs import BLOCK_TOKENS, Pair, text_of
from tests.plugin.stock import install, lay_stock
from tests.selection import chosen
from tools.pdstack.engine import Device
from tools.pdstack.tiny_models import write_tiny_llama

RELEASE = "0.32.0"
PROMPT_TOKENS = (12, 2 * BLOCK_TOKENS + 16)
CASES = (
    Case(STAGES, ONE, reads=2),
    # What the fork's pairs decide for both: they read with the same modules.
    pytest.param(Case(RANKS, ONE, reads=2), marks=pytest.mark.nightly),
    pytest.param(Case(ONE, RANKS, reads=2), marks=pytest.mark.nightly),
    pytest.param(Case(STAGES, RANKS, reads=4), marks=pytest.mark.nightly),
)
# Stages need a first run, which eager execution leaves out: compiled, but by nothing that takes
# minutes.
COMPILED = ("--no-enforce-eager", "--compilation-config", json.dumps({"backend": "eager"}))

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.parametrize("case", CASES, ids=str, scope="module"),
]


@pytest.fixture(scope="module")
def stock_site(plugin_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site directory with vLLM as released, for CPU, and the plugin."""
    site = tmp_path_factory.mktemp("stock")
    lay_stock(RELEASE, "cpu", site, compile_all=True)
    install(plugin_wheel, site, compile_all=True)
    return site


@pytest.fixture(scope="module")
def engines(
    request: pytest.FixtureRequest, stock_site: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    """Start one of each layout, which find that vLLM before the fork."""
    model = write_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama")
    cases, run = chosen(request, "case"), tmp_path_factory.mktemp("run")
    # Nothing of the launcher's is found there: their processes are spawned, as vLLM would.
    env = {"PYTHONPATH": str(stock_site), "VLLM_LOGGING_LEVEL": "INFO"}
    options = {layout: Options(env=env) for layout in (ONE, RANKS)}
    options[STAGES] = Options(COMPILED, {**env, "TORCHDYNAMO_DISABLE": "0"})
    with running(model, run, cases, also=[ONE], options=options, device=Device.CPU) as engines:
        yield engines


@pytest.fixture(scope="module")
def pair(engines: Engines, case: Case) -> Iterator[Pair]:
    """The two engines of a case, behind a router."""
    with engines.pair(case) as pair:
        yield pair


@pytest.mark.parametrize("tokens", PROMPT_TOKENS)
def test_an_answer_equals_one_engines(
    engines: Engines, case: Case, pair: Pair, tokens: int
) -> None:
    """All blocks of the prompt are read, and the answer is that of one engine of one rank."""
    assert_read_and_right(engines, case, pair, text_of(f"{tokens} {case}", tokens), tokens)


def test_the_log_tells_what_was_found(pair: Pair) -> None:
    """Both engines say which vLLM it is, that it was checked, and nothing of the fork."""
    for engine in (pair.prefill, pair.decode):
        log = engine.child.log_path.read_text(encoding="utf-8")
        assert log.count(f"found vLLM {RELEASE} of vllm, which it is checked with") == 1
        assert "reshard.1" not in log


def test_limits_are_told(pair: Pair) -> None:
    """What costs cores without the fork's patches is said by engines of several workers."""
    for engine in (pair.prefill, pair.decode):
        told = "rest on CPU" in engine.child.log_path.read_text(encoding="utf-8")
        assert told == (engine.spec.layout.world_size > 1)
