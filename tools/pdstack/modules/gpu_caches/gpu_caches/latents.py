# SPDX-License-Identifier: Apache-2.0
"""Attention to latents, MLA, over a cache in blocks of any size, and a backend for each format.

A format has a token's latent for the key of its one head, and what has its position for the value.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl
from vllm.v1.kv_cache_layout import KVCacheLayout

from . import formats
from .heads import BLOCK_COMPACT, kernel_block_sizes
from .identity import takes_the_place_of


class Attention(CPUMLAImpl):
    """Writes tokens, and attends to them when it decodes; vLLM computes prompts."""

    format: ClassVar[type[formats.Format]] = formats.Format
    can_return_lse_for_decode = True
    supports_dcp = True
    dcp_world_size: int

    def __init__(self, *args: Any, **mla_args: Any) -> None:
        ranks = self.dcp_world_size
        super().__init__(*args, **mla_args)
        # Which sets it to 1.
        self.dcp_world_size = ranks

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
    ) -> None:
        """Write latents, [tokens, size], and positions to the slots that are not negative."""
        if not kv_cache.numel():
            return
        slots = slot_mapping.flatten()[: len(kv_c_normed)].long()
        chosen = (slots >= 0).nonzero()[:, 0]
        latents, positions = (
            each.reshape(len(each), 1, -1)[chosen] for each in (kv_c_normed, k_pe)
        )
        self.format.write(kv_cache.unsqueeze(1), slots[chosen], latents, positions)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend with one query a request, [requests, heads, latent and position].

        Where ranks share tokens out, to those of this rank, of which vLLM says how many there are.
        """
        queries = (torch.cat(q, -1) if isinstance(q, tuple) else q).float()
        view, decode = kv_c_and_k_pe_cache.unsqueeze(1), attn_metadata.decode
        block_tokens = view.shape[2]
        found = torch.zeros(*queries.shape[:2], self.kv_lora_rank)
        log_sums = torch.full(queries.shape[:2], -torch.inf)
        for request, length in enumerate(decode.seq_lens.tolist()):
            blocks = decode.block_table[request, : -(-length // block_tokens)].long()
            latents, positions = (
                each[:length, 0] for each in self.format.read(view, blocks, self.kv_lora_rank)
            )
            scores = queries[request] @ torch.cat((latents, positions), -1).T * self.scale
            log_sums[request] = scores.logsumexp(-1)
            found[request] = (scores - log_sums[request, :, None]).exp().nan_to_num(0.0) @ latents
        return found.to(q[0].dtype), log_sums


class Backend(CPUMLABackend):
    """What all backends have in common."""

    format: ClassVar[type[formats.Format]]
    layouts: ClassVar[tuple[KVCacheLayout, ...] | None] = None

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Latents of any size."""
        return []

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Blocks of any size, or of the one that is asked for."""
        return kernel_block_sizes()

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        """All that a kernel's blocks divide."""
        return block_size is None or block_size % 16 == 0

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...] | None:
        """All, unless a format speaks of whole blocks."""
        return cls.layouts


@takes_the_place_of("FLASH_ATTN_MLA", Attention)
class Slots(Backend):
    """`concat_and_cache_mla`, of whichever backend."""

    format = formats.Format


@takes_the_place_of(None, Attention)
class Scrambled(Backend):
    """Nobody's."""

    format = formats.Scrambled
    layouts = BLOCK_COMPACT
