# SPDX-License-Identifier: Apache-2.0
"""A model directory of random weights for DeepSeek V4, which shares no part with other models.

It is written as those of `tiny_checkpoints` are.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import interpreter
from .engine import ServedModel
from .tiny_checkpoints import Shapes, draw_all, write_files
from .tiny_models import common_sizes, silence_what_is_no_character, write_tokenizer

DEEPSEEK4: Mapping[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "head_dim": 512,
    "hidden_size": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 128,
    "o_groups": 8,
    "o_lora_rank": 64,
    "n_routed_experts": 256,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 6,
    "n_shared_experts": 1,
    "num_hash_layers": 1,
    "norm_topk_prob": True,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 1.5,
    "expert_dtype": "bf16",
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "compress_rope_theta": 160000.0,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4,
        "original_max_position_embeddings": 2048,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}
"""What a tiny DeepSeek V4 says of itself, but for its layers. Sizes of heads, of the index and of
experts are those that vLLM's kernels for CPU know."""

_COMPRESS_RATIOS = (0, 4, 128, 4, 0, 4, 128, 4)
"""Of each layer, how many tokens it compresses into one state; 0 where it has a window only. Each
stage needs a layer of each kind."""


def write_tiny_deepseek4(directory: Path) -> ServedModel:
    """Write a DeepSeek V4 with few and small layers, of all the kinds that it has.

    Args:
        directory: Where to; made if it is not there.
    """
    num_heads, head_size, query_rank = 64, DEEPSEEK4["head_dim"], DEEPSEEK4["q_lora_rank"]
    hidden, groups, output_rank = (
        DEEPSEEK4[size] for size in ("hidden_size", "o_groups", "o_lora_rank")
    )
    num_experts, inner, streams = (
        DEEPSEEK4[size] for size in ("n_routed_experts", "moe_intermediate_size", "hc_mult")
    )
    index_heads, index_size = DEEPSEEK4["index_n_heads"], DEEPSEEK4["index_head_dim"]
    config = {
        **common_sizes(len(_COMPRESS_RATIOS), num_heads, 1, head_size),
        **DEEPSEEK4,
        "compress_ratios": list(_COMPRESS_RATIOS),
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
    }
    vocabulary, mixes = config["vocab_size"], (2 + streams) * streams

    def compressor(prefix: str, ratio: int, size: int) -> Shapes:
        # Groups of four tokens overlap with those before them.
        width = 2 * size if ratio == 4 else size
        return {
            f"{prefix}.ape": (ratio, width),
            f"{prefix}.wkv.weight": (width, hidden),
            f"{prefix}.wgate.weight": (width, hidden),
            f"{prefix}.norm.weight": (size,),
        }

    shapes: Shapes = {
        "embed.weight": (vocabulary, hidden),
        "norm.weight": (hidden,),
        "head.weight": (vocabulary, hidden),
        "hc_head_fn": (streams, streams * hidden),
        "hc_head_base": (streams,),
        "hc_head_scale": (1,),
    }
    for layer, ratio in enumerate(_COMPRESS_RATIOS):
        prefix = f"layers.{layer}"
        attention, experts = f"{prefix}.attn", f"{prefix}.ffn"
        for part in ("attn", "ffn"):
            shapes |= {
                f"{prefix}.hc_{part}_fn": (mixes, streams * hidden),
                f"{prefix}.hc_{part}_base": (mixes,),
                f"{prefix}.hc_{part}_scale": (3,),
                f"{prefix}.{part}_norm.weight": (hidden,),
            }
        shapes |= {
            f"{attention}.attn_sink": (num_heads,),
            f"{attention}.wq_a.weight": (query_rank, hidden),
            f"{attention}.q_norm.weight": (query_rank,),
            f"{attention}.wq_b.weight": (num_heads * head_size, query_rank),
            f"{attention}.wkv.weight": (head_size, hidden),
            f"{attention}.kv_norm.weight": (head_size,),
            f"{attention}.wo_a.weight": (groups * output_rank, num_heads * head_size // groups),
            f"{attention}.wo_b.weight": (hidden, groups * output_rank),
        }
        if ratio:
            shapes |= compressor(f"{attention}.compressor", ratio, head_size)
        if ratio == 4:
            shapes |= {
                f"{attention}.indexer.wq_b.weight": (index_heads * index_size, query_rank),
                f"{attention}.indexer.weights_proj.weight": (index_heads, hidden),
            }
            shapes |= compressor(f"{attention}.indexer.compressor", ratio, index_size)
        shapes[f"{experts}.gate.weight"] = (num_experts, hidden)
        if layer >= config["num_hash_layers"]:
            shapes[f"{experts}.gate.bias"] = (num_experts,)
        parts = [f"{experts}.experts.{expert}" for expert in range(num_experts)]
        for part in [*parts, f"{experts}.shared_experts"]:
            shapes |= {
                f"{part}.w1.weight": (inner, hidden),
                f"{part}.w2.weight": (hidden, inner),
                f"{part}.w3.weight": (inner, hidden),
            }
    import torch

    weights = draw_all(shapes, seed=0)
    silence_what_is_no_character(weights["head.weight"])
    for name, weight in weights.items():
        if name.endswith(".weight"):
            weights[name] = weight.bfloat16()
        elif name.endswith(".gate.bias"):
            # So large that it chooses the experts: else two sums that are rounded in another order
            # may choose others, and answers of equal engines soon have nothing in common.
            weights[name] = 1e4 * weight
    generator = torch.Generator().manual_seed(0)
    for layer in range(config["num_hash_layers"]):
        # Which experts a token has, whatever it means: six of them, none twice.
        weights[f"layers.{layer}.ffn.gate.tid2eid"] = torch.stack(
            [torch.randperm(num_experts, generator=generator)[:6] for _ in range(vocabulary)]
        ).int()
    write_files(directory, config, weights, "bfloat16")
    write_tokenizer(directory)
    return ServedModel(
        directory,
        directory.name,
        # A whole prompt is one batch, as kernels for CPU want it.
        ("--dtype", "bfloat16", "--tokenizer-mode", "hf", "--max-num-batched-tokens", "4096"),
        block_tokens=4,
        env=(*interpreter.ENV, ("PYTHONPATH", str(interpreter.MODULE_DIR))),
    )
