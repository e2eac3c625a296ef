# SPDX-License-Identifier: Apache-2.0
"""The connector for a vLLM as released: it refuses what only the fork can serve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, final

from vllm.config import CompilationMode
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
)
from vllm.logger import init_logger
from vllm.platforms import current_platform

from .connector import NixlConnector as ForkConnector
from .engine.metadata import ReshardHandshakeMetadata
from .errors import LocalLayoutError
from .installed import DISTRIBUTION
from .limits import Needs, limits_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger(__name__)


@final
class NixlConnector(ForkConnector):
    """The fork's, in an engine without the fork's patches."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        # Not in __new__, which may leave the engine to upstream's connector.
        for limit in limits_of(_needs(vllm_config)):
            if limit.fatal:
                raise LocalLayoutError(str(limit))
            if role == KVConnectorRole.SCHEDULER:
                logger.info("Without the fork's patches, %s.", limit)
        super().__init__(vllm_config, role, kv_cache_config)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Serve the handshakes of all stages, if the plugin is there on all nodes."""
        for (pp_rank, tp_rank), payload in sorted(metadata.items()):
            if not isinstance(payload, ReshardHandshakeMetadata):
                raise LocalLayoutError(
                    f"the worker pp{pp_rank}tp{tp_rank} runs another connector, as it sent a "
                    f"{type(payload).__name__}: install {DISTRIBUTION} on every node, and let "
                    "VLLM_PLUGINS be the same on all"
                )
        super().set_xfer_handshake_metadata_pp_aware(metadata)


def _needs(vllm_config: VllmConfig) -> Needs:
    parallel = vllm_config.parallel_config
    return Needs(
        device_type=current_platform.device_type,
        pp_size=parallel.pipeline_parallel_size,
        num_workers=parallel.world_size,
        compiles=vllm_config.compilation_config.mode != CompilationMode.NONE,
        pools=vllm_config.model_config.runner_type == "pooling",
        v2_runner=vllm_config.use_v2_model_runner,
    )
