# SPDX-License-Identifier: Apache-2.0
"""The drawing, judged by its rectangles."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.cli.layouts import EngineLayout
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.cli.planning import plan_engines
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.cli.sizes import Sizes, from_sizes
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.cli.svg import draw_plan
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import ParallelMesh

NAMESPACE = "{http://www.w3.org/2000/svg}"


def drawn(prefill, decode, num_layers, num_kv_heads, *, is_latent=False, num_shares=1):
    """The plan between two meshes, and the root of its drawing."""
    layouts = EngineLayout(prefill, num_shares), EngineLayout(decode)
    sizes = Sizes(num_layers, num_kv_heads, 64, is_latent=is_latent)
    answer = from_sizes(sizes, "a test", layouts)
    planned = plan_engines(*answer.engines, 16)
    return planned.plan, ElementTree.fromstring(draw_plan(answer, planned))


def rectangles(root, kind):
    """Left, top, right, bottom and colour of the rectangles of one class."""
    found = []
    for rect in root.iter(f"{NAMESPACE}rect"):
        if rect.get("class") == kind:
            x, y, width, height = (float(rect.get(name)) for name in ("x", "y", "width", "height"))
            found.append((x, y, x + width, y + height, rect.get("fill")))
    return found


def overlap(one, other):
    """Whether two rectangles share more than rounding."""
    return (
        min(one[2], other[2]) - max(one[0], other[0]) > 0.05
        and min(one[3], other[3]) - max(one[1], other[1]) > 0.05
    )


@settings(max_examples=40, deadline=None)
@given(data=st.data(), num_heads=st.sampled_from([1, 2, 6, 8]), num_layers=st.integers(4, 80))
def test_one_rectangle_for_each_read_and_each_prefill_rank(data, num_heads, num_layers):
    """Rectangles are as many as reads and ranks, lie within the drawing, and do not overlap."""
    sizes = [
        size for size in (1, 2, 3, 6, 8, 16) if max(size, num_heads) % min(size, num_heads) == 0
    ]
    mesh = st.builds(ParallelMesh, st.integers(1, 4), st.sampled_from(sizes))
    prefill, decode = data.draw(mesh), data.draw(mesh)
    shares = st.sampled_from([1, 2]) if prefill.tp_size % 2 == 0 else st.just(1)
    is_latent = num_heads == 1
    num_shares = data.draw(shares) if is_latent else 1
    plan, root = drawn(
        *(prefill, decode, num_layers, num_heads), is_latent=is_latent, num_shares=num_shares
    )
    reads, sources = rectangles(root, "read"), rectangles(root, "source")
    assert len(reads) == len(plan.reads)
    assert len(sources) == prefill.world_size
    hatched = [source for source in sources if source[4].startswith("url")]
    assert len(hatched) == prefill.world_size - len({read.src_rank for read in plan.reads})
    _, _, width, height = map(float, root.get("viewBox").split())
    everything = [*reads, *sources]
    for position, one in enumerate(everything):
        assert 0 <= one[0] < one[2] <= width and 0 <= one[1] < one[3] <= height
        assert not any(overlap(one, other) for other in everything[:position])


def test_a_read_has_the_colour_of_its_source():
    """Same colours on both sides, a different one for each prefill rank."""
    plan, root = drawn(ParallelMesh(4, 8), ParallelMesh(1, 4), 80, 8)
    colours = [source[4] for source in rectangles(root, "source")]
    assert len(set(colours)) == 32
    by_rank = dict(zip(ParallelMesh(4, 8).ranks(), colours, strict=True))
    for read, rectangle in zip(plan.reads, rectangles(root, "read"), strict=True):
        assert rectangle[4] == by_rank[read.src_rank]


@pytest.mark.parametrize(
    ("prefill", "decode"), [(ParallelMesh(4, 8), ParallelMesh(1, 4)), (ParallelMesh(1, 2),) * 2]
)
def test_every_read_is_labelled_with_its_source(prefill, decode):
    """Within each read's rectangle stands the name of the rank that is read from."""
    plan, root = drawn(prefill, decode, 80, 8)
    labels = [
        (float(text.get("x")), float(text.get("y")), text.text)
        for text in root.iter(f"{NAMESPACE}text")
    ]
    for read, (left, top, right, bottom, _) in zip(
        plan.reads, rectangles(root, "read"), strict=True
    ):
        inside = [text for x, y, text in labels if left < x < right and top < y < bottom]
        assert str(read.src_rank) in inside
        assert f"units {read.units}" in inside


def test_what_nobody_reads_is_told_apart():
    """MLA: one rank is read, the others are hatched and named as only notified."""
    _, root = drawn(ParallelMesh(1, 4), ParallelMesh(1, 1), 61, 1)
    texts = [text.text for text in root.iter(f"{NAMESPACE}text")]
    assert texts.count("only notified") == 3
    assert any(text.startswith("Hatched:") for text in texts)
