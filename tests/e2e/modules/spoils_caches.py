# SPDX-License-Identifier: Apache-2.0
"""The connector, but that it can lose what was read of some layers.

The file that SPOILED_LAYERS_FILE names holds a pattern: of layers whose names it matches, blocks
that were read are cleared, as if they never had been.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.reshard import connector


class NixlConnector(connector.NixlConnector):
    """Spoils blocks between their read and the report of it."""

    def register_kv_caches(self, kv_caches: Any) -> None:
        """Remember the caches."""
        super().register_kv_caches(kv_caches)
        self._caches = kv_caches
        self._blocks: dict[str, Any] = {}

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Remember which blocks are read into."""
        super().bind_connector_metadata(connector_metadata)
        for name, request in connector_metadata.receive.items():
            self._blocks[name] = request.local_block_ids

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Clear blocks of layers that the pattern matches."""
        results = super().get_transfer_results(finished_req_ids)
        pattern = Path(os.environ["SPOILED_LAYERS_FILE"]).read_text(encoding="utf-8")
        for name in results.finished_recving or ():
            for group, blocks in zip(
                self.kv_cache_config.kv_cache_groups, self._blocks.pop(name), strict=True
            ):
                for layer in group.layer_names:
                    if pattern and re.search(pattern, layer):
                        self._clear(self._caches[layer], list(blocks))
        return results

    def _clear(self, cache: Any, blocks: list[int]) -> None:
        per_id = len(cache) // self.kv_cache_config.num_blocks
        cache.view(-1, per_id, *cache.shape[1:])[blocks] = 0
