# SPDX-License-Identifier: Apache-2.0
"""What must be equal at two engines, and what an error says when it is not."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import vllm.config
from transformers import LlamaConfig

from tests.v1.kv_connector.unit.reshard.engine.configs import config, speculative
from tests.v1.kv_connector.unit.reshard.protocol import golden
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine import content as content_module
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.caches import (
    factors as factors_module,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.caches.factors import (
    compared_factors,
    compatibility_factors,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.compat import ITEM_HASHES
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.content import counted_items
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.settings import Settings
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import (
    RemoteIncompatibleError,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.compatibility import (
    _REMEDIES,
    RELEASE_FACTOR,
    check_compatibility,
)

BASE = compatibility_factors(config())


def test_factors_of_a_real_configuration(tmp_path):
    """Everything asked of vLLM's configuration is there under the name that is asked for."""
    LlamaConfig(
        hidden_size=96,
        num_attention_heads=6,
        num_key_value_heads=3,
        num_hidden_layers=5,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(tmp_path)
    model = vllm.config.ModelConfig(
        str(tmp_path), skip_tokenizer_init=True, dtype="float32", max_model_len=64
    )
    real = vllm.config.VllmConfig(model_config=model)
    factors = compatibility_factors(real)
    assert factors.pop("vllm_version")
    architecture = factors.pop("model")
    assert architecture.startswith("model_type llama, hidden_size 96, intermediate_size 11008, ")
    assert "rope_theta" in architecture
    assert factors == {
        "num_hidden_layers": "5",
        "num_kv_heads": "3",
        "head_size": "16",
        "mla": "no",
        "dtype": "float32",
        "kv_cache_dtype": "float32",
        "hybrid_kv_cache_manager": "yes",
        "multimodal_items_named_by": "none",
        "multimodal_items_hashed_as": "none",
        "draft_method": "none",
        "draft_model": "none",
        "draft_layers": "none",
        "draft_aux_layers": "none",
        "draft_kv_cache_dtype": "none",
        "draft_lookahead": "none",
        "parallel_drafting": "none",
    }


@pytest.mark.parametrize(
    "change",
    [dict(model="there/model"), dict(tp_size=4), dict(pp_size=2), dict(block_size=64)],
    ids=lambda change: next(iter(change)),
)
def test_what_may_differ(change):
    """Layouts are what we reshard, and a model may lie anywhere."""
    assert compatibility_factors(config(**change)) == BASE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(layers=5), "num_hidden_layers is 5 there and 4 here.*serve the same model"),
        (dict(kv_heads=8), "num_kv_heads is 8 there and 2 here.*serve the same model"),
        (dict(head_size=128), "head_size is 128 there and 64 here.*serve the same model"),
        (dict(mla=True), "mla is yes there and no here.*VLLM_MLA_DISABLE"),
        (dict(cache_dtype="fp8"), "kv_cache_dtype is fp8 there and bfloat16 here.*--kv-cache-dty"),
        (dict(no_hybrid=True), "hybrid_kv_cache_manager is no there and yes.*--disable-hybrid"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_must_not_differ(change, message):
    """The error has the name, both values and the remedy."""
    remote = compatibility_factors(config(**change))
    with pytest.raises(RemoteIncompatibleError, match=message):
        check_compatibility(BASE, remote)


def test_each_factor_has_its_remedy():
    """None is answered with the advice for names that a build does not know."""
    assert BASE.keys() - {RELEASE_FACTOR} <= _REMEDIES.keys()


DRAFTING = compatibility_factors(config(speculative=speculative()))


@pytest.mark.parametrize(
    ("there", "message"),
    [
        (None, "draft_method is none there and eagle3 here.*give the same --speculative-config"),
        (dict(method="mtp"), "draft_method is mtp there and eagle3 here"),
        (dict(method="ngram"), "draft_method is none there and eagle3 here"),
        (dict(hidden_size=128), "draft_model is .*hidden_size 128 there and .*hidden_size 64 here"),
        (dict(layers=2), "draft_layers is 2 there and 1 here"),
        (dict(aux_layers=None), r"draft_aux_layers is None there and \(2, 14\) here"),
        (dict(parallel=True), "parallel_drafting is yes there and no here"),
    ],
    ids=lambda value: str(value) if not isinstance(value, str) else "",
)
def test_drafts_from_hidden_states_are_made_alike_or_not_at_all(there, message):
    """Their layers' KV cache is read with the model's: who drafts needs a source that does."""
    other = None if there is None else speculative(**there)
    remote = compatibility_factors(config(speculative=other))
    with pytest.raises(RemoteIncompatibleError, match=message):
        check_compatibility(DRAFTING, remote)
    with pytest.raises(RemoteIncompatibleError, match="give the same --speculative-config"):
        check_compatibility(remote, DRAFTING)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (dict(cache_dtype="fp8"), "draft_kv_cache_dtype is fp8 there and bfloat16 here"),
        (dict(lookahead=3), "draft_lookahead is 3 there and 1 here"),
    ],
    ids=["format", "lookahead"],
)
def test_what_drafts_keep_and_how_far_they_read_must_be_equal(monkeypatch, change, name):
    """Modules that read ahead leave the end of a prompt to the decode engine."""
    monkeypatch.setattr(
        factors_module,
        "prefill_lookahead_tokens",
        lambda vllm_config: vllm_config.num_prefill_lookahead_tokens,
    )
    remote = compatibility_factors(config(speculative=speculative(), **change))
    with pytest.raises(RemoteIncompatibleError, match=name):
        check_compatibility(DRAFTING, remote)


@pytest.mark.parametrize("change", [dict(model="there/draft"), dict(tokens=7)])
def test_drafts_may_lie_elsewhere_and_be_of_other_lengths(change):
    """Neither says anything about the KV cache."""
    other = config(speculative=speculative(**change))
    assert compatibility_factors(other) == DRAFTING


def test_a_window_is_what_layers_attend_by():
    """MiMo-V2's is said twice, and releases of transformers differ in what the other name means."""

    def told(**sizes: int) -> str:
        text_config = SimpleNamespace(model_type="mimo_v2_flash", **sizes)
        return factors_module._architecture(text_config)

    as_written = told(sliding_window=256, sliding_window_size=256)
    assert as_written == "model_type mimo_v2_flash, sliding_window 256"
    assert told(sliding_window=257, sliding_window_size=256) == as_written
    assert told(sliding_window=257) == told(sliding_window=257, sliding_window_size=257)
    assert told(sliding_window=257) != as_written


def test_drafts_from_tokens_alone_are_each_engines_own():
    """One engine may draft by n-grams, and the other not."""
    by_ngrams = config(speculative=speculative(method="ngram"))
    assert compatibility_factors(by_ngrams) == BASE


def test_every_difference_is_named_at_once():
    """Nobody should have to restart engines once for each difference."""
    remote = compatibility_factors(config(dtype=torch.float16, kv_heads=8))
    with pytest.raises(RemoteIncompatibleError) as caught:
        check_compatibility(BASE, remote)
    message = str(caught.value)
    for part in (
        "num_kv_heads is 8 there and 2 here",
        "dtype is float16 there and bfloat16 here",
        "kv_cache_dtype is float16 there and bfloat16 here",
        "give the same --dtype, give the same --kv-cache-dtype",
    ):
        assert part in message
    assert "head_size" not in message


def test_automatic_cache_dtype_is_the_model_dtype():
    """To name what is the default is no difference."""
    assert compatibility_factors(config(cache_dtype="bfloat16")) == BASE


@pytest.mark.parametrize("version", ["0.22.1", "0.22.1+reshard.1.cpu", "0.22.1+cu129"])
def test_release_is_said_and_not_compared(monkeypatch, version):
    """Neither another one, nor another build of one, is a difference."""
    ours = compared_factors(compatibility_factors(config()), Settings())
    monkeypatch.setattr(factors_module, "vllm_version", version)
    theirs = compatibility_factors(config())
    assert theirs["vllm_version"] == "0.22.1"
    check_compatibility(ours, theirs)


def test_factors_are_those_of_the_protocols_version():
    """Peers that are not upgraded yet know these, and refuse what has one more or one less."""
    assert BASE.keys() | {"weights"} == golden.FACTORS.keys()


HASHED = SimpleNamespace(mm_processor_cache_gb=4)


def test_multimodal_items_of_releases_that_hash_otherwise_are_told_apart(monkeypatch):
    """One engine would not know the other's; without items nothing is said of them."""
    local = compatibility_factors(config(multimodal=HASHED))
    plain = compatibility_factors(config())
    other = replace(ITEM_HASHES, since="99" if ITEM_HASHES.is_here else "0")
    monkeypatch.setattr(content_module, "ITEM_HASHES", other)
    remote = compatibility_factors(config(multimodal=HASHED))
    with pytest.raises(
        RemoteIncompatibleError, match=r"hashed_as is .* between which that has not"
    ):
        check_compatibility(local, remote)
    assert compatibility_factors(config()) == plain


def test_multimodal_items_are_hashed_with_the_models_path():
    """Engines that serve one multimodal model under two paths would not know each other's items."""
    local = compatibility_factors(config(multimodal=HASHED))
    remote = compatibility_factors(config(multimodal=HASHED, model="there/model"))
    message = "there/model there and here/model here.*same name or path"
    with pytest.raises(RemoteIncompatibleError, match=message):
        check_compatibility(local, remote)


@pytest.mark.parametrize(
    ("cache_gb", "prefix_caching", "counted"),
    [(0, False, True), (0, True, False), (4, False, False)],
)
def test_items_that_are_only_counted_are_recognised(cache_gb, prefix_caching, counted):
    """What is named by a number of the process's own is another item elsewhere."""
    values = SimpleNamespace(mm_processor_cache_gb=cache_gb)
    reason = counted_items(config(multimodal=values, prefix_caching=prefix_caching))
    assert ("count multimodal items" in (reason or "")) is counted
    assert counted_items(config(prefix_caching=False)) is None
