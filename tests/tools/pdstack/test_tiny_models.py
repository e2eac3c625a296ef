# SPDX-License-Identifier: Apache-2.0
"""Models of random weights: the same every time, and sensitive to all of the prompt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open

from tools.pdstack.engine import Device, EngineSpec, ServedModel, engine_command
from tools.pdstack.layout import Layout, check_layout, read_model_shape
from tools.pdstack.tiny_models import (
    write_tiny_deepseek2,
    write_tiny_falcon_h1,
    write_tiny_gemma3,
    write_tiny_llama,
    write_tiny_llava,
    write_tiny_qwen3_next,
)

WRITERS = [
    write_tiny_llama,
    write_tiny_gemma3,
    write_tiny_falcon_h1,
    write_tiny_qwen3_next,
    write_tiny_deepseek2,
]
TEXT = "".join(f"On day {day} the gardener planted {3 * day} tulips.\n" for day in range(1, 11))
NUM_PARTS = 13
Writer = Callable[..., ServedModel]


def answer(directory: Path, texts: list[str], num_tokens: int = 24) -> list[str]:
    """Ask a model in one batch; all texts must be of one length."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    prompts = [tokenizer.apply_chat_template([{"role": "user", "content": t}]) for t in texts]
    ids = torch.tensor([prompt["input_ids"] for prompt in prompts])
    assert ids.shape == (len(texts), len(texts[0]) + 1)
    answers = model.generate(ids, max_new_tokens=num_tokens, do_sample=False)[:, ids.shape[1] :]
    assert answers.shape[1] == num_tokens
    return tokenizer.batch_decode(answers)


@pytest.mark.parametrize("write", [*WRITERS, write_tiny_llava])
def test_weights_depend_on_the_seed_only(tmp_path: Path, write: Writer) -> None:
    """Two directories of one seed hold the same bytes, those of another seed do not."""
    one, other, third = (
        write(tmp_path / name, seed=seed).directory / "model.safetensors"
        for name, seed in (("one", 1), ("other", 1), ("third", 2))
    )
    assert one.read_bytes() == other.read_bytes() != third.read_bytes()


def test_sizes_are_those_asked_for(tmp_path: Path) -> None:
    """The launcher reads from the directory what the writer was given."""
    model = write_tiny_llama(
        tmp_path / "tiny", num_layers=3, num_heads=6, num_kv_heads=3, head_size=64
    )
    shape = read_model_shape(model.directory)
    assert (shape.num_layers, shape.num_attention_heads) == (3, 6)
    assert (shape.num_kv_heads, shape.head_size) == (3, 64)
    assert model.name == "tiny"


def same_answers(model: ServedModel) -> list[int]:
    """The parts of a prompt where a few other characters give the same answer, by number."""
    variants = [f"{TEXT[:at]}ABCDEFGH{TEXT[at + 8 :]}" for at in range(0, len(TEXT) - 8, 32)]
    first, *others = answer(model.directory, [TEXT, *variants])
    assert first.isascii()
    assert len(others) == NUM_PARTS
    return [number for number, other in enumerate(others) if other == first]


@pytest.mark.parametrize("write", [each for each in WRITERS if each is not write_tiny_falcon_h1])
def test_answers_depend_on_every_part_of_the_prompt(tmp_path: Path, write: Writer) -> None:
    """A few other characters anywhere give another answer: no block of the KV cache is idle."""
    assert same_answers(write(tmp_path / "tiny")) == []


def test_answers_of_falcon_h1_depend_on_most_of_the_prompt(tmp_path: Path) -> None:
    """Its state forgets a part, and has a say in every layer."""
    assert len(same_answers(write_tiny_falcon_h1(tmp_path / "tiny"))) < NUM_PARTS / 2


def test_gemma3_mixes_windows_with_full_attention(tmp_path: Path) -> None:
    """The config says which layers look at all tokens and how far the others look."""
    write_tiny_gemma3(tmp_path, num_layers=5, sliding_window=64, full_attention_every=3)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    sliding, full = "sliding_attention", "full_attention"
    assert config.layer_types == [sliding, sliding, full, sliding, sliding]
    assert config.sliding_window == 64


def test_deepseek2_keeps_one_latent_for_all_heads(tmp_path: Path) -> None:
    """It has the sizes of vLLM's kernel for CPU, which the launcher reads, and no experts."""
    model = write_tiny_deepseek2(tmp_path / "tiny", num_layers=2, num_heads=8)
    shape = read_model_shape(model.directory)
    assert (shape.num_layers, shape.num_attention_heads) == (2, 8)
    assert shape.kv_bytes_per_token(element_bytes=4) == 2 * (512 + 64) * 4
    for layout in (Layout(2, 1), Layout(1, 2)):
        check_layout(layout, shape)
    with safe_open(model.directory / "model.safetensors", "pt") as weights:
        names = [name for name in weights.keys() if ".layers.1." in name]  # noqa: SIM118
    parts = ("kv_a_layernorm", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "q_proj")
    assert {name.split(".")[-2] for name in names if "self_attn" in name} == set(parts)
    assert {name.split(".")[-2] for name in names if "mlp" in name} == {
        *("gate_proj", "up_proj", "down_proj")
    }


def test_deepseek2_says_how_engines_serve_it(tmp_path: Path) -> None:
    """Every engine is told of the one kernel and the one block size, before what it adds itself."""
    model = write_tiny_deepseek2(tmp_path / "tiny", num_layers=1)
    spec = EngineSpec("e", extra_args=("--block-size", "32"))
    command = engine_command(spec, model, Device.CPU, 1, "vllm")
    args = ["--attention-backend", "CPU_MLA", "--block-size", "16", "--no-enable-prefix-caching"]
    args += ["--compilation-config", '{"custom_ops": ["-rotary_embedding"]}']
    assert command[-9:] == [*args, *spec.extra_args]
    assert model.block_tokens == 16
