# SPDX-License-Identifier: Apache-2.0
"""Attention of heads to heads over a cache in blocks, whatever the format of these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
)

from vllm.distributed import get_dcp_group

from . import formats, shared_tokens


@dataclass
class Metadata(AttentionMetadata):
    """A batch.

    Attributes:
        starts: where the tokens of each request begin, and where the last ones end.
        lengths: of each request, with its tokens in this batch.
        block_table: the blocks of each request.
        is_causal: whether tokens attend to none that come after them.
        run_tokens: that are dealt to a rank at a time, where ranks share tokens out.
    """

    starts: list[int]
    lengths: list[int]
    block_table: torch.Tensor
    is_causal: bool
    run_tokens: int


class Builder(AttentionMetadataBuilder[Metadata]):
    """Takes from vLLM's metadata what is looked at."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # Not before: a connector may have had it changed.
        self.run_tokens = vllm_config.parallel_config.cp_kv_cache_interleave_size

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Metadata:
        """Return the metadata of a batch."""
        batch = common_attn_metadata
        return Metadata(
            batch.query_start_loc_cpu[: batch.num_reqs + 1].tolist(),
            batch.seq_lens[: batch.num_reqs].tolist(),
            batch.block_table_tensor,
            bool(batch.causal),
            self.run_tokens,
        )


class Attention(AttentionImpl[Metadata]):
    """Attention at float32, request by request."""

    format: ClassVar[type[formats.Format]] = formats.Format
    can_return_lse_for_decode = True
    supports_dcp = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if alibi_slopes is not None or attn_type != AttentionType.DECODER:
            raise ValueError(
                f"attention of type {attn_type} with slopes {alibi_slopes} is not computed with "
                "GPU_CACHES, only that of decoders without: unset it for this model"
            )
        if self.dcp_world_size > 1 and (sliding_window or sinks is not None):
            raise ValueError(
                "ranks cannot share the tokens of a window out, nor sinks, with GPU_CACHES: leave "
                "out --decode-context-parallel-size for this model"
            )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = scale
        self.num_kv_heads = num_kv_heads or num_heads
        self.window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.soft_cap = logits_soft_cap
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write keys and values, [tokens, heads, size], to the slots that are not negative."""
        slots = slot_mapping[: len(key)].long()
        chosen = (slots >= 0).nonzero()[:, 0]
        self.format.write(kv_cache, slots[chosen], key[chosen], value[chosen])

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Metadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend with queries, [tokens, heads, size], to what the cache has of their requests."""
        if attn_metadata is None:
            return output
        batch, block_tokens, ranks = attn_metadata, kv_cache.shape[2], self.dcp_world_size
        if ranks > 1:
            # Each rank attends for all of them to its own tokens.
            query = get_dcp_group().all_gather(query.contiguous(), dim=1)
        found = torch.zeros_like(query, dtype=torch.float32)
        log_sums = torch.full(query.shape[:2], -torch.inf)
        for request, length in enumerate(batch.lengths):
            begin, end = batch.starts[request : request + 2]
            if begin == end:
                continue
            first = length - (end - begin)
            # Blocks in front of a window may be another request's by now.
            oldest = max(0, first + 1 - self.window) if self.window else 0
            skipped = oldest // block_tokens
            places = shared_tokens.places(length, self.dcp_rank, ranks, batch.run_tokens)
            blocks = batch.block_table[request, skipped : -(-len(places) // block_tokens)].long()
            keys, values = self.format.read(kv_cache, blocks, self.head_size)
            places = places[skipped * block_tokens :]
            found[begin:end], log_sums[begin:end] = self._attend(
                query[begin:end].float(),
                keys[: len(places)],
                values[: len(places)],
                self._sees(torch.arange(first, length), places, batch.is_causal),
            )
        if ranks > 1:
            found = shared_tokens.join(found, log_sums)
        output.copy_(found.reshape(output.shape))
        return output

    def _sees(self, asking: torch.Tensor, places: torch.Tensor, is_causal: bool) -> torch.Tensor:
        """Which positions see which, [asking, places]."""
        seen = torch.ones(len(asking), len(places), dtype=torch.bool)
        if is_causal:
            seen &= places <= asking[:, None]
        if self.window:
            seen &= places > asking[:, None] - self.window
        return seen

    def _attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sees: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What queries find, [asking, heads, size], and the log-sums of their scores."""
        # A head of the cache is that of several queries.
        queries = queries.unflatten(1, (self.num_kv_heads, -1))
        scores = torch.einsum("thgd,nhd->hgtn", queries, keys) * self.scale
        if self.soft_cap:
            scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
        scores = scores.masked_fill(~sees, -torch.inf)
        if self.sinks is not None:
            sinks = self.sinks.float().view(self.num_kv_heads, -1, 1, 1)
            scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), -1)
        log_sums = scores.logsumexp(-1)
        # Of those that see nothing, as what they would is another rank's, there is no softmax.
        weights = (scores - log_sums[..., None]).exp()[..., : len(keys)].nan_to_num(0.0)
        # What nobody sees may be anything, not a number included.
        values = values.masked_fill(~sees.any(0)[:, None, None], 0.0)
        found = torch.einsum("hgtn,nhd->thgd", weights, values).flatten(1, 2)
        return found, log_sums.flatten(0, 1).T
