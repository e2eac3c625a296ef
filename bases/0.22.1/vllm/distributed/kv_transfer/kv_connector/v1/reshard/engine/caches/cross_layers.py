# SPDX-License-Identifier: Apache-2.0
"""Caches of all layers in one tensor, which connectors of 0.22.1 are asked for and are given.

Later releases make each layer a view of its own, whatever lies where. This module goes when 0.22.1
goes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import connector as upstream

from ..settings import read_settings
from .probed_shapes import split_layers

if TYPE_CHECKING:
    import torch
    from vllm.v1.attention.backend import AttentionBackend


class CrossLayerConnector(upstream.NixlConnector):
    """Upstream's connector, which takes such a tensor for what it is: many layers."""

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """As upstream's, which asks for the attention backend also where nobody wants this."""
        wanted = read_settings(self.kv_transfer_config).enable_cross_layers_blocks
        return wanted and bool(super().prefer_cross_layer_blocks)

    def register_cross_layers_kv_cache(
        self, kv_cache: torch.Tensor, attn_backend: type[AttentionBackend]
    ) -> None:
        """Make this worker's KV caches known, which lie in one tensor."""
        self.register_kv_caches(split_layers(kv_cache, self.kv_cache_config, attn_backend))
