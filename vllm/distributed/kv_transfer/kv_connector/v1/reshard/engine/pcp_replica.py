# SPDX-License-Identifier: Apache-2.0
"""Producers with prefill context parallelism (PCP): only the first rank of a PCP group is read.

The ranks of a PCP group compute parts of a prompt, and gather the KV that they store: without
decode context parallelism, each has the whole cache. vLLM keys the workers' handshake data by stage
and TP rank only, so only one rank of the group can be read from. That is the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm.distributed.parallel_state import get_pcp_group

from ..errors import LocalLayoutError, quote
from ..protocol.ids import RequestId
from .caches.ownership import shares_over_pcp
from .metadata import ReshardConnectorMetadata, WorkerReport
from .settings import Settings

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig, ParallelConfig


def is_pcp_replica(parallel_config: ParallelConfig) -> bool:
    """Return whether this worker holds a copy of a cache that another worker serves."""
    return (
        parallel_config.prefill_context_parallel_size > 1
        and not shares_over_pcp(parallel_config)
        and get_pcp_group().rank_in_group > 0
    )


def refuse_pcp_consumers(
    parallel_config: ParallelConfig, transfer_config: KVTransferConfig, settings: Settings
) -> None:
    """Refuse an engine that has prefill context parallelism and may read.

    A rank reads into its own cache only, but attention with PCP assumes that all ranks of a group
    have the same cache.

    Args:
        parallel_config: The engine's parallel sizes.
        transfer_config: The engine's role.
        settings: The connector's options.

    Raises:
        LocalLayoutError: The engine has PCP and may read.
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
    """A worker that neither reads nor is read from. Belongs to the engine's thread.

    A request counts as sent once all workers of its engine have reported it. This worker reports it
    at once and only once: the blocks are held until the serving worker reports it, too. So this
    worker needs no lease, no reader, no agent and no thread.

    Attributes:
        handshake: Always None, so that the serving worker's data is used for this stage and TP
            rank.
        report: As `ReshardWorker`'s.
    """

    handshake = None

    def __init__(self) -> None:
        # Requests that may be offered, as in the serving worker's ledger: an offer that is not in
        # that ledger is never reported there, and must not be reported here.
        self._admitted: set[RequestId] = set()
        self.report = WorkerReport()

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Do nothing: no other engine accesses these caches."""

    def submit(self, metadata: ReshardConnectorMetadata) -> None:
        """Record the offers of this step; announcements do not concern this worker."""
        # Withdrawn requests first: an id may be used again in the same step.
        self._admitted -= metadata.withdrawn
        self._admitted |= metadata.admitted
        offered = self._admitted & metadata.offered.keys()
        self._admitted -= offered
        self.report.sent |= offered

    def collect(self) -> WorkerReport:
        """Return `report`: the requests offered since it was taken out are sent."""
        return self.report

    def close(self) -> None:
        """Do nothing: there is nothing to free."""
