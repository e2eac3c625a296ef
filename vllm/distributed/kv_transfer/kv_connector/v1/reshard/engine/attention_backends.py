# SPDX-License-Identifier: Apache-2.0
"""Which attention backends' caches can be read, and how these arrange the tokens of a block.

A tensor's shape does not tell what lies where: some backends take a block for a page of their own
and arrange its tokens for their kernels, in a cache that looks like any other. What is here was
read in the backends' sources; everything else is refused. Bytes read from a wrong place are KV of
other tokens, and nothing but the answers would tell.

Names do not tell either: two backends are called FLASH_ATTN, and models subclass one that is plain
to store in their own way. So a backend counts as the one of its name only where both its name and
its implementation, which is what stores, come from that one's module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..errors import LocalLayoutError

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionBackend

_PACKAGE = "vllm.v1.attention.backends"

_PLAIN: Mapping[str, str] = {
    # Written by `reshape_and_cache_flash`: each head of each token has a slot, keys before values.
    "FLASH_ATTN": "flash_attn",
    "FLASHINFER": "flashinfer",
    "FLEX_ATTENTION": "flex_attention",
    # The same in Triton; scales of single tokens and heads lie in their slots.
    "TRITON_ATTN": "triton_attn",
    # Keys and values differ in size, and share a slot.
    "FLASH_ATTN_DIFFKV": "flash_attn_diffkv",
    "TRITON_ATTN_DIFFKV": "triton_attn_diffkv",
    # Written by `concat_and_cache_mla`: each token has a slot, the latent before the rope.
    "CUTLASS_MLA": "mla.cutlass_mla",
    "FLASHINFER_MLA": "mla.flashinfer_mla",
    "FLASHMLA": "mla.flashmla",
    "FLASH_ATTN_MLA": "mla.flashattn_mla",
    "TOKENSPEED_MLA": "mla.tokenspeed_mla",
    "TRITON_MLA": "mla.triton_mla",
    # The same with functions of their own.
    "AMX_MLA": "mla.amx_mla",
    "CPU_MLA": "mla.cpu_mla",
}
"""Backends whose blocks are plain strides, and the modules that they stand in."""

_PACKED: Mapping[str, str] = {
    # Keys of a head of a block, then its values, both arranged for the instruction set.
    "CPU_ATTN": "cpu_attn",
}
"""Backends whose blocks are whole heads that only they can look into."""


def packs_tokens(layer: str, backend: type[AttentionBackend]) -> bool:
    """Whether a backend arranges the tokens of a block as it likes.

    Args:
        layer: The layer that it is used for, to be named where it is refused.
        backend: The backend.

    Raises:
        LocalLayoutError: It is not known how the backend stores.
    """
    name = backend.get_name()
    modules = {_defined_in(backend, method) for method in ("get_name", "get_impl_cls")}
    for known, packed in ((_PLAIN, False), (_PACKED, True)):
        if modules == {f"{_PACKAGE}.{known.get(name)}"}:
            return packed
    raise LocalLayoutError(
        f"layer {layer} uses attention backend {name} of {' and '.join(sorted(modules))}, and how "
        "that one arranges its KV cache is not known here: use --attention-backend with one of "
        f"{', '.join(sorted({*_PLAIN, *_PACKED}))}"
    )


def _defined_in(backend: type[AttentionBackend], method: str) -> str:
    """The module of the class that a method comes from."""
    return next(each.__module__ for each in backend.__mro__ if method in vars(each))
