# SPDX-License-Identifier: Apache-2.0
"""Warnings, and tables of different widths."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.cli.advice import advise, bytes_text
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.cli.figures import (
    CacheSizes,
    measure_plan,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.cli.layouts import EngineLayout
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.cli.report import PlanReport
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.cli.text import print_report
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.mesh import ParallelMesh
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.reshard import plan_reshard
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import shard_model

PAGES = CacheSizes(slot_bytes=256, num_planes=2, src_block_tokens=16, dst_block_tokens=16)


def report(prefill, decode, heads=8, *, cache_sizes=PAGES, is_mla=False, knows_bytes=True):
    """All that is told of a plan for 80 layers."""
    src, dst = shard_model(prefill, 80, heads), shard_model(decode, 80, heads)
    plan = plan_reshard(src, dst)
    figures = measure_plan(plan, src, dst, cache_sizes, 1024)
    return PlanReport(
        prefill=EngineLayout(prefill),
        decode=EngineLayout(decode),
        src=src,
        dst=dst,
        plan=plan,
        figures=figures,
        num_layers=80,
        num_kv_heads=heads,
        model="80 layers",
        is_mla=is_mla,
        cache_sizes=cache_sizes,
        layers={},
        knows_bytes=knows_bytes,
        prompt_tokens=1024,
    )


def warnings(prefill, decode, heads=8, **options):
    """What is warned of."""
    whole = report(ParallelMesh(*prefill), ParallelMesh(*decode), heads, **options)
    cache_sizes = whole.cache_sizes if whole.knows_bytes else None
    return list(advise(whole.figures, whole.src, whole.dst, cache_sizes, is_mla=whole.is_mla))


def test_good_layouts_are_not_warned_of():
    """Whole pages of 4 KiB, no replicas, and equal shares."""
    assert warnings((4, 8), (1, 4)) == []


def test_small_descriptors_name_the_block_size_that_helps():
    """With the block size that is named there is no warning any more."""
    tiny = CacheSizes(100, 2, 16, 16)
    (warning,) = warnings((1, 8), (1, 4), cache_sizes=tiny)
    assert "8 of 8 reads move as little as 1.562 KiB at a time" in warning
    assert "give both engines --block-size 64" in warning
    assert warnings((1, 8), (1, 4), cache_sizes=CacheSizes(100, 2, 64, 64)) == []
    assert len(warnings((1, 8), (1, 4), cache_sizes=CacheSizes(100, 2, 32, 32))) == 1


def test_small_descriptors_that_are_staged_are_told_apart():
    """Pages that are half a page at the other end are staged, and direct reads still are slow."""
    (warning,) = warnings((1, 8), (1, 4), cache_sizes=CacheSizes(64, 2, 16, 16))
    assert "8 of 8 reads" in warning
    assert "--block-size 64; `auto` stages 8 of them, which merges" in warning


def test_large_descriptors_that_are_staged_are_not_counted_among_small_ones():
    """TP3 to TP2: two heads of a block are 4 KiB and staged, one alone is less and goes direct."""
    of_128 = CacheSizes(128, 2, 16, 16)
    (warning,) = warnings((1, 3), (1, 2), 6, cache_sizes=of_128)
    whole = report(ParallelMesh(1, 3), ParallelMesh(1, 2), 6, cache_sizes=of_128)
    assert any(read.strategy == "staged" for read in whole.figures.readers[0].reads)
    assert "2 of 4 reads" in warning and "stages" not in warning


def test_small_descriptors_of_unequal_blocks_want_equal_ones():
    """Where blocks differ, a larger block would not help."""
    (warning,) = warnings((1, 1), (1, 1), cache_sizes=CacheSizes(64, 2, 16, 64))
    assert "the same --block-size, not 16 and 64" in warning


def test_descriptors_of_unknown_size_are_not_warned_of():
    """A size that is not known is not called small."""
    tiny = CacheSizes(1, 2, 16, 16)
    assert warnings((1, 1), (1, 1), cache_sizes=tiny, knows_bytes=False) == []


def test_replicas_of_prefill_are_named():
    """16 ranks keep one latent, of which one is read: it serves 16 times its share."""
    latent = CacheSizes(1152, 1, 16, 16)
    burdened, replicated = warnings((1, 16), (1, 1), 1, cache_sizes=latent, is_mla=True)
    assert "prefill pp0tp0 serves up to 16 times an equal share" in burdened
    assert "the latent of MLA on 16 ranks of a stage; 15 of its 16 ranks" in replicated


def test_replicas_that_are_all_read_are_no_burden():
    """As many readers as replicas: only the replicas themselves are waste, on both sides."""
    prefill, decode = warnings((1, 16), (1, 16))
    assert "prefill keeps every KV head on 2 ranks of a stage: divide" in prefill
    assert "decode keeps, and reads, every KV head 2 times" in decode


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize(("prefill", "decode"), [((4, 8), (1, 4)), ((1, 4), (4, 8))])
def test_tables_fit_and_lose_nothing(width, prefill, decode):
    """No line is longer than the terminal, no cell is cut, and there is no colour in a file."""
    console = Console(file=io.StringIO(), width=width)
    whole = report(ParallelMesh(*prefill), ParallelMesh(*decode))
    print_report(whole, console)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert "\u2026" not in text and "\x1b" not in text
    words = [line.split() for line in text.splitlines()]
    for source in whole.figures.sources:
        assert any(line[:2] == [str(source.rank), str(source.fan_out)] for line in words)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (320 << 20, "320 MiB"), (3 << 30, "3 GiB")],
)
def test_sizes_for_people(num_bytes, text):
    """Binary units, and as many digits as matter."""
    assert bytes_text(num_bytes) == text
