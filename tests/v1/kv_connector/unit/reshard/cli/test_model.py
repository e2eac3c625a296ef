# SPDX-License-Identifier: Apache-2.0
"""What is read from a model's `config.json`."""

from __future__ import annotations

import json

import pytest

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.cli.model import (
    ModelSizes,
    element_bytes,
    read_model,
)

LLAMA = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 512,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def read(tmp_path):
    """Reads a configuration back from a directory."""

    def write_and_read(config) -> ModelSizes:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return read_model(tmp_path)

    return write_and_read


def test_heads_and_their_size(read):
    """A head's size follows from the hidden size where it is not given."""
    assert read(LLAMA) == ModelSizes(4, 2, 64, False, "bfloat16", {})


@pytest.mark.parametrize(
    ("changes", "num_kv_heads", "head_size"),
    [
        ({"head_dim": 128}, 2, 128),
        ({"head_dim": None}, 2, 64),
        ({"num_key_value_heads": None}, 8, 64),
        ({"multi_query": True}, 1, 64),
    ],
)
def test_variants_of_heads(read, changes, num_kv_heads, head_size):
    """Explicit head sizes, attention without groups, and multi-query attention."""
    sizes = read({**LLAMA, **changes})
    assert (sizes.num_kv_heads, sizes.slot_elements) == (num_kv_heads, head_size)


def test_older_names(read):
    """GPT-2 has names of its own."""
    assert read({"n_layer": 3, "n_head": 4, "n_embd": 64}) == ModelSizes(3, 4, 16, False, None, {})


def test_latent_of_mla(read):
    """The latent with its rotary part is one head, whatever the heads of attention."""
    config = {**LLAMA, "num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert read(config) == ModelSizes(61, 1, 576, True, "bfloat16", {})


def test_decoder_of_several_modalities(read):
    """The sizes are the decoder's, the type may be the whole model's."""
    text = {name: value for name, value in LLAMA.items() if name != "torch_dtype"}
    config = {"dtype": "float16", "num_hidden_layers": 99, "text_config": text}
    assert read(config) == ModelSizes(4, 2, 64, False, "float16", {})
    assert read({"thinker_config": {"text_config": LLAMA}}).num_layers == 4


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        (
            {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 32},
            {0: 32, 2: 32},
        ),
        (
            {
                "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
                "attention_chunk_size": 64,
            },
            {0: 64, 1: 64, 2: 64},
        ),
        ({"sliding_window": 32}, {0: 32, 1: 32, 2: 32, 3: 32}),
        ({"sliding_window": 32, "use_sliding_window": False}, {}),
        ({"sliding_window": None}, {}),
        ({"sliding_window": 32, "sliding_window_pattern": 2}, {0: 32, 2: 32}),
        ({"sliding_window": 32, "model_type": "gemma2"}, {0: 32, 2: 32}),
    ],
)
def test_layers_with_windows(read, changes, windows):
    """A list of kinds, a pattern, or one rule for all layers."""
    assert read({**LLAMA, **changes}).window_tokens_by_layer == windows


def test_chunks_are_told_from_windows_that_slide(read):
    """Only a model with chunks has the size of one, which vLLM goes by, too."""
    kinds = ["chunked_attention"] * 4
    assert read({**LLAMA, "layer_types": kinds, "attention_chunk_size": 64}).is_chunked
    assert not read({**LLAMA, "sliding_window": 64}).is_chunked


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([], "no JSON object"),
        ({}, "num_hidden_layers is missing: give --num-layers"),
        ({**LLAMA, "num_hidden_layers": "many"}, "num_hidden_layers is 'many'"),
        ({**LLAMA, "num_attention_heads": 0}, "num_attention_heads is 0"),
        ({**LLAMA, "num_key_value_heads": True}, "num_key_value_heads is True"),
        ({**LLAMA, "hidden_size": None}, "neither head_dim nor hidden_size"),
        ({**LLAMA, "kv_lora_rank": 512}, "qk_rope_head_dim is missing"),
        ({**LLAMA, "layer_types": ["linear_attention"] * 4}, "layers of linear_attention keep no"),
        ({**LLAMA, "mamba_d_state": 16}, "layers of Mamba keep no"),
        ({**LLAMA, "layer_types": ["mamba", "hyena"] * 2}, "layers of hyena, mamba keep no"),
        ({**LLAMA, "layer_types": ["full_attention"]}, "does not name a kind for each of 4"),
        ({**LLAMA, "layer_types": ["sliding_attention"] * 4}, "sliding_window is missing"),
        ({**LLAMA, "sliding_window": 8, "sliding_window_pattern": "LG"}, "must be a number"),
    ],
)
def test_what_cannot_be_planned_is_one_line(read, tmp_path, config, message):
    """The file, the entry and its value are named."""
    with pytest.raises(ValueError) as caught:
        read(config)
    assert message in str(caught.value)
    assert str(tmp_path / "config.json") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_and_broken_files_are_named(tmp_path):
    """A directory without a model, and a file that is no JSON."""
    with pytest.raises(ValueError, match=r"config\.json cannot be read"):
        read_model(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        read_model(tmp_path)


@pytest.mark.parametrize(
    ("dtype", "size"), [("torch.bfloat16", 2), ("float32", 4), ("fp8_e4m3", 1), ("half", 2)]
)
def test_sizes_of_elements(dtype, size):
    """Types by torch's names and by vLLM's."""
    assert element_bytes(dtype) == size


GEMMA4 = {
    **LLAMA,
    "num_hidden_layers": 6,
    "head_dim": 64,
    "global_head_dim": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": 32,
    "num_kv_shared_layers": 2,
}


# As it is published: it gives a size for chunks, and has none.
MIMO2 = {
    **LLAMA,
    "head_dim": 192,
    "v_head_dim": 128,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 192,
    "swa_v_head_dim": 128,
    "hybrid_layer_pattern": [0, 1, 1, 0],
    "sliding_window": 128,
    "attention_chunk_size": 128,
}


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        (
            {**LLAMA, "per_layer_config": {"1": {"head_dim": 128, "num_key_value_heads": 1}}},
            {0: (2, 64), 1: (1, 128), 2: (2, 64), 3: (2, 64)},
        ),
        (GEMMA4, {0: (2, 64), 1: (2, 128), 2: (2, 64), 3: (2, 128)}),
        (
            {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
            {0: (2, 64), 1: (1, 128), 2: (2, 64), 3: (1, 128)},
        ),
        (
            {
                **LLAMA,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
                "sliding_window": 32,
                "swa_num_key_value_heads": 4,
                "swa_head_dim": 32,
            },
            {0: (2, 64), 1: (4, 32), 2: (2, 64), 3: (4, 32)},
        ),
        (MIMO2, {0: (2, 160), 1: (4, 160), 2: (4, 160), 3: (2, 160)}),
        (
            {
                **{name: value for name, value in LLAMA.items() if name != "num_key_value_heads"},
                "num_attention_groups": 2,
                "attention_other_setting": {"num_attention_groups": 4},
                "layer_types": ["full_attention", "sliding_attention"] * 2,
                "sliding_window": 32,
            },
            {0: (2, 64), 1: (4, 64), 2: (2, 64), 3: (4, 64)},
        ),
        (
            {
                **LLAMA,
                "block_configs": [
                    {"attention": {"n_heads_in_group": 4}},
                    {"attention": {"no_op": True}},
                    {"attention": {"n_heads_in_group": 8}},
                    {"attention": {"replace_with_linear": True}},
                ],
            },
            {0: (2, 64), 2: (1, 64)},
        ),
    ],
    ids=["per layer", "gemma4", "gemma4 with other heads", "mimo", "mimo2", "step", "nemotron"],
)
def test_layers_that_differ(read, config, layers):
    """Heads and their size of each layer that has a cache of its own."""
    found = read(config).layers
    sizes = {layer: (each.num_kv_heads, each.slot_elements) for layer, each in found.items()}
    assert sizes == layers


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000 but must be at most 1024"),
        ({"head_dim": 10**30}, f"head_dim is {10**30} but must be at most"),
        (
            {"layer_types": ["conv"] * 4, "conv_L_cache": 3, "hidden_size": 10**9},
            "hidden_size is 1000000000 but must be at most",
        ),
        (
            {"layer_types": ["mamba"] * 4, "mamba_n_heads": 10**9},
            "mamba_n_heads is 1000000000 but must be at most",
        ),
        ({"model_type": "deepseek_v32", "index_head_dim": 10**9}, "index_head_dim is 1000000000"),
    ],
)
def test_numbers_are_bounded(read, changes, message):
    """What no model has is refused by its name, before anything is computed with it."""
    with pytest.raises(ValueError, match=message) as caught:
        read({**LLAMA, **changes})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"text_config":' * 100_000])
def test_deep_configuration_is_one_line(tmp_path, text):
    """Nesting that the parser gives up on is refused as what is no JSON."""
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json is not JSON") as caught:
        read_model(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"block_configs": ["none"] * 4},
        {"layer_types": 4},
        {"num_kv_shared_layers": [1]},
        {"model_type": "deepseek_v4", "compress_ratios": 4},
    ],
)
def test_entry_of_another_kind_is_one_line(read, changes):
    """A number, a list or a text in place of another is told with the file's name."""
    with pytest.raises(ValueError, match=r"config\.json: ") as caught:
        read({**LLAMA, **changes})
    assert "\n" not in str(caught.value)


def test_mimo2_has_windows_and_no_chunks(read):
    """Which layers have one is told by a list of its own."""
    found = read(MIMO2)
    assert found.window_tokens_by_layer == {1: 128, 2: 128}
    assert not found.is_chunked
