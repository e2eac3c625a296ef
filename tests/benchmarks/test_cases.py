# SPDX-License-Identifier: Apache-2.0
"""What is measured."""

from __future__ import annotations

from itertools import groupby

import pytest

from benchmarks.cases import (
    Depth,
    Shape,
    handshake_cases,
    request_path_cases,
    transfer_cases,
)
from benchmarks.tables import TableOrder
from tools.pdstack.layout import Layout

ALL = {"handshake": handshake_cases, "transfer": transfer_cases, "request path": request_path_cases}


@pytest.mark.parametrize("cases", ALL.values(), ids=ALL)
@pytest.mark.parametrize("depth", Depth)
def test_names_are_unique(cases, depth):
    """Results can be told apart by the names of their cases."""
    names = [case.name for case in cases(depth)]
    assert names and len(set(names)) == len(names)


@pytest.mark.parametrize("depth", [Depth.DEFAULT, Depth.FULL])
def test_targets_are_covered(depth):
    """There is a case for every chunk size, layout and order that has a target."""
    found = {
        (case.shape.prefill.tp_size, case.shape.chunk_bytes, case.order)
        for case in transfer_cases(depth)
        if case.shape.decode.tp_size == 1 and not case.shape.mla
    }
    wanted = {(tp, size, order) for tp in (2, 4) for size in (2048, 8192) for order in TableOrder}
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


@pytest.mark.parametrize(
    ("prefill", "decode", "mla", "read_bytes", "chunk_bytes"),
    [
        (2, 1, False, 3 * 2 * 2 * 4 * 16 * 64 * 2, 2 * 16 * 64 * 2),
        (1, 4, False, 3 * 2 * 2 * 4 * 16 * 64 * 2, 16 * 64 * 2),
        (2, 1, True, 3 * 2 * 4 * 16 * 64 * 2, 4 * 16 * 64 * 2),
        (1, 2, True, 2 * 3 * 2 * 4 * 16 * 64 * 2, 4 * 16 * 64 * 2),
    ],
)
def test_bytes_of_a_request(prefill, decode, mla, read_bytes, chunk_bytes):
    """Bytes are those of all decode ranks; MLA is on every one of them."""
    shape = Shape(Layout(prefill, 1), Layout(decode, 1), 2, 4, 64, 16, mla)
    assert shape.bytes_read(33) == read_bytes
    assert shape.chunk_bytes == chunk_bytes
    assert shape.num_chunks(33) == read_bytes // chunk_bytes
