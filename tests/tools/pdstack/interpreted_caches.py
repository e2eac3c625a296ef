# SPDX-License-Identifier: Apache-2.0
"""What caches of GPUs have on CPU is what kernels of Triton's write, run by its interpreter.

`test_gpu_caches` has pytest run these in a process that has the interpreter.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.layers.quantization.turboquant.config import TurboQuantConfig
from vllm.model_executor.layers.quantization.utils.quant_utils import FP8_DTYPE
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.b12x import B12xPagedAttentionBackend, B12xPagedAttentionImpl
from vllm.v1.attention.backends.rocm_attn import RocmAttentionBackend, RocmAttentionImpl
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl
from vllm.v1.attention.backends.turboquant_attn import (
    TurboQuantAttentionBackend,
    TurboQuantAttentionImpl,
)
from vllm.v1.attention.backends.ultraquant_attn import (
    UltraQuantAttentionBackend,
    UltraQuantAttentionImpl,
)
from vllm.v1.attention.ops import triton_turboquant_store
from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash
from vllm.v1.attention.ops.triton_turboquant_decode import _tq_full_dequant_kv
from vllm.v1.attention.ops.ultraquant.reference import (
    UltraQuantEncoded,
    hadamard_matrix,
    ultraquant_dequant,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode
from vllm.v1.worker.block_table import ComputeSlotMappingKernel

from tests.v1.kv_connector.unit.reshard.engine.interpreted_writers import SCALES, shuffling_aiter
from tests.v1.kv_connector.unit.reshard.engine.release_caches import LAYERS, Cache, bare
from tools.pdstack.caches import BITS
from tools.pdstack.modules.gpu_caches.gpu_caches import formats, heads, shared_tokens

LAYOUTS = pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BHLNC", "LHBNC"])
HEADS, SIZE = 3, 32


@pytest.fixture(autouse=True)
def device(monkeypatch):
    """A GPU as far as launchers ask for one."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (9, 0))
    monkeypatch.setattr(type(current_platform), "has_device_capability", lambda *_: True)


def spec(
    block_tokens: int, dtype: torch.dtype = torch.float32, bits: str = "auto", size: int = SIZE
):
    """A specification of full attention."""
    return FullAttentionSpec(
        block_size=block_tokens,
        num_kv_heads=HEADS,
        head_size=size,
        dtype=dtype,
        kv_quant_mode=get_kv_quant_mode(bits),
    )


def drawn(tokens: int, size: int, seed: int) -> torch.Tensor:
    """Numbers of heads."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, HEADS, size, generator=random)


def of_fp8(tokens: int, size: int, seed: int) -> torch.Tensor:
    """Those that fp8 has: the interpreter rounds amiss."""
    return drawn(tokens, size, seed).to(FP8_DTYPE).float()


def numbers(tokens: int, size: int, seed: int) -> torch.Tensor:
    """Those that fp8 has, but for the scale of each head."""
    found = of_fp8(tokens, size, seed)
    found[..., 0] = torch.finfo(FP8_DTYPE).max
    random = torch.Generator().manual_seed(seed)
    return found * 2.0 ** torch.randint(-3, 4, (tokens, HEADS, 1), generator=random)


def of_bfloat16(tokens: int, size: int, seed: int) -> torch.Tensor:
    """Those that bfloat16 has, of which few are in the middle of two codes once they are turned."""
    return drawn(tokens, size, seed).bfloat16().float()


def compare(theirs: Cache, ours: Cache, write, backend, draw=numbers) -> None:
    """See that the same tokens make the same memory, in blocks that are full and one that is not.

    Args:
        theirs: A cache as the release's backend has it.
        ours: The same for ours.
        write: The release's writer: of a view, slots, keys and values.
        backend: Ours.
        draw: What draws the numbers.
    """
    assert theirs.spec == ours.spec
    tokens, size = ours.spec.block_size + 5, ours.spec.head_size
    keys, values = (draw(tokens, size, seed) for seed in (3, 4))
    slots = torch.arange(ours.spec.block_size, ours.spec.block_size + tokens).flip(0)
    for background in (0, 0xA5):
        memory = [
            cache.after(lambda: each(cache.views[LAYERS[1]], slots, keys, values), background)  # noqa: B023
            for cache, each in ((theirs, write), (ours, backend.format.write))
        ]
        assert (memory[0] != background).any()
        assert (memory[0] == memory[1]).all()


@LAYOUTS
@pytest.mark.parametrize("block_tokens", [16, 48])
def test_slots(layout, block_tokens):
    """`triton_reshape_and_cache_flash`, which does what that of CUDA does."""
    impl = TritonAttentionImpl(HEADS, SIZE, 1.0, HEADS, None, None, "auto")
    theirs = Cache(TritonAttentionBackend, spec(block_tokens), layout)
    ours = Cache(heads.Slots, spec(block_tokens), layout)
    compare(
        theirs,
        ours,
        lambda view, slots, keys, values: impl.do_kv_cache_update(
            SCALES, keys, values, view, slots
        ),
        heads.Slots,
    )


@LAYOUTS
def test_scales_of_tokens_and_heads(layout):
    """`triton_reshape_and_cache_flash_per_token_head_quant`, places and numbers."""
    of_eight = spec(32, torch.uint8, "fp8_per_token_head")
    impl = TritonAttentionImpl(HEADS, SIZE, 1.0, HEADS, None, None, "fp8_per_token_head")
    theirs = Cache(TritonAttentionBackend, of_eight, layout)
    # All scales are put in place once: here before there is anything to compare.
    impl._ensure_scale_caches(theirs.views[LAYERS[1]])
    compare(
        theirs,
        Cache(heads.Scaled, of_eight, layout),
        lambda view, slots, keys, values: impl.do_kv_cache_update(
            SCALES, keys, values, view, slots
        ),
        heads.Scaled,
    )


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC"])
def test_keys_and_values_apart(layout):
    """The views of `B12xPagedAttentionImpl`, to which it writes as all others do."""
    impl = bare(
        B12xPagedAttentionImpl,
        num_kv_heads=HEADS,
        head_size=SIZE,
        kv_cache_dtype="auto",
        kv_torch_dtype=torch.float32,
    )

    def write(view, slots, keys, values):
        triton_reshape_and_cache_flash(
            keys, values, *impl._kv_cache_views(view), slots, "auto", *vars(SCALES).values()
        )

    theirs = Cache(B12xPagedAttentionBackend, spec(64), layout)
    compare(theirs, Cache(heads.Sides, spec(64), layout), write, heads.Sides)


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (0, 1, 3, 2, 4)], ids=["NHD", "HND"])
def test_planes(order):
    """`triton_reshape_and_cache_flash` with the two planes of 0.22.1, in both of its orders."""
    sizes, block_tokens = (2, 4, 16, HEADS, SIZE), 16
    memory = []
    keys, values = numbers(21, SIZE, 3), numbers(21, SIZE, 4)
    slots = torch.arange(16, 37).flip(0)
    for is_theirs in (True, False):
        cache = torch.full([sizes[axis] for axis in order], 7.0)
        view = cache.permute([order.index(axis) for axis in range(5)])
        assert view.shape == sizes and view.shape[2] == block_tokens
        if is_theirs:
            triton_reshape_and_cache_flash(
                keys, values, *view.unbind(0), slots, "auto", *vars(SCALES).values()
            )
        else:
            formats.Planes.write(view, slots, keys, values)
        memory.append(cache)
        found = formats.Planes.read(view, torch.tensor([1, 2]), SIZE)
        for right, each in zip((keys, values), found, strict=True):
            assert torch.equal(each[:21], right.flip(0))
    assert torch.equal(*memory) and (memory[0] != 7.0).any()


@pytest.mark.parametrize(("layout", "block_tokens"), [("LBHNC", 32), ("LBHNC", 64), ("LHBNC", 48)])
def test_packed_keys_and_values_apart(layout, block_tokens):
    """`triton_reshape_and_cache_flash` with the views of `PagedAttention`, as ROCm's attention."""
    impl = bare(
        RocmAttentionImpl,
        attn_type=AttentionType.DECODER,
        num_kv_heads=HEADS,
        head_size=SIZE,
        kv_cache_dtype="auto",
        _use_interleaved_v_cache=False,
    )
    theirs = Cache(RocmAttentionBackend, spec(block_tokens), layout)
    compare(
        theirs,
        Cache(heads.PackedSides, spec(block_tokens), layout),
        lambda view, slots, keys, values: impl.do_kv_cache_update(
            SCALES, keys, values, view, slots
        ),
        heads.PackedSides,
    )


@pytest.mark.parametrize("layout", ["LBHNC", "LHBNC"])
@pytest.mark.parametrize("block_tokens", [16, 32])
def test_shuffled_keys_and_values(monkeypatch, layout, block_tokens):
    """`reshape_and_cache_shuffle_triton`, as AITER's attention calls it."""
    module = shuffling_aiter(monkeypatch)
    impl = bare(
        module.AiterFlashAttentionImpl,
        num_kv_heads=HEADS,
        head_size=SIZE,
        kv_cache_dtype="auto",
    )
    theirs = Cache(module.AiterFlashAttentionBackend, spec(block_tokens), layout)
    compare(
        theirs,
        Cache(heads.Shuffled, spec(block_tokens), layout),
        lambda view, slots, keys, values: impl.do_kv_cache_update(
            SCALES, keys, values, view, slots
        ),
        heads.Shuffled,
    )


@pytest.mark.parametrize("backend", [heads.TurboQuant, heads.TurboQuant3])
def test_turboquant(monkeypatch, backend):
    """`triton_turboquant_store`, byte for byte, and what `_tq_full_dequant_kv` makes of it."""
    monkeypatch.setattr(triton_turboquant_store, "_use_fp8_e4b15", lambda _: 0)
    name, size = BITS[backend.__name__], 64
    config = TurboQuantConfig.from_cache_dtype(name, size)
    impl = bare(
        TurboQuantAttentionImpl,
        num_kv_heads=HEADS,
        head_size=size,
        tq_config=config,
        _soa_store=False,
    )
    layer = SimpleNamespace()
    of_few = spec(32, torch.uint8, name, size)
    ours = Cache(backend, of_few, "LBNHC")
    compare(
        Cache(TurboQuantAttentionBackend, of_few, "LBNHC"),
        ours,
        lambda view, slots, keys, values: impl.do_kv_cache_update(layer, keys, values, view, slots),
        backend,
        of_fp8,
    )
    view = ours.views[LAYERS[1]]
    theirs = torch.zeros(2, 1, HEADS, 64, size, dtype=torch.float16)
    cache = view.transpose(1, 2)
    _tq_full_dequant_kv[64, HEADS](
        cache,
        torch.tensor([[1, 2]], dtype=torch.int32),
        layer._tq_centroids,
        *theirs,
        *theirs[0].stride()[:3],
        *theirs[1].stride()[:3],
        *cache.stride()[:3],
        2,
        HEAD_DIM=size,
        BLOCK_SIZE=32,
        NUM_KV_HEADS=HEADS,
        MSE_BYTES=size * config.key_mse_bits // 8,
        KPS=config.key_packed_size,
        VQB=config.effective_value_quant_bits,
        VAL_DATA_BYTES=size * config.value_quant_bits // 8,
        MSE_BITS=config.key_mse_bits,
        KEY_FP8=int(config.key_fp8),
        BLOCK_D=size,
        NORM_CORRECTION=int(config.norm_correction),
    )
    keys, values = theirs[:, 0].float().transpose(1, 2)
    if not config.key_fp8:
        keys = keys @ layer._tq_Pi
    found = backend.format.read(view, torch.tensor([1, 2]), size)
    for right, each in zip((keys, values), found, strict=True):
        # Of this many tokens something was written, over bytes that stand for anything.
        assert torch.allclose(each[:37], right[:37], rtol=2e-3, atol=2e-3)


def test_ultraquant():
    """`ultraquant_store`, byte for byte, and what `ultraquant_dequant` makes of it."""
    size, name = 64, BITS["UltraQuant"]
    impl = bare(UltraQuantAttentionImpl, num_kv_heads=HEADS, head_size=size)
    impl._use_ultraquant_flydsl = False
    of_few = spec(32, torch.uint8, name, size)
    ours = Cache(heads.UltraQuant, of_few, "LBNHC")
    compare(
        Cache(UltraQuantAttentionBackend, of_few, "LBNHC"),
        ours,
        lambda view, slots, *sides: impl.do_kv_cache_update(
            SimpleNamespace(), *(side.bfloat16() for side in sides), view, slots
        ),
        heads.UltraQuant,
        of_bfloat16,
    )
    view = ours.views[LAYERS[1]]
    # Tokens, heads, keys and values, content.
    slots = view[1].transpose(0, 1).unflatten(-1, (2, -1))
    encoded = UltraQuantEncoded(*slots.tensor_split([size // 2], -1))
    keys, values = ultraquant_dequant(encoded, size).unbind(2)
    found = heads.UltraQuant.format.read(view, torch.tensor([1]), size)
    assert torch.equal(found[1], values)
    assert torch.allclose(found[0], keys @ hadamard_matrix(size, keys.device), atol=1e-6)


@pytest.mark.parametrize(("ranks", "run"), [(1, 1), (2, 1), (2, 16), (3, 8), (4, 4)])
def test_slots_of_tokens_that_ranks_share_out(ranks, run):
    """`ComputeSlotMappingKernel`, for each rank: of two requests, and padding behind them."""
    starts = torch.tensor([0, 70, 75], dtype=torch.int32)
    positions = torch.cat((torch.arange(70), torch.arange(113, 118)))
    table = torch.randperm(40, generator=torch.Generator().manual_seed(1)).int().view(2, 20)
    for rank in range(ranks):
        theirs, ours = (torch.full((80,), 7) for _ in range(2))
        common = 75, 80, starts, positions, table, 20
        sizes = dict(
            KV_CACHE_BLOCK_SIZE=16,
            TOTAL_CP_WORLD_SIZE=ranks,
            TOTAL_CP_RANK=rank,
            CP_KV_CACHE_INTERLEAVE_SIZE=run,
            PAD_ID=-1,
            BLOCK_SIZE=1024,
        )
        ComputeSlotMappingKernel.kernel[(3,)](*common, theirs, **sizes)
        shared_tokens.map_slots(*common, ours, **sizes)
        assert (theirs >= 0).any()
        assert ours.tolist() == theirs.tolist()
