# SPDX-License-Identifier: Apache-2.0
"""Blocks that backends for GPUs arrange, whole workers over real NIXL, byte for byte.

Where a head's bytes are in a block is taken from the release's own views of it, and from nothing of
the connector's.
"""

# What is skipped on a base imports what that base lacks.
# ruff: noqa: E402

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

import vllm
from tests.bases import skip_module_unless_base

skip_module_unless_base("0.32.0", "0.33.0", reason="caches are no views")

from vllm.utils.torch_utils import nvfp4_kv_cache_full_dim, nvfp4_split_data_scale
from vllm.v1.attention.backends.b12x import B12xPagedAttentionBackend, B12xPagedAttentionImpl
from vllm.v1.attention.backends.rocm_aiter_fa import AiterFlashAttentionBackend
from vllm.v1.attention.backends.rocm_attn import RocmAttentionBackend
from vllm.v1.attention.backends.turboquant_attn import TurboQuantAttentionBackend
from vllm.v1.attention.ops.paged_attn import PagedAttention
from vllm.v1.kv_cache_interface import MLAAttentionSpec, get_kv_quant_mode

from tests.v1.kv_connector.unit.reshard.engine.models import (
    NUM_BLOCKS,
    NUM_TOKENS,
    Kind,
    Model,
    made_engines,
    transfer,
)
from tests.v1.kv_connector.unit.reshard.engine.release_caches import bare
from tests.v1.kv_connector.unit.reshard.engine.workers import OFFER, Progress, kinds_in_layouts
from tests.v1.kv_connector.unit.reshard.forms import backend_of
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.caches import (
    cache_formats,
    geometry,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.caches.cache_views import (
    Arrangement,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import Receive

HEADS, SIZE = 6, 32
Parts = Callable[[torch.Tensor, int], list[torch.Tensor]]


@dataclass(frozen=True)
class Arranged(Kind):
    """A layer whose backend has its own way with a block.

    Attributes:
        by: The backend.
        split: Views of what a head has in a cache, for a cache and the number of its heads: blocks,
            heads, and then tokens, where these have a place of their own.
        quantized: How numbers are kept, as `--kv-cache-dtype` has it.
        order: The axes of a cache in memory: blocks, slots of heads, tokens and content.
        customize: What the backend does to a specification, where its class is none of the
            release's.
    """

    by: type | None = None
    split: Parts | None = None
    quantized: str = "auto"
    order: str = "BHNC"
    customize: Callable | None = None

    @property
    def written_by(self):
        """The attention backend."""
        return self.by

    def spec(self, heads: int):
        """What vLLM would say of it, once the backend has had its say."""
        spec = super().spec(heads)
        if self.quantized != "auto":
            spec = replace(spec, kv_quant_mode=get_kv_quant_mode(self.quantized))
        return (self.customize or self.by.customize_spec)(spec)

    def empty(self, heads: int) -> torch.Tensor:
        """The cache of a layer on a rank with so many heads, full of zeros."""
        spec = self.spec(heads)
        content = spec.state_content_size_bytes // self.dtype.itemsize
        if isinstance(spec, MLAAttentionSpec):
            content = spec.head_size
        sizes = dict(B=NUM_BLOCKS, H=spec.num_heads, N=spec.num_states, C=content)
        memory = torch.zeros([sizes[axis] for axis in self.order], dtype=self.dtype)
        return memory.permute([self.order.index(axis) for axis in "BHNC"])

    def parts(self, tensor: torch.Tensor, heads: int) -> list[torch.Tensor]:
        """Views of what it holds."""
        return self.split(tensor, heads)


def slots(tensor: torch.Tensor, heads: int) -> list[torch.Tensor]:
    """A slot for each head of each token."""
    assert tensor.shape[1] == heads
    return [tensor]


def sides(tensor: torch.Tensor, heads: int) -> list[torch.Tensor]:
    """Keys and values, each with all heads of a token."""
    impl = bare(
        B12xPagedAttentionImpl,
        num_kv_heads=heads,
        head_size=SIZE,
        kv_cache_dtype="auto",
        kv_torch_dtype=tensor.dtype,
    )
    return [side.transpose(1, 2) for side in impl._kv_cache_views(tensor)]


def packed_sides(tensor: torch.Tensor, heads: int) -> list[torch.Tensor]:
    """Keys and values, each with every head's tokens arranged."""
    return list(PagedAttention.split_kv_cache(tensor.transpose(0, 1), heads, SIZE))


def quarters(tensor: torch.Tensor, heads: int) -> list[torch.Tensor]:
    """Numbers and scales of keys, and of values: `_nvfp4_kv_views`."""
    parts = [part for side in tensor.split(heads, 1) for part in nvfp4_split_data_scale(side)]
    return [part.view(torch.uint8) for part in parts]


def paired_slots(tensor: torch.Tensor, heads: int) -> list[torch.Tensor]:
    """A slot for keys and one for values of each head: `nvfp4_kv_cache_slots`."""
    assert tensor.shape[1] == 2 * heads
    return [tensor[:, 0::2], tensor[:, 1::2]]


def _two_slots_a_head(spec):
    """`customize_spec` of what keeps 4 bits, whose modules want what only GPUs have."""
    content = nvfp4_kv_cache_full_dim(spec.head_size)
    return replace(spec, num_head_slots=2 * spec.num_kv_heads, state_content_bytes=content)


def _as_it_is(spec):
    return spec


OCTETS = dict(heads=HEADS, size=SIZE, dtype=torch.uint8)
NUMBERS = dict(heads=HEADS, size=SIZE, dtype=torch.float16)
M3 = "vllm.models.minimax_m3.common"
M3_HEADS = backend_of(f"{M3}.sparse_attention", "MINIMAX_M3_SPARSE")
M3_INDEX = Arranged(
    1,
    SIZE,
    mla=True,
    dtype=torch.float16,
    suffix="index",
    by=backend_of(f"{M3}.indexer", "MINIMAX_M3_SPARSE_INDEXER"),
    split=slots,
    customize=_as_it_is,
)
SIDES = Arranged(**NUMBERS, by=B12xPagedAttentionBackend, split=sides)
ROCM = Arranged(**NUMBERS, by=RocmAttentionBackend, split=packed_sides)
NVFP4 = Arranged(
    **OCTETS | dict(size=128),
    by=backend_of("vllm.v1.attention.backends.flashinfer", "FLASHINFER"),
    split=quarters,
    quantized="nvfp4",
    customize=_two_slots_a_head,
)
TURBOQUANT = Arranged(
    **OCTETS | dict(size=64),
    by=TurboQuantAttentionBackend,
    split=slots,
    quantized="turboquant_k8v4",
)
M3_SLOTS = Arranged(**NUMBERS, by=M3_HEADS, split=slots, customize=_as_it_is)
M3_NVFP4 = replace(NVFP4, by=M3_HEADS, split=paired_slots)


def other(kind: Kind, **fields) -> tuple[tuple[Kind, ...], tuple[Kind, ...]]:
    """What a layer keeps at P, and what it keeps at D with other fields."""
    return (kind,), (replace(kind, **fields),)


def same(*kinds: Kind) -> tuple[tuple[Kind, ...], tuple[Kind, ...]]:
    """What a layer keeps, at both ends."""
    return kinds, kinds


# How blocks are filled, for the connector, and what a layer keeps at P and at D. Where tokens have
# a place of their own, D has other blocks and another order of axes.
KINDS = {
    "B12X": (Arrangement.SIDES, other(SIDES, block_tokens=48, order="BNHC")),
    "B12X, sides outside of blocks": (Arrangement.SIDES, other(SIDES, order="HBNC")),
    "ROCM_ATTN": (Arrangement.PACKED_SIDES, same(ROCM)),
    "ROCM_ATTN, sides outside of blocks": (
        Arrangement.PACKED_SIDES,
        same(replace(ROCM, order="HBNC", block_tokens=48)),
    ),
    "AITER, shuffled": (
        Arrangement.PACKED_SIDES,
        same(
            replace(
                ROCM, by=AiterFlashAttentionBackend, customize=RocmAttentionBackend.customize_spec
            )
        ),
    ),
    "FlashInfer with NVFP4": (Arrangement.QUARTERS, same(NVFP4)),
    "TurboQuant": (Arrangement.SLOTS, other(TURBOQUANT, block_tokens=24, order="BNHC")),
    "TurboQuant of 3 bits": (
        Arrangement.SLOTS,
        other(replace(TURBOQUANT, quantized="turboquant_3bit_nc"), block_tokens=48),
    ),
    "MiniMax M3": (
        Arrangement.SLOTS,
        (
            (M3_SLOTS, M3_INDEX),
            (replace(M3_SLOTS, block_tokens=48, order="BNHC"), replace(M3_INDEX, block_tokens=48)),
        ),
    ),
    "MiniMax M3 with NVFP4": (Arrangement.HEADS, same(M3_NVFP4, M3_INDEX)),
}
LAYOUTS = {
    "TP2 to TP1": (dict(tp=2), dict()),
    "TP1 to TP2": (dict(), dict(tp=2)),
    "TP3 to TP2": (dict(tp=3), dict(tp=2)),
    "PP2 to TP2": (dict(pp=2), dict(tp=2)),
}


@pytest.fixture
def engines(request):
    """Makes engines, which read direct unless something else is asked for, and closes them."""
    yield from made_engines(getattr(request, "param", "direct"))


@pytest.fixture
def models(monkeypatch, name):
    """Models of two layers of a kind at P and at D, and how heads are arranged, for the connector.

    So that what is moved is that format, and no whole blocks of somebody unknown.
    """
    if "shuffled" in name:
        monkeypatch.setattr(cache_formats, "_is_shuffled", lambda: True)
    arrangements, ask = set(), geometry.cache_format

    def asked(backend, spec, *rest):
        found = ask(backend, spec, *rest)
        if not isinstance(spec, MLAAttentionSpec):
            arrangements.add(found.arrangement)
        return found

    monkeypatch.setattr(geometry, "cache_format", asked)
    prefill, decode = (Model((kinds, kinds)) for kinds in KINDS[name][1])
    return prefill, decode, arrangements


def test_slots_of_minimax_m3_are_where_the_release_has_them():
    """Its function is read, not called: the model's modules want what is not installed here."""
    module = Path(vllm.__file__).parent / "models/minimax_m3/nvidia/msa_cutlass_sparse_decode.py"
    _, _, function = module.read_text().partition("def nvfp4_kv_cache_slots(")
    assert "return kv_cache[:, 0::2], kv_cache[:, 1::2]" in function.partition("\ndef ")[0]


@kinds_in_layouts("name", {name: name for name in KINDS}, LAYOUTS, ["TP3 to TP2", "PP2 to TP2"])
def test_heads_are_read_out_of_it(engines, models, name, prefill, decode):
    """Every byte of ranks that gather and part, and of stages, and no other, by their format."""
    transfer(engines("prefill", models[0], **prefill), engines("decode", models[1], **decode))
    assert models[2] == {KINDS[name][0]}


@pytest.mark.parametrize("name", ["B12X", "ROCM_ATTN", "FlashInfer with NVFP4", "TurboQuant"])
@pytest.mark.parametrize(
    "engines", ["staged", pytest.param("auto", marks=pytest.mark.nightly)], indirect=True
)
def test_however_it_is_read(engines, models):
    """By way of the arena as well: of unequal ranks, whose pieces are the smallest."""
    transfer(engines("prefill", models[0], tp=3), engines("decode", models[1], tp=2))


_OTHER_BLOCKS = (
    "has blocks of 16 tokens, 16 to a slot.* but of 48 tokens, 48 to a slot.* --block-size"
)


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        (other(ROCM, block_tokens=48), _OTHER_BLOCKS),
        (other(NVFP4, block_tokens=48), _OTHER_BLOCKS),
        (other(M3_NVFP4, block_tokens=48), _OTHER_BLOCKS),
        (
            other(TURBOQUANT, quantized="turboquant_4bit_nc"),
            "TURBOQUANT_K8V4 .*there and .*TURBOQUANT_4BIT_NC .*--kv-cache-dtype",
        ),
        (
            other(SIDES, by=RocmAttentionBackend, split=packed_sides),
            "in slots there and keys and values apart, in packed heads here.*--attention-backend",
        ),
        (
            other(M3_NVFP4, by=NVFP4.by, split=quarters),
            "packed heads there and keys, their scales, values, their scales here",
        ),
    ],
    ids=["ROCM_ATTN", "NVFP4", "M3 with NVFP4", "other bits", "B12X to ROCM_ATTN", "M3 to NVFP4"],
)
def test_what_would_have_to_be_arranged_anew_is_refused(engines, caplog_vllm, kinds, message):
    """At the handshake: other blocks of what is packed, other numbers, another arrangement."""
    p, d = (
        engines(engine_id, Model((kept,)))
        for engine_id, kept in zip(("prefill", "decode"), kinds, strict=True)
    )
    address = p.serve()
    p.offer("p-a")
    receive = Receive(address, "p-a", d.block_ids(4), p.block_ids(3), NUM_TOKENS, NUM_TOKENS, OFFER)
    d.start(receive={"d-a": receive})
    Progress(p, d).until(d, received="d-a")
    (worker,) = d.workers.values()
    assert set(worker.report.take_failed()) == {"d-a"}
    assert re.search(f"layer model.layers.0.attn .*{message}", caplog_vllm.text)
