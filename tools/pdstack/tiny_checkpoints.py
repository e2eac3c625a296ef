# SPDX-License-Identifier: Apache-2.0
"""Model directories of random weights for architectures that transformers has no whole class for.

They are written tensor by tensor, under the names and with the configuration that their published
checkpoints have. Weights are drawn as in `tiny_models`, and the tokenizer is the one from there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .engine import ServedModel
from .tiny_models import (
    common_sizes,
    draw,
    silence_what_is_no_character,
    write_tiny_llama,
    write_tokenizer,
)

Shapes = dict[str, tuple[int, ...]]

_AS_LLAMA: Mapping[str, Any] = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0}
"""What most of these models take from Llama, by the same names."""

_NEMOTRON_CONFIGURATION = '''\
"""What the configuration of a Nemotron-NAS checkpoint is read with: blocks by attribute."""

from transformers import LlamaConfig


class Block(dict):
    def __getattr__(self, name):
        try:
            value = self[name]
        except KeyError:
            raise AttributeError(name) from None
        return Block(value) if isinstance(value, dict) else value


class DeciLMConfig(LlamaConfig):
    model_type = "nemotron-nas"

    def __init__(self, block_configs=(), **kwargs):
        self.block_configs = [Block(each) for each in block_configs]
        super().__init__(**kwargs)
'''


def write_tiny_mimo2(directory: Path, *, sliding_window: int = 256, seed: int = 0) -> ServedModel:
    """Write a MiMo-V2 without experts, whose layers with a window have other KV heads, and sinks.

    Every other layer attends to all tokens. Values are as large as keys, as they are not in the
    published one: only so does vLLM's attention for CPU serve it.

    Args:
        directory: Where to; made if it is not there.
        sliding_window: In tokens.
        seed: Other weights for another number.
    """
    num_layers, num_window_kv_heads = 6, 4
    sizes = common_sizes(num_layers)
    num_heads, head_size = sizes["num_attention_heads"], sizes["head_dim"]
    config = sizes | {
        "architectures": ["MiMoV2FlashForCausalLM"],
        "model_type": "mimo_v2_flash",
        "v_head_dim": head_size,
        "swa_num_attention_heads": num_heads,
        "swa_num_key_value_heads": num_window_kv_heads,
        "swa_head_dim": head_size,
        "swa_v_head_dim": head_size,
        "hybrid_layer_pattern": [layer % 2 ^ 1 for layer in range(num_layers)],
        "moe_layer_freq": [0] * num_layers,
        "n_routed_experts": 2,
        "sliding_window": sliding_window,
        "sliding_window_size": sliding_window,
        "add_swa_attention_sink_bias": True,
        "layernorm_epsilon": 1e-5,
        "rope_theta": 10000.0,
        "swa_rope_theta": 10000.0,
        "hidden_act": "silu",
    }
    shapes = _ends(config)
    for layer, has_window in enumerate(config["hybrid_layer_pattern"]):
        prefix = f"model.layers.{layer}"
        shapes |= _attention(prefix, config, num_window_kv_heads if has_window else None)
        shapes |= _mlp(prefix, config)
        if has_window:
            shapes[f"{prefix}.self_attn.attention_sink_bias"] = (num_heads,)
    return _write(directory, config, shapes, seed)


def write_tiny_step3p5(directory: Path, *, sliding_window: int = 256, seed: int = 0) -> ServedModel:
    """Write a Step-3.5, whose layers with a window have other heads: since 0.33 the same ones.

    Every other layer attends to all tokens. The last layer of each half has experts, as vLLM wants
    some in every stage. They are chosen by softmax, which the published one's are not: vLLM's
    router for CPU wants that.

    Args:
        directory: Where to; made if it is not there.
        sliding_window: In tokens.
        seed: Other weights for another number.
    """
    num_layers, num_window_kv_heads = 6, 4
    sizes = common_sizes(num_layers)
    num_heads, head_size = sizes["num_attention_heads"], sizes["head_dim"]
    num_experts, kinds = 4, ("sliding_attention", "full_attention")
    with_experts = (num_layers // 2 - 1, num_layers - 1)
    config = sizes | {
        "architectures": ["Step3p5ForCausalLM"],
        "model_type": "step3p5",
        "num_attention_groups": sizes["num_key_value_heads"],
        "attention_other_setting": {
            "attention_type": kinds[0],
            "num_attention_heads": num_heads,
            "num_attention_groups": num_window_kv_heads,
            "head_dim": head_size,
        },
        "layer_types": [kinds[layer % 2] for layer in range(num_layers)],
        "sliding_window": sliding_window,
        "use_head_wise_attn_gate": True,
        "rope_theta": 10000.0,
        "use_moe": True,
        "moe_layers_enum": ",".join(map(str, with_experts)),
        "moe_num_experts": num_experts,
        "moe_top_k": 2,
        "moe_intermediate_size": sizes["intermediate_size"],
        "share_expert_dim": sizes["intermediate_size"],
        "moe_router_activation": "softmax",
        # vLLM's own defaults, until 0.33 left them to transformers, which has others.
        "norm_expert_weight": True,
        "use_moe_router_bias": True,
        "need_fp32_gate": True,
        "pad_token_id": sizes["eos_token_id"],
        "max_seq_len": sizes["max_position_embeddings"],
    }
    shapes, hidden = _ends(config), config["hidden_size"]
    for layer, kind in enumerate(config["layer_types"]):
        prefix = f"model.layers.{layer}"
        shapes |= _attention(prefix, config, num_window_kv_heads if kind == kinds[0] else None)
        shapes[f"{prefix}.self_attn.g_proj.weight"] = (num_heads, hidden)
        shapes |= {f"{prefix}.self_attn.{name}_norm.weight": (head_size,) for name in "qk"}
        if layer not in with_experts:
            shapes |= _mlp(prefix, config)
            continue
        inner = config["moe_intermediate_size"]
        shapes |= {
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.moe.gate.weight": (num_experts, hidden),
            f"{prefix}.moe.router_bias": (num_experts,),
            f"{prefix}.moe.gate_proj.weight": (num_experts, inner, hidden),
            f"{prefix}.moe.up_proj.weight": (num_experts, inner, hidden),
            f"{prefix}.moe.down_proj.weight": (num_experts, hidden, inner),
        }
        shapes |= _mlp(prefix, config, "share_expert")
    return _write(directory, config, shapes, seed)


def write_tiny_nemotron_nas(
    directory: Path, *, kv_heads: Sequence[int] = (4, 0, 2, 1, 0, 4), seed: int = 0
) -> ServedModel:
    """Write a Nemotron-NAS, each layer of which has KV heads of its own number.

    vLLM reads its configuration with the code that lies beside it, as with the published ones.

    Args:
        directory: Where to; made if it is not there.
        kv_heads: KV heads of each layer; 0 where it has no attention, as not the first.
        seed: Other weights for another number.
    """
    num_heads = 4
    sizes = common_sizes(len(kv_heads), num_heads, num_heads)
    config = sizes | {
        "architectures": ["DeciLMForCausalLM"],
        "model_type": "nemotron-nas",
        "auto_map": {"AutoConfig": "configuration_decilm.DeciLMConfig"},
        **_AS_LLAMA,
        "block_configs": [
            {
                "attention": {
                    "no_op": not count,
                    "n_heads_in_group": num_heads // count if count else None,
                },
                "ffn": {"no_op": False, "intermediate_size": sizes["intermediate_size"]},
            }
            for count in kv_heads
        ],
    }
    shapes = _ends(config)
    for layer, count in enumerate(kv_heads):
        prefix = f"model.layers.{layer}"
        if count:
            shapes |= _attention(prefix, config, count)
        shapes |= _mlp(prefix, config)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "configuration_decilm.py").write_text(_NEMOTRON_CONFIGURATION)
    served = _write(directory, config, shapes, seed)
    return ServedModel(served.directory, served.name, ("--trust-remote-code",))


def write_tiny_mimo(directory: Path, *, num_layers: int = 4, seed: int = 0) -> ServedModel:
    """Write a MiMo, which has a layer that predicts one token more (MTP).

    Args:
        directory: Where to; made if it is not there.
        seed: Other weights for another number.
    """
    config = common_sizes(num_layers) | {
        "architectures": ["MiMoForCausalLM"],
        # What its own configuration is derived from, and all that differs is the next line.
        "model_type": "qwen2",
        "num_nextn_predict_layers": 1,
        **_AS_LLAMA,
    }
    hidden, head_size = config["hidden_size"], config["head_dim"]
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    shapes = _ends(config)
    for prefix in (*(f"model.layers.{n}" for n in range(num_layers)), "model.mtp_layers.0"):
        shapes |= _attention(prefix, config) | _mlp(prefix, config)
        for name, count in (("q", num_heads), ("k", num_kv_heads), ("v", num_kv_heads)):
            shapes[f"{prefix}.self_attn.{name}_proj.bias"] = (count * head_size,)
    for name in ("token", "hidden", "final"):
        shapes[f"model.mtp_layers.0.{name}_layernorm.weight"] = (hidden,)
    shapes["model.mtp_layers.0.input_proj.weight"] = (hidden, 2 * hidden)
    return _write(directory, config, shapes, seed)


def write_tiny_llama_with_eagle(directory: Path, *, seed: int = 0) -> ServedModel:
    """Write a Llama, and below it, in `eagle`, an EAGLE head: a layer that drafts for it.

    Args:
        directory: Where to; made if it is not there.
        seed: Other weights for another number.
    """
    served = write_tiny_llama(directory, seed=seed)
    # Twice as many KV heads as the Llama's.
    config = common_sizes(1, num_kv_heads=4) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **_AS_LLAMA,
    }
    hidden, prefix = config["hidden_size"], "layers.0"
    shapes = _attention(prefix, config)
    # The first layer of a head takes its input as it is.
    del shapes[f"{prefix}.input_layernorm.weight"]
    shapes |= _mlp(prefix, config) | {"fc.weight": (hidden, 2 * hidden)}
    write_files(directory / "eagle", config, draw_all(shapes, seed + 1))
    return served


def _ends(config: Mapping[str, Any]) -> Shapes:
    """What comes before the layers, and after them."""
    vocabulary, hidden = config["vocab_size"], config["hidden_size"]
    return {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocabulary, hidden),
    }


def _attention(prefix: str, config: Mapping[str, Any], num_kv_heads: int | None = None) -> Shapes:
    """A layer's attention, with as many KV heads as most layers by default; and the norm before."""
    hidden, head_size = config["hidden_size"], config["head_dim"]
    queries = config["num_attention_heads"] * head_size
    keys = (num_kv_heads or config["num_key_value_heads"]) * head_size
    return {
        f"{prefix}.input_layernorm.weight": (hidden,),
        f"{prefix}.self_attn.q_proj.weight": (queries, hidden),
        f"{prefix}.self_attn.k_proj.weight": (keys, hidden),
        f"{prefix}.self_attn.v_proj.weight": (keys, hidden),
        f"{prefix}.self_attn.o_proj.weight": (hidden, queries),
    }


def _mlp(prefix: str, config: Mapping[str, Any], name: str = "mlp") -> Shapes:
    """A layer's dense part, and the norm before it."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    return {
        f"{prefix}.post_attention_layernorm.weight": (hidden,),
        f"{prefix}.{name}.gate_proj.weight": (inner, hidden),
        f"{prefix}.{name}.up_proj.weight": (inner, hidden),
        f"{prefix}.{name}.down_proj.weight": (hidden, inner),
    }


def draw_all(shapes: Shapes, seed: int) -> dict[str, Any]:
    """Draw a tensor of each shape, by name."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return {
        name: draw(torch.ones(shape), generator, is_norm=name.endswith("norm.weight"))
        for name, shape in sorted(shapes.items())
    }


def _write(directory: Path, config: Mapping[str, Any], shapes: Shapes, seed: int) -> ServedModel:
    """Draw the weights, and write everything that vLLM looks for."""
    weights = draw_all(shapes, seed)
    silence_what_is_no_character(weights["lm_head.weight"])
    write_files(directory, config, weights)
    write_tokenizer(directory)
    return ServedModel(directory, directory.name)


def write_files(
    directory: Path, config: Mapping[str, Any], weights: Mapping[str, Any], dtype: str = "float32"
) -> None:
    """Write a configuration, and the weights under their names."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**config, "dtype": dtype}, indent=1))
    save_file(dict(weights), directory / "model.safetensors", {"format": "pt"})
