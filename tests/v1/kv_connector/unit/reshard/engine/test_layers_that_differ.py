# SPDX-License-Identifier: Apache-2.0
"""Models whose layers differ: whole workers over real NIXL, byte for byte.

Each family is as its own models are: other heads and sizes in windows, heads of each layer's own,
layers without attention, caches that are shared, an indexer beside MLA, drafts of another kind.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from vllm.model_executor.layers.attention.attention import validate_kv_sharing_target

from tests.bases import requires_base
from tests.v1.kv_connector.unit.reshard.engine.models import (
    NUM_TOKENS,
    Kind,
    Model,
    made_engines,
    transfer,
)
from tests.v1.kv_connector.unit.reshard.engine.workers import (
    OFFER,
    Progress,
    every_strategy,
    kinds_in_layouts,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.description import (
    decode_worker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import Receive

WINDOW = Kind(heads=4, size=8, window=True, block_tokens=16)
GLOBAL = Kind(heads=2, size=16, block_tokens=16)
LATENT, INDEX = Kind(1, 12, mla=True), Kind(1, 20, mla=True, dtype=torch.uint8, suffix="indexer")
FP8_LATENT = replace(
    LATENT, size=656, dtype=torch.uint8, backend=("flashmla_sparse", "FLASHMLA_SPARSE")
)
FP8_INDEX = replace(INDEX, size=132, backend=("indexer", "DEEPSEEK_V32_INDEXER"))
MODELS = {
    # Gemma 4: other heads and head sizes where attention is global; the last layers share.
    "gemma4": Model(
        (
            *((WINDOW,), (WINDOW,), (GLOBAL,), (WINDOW,), (WINDOW,), (GLOBAL,)),
            (replace(WINDOW, shares=4),),
            (replace(GLOBAL, shares=5),),
        )
    ),
    # Gemma 4 with pages made equal: blocks of other sizes.
    "gemma4 of equal pages": Model(((replace(WINDOW, block_tokens=24),), (GLOBAL,)) * 2),
    # MiMo-V2, Step-3.5: other KV heads in windows, of one size.
    "mimo": Model(((Kind(2),), (WINDOW,), (WINDOW,), (Kind(2),))),
    # Nemotron-NAS: each layer its own, and some without attention.
    "nemotron": Model(((Kind(4),), (), (Kind(2),), (Kind(1),), (), (Kind(4),))),
    # MLA with the cache of an indexer.
    "indexer": Model(((LATENT, INDEX),) * 4),
    # LongCat Flash: two attentions in each layer.
    "longcat": Model(
        (tuple(replace(LATENT, suffix=f"self_attn.{number}.attn") for number in range(2)),) * 2
    ),
    # DeepSeek V3.2 and GLM 5 as they are: rows of 656 bytes and 132, the latter of whole blocks.
    "deepseek 3.2": pytest.param(
        Model(((FP8_LATENT, FP8_INDEX),) * 4),
        marks=requires_base("0.32.0", "0.33.0", reason="its caches are of other shapes"),
    ),
    # GQA drafts under MLA, and MLA with drafts like it.
    "mla with a draft": Model(((LATENT,),) * 4, ((Kind(4),),)),
    "heads with a draft": Model(((Kind(2),),) * 4, ((Kind(4, 16),),)),
}
LAYOUTS = {
    "TP2 to TP1": (dict(tp=2), dict(tp=1)),
    "TP1 to TP2": (dict(tp=1), dict(tp=2)),
    "TP4 to TP2": (dict(tp=4), dict(tp=2)),
    "PP2 to PP1": (dict(pp=2), dict(pp=1)),
    "PP2 to TP2": (dict(pp=2), dict(tp=2)),
    "PP2 x TP2 to TP4": (dict(pp=2, tp=2), dict(tp=4)),
}


@pytest.fixture
def engines(request):
    """Makes engines, which read direct unless something else is asked for, and closes them."""
    yield from made_engines(getattr(request, "param", "direct"))


# Ranks that gather, and ranks and stages that part.
@kinds_in_layouts("model", MODELS, LAYOUTS, ["TP4 to TP2", "TP1 to TP2", "PP2 x TP2 to TP4"])
def test_every_layer_is_read_by_its_own_heads(engines, model, prefill, decode):
    """Every byte that belongs here arrives, and no other changes."""
    drafts = "eagle" if model.draft else ""
    transfer(
        engines("prefill", model, drafts=drafts, **prefill),
        engines("decode", model, drafts=drafts, **decode),
    )


@pytest.mark.parametrize("model", ["gemma4", "nemotron", "indexer"])
@every_strategy
def test_layers_that_differ_are_staged_too(engines, model):
    """However they are read, they are the same."""
    transfer(engines("prefill", MODELS[model], tp=2), engines("decode", MODELS[model]))


def test_layer_that_shares_a_cache_is_not_read_twice(engines):
    """It has none of its own: nobody says that he holds it."""
    engine = engines("engine", MODELS["gemma4"])
    (worker,) = engine.workers.values()
    shard = decode_worker(worker.handshake.body).shard
    assert sorted(int(name.split(".")[2]) for name in shard.holdings) == [0, 1, 2, 3, 4, 5]


def test_layer_and_owner_on_different_stages_are_refused_by_vllm():
    """Its error names both: this connector never sees such an engine."""
    sharing, owner = "model.layers.6.self_attn.attn", "model.layers.4.self_attn.attn"
    with pytest.raises(ValueError, match=f"for {sharing} is not valid: target layer {owner}"):
        validate_kv_sharing_target(sharing, owner, {sharing: object()})


@pytest.mark.parametrize("theirs", ["", "another draft"])
@pytest.mark.parametrize("pp", [1, 2])
def test_missing_drafts_may_be_computed(engines, caplog_vllm, theirs, pp):
    """The model's layers are read, the draft's are not, and the log says so."""
    model = MODELS["mla with a draft"]
    p = engines("prefill", model, drafts=theirs, pp=pp)
    d = engines("decode", model, drafts="eagle", tp=2, missing_draft_layers="compute")
    transfer(p, d, unread=frozenset({"model.layers.4.attn"}))
    assert "Drafts start cold" in caplog_vllm.text


def test_drafts_of_both_are_read_also_where_they_may_be_missing(engines, caplog_vllm):
    """What is there is read."""
    model = MODELS["mla with a draft"]
    p = engines("prefill", model, drafts="eagle")
    transfer(p, engines("decode", model, drafts="eagle", missing_draft_layers="compute"))
    assert "Drafts start cold" not in caplog_vllm.text


@pytest.mark.parametrize(
    ("theirs", "extra", "message"),
    [
        ("", {}, "draft_method is none there and eagle here"),
        ("another draft", {}, "draft_model is model_type llama, hidden_size 13 there"),
        (
            "",
            dict(enforce_handshake_compat=False),
            r"does not have the draft's layers that this engine has "
            r"\(model.layers.draft0.attn\): .*missing_draft_layers",
        ),
    ],
)
def test_missing_drafts_are_refused(engines, caplog_vllm, theirs, extra, message):
    """With what differs, or with the layers, and what to do."""
    model = MODELS["mla with a draft"]
    p = engines("prefill", model, drafts=theirs)
    d = engines("decode", model, drafts="eagle", **extra)
    address = p.serve()
    p.offer("p-a")
    receive = Receive(address, "p-a", d.block_ids(4), p.block_ids(3), NUM_TOKENS, NUM_TOKENS, OFFER)
    d.start(receive={"d-a": receive})
    Progress(p, d).until(d, received="d-a")
    (worker,) = d.workers.values()
    assert set(worker.report.take_failed()) == {"d-a"}
    assert re.search(message, caplog_vllm.text)


def test_engine_that_drafts_is_read_by_one_that_does_not(engines):
    """Layers that nobody needs are left where they are."""
    model = MODELS["heads with a draft"]
    p = engines("prefill", model, drafts="eagle", pp=2)
    transfer(p, engines("decode", model, missing_draft_layers="compute"))
