# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402
"""DeepSeek V3.2, GLM 5 and DeepSeek V4: whole workers over real NIXL, byte for byte.

What layers keep is what the release's own models say, in memory that the release has allocated. Of
indexers `interpreted_indexers` has keys that the release has written, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial

import pytest

from tests.bases import skip_module_unless_base

skip_module_unless_base("0.32.0", "0.33.0", reason="its models are others, and its caches no views")

from tests.v1.kv_connector.unit.reshard.cli.families import WHOLE
from tests.v1.kv_connector.unit.reshard.cli.whole_models import kept_by, one_rank
from tests.v1.kv_connector.unit.reshard.engine.release_engines import ReleaseEngine, transfer
from tests.v1.kv_connector.unit.reshard.engine.workers import pairs_of_layouts

LAYOUTS = {
    "TP2 to TP1": (dict(tp=2), dict(tp=1)),
    "TP1 to TP2": (dict(tp=1), dict(tp=2)),
    "PP2 to PP1": (dict(pp=2), dict(pp=1)),
    "PP2 to TP2": (dict(pp=2), dict(tp=2)),
    "PP1 to PP2": (dict(), dict(pp=2)),
    "PP2 x TP2 to TP4": (dict(pp=2, tp=2), dict(tp=4)),
}
NUM_TOKENS = 600
"""Whose last block of every kind is not full."""


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """What the layers of a model keep, as it says itself."""
    with one_rank(tmp_path_factory.mktemp("rank")):

        @cache
        def of(family: str):
            return kept_by(tmp_path_factory.mktemp("model"), WHOLE[family])

        yield of


@pytest.fixture
def engines(request) -> Iterator:
    """Makes engines, which read direct unless something else is asked for, and closes them."""
    made: list[ReleaseEngine] = []

    def make(engine_id, kept, num_layers, **options) -> ReleaseEngine:
        strategy = {"transfer_strategy": getattr(request, "param", "direct")}
        made.append(ReleaseEngine(engine_id, kept, num_layers, **{**strategy, **options}))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.mark.parametrize("cached_tokens", [0, 256], ids=["all of it", "behind a prefix"])
@pairs_of_layouts(LAYOUTS, {"PP2 to TP2", "TP1 to TP2"})
def test_all_caches_of_deepseek_v4_are_read(engines, kept, prefill, decode, cached_tokens):
    """Windows, states of 4 and 128 tokens, an indexer's, and what is still to be compressed."""
    made = partial(engines, kept=kept("DeepSeek V4"), num_layers=6, layout="BLHNC")
    p, d = made("prefill", **prefill), made("decode", **decode)
    kinds = {spec.tokens_per_state for spec, _ in p.kept.values()}
    assert kinds == {1, 4, 128}
    transfer(p, d, NUM_TOKENS, cached_tokens)


@pytest.mark.parametrize("engines", ["staged", "auto"], indirect=True)
def test_all_caches_of_deepseek_v4_are_staged(engines, kept):
    """However they are read, they are the same."""
    made = partial(engines, kept=kept("DeepSeek V4"), num_layers=6, layout="BLHNC")
    transfer(made("prefill", tp=2), made("decode", pp=2), NUM_TOKENS, 256)


@pytest.mark.parametrize("family", ["DeepSeek V3.2", "GLM 5"])
@pytest.mark.parametrize("has_draft", [False, True], ids=["no draft", "MTP"])
@pairs_of_layouts(LAYOUTS, {"PP2 to TP2", "TP2 to TP1"})
def test_latents_and_indexers_are_read(engines, kept, family, has_draft, prefill, decode):
    """Those of an MTP layer, too, which the last stage has."""
    layers = dict(kept(family))
    if has_draft:
        layers |= {
            name.replace("layers.3.", "layers.4.mtp_block."): layer
            for name, layer in layers.items()
            if "layers.3." in name
        }
        assert sum("mtp_block" in name for name in layers) == 2
    made = partial(engines, kept=layers, num_layers=4, layout="LBHNC")
    transfer(made("prefill", **prefill), made("decode", **decode), NUM_TOKENS, 128)
