# SPDX-License-Identifier: Apache-2.0
"""The configuration of a model without weights, as a directory that vLLM reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .cases import Shape

MAX_TOKENS = 65536
_MLA_ROPE = 64


def write_model(shape: Shape, directory: Path) -> Path:
    """Write a model's configuration; both engines are to be given the same directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(hf_config(shape)), encoding="utf-8")
    return directory


def hf_config(shape: Shape) -> dict[str, Any]:
    """What stands in its `config.json`."""
    num_heads = max(shape.num_heads, shape.prefill.tp_size, shape.decode.tp_size)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": num_heads * 64,
        "intermediate_size": 128,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": shape.num_heads,
        "max_position_embeddings": MAX_TOKENS,
        "vocab_size": 128,
    }
    if not shape.mla:
        return config | {"head_dim": shape.head_size}
    return config | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_key_value_heads": num_heads,
        "kv_lora_rank": shape.head_size - _MLA_ROPE,
        "qk_rope_head_dim": _MLA_ROPE,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "q_lora_rank": None,
    }
