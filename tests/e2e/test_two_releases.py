# SPDX-License-Identifier: Apache-2.0
"""Two engines of two releases: keys and values lie apart at one end, and adjoin at the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.bases import requires_base
from tests.e2e.layouts import FLOAT32_BYTES
from tests.e2e.pairs import BLOCK_TOKENS, Pair, ask_unaided, text_of
from tools.pdstack.engine import EngineSpec
from tools.pdstack.layout import Layout, read_model_shape
from tools.pdstack.metrics import NixlCounters
from tools.pdstack.stack import Engine, PDStack
from tools.pdstack.tiny_models import write_tiny_llama

OLDER = "0.22.1"
SCRIPTS = Path(__file__).parents[2] / f".venv-{OLDER}" / "bin"
READS = 4

# Whole workers over real NIXL read such caches in `make test`.
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.release,
    requires_base("0.32.0", "0.33.0", reason="one engine is of a later base"),
    pytest.mark.skipif(
        not (SCRIPTS / "vllm").exists(), reason=f"make setup BASE={OLDER} makes the other engine"
    ),
]


@dataclass(frozen=True)
class Engines:
    """An engine of either release.

    Attributes:
        block_bytes: size of a block of the whole model.
    """

    stack: PDStack
    older: Engine
    newer: Engine
    block_bytes: int


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Start them: one with stages, the other with ranks."""
    model = write_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama")
    per_token = read_model_shape(model.directory).kv_bytes_per_token(FLOAT32_BYTES)
    args = ("--num-gpu-blocks-override", "64")
    with PDStack(model, tmp_path_factory.mktemp("run")) as stack:
        older, newer = stack.start_engines(
            EngineSpec("older", Layout(1, 2), extra_args=args, max_model_len=1024, scripts=SCRIPTS),
            EngineSpec("newer", Layout(2, 1), extra_args=args, max_model_len=1024),
        )
        yield Engines(stack, older, newer, per_token * BLOCK_TOKENS)


@pytest.fixture(scope="module", params=["from the older", "from the newer"])
def pair(request: pytest.FixtureRequest, engines: Engines) -> Iterator[Pair]:
    """Both, behind a router, in either role."""
    prefill, decode = engines.older, engines.newer
    if request.param == "from the newer":
        prefill, decode = decode, prefill
    router = engines.stack.start_router([prefill], [decode])
    yield Pair(engines.stack.model.name, prefill, decode, router)
    engines.stack.stop(router)


@pytest.mark.parametrize("tokens", [12, BLOCK_TOKENS, BLOCK_TOKENS + 1, 3 * BLOCK_TOKENS + 16])
def test_an_answer_equals_one_engines(engines: Engines, pair: Pair, tokens: int) -> None:
    """Each release's own is the pair's, with all blocks read; and again with those not kept."""
    text = text_of(f"{tokens} {pair.prefill.name}", tokens)
    right = ask_unaided(pair.decode, pair.model, text)
    assert ask_unaided(pair.prefill, pair.model, text) == right
    before = pair.decode.nixl_counters()
    assert pair.ask(text) == right
    blocks = -(-tokens // BLOCK_TOKENS)
    assert pair.read_since(before, READS) == NixlCounters(
        bytes_moved=blocks * engines.block_bytes, transfers=READS
    )
    before = pair.decode.nixl_counters()
    assert pair.ask(text) == right
    assert pair.read_since(before, READS).bytes_moved == engines.block_bytes


def test_requests_at_once_do_not_mix(pair: Pair) -> None:
    """Six requests that begin differently and go on alike get six answers, each the right one."""
    texts = [text_of(f"{number} {pair.prefill.name}", 60 * number) for number in range(1, 7)]
    assert pair.ask_at_once(texts) == [ask_unaided(pair.decode, pair.model, each) for each in texts]


def test_all_blocks_come_back(pair: Pair) -> None:
    """Each release's scheduler hears that its blocks were read."""
    pair.assert_nothing_is_left()
