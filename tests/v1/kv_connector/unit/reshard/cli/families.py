# SPDX-License-Identifier: Apache-2.0
"""A small `config.json` of each family that keeps more than heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tools.pdstack.tiny_deepseek4 import DEEPSEEK4

COMMON: Mapping[str, Any] = {
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "hidden_size": 256,
    "intermediate_size": 128,
    "vocab_size": 192,
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
}
MLA: Mapping[str, Any] = {
    **COMMON,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "first_k_dense_replace": 4,
    "n_routed_experts": 2,
    "n_shared_experts": 1,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 64,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "rope_theta": 1e4,
}
_INDEXER = {"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64}
_GEMMA3 = {
    **COMMON,
    "num_hidden_layers": 6,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "sliding_window": 256,
    "query_pre_attn_scalar": 128,
}
DEEPSEEK_V4 = {
    **COMMON,
    **DEEPSEEK4,
    "num_hidden_layers": 6,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "compress_ratios": [0, 4, 128, 4, 0, 128],
}
WHOLE: Mapping[str, Mapping[str, Any]] = {
    "DeepSeek V3": {
        **MLA,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
    },
    "DeepSeek V3.2": {
        **MLA,
        **_INDEXER,
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
    },
    "DeepSeek V4": DEEPSEEK_V4,
    "GLM 5": {
        **MLA,
        **_INDEXER,
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        # The third layer takes over what the second one has chosen.
        "index_topk_freq": 2,
    },
    "GLM 5, by a pattern": {
        **MLA,
        **_INDEXER,
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "index_topk_pattern": "FSSF",
    },
    "Gemma 3": _GEMMA3,
}
"""Those whose model can be made without a GPU."""

LEFT_TO_UPSTREAM: Mapping[str, Mapping[str, Any]] = {
    "DeepSeek V4.1": {
        "model_type": "deepseek_v41",
        "text_config": {
            **COMMON,
            "compress_ratios": [0, 2, 2, 1],
            "kv_source_layer_ids": [1, 3],
            "index_source_layer_ids": [1, 3],
        },
    },
    "GLM 5.3 Flash": {
        "model_type": "glm5_next",
        "text_config": {
            **MLA,
            "model_type": "glm5_next_text",
            "qk_rope_head_dim": 0,
            "index_topk": 2048,
            "index_kpool": 16,
            "layer_types": ["linear_attention", "indexed_attention"] * 2,
        },
    },
    "Qwen4": {
        "model_type": "qwen4_exp",
        "text_config": {
            **COMMON,
            "model_type": "qwen4_exp_text",
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "indexer_n_heads": 4,
            "ple_layer_ids": [1],
        },
    },
    "Step 5": {
        **COMMON,
        "model_type": "step5",
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
        "sliding_window": 512,
        "sparse_config": {"topk": 512},
    },
}
"""Layers that this connector does not serve: 1 and 3, or 1 alone for DeepSeek V4.1."""
