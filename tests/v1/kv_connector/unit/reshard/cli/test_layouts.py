# SPDX-License-Identifier: Apache-2.0
"""How layouts are written on the command line."""

from __future__ import annotations

import re

import pytest

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.cli.layouts import parse_layout


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("tp1pp2", (1, 2, 1, 1, 1)),
        ("TP2PP1", (2, 1, 1, 1, 1)),
        ("tp8", (8, 1, 1, 1, 1)),
        ("pp=2, tp=3", (3, 2, 1, 1, 1)),
        ("tp=8,dcp=4", (8, 1, 4, 1, 1)),
        ("tp=2,pcp=4", (2, 1, 1, 4, 1)),
        ("dp=4", (1, 1, 1, 1, 4)),
        ("tp=4,dp=2,ep=8", (4, 1, 1, 1, 2)),
        ("tp4dp2ep1", (4, 1, 1, 1, 2)),
    ],
)
def test_layouts_are_written_by_axis_or_in_one_word(text, sizes):
    """Replicas are counted beside the mesh, and experts change nothing that is read."""
    found = parse_layout(text)
    mesh = found.mesh.tp_size, found.mesh.pp_size
    assert (*mesh, found.num_shares, found.num_copies, found.num_replicas) == sizes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not understood"),
        ("tp=x", "'tp=x' is not understood"),
        ("tp=1,tp=2", "each at most once"),
        ("tp=2;pp=1", "is not understood"),
        ("8", "is not understood"),
        ("tp=9999999", "is not understood"),
        ("tp=0", "tp is 0 but must be at least 1"),
        ("tp=1,dp=0", "dp is 0 but must be at least 1"),
        ("tp=128", "more than 64 ranks in a stage"),
        ("tp1pp1025", "or 1024 in all"),
        ("tp=2,pcp=2,dcp=4", "write tp=4,dcp=4, whose reads are the same"),
        ("tp=4,dp=2,ep=4", "ep is 4 but vLLM divides experts among all 8 ranks"),
    ],
)
def test_impossible_layouts_are_told(text, message):
    """With what was written, and what to write instead."""
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_layout(text)


def test_only_prefill_engines_have_prefill_context_parallelism():
    """One that reads is told to leave it out."""
    with pytest.raises(ValueError, match="cannot read: leave pcp out"):
        parse_layout("pcp=2", reads=True)


def test_partitions_are_numbers():
    """As in VLLM_PP_LAYER_PARTITION."""
    assert parse_layout("pp2", "10,22").partition == (10, 22)
    with pytest.raises(ValueError, match="'1;3' is not understood"):
        parse_layout("pp2", "1;3")


@pytest.mark.parametrize("sizes", [(0, None), (None, 0), (10**30, None)])
def test_tokens_are_bounded(sizes):
    """Of a block, and of what is dealt to a rank at a time."""
    with pytest.raises(ValueError, match="must be between 1 and 16384"):
        parse_layout("tp1", None, *sizes)
