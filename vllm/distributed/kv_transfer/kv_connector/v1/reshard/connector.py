# SPDX-License-Identifier: Apache-2.0
"""`NixlConnector` for any two parallel layouts: a facade over scheduler and worker.

The fork and the plugin register it under that name. Select it with

    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_producer"}'

on the prefill engine, and with the role `kv_consumer` on the decode engine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import connector as upstream
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

from .engine.caches.drafts import refuse_impossible_drafts
from .engine.caches.geometry import keeps_no_middle, unserved_layer
from .engine.caches.ownership import shares_over_pcp
from .engine.compat import (
    FAILED_READS_ARE_NAMED,
    LAYERS_SAY_WHAT_IS_SHARED,
    SLEEP_IS_UPSTREAMS,
    STATE_IS_UPSTREAMS,
    UpstreamConnector,
    is_in_two_memories,
    keeps_groups_back,
    makes_own_scales,
    transfer_results,
)
from .engine.content import counted_items
from .engine.failed_reads import LoadReports
from .engine.metadata import ReshardConnectorMetadata, WorkerReport
from .engine.pcp_replica import PcpReplicaWorker, is_pcp_replica, refuse_pcp_consumers
from .engine.scheduling.scheduler import ReshardScheduler
from .engine.settings import OWN_OPTIONS, Settings, read_settings
from .engine.stats import ReshardPromMetrics, ReshardStats
from .engine.worker import ReshardWorker
from .errors import LocalLayoutError, one_line
from .transport.agent import CHECK_BACKENDS, try_backends

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorStats,
        PromMetric,
        PromMetricT,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = init_logger(__name__)


class NixlConnector(UpstreamConnector):
    """Upstream's connector with a scheduler and a worker of our own.

    For a model or a device that these cannot serve, the constructor returns upstream's connector
    and logs why, and what is lost. It raises `LocalLayoutError` if upstream's cannot serve the
    configuration either: it lacks pipeline parallelism, for one.
    """

    connector_scheduler: ReshardScheduler | None
    connector_worker: ReshardWorker | PcpReplicaWorker | None

    def __new__(
        cls, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> upstream.NixlConnector:
        """Choose our connector or upstream's, from the configuration alone."""
        reason = reason_for_upstream(vllm_config, kv_cache_config)
        if reason is None:
            return super().__new__(cls)
        assert vllm_config.kv_transfer_config is not None
        _tell_what_is_lost(reason, vllm_config.kv_transfer_config)
        return upstream.NixlConnector(vllm_config, role, kv_cache_config)

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        # Not upstream's: it would construct upstream's scheduler or worker.
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        assert vllm_config.kv_transfer_config is not None
        assert vllm_config.kv_transfer_config.engine_id is not None
        self.kv_cache_config = kv_cache_config
        self.kv_transfer_config = vllm_config.kv_transfer_config
        self.engine_id = vllm_config.kv_transfer_config.engine_id
        self.connector_scheduler = self.connector_worker = None
        refuse_impossible_drafts(vllm_config)
        if not LAYERS_SAY_WHAT_IS_SHARED and (reason := _context_parallel_reason(vllm_config)):
            raise LocalLayoutError(f"{reason}, which this connector cannot read: use 1")
        settings = read_settings(self.kv_transfer_config)
        refuse_pcp_consumers(vllm_config.parallel_config, self.kv_transfer_config, settings)
        offers_answers = settings.bidirectional_kv_xfer
        if keeps_no_middle(kv_cache_config) and offers_answers:
            raise LocalLayoutError(
                "some layers keep a prompt and the last tokens of its answer only, so that "
                "bidirectional_kv_xfer cannot offer the answer: leave that option out"
            )
        if (
            kv_cache_config.has_mamba_layers
            and vllm_config.speculative_config is not None
            and offers_answers
        ):
            raise LocalLayoutError(
                "--speculative-config keeps the recurrent state of an answer in one of several "
                "blocks, and vLLM does not tell in which at its end, so that bidirectional_kv_xfer "
                "cannot offer it: leave out one of the two"
            )
        if vllm_config.model_config.enable_sleep_mode:
            raise LocalLayoutError(
                "--enable-sleep-mode takes the KV cache's memory away while other engines may read "
                "it, and NIXL goes on with what was there: leave it out"
            )
        cache_config = vllm_config.cache_config
        if makes_own_scales(cache_config) and is_quantized_kv_cache(cache_config.cache_dtype):
            raise LocalLayoutError(
                f"--calculate-kv-scales with --kv-cache-dtype {cache_config.cache_dtype} gives "
                "every engine scales of its own, so that one's KV cache means something else to "
                "another: leave it out, for the scales of the checkpoint"
            )
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = ReshardScheduler(
                vllm_config, self.engine_id, kv_cache_config
            )
        else:
            if is_pcp_replica(vllm_config.parallel_config):
                self.connector_worker = PcpReplicaWorker()
            else:
                self.connector_worker = ReshardWorker(vllm_config, self.engine_id, kv_cache_config)
            self._reports = LoadReports()

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Give the scheduler access to the blocks of requests whose reads failed."""
        assert self.connector_scheduler is not None
        self.connector_scheduler.set_kv_cache_manager(kv_cache_manager)
        self.bind_gpu_block_pool(kv_cache_manager.block_pool)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Give the scheduler the block pool, which tells how many blocks are free."""
        if self.connector_scheduler is not None:
            self.connector_scheduler.set_block_pool(gpu_block_pool)

    def hold_back(self, request: Request, resume: Callable[[], None]) -> bool:
        """Return whether a request is not added yet: another engine computes its prompt."""
        assert self.connector_scheduler is not None
        return self.connector_scheduler.hold_back(request, resume)

    def drop_held(self, request_ids: Iterable[str]) -> None:
        """Forget requests that are held back: their clients have left."""
        assert self.connector_scheduler is not None
        self.connector_scheduler.drop(request_ids)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Serve the handshakes of all pipeline stages."""
        assert self.connector_scheduler is not None
        self.connector_scheduler.serve_handshake(metadata)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return this worker's handshake; None if another worker's covers it."""
        return self._worker.handshake

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Register this worker's KV caches for transfers."""
        self._worker.register_kv_caches(kv_caches)

    def set_host_xfer_buffer_ops(self, copy_operation: object) -> None:
        """Do nothing: there is no host buffer to copy from or to."""

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Submit what the scheduler requests, before the model computes.

        Not in `start_load_kv`, which later bases call after the model has computed, to keep its
        cost out of the way. Submitting here costs nothing. Later, readers would wait a step longer
        to see that their requests are held, and on a prefill engine a step may take as long as a
        prompt.
        """
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, ReshardConnectorMetadata)
        self._worker.submit(connector_metadata)
        if FAILED_READS_ARE_NAMED:
            begun = (*connector_metadata.prefetch.items(), *connector_metadata.receive.items())
            names = (name for name, each in begun if any(each.local_block_ids))
            self._reports.note_started(names, connector_metadata.failed)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Do nothing: reads began when the metadata was bound."""

    def wait_for_save(self) -> None:
        """Do nothing: blocks are read from where the model writes them."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Return the requests that were sent, and those that were received."""
        return self._worker.collect().take_finished()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Return the requests that were sent, those received, and which of the latter failed."""
        report = self._worker.collect()
        sent, drained = report.take_finished()
        received, failed = self._reports.advance(report.failed, drained)
        return transfer_results(sent, received, failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return blocks that could not be read, if vLLM does not take failed requests instead."""
        if FAILED_READS_ARE_NAMED:
            return set()
        return set().union(*self._worker.report.take_failed().values())

    def build_connector_worker_meta(self) -> WorkerReport | None:
        """Return reports for the scheduler that vLLM would not pass on at once."""
        report = self._worker.report
        failed = report.take_failed() if FAILED_READS_ARE_NAMED else {}
        return WorkerReport(failed=failed, shortages=report.take_shortages()) or None

    def take_first_outputs(self) -> Iterable[tuple[int, EngineCoreOutput]]:
        """Return outputs for the clients of requests that were received with a first token."""
        assert self.connector_scheduler is not None
        return self.connector_scheduler.first_tokens.take_outputs()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return what this worker or scheduler counted; None if nothing."""
        if self.connector_scheduler is not None:
            return self.connector_scheduler.take_stats()
        return self._worker.report.take_stats()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return False. On GPUs, vLLM asks before weights are loaded: so try what NIXL is given.

        What cannot be opened here may be there where the workers run, so that is told only.

        Raises:
            LocalLayoutError: NIXL does not have a backend that is named.
        """
        if "backends" in extra_config or {"UCX_TLS", "UCX_NET_DEVICES"} & os.environ.keys():
            backends = tuple(map(str, extra_config.get("backends", Settings().backends)))
            if fault := try_backends(backends):
                logger.warning(
                    "NIXL cannot open all it is given (%s): %s.", one_line(fault), CHECK_BACKENDS
                )
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ReshardStats:
        """Return stats with the values that came from a worker; empty without any."""
        return ReshardStats() if data is None else ReshardStats(data=data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ReshardPromMetrics:
        """Return the metrics for Prometheus."""
        return ReshardPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Release all resources."""
        if self.connector_worker is not None:
            self.connector_worker.close()
        if self.connector_scheduler is not None:
            self.connector_scheduler.shutdown()

    @property
    def _worker(self) -> ReshardWorker | PcpReplicaWorker:
        assert self.connector_worker is not None
        return self.connector_worker


def reason_for_upstream(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str | None:
    """Return why this engine must use upstream's connector; None if it need not.

    Raises:
        LocalLayoutError: It must, and upstream's cannot serve it either.
    """
    reason = _reason_against_ours(vllm_config, kv_cache_config)
    if reason is None:
        return None
    if (pp_size := vllm_config.parallel_config.pipeline_parallel_size) > 1:
        raise LocalLayoutError(
            f"{reason}, and upstream's NixlConnector does not support pipeline parallelism: "
            f"use --pipeline-parallel-size 1 instead of {pp_size}"
        )
    assert vllm_config.kv_transfer_config is not None
    name = vllm_config.kv_transfer_config.kv_connector
    if name != "NixlConnector":
        raise LocalLayoutError(
            f"{reason}, which upstream's NixlConnector serves; but vLLM checks such engines by "
            f"that name, and not by {name}: set kv_connector to NixlConnector"
        )
    _refuse_what_upstream_cannot_share(vllm_config, reason)
    return reason


def _reason_against_ours(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str | None:
    """Return why this connector does not serve an engine; None if it does."""
    assert vllm_config.kv_transfer_config is not None
    if STATE_IS_UPSTREAMS and kv_cache_config.has_mamba_layers:
        return "the model keeps Mamba state"
    if (
        current_platform.device_type != "cpu"
        and vllm_config.kv_transfer_config.kv_buffer_device == "cpu"
    ):
        return "kv_buffer_device is cpu, and the KV cache is not in host memory"
    if current_platform.device_type not in ("cpu", "cuda"):
        # Workers wait for the device's pending work with CUDA events, which ROCm has, too.
        return f"the device is {current_platform.device_type}"
    if is_in_two_memories(kv_cache_config):
        return "some layers' KV caches are in the host's memory, and others' are not"
    if keeps_groups_back(kv_cache_config):
        return "some of its KV-cache groups are not transferred"
    if SLEEP_IS_UPSTREAMS and vllm_config.model_config.enable_sleep_mode:
        return "--enable-sleep-mode takes the KV cache's memory away"
    parallel_config = vllm_config.parallel_config
    num_shares = parallel_config.decode_context_parallel_size
    over_pcp = LAYERS_SAY_WHAT_IS_SHARED and shares_over_pcp(parallel_config)
    return counted_items(vllm_config) or unserved_layer(
        kv_cache_config, num_shares, over_pcp=over_pcp
    )


def _refuse_what_upstream_cannot_share(vllm_config: VllmConfig, reason: str) -> None:
    """Refuse decode context parallelism that upstream's connector would read wrongly.

    vLLM asserts this itself, but in the fork only if that connector is configured.
    """
    parallel_config = vllm_config.parallel_config
    num_shares = parallel_config.decode_context_parallel_size
    num_ranks = max(
        parallel_config.tensor_parallel_size, parallel_config.prefill_context_parallel_size
    )
    if num_shares == 1 or (num_shares == num_ranks and vllm_config.model_config.use_mla):
        return
    raise LocalLayoutError(
        f"{reason}, and upstream's NixlConnector knows --decode-context-parallel-size for models "
        f"with MLA over all {num_ranks} ranks only: use 1 instead of {num_shares}"
    )


def _tell_what_is_lost(reason: str, config: KVTransferConfig) -> None:
    """Log why this engine uses upstream's connector, and the consequences."""
    logger.info(
        "Using upstream's NixlConnector: %s. The engines that it exchanges KV caches with need "
        "that one, too, and it has its own limits: no pipeline stages, and TP sizes of which one "
        "divides the other.",
        reason,
    )
    if lost := sorted(OWN_OPTIONS & config.kv_connector_extra_config.keys()):
        logger.warning(
            "Upstream's NixlConnector has no %s: what that is for does not happen.",
            ", ".join(lost),
        )


def _context_parallel_reason(vllm_config: VllmConfig) -> str | None:
    """Return which option spreads a block's tokens over ranks; None if none does."""
    for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        if (size := getattr(vllm_config.parallel_config, name)) > 1:
            return f"--{name.replace('_', '-')} {size} spreads the tokens of a block over ranks"
    return None
