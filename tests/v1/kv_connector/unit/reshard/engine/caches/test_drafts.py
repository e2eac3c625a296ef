# SPDX-License-Identifier: Apache-2.0
"""Which layers are a draft's, and what becomes of those that are not there."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from tests.v1.kv_connector.unit.reshard.engine.configs import config, speculative
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.caches.drafts import (
    draft_identities,
    refuse_impossible_drafts,
    without_missing_drafts,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import (
    LocalLayoutError,
    RemoteLayoutError,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import (
    Holding,
    MeshRank,
    Shard,
    UnitInterval,
)

ONE = Holding(UnitInterval(0, 1), 1)


@pytest.mark.parametrize(
    ("name", "is_draft"),
    [
        ("model.layers.3.self_attn.attn", False),
        ("language_model.model.layers.0.self_attn.attn", False),
        ("model.layers.4.self_attn.attn", True),
        ("draft_model.model.layers.0.self_attn.attn", True),
        ("model.eagle_layers.0.self_attn.attn", True),
        ("mtp.layers.0.self_attn.attn", True),
        ("model.mtp_block.self_attn.attn", True),
    ],
)
def test_drafts_are_told_by_their_names(name, is_draft):
    """They are numbered after the model's 4 layers, or say what they are."""
    found = draft_identities(config(speculative=speculative()), [name])
    assert list(found) == ([name] if is_draft else [])
    assert all("@draft-" in identity for identity in found.values())


@pytest.mark.parametrize(
    ("own", "number"),
    [
        # EAGLE: from how many layers the last stage has.
        ((0, 8), 8),
        ((5, 8), 3),
        ((6, 8), 2),
        # MTP: behind the model's own.
        ((6, 8), 8),
    ],
)
def test_drafts_are_the_same_whatever_they_are_numbered_from(own, number):
    """On a last stage, their numbers may be those of layers that another stage has."""
    names = [f"model.layers.{number + index}.attn" for index in range(2)]
    stage = config(speculative=speculative(), layers=8, stage=own)
    found = draft_identities(stage, ["model.layers.7.attn", *names])
    whole = config(speculative=speculative(), layers=4)
    assert list(found) == names
    assert list(found.values()) == list(
        draft_identities(whole, ["model.layers.4.attn", "model.layers.5.attn"]).values()
    )
    assert not {*found.values()} & {f"model.layers.{index}.attn" for index in range(8)}


def test_same_drafts_have_the_same_names_everywhere():
    """Wherever the draft lies, and however many tokens each engine drafts."""

    def identities(**changes):
        return draft_identities(config(speculative=speculative(**changes)), ["model.layers.4.attn"])

    assert identities() == identities(model="there/draft", tokens=5)
    assert identities() != identities(hidden_size=128)
    assert identities() != identities(method="draft_model")


@pytest.mark.parametrize("method", [None, "ngram"])
def test_drafts_without_layers_have_none(method):
    """N-grams are looked up in the prompt."""
    speculates = None if method is None else speculative(method=method)
    assert draft_identities(config(speculative=speculates), ["model.layers.4.attn"]) == {}


def shards(*names: str) -> tuple[Shard, ...]:
    """An engine of one rank."""
    return (Shard(MeshRank(0, 0), dict.fromkeys(names, ONE)),)


def test_only_drafts_may_be_missing():
    """A layer of the model that is not there is left for the plan to refuse."""
    src, dst = shards("a"), shards("a", "b", "c@draft-1")
    needed, missing = without_missing_drafts(src, dst, "compute")
    assert missing == ("c@draft-1",)
    assert needed == shards("a", "b")
    with pytest.raises(RemoteLayoutError, match=r"this engine has \(c\): .*missing_draft_layers"):
        without_missing_drafts(src, dst, "refuse")


@pytest.mark.parametrize("policy", ["refuse", "compute"])
def test_what_is_there_is_needed(policy):
    """Nothing is missing, also where the source has more."""
    dst = shards("a", "c@draft-1")
    assert without_missing_drafts(shards("a", "c@draft-1", "d"), dst, policy) == (dst, ())


@pytest.mark.parametrize(
    ("pp_size", "speculates", "second_runner", "refused"),
    [
        (2, "ngram", False, True),
        (2, "eagle", False, True),
        (2, "ngram", True, False),
        (1, "ngram", False, False),
        (2, None, False, False),
    ],
)
def test_drafts_on_stages_without_a_drafter_are_refused(
    pp_size, speculates, second_runner, refused
):
    """VLLM's first model runner asks all stages for what it makes on the last."""
    vllm_config = SimpleNamespace(
        speculative_config=None if speculates is None else speculative(method=speculates),
        parallel_config=SimpleNamespace(pipeline_parallel_size=pp_size),
        use_v2_model_runner=second_runner,
    )
    message = f"method {speculates} needs one pipeline stage .* instead of 2"
    with pytest.raises(LocalLayoutError, match=message) if refused else nullcontext():
        refuse_impossible_drafts(vllm_config)
