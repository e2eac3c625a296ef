# SPDX-License-Identifier: Apache-2.0
"""Producers with prefill context parallelism (PCP): their first ranks serve, the others keep still.

Ranks of one PCP group compute parts of a prompt, and gather what they store: without decode context
parallelism, each has the whole cache. vLLM keys what workers say at the handshake by stage and TP
rank alone, so that one of them can be read from. That is the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm.distributed.parallel_state import get_pcp_group

from ..errors import LocalLayoutError
from ..protocol.ids import RequestId
from ..protocol.quoting import quote
from .caches.ranks import shares_over_pcp
from .metadata import ReshardConnectorMetadata, WorkerNews
from .settings import Settings

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig, ParallelConfig

    from .stats import ReshardStats


def is_pcp_replica(parallel_config: ParallelConfig) -> bool:
    """Whether this worker holds what another one serves."""
    return (
        parallel_config.prefill_context_parallel_size > 1
        and not shares_over_pcp(parallel_config)
        and get_pcp_group().rank_in_group > 0
    )


def refuse_pcp_consumers(
    parallel_config: ParallelConfig, transfer_config: KVTransferConfig, settings: Settings
) -> None:
    """Refuse engines that have prefill context parallelism, and would read.

    What a rank reads is in its own cache alone, and attention with PCP takes it that all ranks of a
    group have the same.

    Args:
        parallel_config: The engine's sizes.
        transfer_config: Its role.
        settings: Its options.

    Raises:
        LocalLayoutError: It is such an engine.
    """
    if (size := parallel_config.prefill_context_parallel_size) == 1:
        return
    option = f"--prefill-context-parallel-size {size:d}"
    if transfer_config.is_kv_consumer:
        raise LocalLayoutError(
            f"{option} with kv_role {quote(str(transfer_config.kv_role))}: such an engine is read "
            "from, and cannot read: set kv_role to kv_producer, or use "
            "--prefill-context-parallel-size 1"
        )
    if settings.bidirectional_kv_xfer:
        raise LocalLayoutError(
            f"{option} with bidirectional_kv_xfer, by which it would read answers back, and it "
            "cannot read: leave that option out, or use --prefill-context-parallel-size 1"
        )


class PcpReplicaWorker:
    """A worker that is not read from, and reads nothing. Belongs to the engine's thread.

    A request counts as sent when all workers of its engine have said so. This one says it at once,
    and is not asked again: the blocks are held until the worker that serves them says it, too. So
    it has no lease that could run out, no reader that could be late, and neither agent nor thread.

    Attributes:
        handshake: Nothing, which leaves the place of its stage and TP rank to the one that serves.
    """

    handshake = None

    def __init__(self) -> None:
        # Those that may be offered, as the ledger of the worker that serves has them: an offer that
        # it does not know, and never reports, is not reported here either.
        self._admitted: set[RequestId] = set()
        self._sent: set[RequestId] = set()

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """The caches are this engine's own business."""

    def submit(self, metadata: ReshardConnectorMetadata) -> None:
        """Take note of the offers of this step; announcements and boards are for others."""
        # First what has ended: a name may be used again in the same step.
        self._admitted -= metadata.withdrawn
        self._admitted |= metadata.admitted
        offered = self._admitted & metadata.offered.keys()
        self._admitted -= offered
        self._sent |= offered

    def get_finished(self) -> tuple[set[RequestId], set[RequestId]]:
        """The requests that were offered since the last call, and no others."""
        sent, self._sent = self._sent, set()
        return sent, set()

    def take_failed(self) -> dict[RequestId, frozenset[int]]:
        """Nothing, as nothing is read."""
        return {}

    def take_news(self) -> WorkerNews:
        """Nothing, as nothing is watched or received."""
        return WorkerNews()

    def take_stats(self) -> ReshardStats | None:
        """Nothing, as nothing is moved; what is held is counted where it is served."""
        return None

    def close(self) -> None:
        """There is nothing to give back."""
