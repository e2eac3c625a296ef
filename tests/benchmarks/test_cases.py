# SPDX-License-Identifier: Apache-2.0
"""What is measured."""

from __future__ import annotations

from itertools import groupby, product

import pytest

from benchmarks.cases import (
    Depth,
    Shape,
    handshake_cases,
    network_cases,
    pause_cases,
    request_path_cases,
    transfer_cases,
)
from benchmarks.tables import TableOrder
from tools.pdstack.layout import Layout

ALL = {
    "handshake": handshake_cases,
    "transfer": transfer_cases,
    "request path": request_path_cases,
    "pauses": pause_cases,
    "network": network_cases,
}
KIB = 1 << 10


@pytest.fixture(params=["0.22.1+reshard.1.cpu", "0.32.0+reshard.1.cpu", "0.33.0"])
def base(request, monkeypatch) -> None:
    """One base after the other, as if it were installed."""
    monkeypatch.setattr("importlib.metadata.version", lambda _: request.param)


def plain_shapes() -> set[Shape]:
    """Those without MLA, of all cases."""
    cases = [case for kind in ALL.values() for case in kind(Depth.FULL)]
    cases += [case for kind in ALL.values() for case in kind(Depth.DEFAULT)]
    return {case.shape for case in cases if not case.shape.mla}


@pytest.mark.parametrize("cases", ALL.values(), ids=ALL)
@pytest.mark.parametrize("depth", Depth)
def test_names_are_unique(cases, depth):
    """Results can be told apart by the names of their cases."""
    names = [case.name for case in cases(depth)]
    assert (names or depth is Depth.QUICK) and len(set(names)) == len(names)


def test_cases_of_one_link_stand_together():
    """No engine is started twice for the same link."""
    links = [link for link, _ in groupby(network_cases(Depth.DEFAULT), lambda case: case.link)]
    assert None in links and len(set(links)) == len(links)


@pytest.mark.parametrize("depth", [Depth.DEFAULT, Depth.FULL])
def test_targets_are_covered(base, depth):
    """On every base, there is a case for every chunk size, layout and order that has a target."""
    found = {
        (case.shape.prefill.tp_size, case.shape.chunk_bytes, case.order)
        for case in transfer_cases(depth)
        if case.shape.decode.tp_size == 1 and not case.shape.mla
    }
    wanted = set(product((2, 4), (4 * KIB, 8 * KIB), TableOrder))
    assert wanted <= found
    assert any(
        case.shape.num_layers == 80
        and case.num_blocks == 100_000
        and case.shape.prefill.tp_size == 1
        for case in handshake_cases(depth)
    )
    assert 256 in {case.num_requests for case in request_path_cases(depth)}


@pytest.mark.parametrize("depth", Depth)
def test_cases_of_one_shape_stand_together(depth):
    """No engine is started twice for the same shape."""
    shapes = [shape for shape, _ in groupby(transfer_cases(depth), lambda case: case.shape)]
    assert len(set(shapes)) == len(shapes)


def test_quick_cases_are_few():
    """What is to be quick measures less than what is not."""
    for cases in ALL.values():
        assert len(cases(Depth.QUICK)) < len(cases(Depth.DEFAULT)) <= len(cases(Depth.FULL))


def test_cases_are_what_attention_takes(base):
    """Blocks and heads are those of every base's CPU backend, but where they are the question."""
    shapes = plain_shapes()
    alike = {shape.block_tokens for shape in shapes if shape.prefill_block_tokens is None}
    assert {tokens % 32 for tokens in alike} == {0}
    assert {tokens % 16 for shape in shapes for tokens in shape.blocks_tokens} == {0}
    # No model has such heads: they make pieces of some size.
    odd = {shape for shape in shapes if shape.head_size not in (32, 64, 128)}
    found = {(shape.layouts, shape.num_heads) for shape in odd}
    assert found <= {("TP2->TP1", 2), ("NHD TP2->NHD TP1", 16)}


def test_transfers_are_alike_on_all_bases(monkeypatch):
    """As many chunks of the same size are read where keys and values lie apart as side by side."""
    alike = set()
    for version in ("0.22.1", "0.32.0"):
        monkeypatch.setattr("importlib.metadata.version", lambda _, version=version: version)
        cases = transfer_cases(Depth.DEFAULT)
        alike.add(
            tuple((each.shape.chunk_bytes, each.shape.num_chunks(each.tokens)) for each in cases)
        )
        assert cases[0].shape.attention_planes == (2 if version == "0.22.1" else 1)
    assert len(alike) == 1


@pytest.mark.parametrize(
    ("prefill", "decode", "mla", "planes", "read_bytes", "chunk_bytes"),
    [
        (2, 1, False, 2, 3 * 2 * 2 * 4 * 16 * 64 * 2, 2 * 16 * 64 * 2),
        (2, 1, False, 1, 3 * 2 * 2 * 4 * 16 * 64 * 2, 2 * 16 * 64 * 2 * 2),
        (1, 4, False, 2, 3 * 2 * 2 * 4 * 16 * 64 * 2, 16 * 64 * 2),
        (1, 4, False, 1, 3 * 2 * 2 * 4 * 16 * 64 * 2, 16 * 64 * 2 * 2),
        (2, 1, True, 1, 3 * 2 * 4 * 16 * 64 * 2, 4 * 16 * 64 * 2),
        (1, 2, True, 2, 2 * 3 * 2 * 4 * 16 * 64 * 2, 4 * 16 * 64 * 2),
    ],
)
def test_bytes_of_a_request(prefill, decode, mla, planes, read_bytes, chunk_bytes):
    """Bytes are those of all decode ranks, wherever values lie; MLA is on every one of them."""
    shape = Shape(Layout(prefill, 1), Layout(decode, 1), 2, 4, 64, 16, mla, planes)
    assert shape.bytes_read(33) == read_bytes
    assert shape.chunk_bytes == chunk_bytes
    assert shape.num_chunks(33) == read_bytes // chunk_bytes


@pytest.mark.parametrize(
    ("prefill", "decode", "blocks", "nhd", "heads", "tokens"),
    [
        (4, 1, (32, 32), (True, True), 2, 1),
        (1, 4, (32, 32), (True, True), 2, 1),
        (1, 1, (32, 32), (True, True), 8, 32),
        (1, 1, (16, 64), (True, True), 8, 16),
        (1, 1, (32, 32), (True, False), 1, 1),
        (8, 8, (32, 32), (False, True), 1, 32),
        (1, 1, (16, 64), (False, False), 1, 16),
        (2, 1, (64, 16), (False, False), 1, 16),
        (2, 1, (16, 16), (False, False), 4, 16),
    ],
)
def test_chunks_are_contiguous_at_both_ends(prefill, decode, blocks, nhd, heads, tokens):
    """As many heads and tokens as adjoin in the pages of both engines, as for `memory.lowering`."""
    shape = Shape(
        Layout(prefill, 1),
        Layout(decode, 1),
        2,
        8,
        64,
        blocks[1],
        attention_planes=1,
        prefill_block_tokens=blocks[0],
        nhd=nhd,
    )
    assert shape.chunk_bytes == heads * tokens * shape.slot_bytes
    assert shape.prefill_blocks(shape.num_blocks(128)) == 128 // blocks[0]
