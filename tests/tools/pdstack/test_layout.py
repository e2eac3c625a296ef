# SPDX-License-Identifier: Apache-2.0
"""Layouts as text, and what a model allows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.pdstack.errors import UsageError
from tools.pdstack.layout import (
    Layout,
    ModelShape,
    check_layout,
    parse_layout,
    read_model_shape,
)

SMOLLM2 = ModelShape(
    num_layers=30,
    num_attention_heads=9,
    num_kv_heads=3,
    head_size=64,
    intermediate_size=1536,
)
sizes = st.integers(1, 9999)


@given(sizes, sizes, sizes)
def test_text_and_layout_are_inverse(tp_size: int, pp_size: int, pcp_size: int) -> None:
    """A layout that is written out and parsed is the same layout."""
    layout = Layout(tp_size, pp_size, pcp_size)
    assert parse_layout(str(layout)) == layout
    assert layout.world_size == tp_size * pp_size * pcp_size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tp1",
        "pp1",
        "tp0pp1",
        "tp1pp0",
        "tp-1pp1",
        "tp1pp1x",
        "tp1pp1pcp0",
        "1x1",
        "tp\u0661pp1",
        "tp10000pp1",
    ],
)
def test_other_texts_are_refused_by_name(text: str) -> None:
    """A text of another shape is refused, and the message holds it and an example."""
    with pytest.raises(UsageError, match="tp2pp1") as caught:
        parse_layout(text)
    assert repr(text) in str(caught.value)


def test_case_and_surrounding_space_do_not_matter() -> None:
    """What a shell variable easily picks up is forgiven."""
    assert parse_layout(" TP3PP2 ") == Layout(3, 2)


@pytest.mark.parametrize("layout", [Layout(1, 1), Layout(3, 1), Layout(1, 30), Layout(3, 2)])
def test_layouts_that_the_model_can_run_are_accepted(layout: Layout) -> None:
    """Divisors of all sizes pass, with any number of stages up to the layers."""
    check_layout(layout, SMOLLM2)


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (Layout(2, 1), "TP 2 does not divide 9 attention heads"),
        (Layout(9, 1), "TP 9 does not divide the intermediate size 1536"),
        (Layout(1, 31), "31 pipeline stages, but the model has only 30 layers"),
    ],
)
def test_layouts_that_the_model_cannot_run_are_refused(layout: Layout, reason: str) -> None:
    """The refusal names the layout, the reason and what would work."""
    with pytest.raises(UsageError, match=reason) as caught:
        check_layout(layout, SMOLLM2)
    assert str(layout) in str(caught.value)
    assert "TP 1, 3" in str(caught.value) or "PP 30" in str(caught.value)


def test_kv_heads_that_neither_divide_nor_are_divided_are_refused() -> None:
    """12 attention heads over 4 KV heads run with TP 2 and 12, but not with TP 6."""
    shape = ModelShape(num_layers=1, num_attention_heads=12, num_kv_heads=4, head_size=8)
    check_layout(Layout(2), shape)
    check_layout(Layout(12), shape)
    with pytest.raises(UsageError, match="TP 6 and 4 KV heads"):
        check_layout(Layout(6), shape)


def test_the_shape_is_read_from_the_config(tmp_path: Path) -> None:
    """Head size and KV heads follow from the other sizes where the config leaves them out."""
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config}))
    shape = read_model_shape(tmp_path)
    assert shape == ModelShape(2, 4, 4, 8)
    assert shape.kv_bytes_per_token(element_bytes=4) == 2 * 2 * 4 * 8 * 4


def test_a_latent_is_one_head_whatever_the_config_calls_heads(tmp_path: Path) -> None:
    """With MLA every rank keeps the same latent and the same part with a position of a token."""
    heads = {"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 64}
    sizes = {"hidden_size": 48, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    config = {"num_hidden_layers": 3, **heads, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = read_model_shape(tmp_path)
    assert shape.kv_bytes_per_token(element_bytes=4) == 3 * (512 + 64) * 4
    check_layout(Layout(2, 3), shape)


@pytest.mark.parametrize("content", [None, "{", '{"num_hidden_layers": 2}'])
def test_a_directory_without_a_usable_config_is_refused(
    tmp_path: Path, content: str | None
) -> None:
    """A missing, a broken and an incomplete config all end in one readable line."""
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UsageError, match=r"config\.json"):
        read_model_shape(tmp_path)


def test_a_vocabulary_is_divided_after_padding():
    """98 tokens are padded to 128, which three ranks cannot share, and 49152 they can."""
    with pytest.raises(UsageError, match="TP 3 does not divide the vocabulary of 128 tokens"):
        check_layout(Layout(3, 1), replace(SMOLLM2, vocabulary_size=98))
    check_layout(Layout(3, 1), replace(SMOLLM2, vocabulary_size=49152))
