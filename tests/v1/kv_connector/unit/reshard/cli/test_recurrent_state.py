# SPDX-License-Identifier: Apache-2.0
"""What kv-plan knows of recurrent state."""

from __future__ import annotations

import json

import pytest

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.cli.command import main
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.cli.model import read_model

ATTENTION = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 512,
    "torch_dtype": "bfloat16",
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 32,
    "mamba_d_conv": 4,
}
NEMOTRON = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 1,
    "ssm_state_size": 32,
    "conv_kernel": 4,
}
ZAMBA = {
    "n_mamba_heads": 8,
    "mamba_headdim": 16,
    "mamba_ngroups": 1,
    "mamba_d_state": 32,
    "mamba_d_conv": 4,
}
DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
ALTERNATING = {"layer_types": ["mamba", "attention"] * 2}
OF_MAMBA = {"state": (8, 512), "x": (8, 48), "B": (1, 96), "C": (1, 96)}


@pytest.fixture
def directory(tmp_path):
    """Makes the directory of a model of a configuration."""

    def write(config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("config", "layers", "with_kv", "components"),
    [
        ({**MAMBA, "model_type": "falcon_h1"}, (0, 1, 2, 3), None, OF_MAMBA),
        ({**MAMBA, **ALTERNATING}, (0, 2), {1, 3}, OF_MAMBA),
        ({**NEMOTRON, "hybrid_override_pattern": "M-M*"}, (0, 2), {3}, OF_MAMBA),
        ({**ZAMBA, "layers_block_type": ["mamba", "hybrid"] * 2}, (0, 1, 2, 3), {1, 3}, OF_MAMBA),
        (
            {**DELTA_NET, "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
            (0, 1, 2),
            {3},
            {"state": (4, 512), "q": (2, 96), "k": (2, 96), "v": (4, 48)},
        ),
        (
            {"conv_L_cache": 3, "layer_types": ["conv", "full_attention"] * 2},
            (0, 2),
            {1, 3},
            {"x": (512, 2)},
        ),
    ],
)
def test_components_and_the_layers_that_keep_them(directory, config, layers, with_kv, components):
    """By the names of each family; layers with a KV cache are told from those without."""
    sizes = read_model(directory({**ATTENTION, **config}))
    assert {each.name: (each.num_units, each.unit_elements) for each in sizes.state} == components
    assert {each.layers for each in sizes.state} == {layers}
    assert set(sizes.layers) == (with_kv or set())


def test_state_is_planned_component_by_component(directory, capsys):
    """Heads go by their number, and the one group to everybody."""
    path = str(directory({**ATTENTION, **MAMBA, **ALTERNATING}))
    args = ["--prefill", "pp=2", "--decode", "tp=2", "--model", path]
    assert main([*args, "--json"]) == 0
    reads = json.loads(capsys.readouterr().out)["state_reads"]
    found = {
        (each["decode_rank"]["tp"], *each["layers"], *each["components"]): (
            each["prefill_rank"]["pp"],
            each["global_units"],
            each["request_bytes"],
        )
        for each in reads
    }
    assert found == {
        (rank, layer, *components): (layer // 2, units, num_bytes)
        for rank in range(2)
        for layer in (0, 2)
        for components, units, num_bytes in (
            (("state", "x"), [4 * rank, 4 * rank + 4], 2 * 4 * (512 + 48)),
            (("B", "C"), [0, 1], 2 * 2 * 96),
        )
    }
    assert main(args) == 0
    shown = capsys.readouterr().out
    assert "layers 0, 2: no KV cache of their own, but state" in " ".join(shown.split())
    assert "state, x    [4, 8)" in shown


def test_state_is_not_drawn(directory, tmp_path, capsys):
    """A drawing has one width for all layers."""
    path = str(directory({**ATTENTION, **MAMBA, "model_type": "falcon_h1"}))
    drawing = str(tmp_path / "plan.svg")
    assert main(["--prefill", "tp=1", "--decode", "tp=2", "--model", path, "--svg", drawing]) == 2
    assert "draws models whose layers are alike" in capsys.readouterr().err
