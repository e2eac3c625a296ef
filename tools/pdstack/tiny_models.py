# SPDX-License-Identifier: Apache-2.0
"""Model directories of random weights: any architecture, in a second, for layouts to be tried with.

The weights are large enough for attention to be sharp: an answer depends on words all over the
prompt, and so on every block of the KV cache. They depend on nothing but sizes and seed.

The tokenizer has one token for each character of ASCII text, so that a message of n characters is a
prompt of n + 1 tokens; the first one begins the sequence. A greedy answer is as many characters
long as it may be, because nothing but a character is ever the likeliest.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from .engine import ServedModel

_SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")
_IMAGE = "<image>"
_CHARACTERS = ("\n", *map(chr, range(ord(" "), ord("~") + 1)))
_VOCABULARY = 192
"""Of the model; more than the tokenizer has, so that many TP sizes divide it, padded or not."""
_MAX_POSITIONS = 8192
_CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
# Standard deviation of a weight, times the root of its inputs. With 1, attention is an average over
# the prompt, in which no single token counts.
_GAIN = 2.0
# Of recurrent state, in a token. The larger ones that models begin with would forget a prompt but
# for its last few tokens.
_DECAY = (0.05, 1.0)
_CPU_MLA_BLOCK_TOKENS = 16
# The one block size of its kernel. Blocks cannot be used again by another request. Named, because
# vLLM takes another kernel on CPUs with AMX, and answers are to be the same everywhere.
_CPU_MLA_ARGS = (
    *("--attention-backend", "CPU_MLA"),
    *("--block-size", str(_CPU_MLA_BLOCK_TOKENS)),
    "--no-enable-prefix-caching",
    # vLLM's kernel for positions on CPU takes queries and keys for tensors of their own. MLA's are
    # parts of larger ones: it turns other elements, and others for one token than for many.
    *("--compilation-config", '{"custom_ops": ["-rotary_embedding"]}'),
)


def write_tiny_llama(
    directory: Path,
    *,
    num_layers: int = 4,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_size: int = 32,
    seed: int = 0,
) -> ServedModel:
    """Write a Llama, every layer of which attends to all tokens.

    Args:
        directory: Where to; made if it is not there.
        head_size: One that the attention backend knows; for CPU 32, 64, 80, 96, 112 or 128.
        seed: Other weights for another number.
    """
    import transformers

    config = transformers.LlamaConfig(
        **common_sizes(num_layers, num_heads, num_kv_heads, head_size)
    )
    return _write(directory, transformers.LlamaForCausalLM(config), seed)


def write_tiny_gemma3(
    directory: Path,
    *,
    num_layers: int = 4,
    sliding_window: int = 256,
    full_attention_every: int = 2,
    seed: int = 0,
) -> ServedModel:
    """Write a text-only Gemma 3, which mixes sliding windows with full attention.

    Args:
        directory: Where to; made if it is not there.
        sliding_window: In tokens.
        full_attention_every: One layer in so many attends to all tokens, the others to a window.
        seed: Other weights for another number.
    """
    import transformers

    config = transformers.Gemma3TextConfig(
        **common_sizes(num_layers),
        sliding_window=sliding_window,
        layer_types=[
            "sliding_attention" if (layer + 1) % full_attention_every else "full_attention"
            for layer in range(num_layers)
        ],
        # Queries and keys are normalised: only this makes attention sharp.
        query_pre_attn_scalar=2,
    )
    return _write(directory, transformers.Gemma3ForCausalLM(config), seed)


def write_tiny_gemma4(directory: Path, *, sliding_window: int = 256, seed: int = 0) -> ServedModel:
    """Write a text-only Gemma 4, every other layer of which has a window, and other heads.

    Args:
        directory: Where to; made if it is not there.
        sliding_window: In tokens.
        seed: Other weights for another number.
    """
    import transformers

    num_layers = 6
    config = transformers.Gemma4TextConfig(
        **common_sizes(num_layers, num_kv_heads=4),
        global_head_dim=64,
        # Layers without a window have no values of their own.
        attention_k_eq_v=True,
        num_global_key_value_heads=2,
        num_kv_shared_layers=0,
        hidden_size_per_layer_input=0,
        sliding_window=sliding_window,
        layer_types=[
            "full_attention" if layer % 2 else "sliding_attention" for layer in range(num_layers)
        ],
    )
    return _write(directory, transformers.Gemma4ForCausalLM(config), seed)


def write_tiny_falcon_h1(directory: Path, *, seed: int = 0) -> ServedModel:
    """Write a Falcon-H1, every layer of which has attention and Mamba 2 side by side.

    Args:
        directory: Where to; made if it is not there.
        seed: Other weights for another number.
    """
    import transformers

    config = transformers.FalconH1Config(
        **common_sizes(4),
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_d_ssm=128,
        # TP sizes that do not divide a number of groups need 1.
        mamba_n_groups=1,
        mamba_d_state=32,
        mamba_chunk_size=64,
    )
    written = _write(directory, transformers.FalconH1ForCausalLM(config), seed)
    # For its prefix cache, vLLM 0.32 asks its scan for the states within a prompt, of which the one
    # for CPU has none but the last: it ends with an IndexError.
    return replace(written, engine_args=("--no-enable-prefix-caching",))


def write_tiny_qwen3_next(directory: Path, *, seed: int = 0) -> ServedModel:
    """Write a Qwen3-Next, every other layer of which is a gated delta net.

    Args:
        directory: Where to; made if it is not there.
        seed: Other weights for another number.
    """
    import transformers

    num_layers = 4
    config = transformers.Qwen3NextConfig(
        **common_sizes(num_layers),
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        # Of the two sizes that vLLM's kernels for CPU know, the smaller.
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        layer_types=[
            "full_attention" if layer % 2 else "linear_attention" for layer in range(num_layers)
        ],
        # vLLM wants experts on every stage. All of them are asked, so that rounding chooses none.
        mlp_only_layers=list(range(0, num_layers, 2)),
        num_experts=2,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    )
    model = transformers.Qwen3NextForCausalLM(config)
    for name, weight in model.named_parameters():
        # Queries and keys are normalised: only this makes attention sharp.
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            weight.data.fill_(1.5)
    written = _write(directory, model, seed)
    # vLLM's kernels for CPU know no other format.
    return replace(written, engine_args=("--dtype", "bfloat16"))


def write_tiny_deepseek2(
    directory: Path, *, num_layers: int = 6, num_heads: int = 4, seed: int = 0
) -> ServedModel:
    """Write a DeepSeek-V2 without experts, whose layers keep one latent for all heads (MLA).

    The latent has the sizes that vLLM's attention for CPU knows, 512 and 64 with a position.

    Args:
        directory: Where to; made if it is not there.
        seed: Other weights for another number.
    """
    import transformers

    common = common_sizes(num_layers, num_heads, num_heads)
    # Of the part of a query without a position, and of a value; here that name is another part's.
    head_size = common.pop("head_dim")
    config = transformers.DeepseekV2Config(
        **common,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=head_size,
        v_head_dim=head_size,
        # Every layer is dense; no weights of experts are written, whatever their number.
        first_k_dense_replace=num_layers,
        n_routed_experts=2,
        n_shared_experts=1,
        num_experts_per_tok=1,
        moe_intermediate_size=head_size,
    )
    written = _write(directory, transformers.DeepseekV2ForCausalLM(config), seed)
    return replace(written, engine_args=_CPU_MLA_ARGS, block_tokens=_CPU_MLA_BLOCK_TOKENS)


def write_tiny_llava(directory: Path, *, seed: int = 0) -> ServedModel:
    """Write a LLaVA, which sees an image of any size as 16 tokens.

    Args:
        directory: Where to; made if it is not there.
        seed: Other weights for another number.
    """
    import safetensors.torch
    import torch
    import transformers

    side, patch, hidden_size = 32, 8, 64
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**common_sizes(4)),
        vision_config=transformers.CLIPVisionConfig(
            hidden_size=hidden_size,
            intermediate_size=2 * hidden_size,
            projection_dim=hidden_size,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=side,
            patch_size=patch,
        ),
        image_token_index=len(_SPECIAL_TOKENS) + len(_CHARACTERS),
        image_seq_length=(side // patch) ** 2,
    )
    with torch.random.fork_rng():
        # What has one dimension and is no norm's stays as it is made.
        torch.manual_seed(seed)
        model = transformers.LlavaForConditionalGeneration(config)
    written = _write(directory, model, seed)
    file = directory / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    # As published checkpoints name them, and vLLM reads them; transformers 5 has other names.
    old, new = "vision_tower.", "vision_tower.vision_model."
    safetensors.torch.save_file(
        {name.replace(old, new, 1): weight for name, weight in weights.items()},
        file,
        metadata={"format": "pt"},
    )
    transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessor(
            size={"shortest_edge": side}, crop_size={"height": side, "width": side}
        ),
        tokenizer=write_tokenizer(directory, _IMAGE),
        patch_size=patch,
        vision_feature_select_strategy=config.vision_feature_select_strategy,
        image_token=_IMAGE,
        # That of the whole image, which is left out again.
        num_additional_image_tokens=1,
    ).save_pretrained(directory)
    return written


def common_sizes(
    num_layers: int, num_heads: int = 4, num_kv_heads: int = 2, head_size: int = 32
) -> dict[str, Any]:
    """What all architectures call by the same name."""
    return {
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_size,
        "hidden_size": num_heads * head_size,
        "intermediate_size": 2 * num_heads * head_size,
        "vocab_size": _VOCABULARY,
        "max_position_embeddings": _MAX_POSITIONS,
        "tie_word_embeddings": False,
        "bos_token_id": _SPECIAL_TOKENS.index("<s>"),
        "eos_token_id": _SPECIAL_TOKENS.index("</s>"),
        "pad_token_id": None,
    }


def _write(directory: Path, model: Any, seed: int) -> ServedModel:
    """Draw the weights, and write everything that vLLM looks for."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if name.endswith(".A_log"):
                weight.uniform_(*_DECAY, generator=generator).log_()
                continue
            # Those of norms are good as they are.
            draw(weight, generator, is_norm=weight.dim() == 1)
        silence_what_is_no_character(model.lm_head.weight)
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return ServedModel(directory, directory.name)


def draw(weight: Any, generator: Any, *, is_norm: bool) -> Any:
    """Draw the values of a tensor, but for those of a norm, and return it."""
    if is_norm:
        return weight
    return weight.normal_(0.0, _GAIN * weight.shape[-1] ** -0.5, generator=generator)


def silence_what_is_no_character(lm_head: Any) -> None:
    """See that nothing but a character is ever the likeliest."""
    lm_head[: len(_SPECIAL_TOKENS)] = 0.0
    lm_head[len(_SPECIAL_TOKENS) + len(_CHARACTERS) :] = 0.0


def write_tokenizer(directory: Path, *more: str) -> Any:
    """Write a tokenizer that takes characters one by one, and return it.

    Args:
        more: Tokens behind those of characters, which are taken whole.
    """
    import tokenizers
    import transformers

    tokens = [*_SPECIAL_TOKENS, *_CHARACTERS, *more]
    characters = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            {token: number for number, token in enumerate(tokens)}, [], unk_token="<unk>"
        )
    )
    characters.decoder = tokenizers.decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=characters,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=list(more),
        clean_up_tokenization_spaces=False,
        model_max_length=_MAX_POSITIONS,
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    tokenizer.save_pretrained(directory)
    return tokenizer
