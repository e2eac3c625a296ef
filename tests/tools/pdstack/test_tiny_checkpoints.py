# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are written tensor by tensor: the same every time, each layer with its heads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers
from safetensors import safe_open

from tools.pdstack.engine import Device, EngineSpec, ServedModel, engine_command
from tools.pdstack.layout import Layout, check_layout, read_model_shape
from tools.pdstack.tiny_checkpoints import (
    write_tiny_llama_with_eagle,
    write_tiny_mimo,
    write_tiny_mimo2,
    write_tiny_nemotron_nas,
    write_tiny_step3p5,
)

HEAD_SIZE = 32
WRITERS = [
    write_tiny_llama_with_eagle,
    write_tiny_mimo,
    write_tiny_mimo2,
    write_tiny_nemotron_nas,
    write_tiny_step3p5,
]
Writer = Callable[..., ServedModel]


def kv_heads(directory: Path, prefix: str = "model.layers.") -> dict[int, int]:
    """The KV heads of each layer that has any."""
    found = {}
    with safe_open(directory / "model.safetensors", "pt") as weights:
        for name in weights.keys():  # noqa: SIM118
            if name.startswith(prefix) and name.endswith("k_proj.weight"):
                rows = weights.get_slice(name).get_shape()[0]
                found[int(name.removeprefix(prefix).split(".")[0])] = rows // HEAD_SIZE
    return dict(sorted(found.items()))


@pytest.mark.parametrize("write", WRITERS)
def test_weights_depend_on_the_seed_only(tmp_path: Path, write: Writer) -> None:
    """Two directories of one seed hold the same bytes, those of another seed do not."""
    one, other, third = (
        (write(tmp_path / name, seed=seed).directory / "model.safetensors").read_bytes()
        for name, seed in (("one", 1), ("other", 1), ("third", 2))
    )
    assert one == other != third


@pytest.mark.parametrize("write", WRITERS)
def test_the_launcher_can_split_it(tmp_path: Path, write: Writer) -> None:
    """By ranks and by stages; and the tokenizer is one that transformers reads."""
    model = write(tmp_path / "tiny")
    shape = read_model_shape(model.directory)
    for layout in (Layout(2, 1), Layout(1, 2)):
        check_layout(layout, shape)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(model.directory)
    assert tokenizer("tulip")["input_ids"] != []


@pytest.mark.parametrize(
    ("write", "heads"),
    [
        (write_tiny_mimo2, {0: 4, 1: 2, 2: 4, 3: 2, 4: 4, 5: 2}),
        (write_tiny_step3p5, {0: 4, 1: 2, 2: 4, 3: 2, 4: 4, 5: 2}),
        (write_tiny_nemotron_nas, {0: 4, 2: 2, 3: 1, 5: 4}),
    ],
)
def test_layers_have_heads_of_their_own(tmp_path: Path, write: Writer, heads: dict) -> None:
    """As many as their kind has; some have none."""
    assert kv_heads(write(tmp_path).directory) == heads


def test_drafts_have_heads_of_their_own(tmp_path: Path) -> None:
    """Beside the Llama there is a layer with other ones, and a MiMo has one more than it says."""
    llama = write_tiny_llama_with_eagle(tmp_path / "llama").directory
    assert set(kv_heads(llama).values()) == {2}
    assert kv_heads(llama / "eagle", "layers.") == {0: 4}
    mimo = write_tiny_mimo(tmp_path / "mimo", num_layers=3).directory
    assert set(kv_heads(mimo)) == {0, 1, 2}
    assert set(kv_heads(mimo, "model.mtp_layers.")) == {0}


def test_nemotron_is_read_with_the_code_beside_it(tmp_path: Path) -> None:
    """Engines are told so, and what vLLM looks for is where it looks."""
    model = write_tiny_nemotron_nas(tmp_path / "tiny", kv_heads=(2, 0))
    assert "--trust-remote-code" in engine_command(EngineSpec("e"), model, Device.CPU, 1, "vllm")
    config = transformers.AutoConfig.from_pretrained(model.directory, trust_remote_code=True)
    first, second = (block.attention for block in config.block_configs)
    assert (first.no_op, first.n_heads_in_group, second.no_op) == (False, 2, True)
    assert not hasattr(config.block_configs[0].ffn, "ffn_mult")
    assert json.loads(config.to_json_string())["block_configs"][1]["attention"]["no_op"]
