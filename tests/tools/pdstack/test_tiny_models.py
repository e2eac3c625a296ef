# SPDX-License-Identifier: Apache-2.0
"""Models of random weights: the same every time, and sensitive to all of the prompt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from tools.pdstack.engine import ServedModel
from tools.pdstack.layout import read_model_shape
from tools.pdstack.tiny_models import write_tiny_gemma3, write_tiny_llama

WRITERS = [write_tiny_llama, write_tiny_gemma3]
TEXT = "".join(f"On day {day} the gardener planted {3 * day} tulips.\n" for day in range(1, 11))
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


@pytest.mark.parametrize("write", WRITERS)
def test_weights_depend_on_the_seed_only(tmp_path: Path, write: Writer) -> None:
    """Two directories of one seed hold the same bytes, those of another seed do not."""
    one, other, third = (
        write(tmp_path / name, seed=seed).directory / "model.safetensors"
        for name, seed in (("one", 1), ("other", 1), ("third", 2))
    )
    assert one.read_bytes() == other.read_bytes() != third.read_bytes()


@pytest.mark.parametrize("write", WRITERS)
def test_sizes_are_those_asked_for(tmp_path: Path, write: Writer) -> None:
    """The launcher reads from the directory what the writer was given."""
    model = write(
        tmp_path / "tiny",
        num_layers=3,
        num_heads=6,
        num_kv_heads=3,
        head_size=64,
    )
    shape = read_model_shape(model.directory)
    assert (shape.num_layers, shape.num_attention_heads) == (3, 6)
    assert (shape.num_kv_heads, shape.head_size) == (3, 64)
    assert model.name == "tiny"


@pytest.mark.parametrize("write", WRITERS)
def test_answers_depend_on_every_part_of_the_prompt(tmp_path: Path, write: Writer) -> None:
    """A few other characters anywhere give another answer: no block of the KV cache is idle."""
    model = write(tmp_path / "tiny")
    variants = [f"{TEXT[:at]}ABCDEFGH{TEXT[at + 8 :]}" for at in range(0, len(TEXT) - 8, 32)]
    first, *others = answer(model.directory, [TEXT, *variants])
    assert first.isascii()
    assert [number for number, other in enumerate(others) if other == first] == []


def test_gemma3_mixes_windows_with_full_attention(tmp_path: Path) -> None:
    """The config says which layers look at all tokens and how far the others look."""
    write_tiny_gemma3(tmp_path, num_layers=5, sliding_window=64, full_attention_every=3)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    sliding, full = "sliding_attention", "full_attention"
    assert config.layer_types == [sliding, sliding, full, sliding, sliding]
    assert config.sliding_window == 64
