# SPDX-License-Identifier: Apache-2.0
"""As much of the configurations of vLLM as workers and their factors look at."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.caches import ownership
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import MeshRank


def speculative(**changes) -> SimpleNamespace:
    """As much of a `SpeculativeConfig` as the factors are taken from, for EAGLE."""
    values = dict(method="eagle3", hidden_size=64, layers=1, aux_layers=(2, 14), parallel=False)
    values.update(changes)
    return SimpleNamespace(
        method=values["method"],
        parallel_drafting=values["parallel"],
        num_speculative_tokens=values.get("tokens", 3),
        kv_cache_dtype=None,
        use_eagle=lambda: values["method"] in ("eagle", "eagle3", "mtp"),
        uses_draft_model=lambda: values["method"] == "draft_model",
        draft_model_config=SimpleNamespace(
            model=values.get("model", "here/draft"),
            hf_text_config=SimpleNamespace(model_type="llama", hidden_size=values["hidden_size"]),
            hf_config=SimpleNamespace(eagle_aux_hidden_state_layer_ids=values["aux_layers"]),
            get_total_num_hidden_layers=lambda: values["layers"],
        ),
    )


def config(**changes) -> SimpleNamespace:
    """As much of a `VllmConfig` as the factors are taken from."""
    values = dict(
        layers=4, kv_heads=2, head_size=64, mla=False, dtype=torch.bfloat16, model="here/model"
    )
    values.update(
        vocabulary=99, cache_dtype="auto", no_hybrid=False, tp_size=1, pp_size=1, block_size=16
    )
    values.update(speculative=None, lookahead=1, multimodal=None, prefix_caching=True, stage=None)
    values.update(load_format="auto", quantization=None, hf_config=SimpleNamespace())
    values.update(changes)
    return SimpleNamespace(
        load_config=SimpleNamespace(load_format=values["load_format"], download_dir=None),
        model_config=SimpleNamespace(
            revision=None,
            quantization=values["quantization"],
            hf_config=values["hf_config"],
            model=values["model"],
            dtype=values["dtype"],
            use_mla=values["mla"],
            hf_text_config=SimpleNamespace(
                model_type="llama", vocab_size=values["vocabulary"], rope_theta=1e4
            ),
            get_total_num_hidden_layers=lambda: values["layers"],
            get_layers_start_end_indices=lambda parallel: values["stage"] or (0, values["layers"]),
            get_total_num_kv_heads=lambda: values["kv_heads"],
            get_head_size=lambda: values["head_size"],
            multimodal_config=values["multimodal"],
        ),
        cache_config=SimpleNamespace(
            enable_prefix_caching=values["prefix_caching"],
            cache_dtype=values["cache_dtype"],
            block_size=values["block_size"],
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=values["no_hybrid"]),
        speculative_config=values["speculative"],
        num_prefill_lookahead_tokens=values["lookahead"],
        parallel_config=SimpleNamespace(
            tensor_parallel_size=values["tp_size"], pipeline_parallel_size=values["pp_size"]
        ),
    )


def worker_config(
    *, tp: int, extra_config: Mapping[str, Any], drafts: SimpleNamespace | None = None, **model: Any
) -> SimpleNamespace:
    """As much of a `VllmConfig` as a worker is made with.

    Args:
        tp: How many ranks a stage has.
        extra_config: Options of the connector's.
        drafts: Its `SpeculativeConfig`, if it drafts.
        model: Of its `ModelConfig`.
    """
    return SimpleNamespace(
        load_config=SimpleNamespace(load_format="dummy"),
        model_config=SimpleNamespace(multimodal_config=None, **model),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        attention_config=None,
        compilation_config=SimpleNamespace(
            pass_config=SimpleNamespace(), static_forward_context={}
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        speculative_config=drafts,
        num_prefill_lookahead_tokens=1,
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tp,
            data_parallel_rank=0,
            data_parallel_index=0,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            cp_kv_cache_interleave_size=1,
        ),
        kv_transfer_config=KVTransferConfig(
            kv_connector="NixlConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"num_threads": 0, **extra_config},
        ),
    )


def stand_at(patch: pytest.MonkeyPatch, rank: MeshRank, pcp_rank: int = 0) -> None:
    """Have the worker that is made next find itself at a rank of its engine."""
    places = {"pp": rank.pp_rank, "tp": rank.tp_rank, "pcp": pcp_rank}
    for group, number in places.items():
        place = SimpleNamespace(rank_in_group=number)
        patch.setattr(ownership, f"get_{group}_group", lambda place=place: place)
