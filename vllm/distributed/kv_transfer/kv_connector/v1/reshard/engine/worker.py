# SPDX-License-Identifier: Apache-2.0
"""The worker's side of the connector: reads blocks from other engines, and serves its own.

The engine's thread calls everything here, `submit` and `collect` in every step. It registers
the caches, hands over the scheduler's metadata and collects reports; the connector's thread, see
`connector_thread`, does all the rest.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from vllm.platforms import current_platform

from ..errors import LocalLayoutError
from ..memory.cache import RankCache
from ..plan.shards import Shard
from ..protocol.bounds import ReplyBounds
from ..protocol.description import WorkerDescription, encode_worker
from ..protocol.ids import EngineId
from ..protocol.messages import RemoteEngineAddress, decode_announcement
from ..protocol.tasks import Tasks
from ..transport.agent import NixlAgent, can_be_polled, nixl_module
from ..transport.announcements import Listener, listen_to
from ..transport.arena import StagingArea, open_area
from ..transport.connection import PeerConnection
from ..transport.cpu import compute_alone, parents_cores
from ..transport.handshake_client import HandshakeClient
from ..transport.lane import Lane, Lanes
from ..transport.limits import listeners, listeners_told, raise_file_limit
from ..transport.pack_area import open_packs
from ..transport.probe import MetadataProbe
from ..transport.remote import LocalCache, LoweredEngine
from ..transport.transfers import Transfers
from .caches.cache_formats import settings_fingerprint
from .caches.drafts import draft_identities
from .caches.factors import compared_factors, compatibility_factors
from .caches.geometry import layers_of_worker, memory_regions, token_layers, window_groups
from .caches.ownership import (
    gather_shards,
    num_ranks_of_stage,
    rank_of_worker,
    refuse_shared_names,
    shard_of_worker,
    tokens_of_worker,
)
from .compat import REQUEST_NUMBERS, attention_variants
from .connecting.dialer import Dialer, LocalEndpoint
from .connecting.peers import PeerTable
from .connector_thread import ConnectorThread
from .metadata import ReshardConnectorMetadata, ReshardHandshakeMetadata, WorkerReport
from .producer import ProducerSide
from .reading.consumer import ConsumerSide
from .reading.notifier import Notifier, Renewals
from .settings import read_settings
from .stats import ReshardStats
from .transfer_engine import Event, SchedulerStep, TransferEngine

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionBackend
    from vllm.v1.kv_cache_interface import KVCacheConfig

_Result = TypeVar("_Result")


class CacheDevice:
    """The device that a worker's caches are on.

    Args:
        on_cpu: Whether the caches are in host memory, where work is complete when its call returns.

    Attributes:
        place: The caches' device; None until they are registered.
    """

    def __init__(self, *, on_cpu: bool) -> None:
        self._on_cpu = on_cpu
        self.place: torch.device | None = None

    def choose(self) -> None:
        """Make the caches' device current for the calling thread and for NIXL's registrations.

        A thread starts with the process's first device, whichever this worker's is.
        """
        if self.place is not None and self.place.type == "cuda":
            torch.cuda.set_device(self.place)

    def computed_before(self, metadata: ReshardConnectorMetadata) -> Event | None:
        """Record an event after device work that may write into blocks that this step reads into.

        That is an earlier step, where the scheduler does not keep its blocks until it is over, and
        what new blocks receive before this step computes: zeros, and copies of shared blocks.
        Return None where there is nothing to wait for.
        """
        if self._on_cpu or not metadata.receive:
            return None
        event = torch.cuda.Event()
        event.record()
        computed: Event = event
        return computed


class ReshardWorker:
    """One worker of an engine that prefills for others, decodes for others, or both.

    Args:
        vllm_config: The engine's configuration.
        engine_id: The engine's id, the same for all of its workers.
        kv_cache_config: This worker's KV-cache groups.
        clock: Monotonic clock, in seconds.

    Attributes:
        report: What was collected and not taken out yet.
        handshake: Its handshake with other engines; None until the caches are registered.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        engine_id: EngineId,
        kv_cache_config: KVCacheConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        transfer_config = vllm_config.kv_transfer_config
        assert transfer_config is not None
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._engine_id = engine_id
        self._settings = read_settings(transfer_config)
        raise_file_limit()
        # Whether this worker reads from other engines, and they from it.
        self._reads = transfer_config.is_kv_consumer or self._settings.bidirectional_kv_xfer
        self._is_read = transfer_config.is_kv_producer or self._settings.bidirectional_kv_xfer
        self._key = self._settings.channel_key()
        parallel_config = vllm_config.parallel_config
        self._rank = rank_of_worker(parallel_config)
        # vLLM has adjusted the interleaving to the block size before it creates the connector.
        self._share = tokens_of_worker(parallel_config)
        self._name = "/".join((engine_id, str(self._rank)))
        # On CPU this thread is bound to cores of its own. Helper threads would share them, and
        # could not run while it waits for them.
        self._on_cpu = current_platform.device_type == "cpu"
        self._cores = parents_cores() if self._on_cpu else None
        self._device = CacheDevice(on_cpu=self._on_cpu)
        # The objects below belong to the connector's thread once it has started.
        others = listeners()
        agent = self._make_agent(str(uuid.uuid4()), polled=False)
        stats = ReshardStats()
        self._dialer = Dialer(partial(self._make_agent, polled=True), clock, self._device.choose)
        self._transfers = Transfers()
        lanes = Lanes(lambda: self._waking(self._dialer.make_lane()))
        renewals = Renewals(self._settings.lease_s)
        peers = PeerTable(
            self._dial,
            self._connect,
            lanes,
            self._settings.engine_ttl_s,
            lambda: renewals.sources,
        )
        tasks = Tasks()
        notifier = Notifier(self._name, stats, peers, tasks)
        self._transfer_engine = TransferEngine(
            agent,
            ProducerSide(agent, self._settings.lease_s, stats, self._name),
            peers,
            self._transfers,
            ConsumerSide(
                peers,
                self._transfers,
                notifier,
                stats,
                tasks,
                self._settings.kv_read_timeout_s,
                self._name,
                self._settings.verify_reads,
            ),
            notifier,
            renewals,
            stats,
        )
        if self._is_read:
            self._transfer_engine.files.need(listeners_told(agent.metadata(), others))
        self._clock = clock
        self._thread = ConnectorThread(
            self._transfer_engine, clock, self._prepare_thread, [self._dialer.call]
        )
        self._handshake_client: HandshakeClient | None = None
        self._listener: Listener | None = None
        self.report = WorkerReport()
        # Set once the caches are registered.
        self._factors: dict[str, str] = {}
        self.handshake: ReshardHandshakeMetadata | None = None

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Register the caches with NIXL, describe them for other engines, and begin to serve.

        All workers of an engine call this at the same time: they exchange their shards, so that
        each can plan for the whole engine.

        Raises:
            LocalLayoutError: The caches cannot be transferred.
        """
        self._fill_scales(kv_caches)
        backends = self._backends(kv_caches)
        # No draft keeps state, and some models number state layers on from the others.
        drafts = draft_identities(self._vllm_config, token_layers(self._kv_cache_config))
        settings = settings_fingerprint(self._vllm_config)
        layers = layers_of_worker(kv_caches, self._kv_cache_config, backends, drafts, settings)
        self._device.place = device = next(iter(kv_caches.values())).device
        cache = RankCache(
            self._kv_cache_config.num_blocks,
            device.index or 0,
            {name: layer.cache for name, layer in layers.items()},
        )
        parallel_config = self._vllm_config.parallel_config
        num_ranks = num_ranks_of_stage(parallel_config)
        shard = shard_of_worker(self._rank, num_ranks, layers, self._share)
        shards = gather_shards(shard, parallel_config)
        refuse_shared_names(shards)
        regions = memory_regions(kv_caches)
        transfer_engine = self._transfer_engine
        transfer_engine.agent.register(regions)
        if self._is_read and self._settings.packing_arena_bytes != 0:
            ordered = replace(cache, layers={each: cache.layers[each] for each in shard.holdings})
            transfer_engine.producer.packs = open_packs(
                kv_caches.values(),
                self._settings.packing_arena_bytes,
                ordered,
                transfer_engine.agent,
            )
        local = LocalCache(self._rank, cache, window_groups(self._kv_cache_config))
        self._transfers.area = area = self._open_area(kv_caches.values())
        transfer_engine.consumer.set_local_cache(local)
        # Not the data-parallel rank, which is 0 in every replica of a dense model.
        replica_offset = parallel_config.data_parallel_index
        self._factors = compatibility_factors(self._vllm_config)
        self._handshake_client = client = self._make_handshake_client(shards)
        required = compared_factors(self._factors, self._settings)
        policy = self._settings.missing_draft_layers
        self._dialer.begin(
            LocalEndpoint(local, shards, regions, area, replica_offset, policy),
            lambda address: client.request(address, required),
        )
        description = WorkerDescription(
            self._engine_id,
            shard,
            cache,
            transfer_engine.producer.table_address,
            transfer_engine.agent.metadata(),
            transfer_engine.producer.packing_address,
        )
        if self._reads:
            transfer_engine.peers.lanes.prepare(self._clock())
            client.prepare(description.agent_metadata)
        self.handshake = ReshardHandshakeMetadata(self._factors, encode_worker(description))
        self._thread.start()

    def unregister_kv_caches(self) -> None:
        """Refuse that their memory is taken away: 0.33 calls this before an engine sleeps.

        Raises:
            LocalLayoutError: Always.
        """
        raise LocalLayoutError(
            "/sleep and /release_kv_cache_memory take the KV cache's memory away while other "
            "engines may read it: start the engine with --enable-sleep-mode, or use /pause"
        )

    def submit(self, metadata: ReshardConnectorMetadata) -> None:
        """Hand over the scheduler's metadata of this step, without blocking."""
        self._thread.begin_step()
        if metadata.announcer is not None:
            self._listener = listen_to(
                metadata.announcer, self._submit_announcement, self._helpers_cores()
            )
        if metadata:
            self._thread.hand_over(SchedulerStep(metadata, self._device.computed_before(metadata)))

    def collect(self) -> WorkerReport:
        """Return `report`, with what has become of requests since the last call.

        A request that could not be read is among those received once nothing can write into its
        blocks: in the same call, or in a later one.
        """
        self.report.add(self._thread.collect())
        return self.report

    def close(self) -> None:
        """Stop all threads and release all NIXL resources."""
        if self._listener is not None:
            self._listener.close()
        if self._handshake_client is not None:
            self._handshake_client.close()
        self._dialer.close()
        self._thread.close()

    def _submit_announcement(self, message: bytes) -> None:
        """Hand over an announcement ahead of its step. Called by the listener's thread."""
        self._thread.hand_over(decode_announcement(message))

    def _dial(self, address: RemoteEngineAddress) -> Future[LoweredEngine]:
        """Request an engine's layout. Called by the connector's thread, which the result wakes."""
        return self._waking(self._dialer.dial(address))

    def _connect(self, lane: Lane, lowered: LoweredEngine) -> PeerConnection:
        grace_s = self._settings.kv_hung_peer_timeout_s
        return PeerConnection(lane, lowered, grace_s, self._clock)

    def _waking(self, future: Future[_Result]) -> Future[_Result]:
        """Have a future wake the connector's thread when it ends."""
        future.add_done_callback(lambda _: self._thread.wake())
        return future

    def _prepare_thread(self) -> None:
        """Prepare the connector's thread, which calls this."""
        if self._on_cpu:
            compute_alone(self._helpers_cores())
        self._device.choose()

    def _helpers_cores(self) -> set[int] | None:
        """Return cores for helper threads: on CPU, not the engine thread's; None for any core."""
        return self._cores and ((self._cores - os.sched_getaffinity(0)) or self._cores)

    def _open_area(self, caches: Iterable[torch.Tensor]) -> StagingArea | None:
        """Return the area for staged reads; None if there will be none."""
        strategy = self._settings.transfer_strategy
        if strategy == "direct" or not self._reads:
            return None
        return open_area(
            caches,
            self._settings.staging_arena_bytes,
            policy=self._settings.staging_policy(),
        )

    def _make_agent(self, name: str, *, polled: bool) -> NixlAgent:
        return NixlAgent(
            "/".join((self._name, name)),
            memory="DRAM" if self._on_cpu else "VRAM",
            backends=self._settings.backends,
            num_threads=self._settings.num_threads,
            polled=polled,
            progress_delay_us=self._settings.progress_delay_us(on_cpu=self._on_cpu),
            cores=self._cores,
        )

    def _make_handshake_client(self, shards: tuple[Shard, ...]) -> HandshakeClient:
        """Return a handshake client, which limits replies to what fits this engine's shards."""
        return HandshakeClient(
            ReplyBounds.of(shards),
            numbers=REQUEST_NUMBERS,
            key=self._key,
            trusted=self._settings.trusted(),
            probe=self._make_probe(),
            own_id=self._engine_id,
        )

    def _make_probe(self) -> MetadataProbe | None:
        """Return a probe for NIXL metadata if it is unauthenticated and only UCX parses it."""
        if self._key is not None or not can_be_polled(self._settings.backends):
            return None
        return MetadataProbe(nixl_module())

    def _fill_scales(self, names: Iterable[str]) -> None:
        """Have Triton's attention fill its caches' scales now, before anything is received.

        With scales per token and head, a layer fills the scales of all blocks when it first
        computes, which would overwrite those received before.
        """
        from vllm.config import get_layers_from_vllm_config
        from vllm.model_executor.layers.attention import Attention
        from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

        layers = get_layers_from_vllm_config(self._vllm_config, Attention, list(names))
        for layer in layers.values():
            for variant in attention_variants(layer.impl):
                if isinstance(variant, TritonAttentionImpl) and variant._is_per_token_head_quant:
                    variant._ensure_scale_caches(layer.kv_cache)

    def _backends(self, names: Iterable[str]) -> dict[str, type[AttentionBackend]]:
        """Return the attention backend of each layer, by layer name."""
        from vllm.config import get_layers_from_vllm_config
        from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

        layers = get_layers_from_vllm_config(
            self._vllm_config,
            AttentionLayerBase,
            list(names),
        )
        return {name: layer.get_attn_backend() for name, layer in layers.items()}
