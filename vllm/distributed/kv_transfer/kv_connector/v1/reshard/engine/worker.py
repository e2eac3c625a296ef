# SPDX-License-Identifier: Apache-2.0
"""The worker's side of the connector: reads blocks from other engines, and serves its own.

Everything here belongs to the engine's thread, which calls `start_load_kv` and `get_finished` in
every step. The one other thread fetches handshakes: it is given values, returns values through a
future, and touches nothing else.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.logger import init_logger
from vllm.platforms import current_platform

from ..errors import RemoteLayoutError, ReshardError
from ..memory.summary import describe_reads, layers_text
from ..plan.mesh import MeshRank
from ..plan.reshard import plan_reshard
from ..plan.shards import Shard
from ..plan.verify import verify_plan
from ..protocol.ledgers import ConsumerLedger, RequestId
from ..protocol.messages import (
    EngineId,
    Heartbeats,
    Receive,
    RemoteEngineAddress,
)
from ..protocol.metadata import WorkerDescription, encode_worker
from ..transport.agent import NixlAgent
from ..transport.lease_check import Doubt, LeaseChecker, PreparedTable
from ..transport.remote import LocalLists, Reader, RemoteEngine
from ..transport.side_channel import fetch_handshake
from ..transport.staging_area import StagingArea, open_area
from ..transport.transfers import Transfers
from .compat import REQUEST_NUMBERS
from .drafts import draft_identities, without_missing_drafts
from .envelopes import ReshardConnectorMetadata, ReshardHandshakeMetadata
from .factors import compared_factors, compatibility_factors
from .geometry import describe_cache, latent_layers, memory_regions, window_groups
from .holder import Holder
from .notifier import Notifier
from .ownership import shard_of_worker
from .peers import Peer, PeerTable
from .settings import read_settings
from .stats import ReadFailure, ReshardStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionBackend
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger(__name__)

_NAMED_REQUESTS = 8
"""As many requests are named in one line of the log."""

_READ_FAILURES = {
    Doubt.PEER: ReadFailure.TRANSFER,
    Doubt.LEASE: ReadFailure.LEASE,
    Doubt.BINDING: ReadFailure.BINDING,
}

_MAY_BE_ANOTHERS = frozenset({ReadFailure.BINDING, ReadFailure.PARAMETERS})
"""Failures after which what is held under a request's name may be another's, whose blocks are not
ours to give back: the lease ends it."""

_REMEDY = (
    ": check that the engine runs and can be reached, and send the request through prefill again"
)


@dataclass(slots=True)
class _Reading:
    """A request being read.

    Attributes:
        receive: What to read.
        peer: From where.
        lease_tables: Where to see, after that, that it was still held.
        failure: What went wrong first.
    """

    receive: Receive
    peer: Peer
    lease_tables: Sequence[PreparedTable] = ()
    failure: ReadFailure | None = None


class ReshardWorker:
    """One worker of an engine that prefills for others, decodes for others, or both.

    Args:
        vllm_config: The engine's configuration.
        engine_id: The engine's id, the same for all of its workers.
        kv_cache_config: This worker's KV-cache groups.
    """

    def __init__(
        self, vllm_config: VllmConfig, engine_id: EngineId, kv_cache_config: KVCacheConfig
    ) -> None:
        transfer_config = vllm_config.kv_transfer_config
        assert transfer_config is not None
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._engine_id = engine_id
        self._settings = read_settings(transfer_config)
        parallel = vllm_config.parallel_config
        # Not the rank, which is 0 in every replica of a dense model.
        self._spread = parallel.data_parallel_index
        self._rank = MeshRank(get_pp_group().rank_in_group, get_tp_group().rank_in_group)
        self._tp_size = parallel.tensor_parallel_size
        self._name = f"{engine_id}/{self._rank}"
        # On CPU this thread is bound to cores of its own, which others would have to share with it;
        # and where it waits for them, it does not let them run.
        self._on_cpu = current_platform.device_type == "cpu"
        self._cores = _parents_cores() if self._on_cpu else None
        self._agent = self._make_agent(str(uuid.uuid4()))
        self._local_lists = LocalLists(self._agent)
        # As many engines may leave us waiting before they hold up others' handshakes.
        self._threads = ThreadPoolExecutor(32, thread_name_prefix="reshard-handshake")
        self._stats = ReshardStats()
        self._holder = Holder(self._agent, self._settings.lease_s, self._stats)
        self._notifier = Notifier(self._agent, self._name, self._stats)
        self._lease_checker = LeaseChecker(self._agent)
        self._transfers = Transfers(self._agent)
        self._consumer: ConsumerLedger[int] = ConsumerLedger()
        self._peers = PeerTable(
            self._threads, self._fetch, self._connect, self._settings.engine_ttl_s
        )
        self._reading: dict[RequestId, _Reading] = {}
        self._failed: dict[RequestId, frozenset[int]] = {}
        # Known once the caches are registered.
        self._factors: dict[str, str] = {}
        self._engine_shards: tuple[Shard, ...] = ()
        self._reader: Reader | None = None
        self.handshake: ReshardHandshakeMetadata | None = None

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Make the caches known to NIXL, and describe them for other engines.

        All workers of an engine call this at the same time: they tell each other what they hold, so
        that each can plan for the whole engine.

        Raises:
            LocalLayoutError: The caches cannot be transferred.
        """
        backends = self._backends(kv_caches)
        drafts = draft_identities(self._vllm_config, kv_caches)
        cache = describe_cache(kv_caches, self._kv_cache_config, backends, drafts)
        latent = latent_layers(self._kv_cache_config, drafts)
        shard = shard_of_worker(self._rank, self._tp_size, cache, latent)
        self._engine_shards = _gather(shard)
        self._agent.register(memory_regions(kv_caches))
        self._reader = Reader(self._rank, cache, window_groups(self._kv_cache_config))
        self._transfers.area = self._open_area(kv_caches.values())
        self._factors = compatibility_factors(self._vllm_config)
        description = WorkerDescription(
            self._engine_id, shard, cache, self._holder.table_address, self._agent.metadata()
        )
        self.handshake = ReshardHandshakeMetadata(self._factors, encode_worker(description))

    def start_load_kv(self, metadata: ReshardConnectorMetadata) -> None:
        """Take up what the scheduler asks for in this step; blocks on nothing."""
        now_s = time.monotonic()
        # An idle engine takes no steps: a handshake that has failed since the last one, however
        # long ago, fails nobody who asks now.
        self._advance_peers(now_s)
        self._holder.take_up(metadata, now_s)
        for request_id, receive in metadata.receive.items():
            if receive.fault is not None:
                nobody = Peer(receive.source, now_s)
                failure = ReadFailure.PARAMETERS
                self._fail_unread(request_id, receive, nobody, receive.fault, failure)
                continue
            self._peers.want(receive.source, now_s).waiting.append((request_id, receive))
        for heartbeats in metadata.heartbeats:
            self._send_heartbeats(heartbeats, now_s)
        self._advance_peers(now_s)
        self._transfers.left_at_s = time.monotonic()

    def get_finished(self) -> tuple[set[RequestId], set[RequestId]]:
        """Requests that other engines are through with, and requests that this worker received.

        A request whose blocks could not be read is among the received ones; `take_failed` returns
        it next.
        """
        now_s = time.monotonic()
        self._advance_peers(now_s)
        self._poll_reads(now_s)
        self._check_leases(now_s)
        return self._holder.let_go(now_s), self._take_received()

    def take_failed(self) -> dict[RequestId, frozenset[int]]:
        """Requests that could not be read, reported since the last call, with their blocks."""
        failed, self._failed = self._failed, {}
        return failed

    def take_stats(self) -> ReshardStats | None:
        """What was measured since the last call."""
        return None if self._stats.is_empty() else self._stats.clone_and_reset()

    def close(self) -> None:
        """Give everything back to NIXL."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._transfers.close()
        for reading in self._reading.values():
            reading.peer.in_flight -= 1
        self._reading.clear()
        self._lease_checker.close()
        self._peers.close()
        self._local_lists.close()
        self._agent.close()

    def _open_area(self, caches: Iterable[torch.Tensor]) -> StagingArea | None:
        """Where staged reads stop over, if any are to."""
        strategy = self._settings.transfer_strategy
        transfer_config = self._vllm_config.kv_transfer_config
        assert transfer_config is not None
        if strategy == "direct" or not (
            transfer_config.is_kv_consumer or self._settings.bidirectional_kv_xfer
        ):
            return None
        make_stand_in = partial(self._make_agent, f"stand-in/{uuid.uuid4()}")
        return open_area(
            self._agent,
            caches,
            self._settings.staging_arena_bytes,
            make_stand_in=make_stand_in if strategy == "auto" else None,
            cores=self._cores and ((self._cores - os.sched_getaffinity(0)) or self._cores),
        )

    def _make_agent(self, name: str) -> NixlAgent:
        return NixlAgent(
            f"{self._name}/{name}",
            memory="DRAM" if self._on_cpu else "VRAM",
            backends=self._settings.backends,
            num_threads=self._settings.num_threads,
            progress_delay_us=self._settings.progress_delay_us(on_cpu=self._on_cpu),
            cores=self._cores,
        )

    def _backends(self, names: Iterable[str]) -> dict[str, type[AttentionBackend]]:
        """The attention backend of each layer."""
        from vllm.config import get_layers_from_vllm_config
        from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

        layers = get_layers_from_vllm_config(
            self._vllm_config,
            AttentionLayerBase,
            list(names),
        )
        return {name: layer.get_attn_backend() for name, layer in layers.items()}

    def _advance_peers(self, now_s: float) -> None:
        """Read what waited for an engine that is connected now; fail it where it cannot be."""
        for peer, error in self._peers.advance(now_s):
            if error is None:
                assert peer.engine is not None
                for request_id, receive in peer.take_waiting():
                    self._begin(request_id, receive, peer, peer.engine)
                continue
            self._stats.record_handshake_failure(error)
            unread = [each for each in peer.take_waiting() if any(each[1].local_block_ids)]
            # One line for all of them, which have one remedy. Where heartbeats alone have asked,
            # often those of a request that had just failed, nothing is lost.
            log = logger.error if unread else logger.info
            log(
                "Handshake with engine %s at %s:%d failed%s: %s",
                peer.address.engine_id,
                peer.address.host,
                peer.address.port,
                _for_whom([request_id for request_id, _ in unread]),
                error,
            )
            for request_id, receive in unread:
                reason = f"handshake failed: {error}"
                self._fail_unread(request_id, receive, peer, reason, ReadFailure.HANDSHAKE)

    def _fetch(self, address: RemoteEngineAddress) -> tuple[WorkerDescription, ...]:
        """Ask an engine for its workers. Called by another thread: reads what never changes."""
        return fetch_handshake(
            address.host,
            address.port,
            compared_factors(self._factors, self._settings),
            expected_engine_id=address.engine_id,
            numbers=REQUEST_NUMBERS,
        )

    def _connect(self, descriptions: tuple[WorkerDescription, ...], began_s: float) -> RemoteEngine:
        """Plan for an engine that was first asked at `began_s`, and prepare all lists.

        Raises:
            ReshardError: Its layout does not fit ours.
            TransferError: NIXL does not accept it.
        """
        assert self._reader is not None
        shards = [description.shard for description in descriptions]
        policy = self._settings.missing_draft_layers
        needed, missing = without_missing_drafts(shards, self._engine_shards, policy)
        if missing:
            logger.warning(
                "Drafts start cold: engine %s does not have their layers (%s).",
                descriptions[0].engine_id,
                layers_text(missing),
            )
        plan = plan_reshard(shards, needed, spread=self._spread)
        if __debug__ and (faults := verify_plan(shards, needed, plan)):
            raise RemoteLayoutError(
                f"no plan fits what engine {descriptions[0].engine_id} says of itself "
                f"({faults[0]}): run the same build of the connector on both engines"
            )
        engine = RemoteEngine(
            self._agent,
            {description.shard.rank: description for description in descriptions},
            plan,
            self._reader,
            self._local_lists,
            self._transfers.area,
        )
        duration_s = time.monotonic() - began_s
        self._stats.record_handshake(duration_s)
        logger.info(
            "From engine %s of %d ranks, rank %s %s. The handshake took %.1f ms.",
            descriptions[0].engine_id,
            len(descriptions),
            self._rank,
            describe_reads(plan, self._rank),
            1e3 * duration_s,
        )
        return engine

    def _begin(
        self, request_id: RequestId, receive: Receive, peer: Peer, engine: RemoteEngine
    ) -> None:
        """Post all reads of a request, or say that there is nothing to read."""
        if not any(receive.local_block_ids):
            self._notifier.release(receive.remote_request_id, engine)
            return
        assert self._reader is not None
        try:
            selected = [(leg, leg.select(receive, self._reader)) for leg in engine.legs]
        except ReshardError as error:
            self._fail_unread(request_id, receive, peer, str(error), ReadFailure.PARAMETERS)
            return
        parts = [part for each in selected for part in self._transfers.cut(*each)]
        read_from = {part.leg.remote.peer for part in parts}
        tables = [table for name, table in engine.lease_tables.items() if name in read_from]
        self._account(request_id, receive, peer, len(parts), tables)
        self._transfers.start(request_id, parts, time.monotonic())

    def _account(
        self,
        request_id: RequestId,
        receive: Receive,
        peer: Peer,
        num_legs: int,
        lease_tables: Sequence[PreparedTable] = (),
    ) -> _Reading:
        """Take a request into account until it is reported."""
        reading = self._reading[request_id] = _Reading(receive, peer, lease_tables)
        peer.in_flight += 1
        self._consumer.begin(request_id, range(num_legs), following_steps=len(lease_tables))
        return reading

    def _poll_reads(self, now_s: float) -> None:
        """Look at everything in flight."""
        for part in self._transfers.advance(now_s):
            reading = self._reading[part.request_id]
            if part.fault is None and part.telemetry is not None:
                self._stats.record_transfer(part.telemetry, part.strategy)
            if part.fault is not None:
                if not part.local:
                    reading.peer.break_off(now_s)
                kind = ReadFailure.COPY if part.local else ReadFailure.TRANSFER
                reading.failure = reading.failure or kind
                # What is in flight is left to end by itself: nobody else gets the blocks before.
                if self._consumer.leg_failed(part.request_id, part.key, part.fault):
                    self._transfers.give_up(part.request_id)
            elif self._consumer.leg_done(part.request_id, part.key):
                receive = reading.receive
                assert receive.binding is not None
                for table in reading.lease_tables:
                    self._lease_checker.want(
                        part.request_id, receive.remote_request_id, receive.binding, table
                    )

    def _check_leases(self, now_s: float) -> None:
        """See that what was read was still held, and was what this engine's prompt wants."""
        for verdict in self._lease_checker.advance():
            if verdict.doubt is not None:
                self._consumer.fail(verdict.request_id, verdict.fault)
                reading = self._reading[verdict.request_id]
                if verdict.doubt is Doubt.PEER:
                    reading.peer.break_off(now_s)
                reading.failure = reading.failure or _READ_FAILURES[verdict.doubt]
            self._consumer.step_done(verdict.request_id)

    def _take_received(self) -> set[RequestId]:
        """Requests that have ended, well or not; their holders are told in both cases."""
        received = set()
        for outcome in self._consumer.take_ended():
            reading = self._reading.pop(outcome.request_id)
            receive, peer = reading.receive, reading.peer
            peer.in_flight -= 1
            if outcome.failure is not None:
                assert reading.failure is not None
                self._stats.record_failed_read(reading.failure)
                self._failed[outcome.request_id] = frozenset().union(*receive.local_block_ids)
                # A failed handshake was told, with the requests that it cost.
                if reading.failure is not ReadFailure.HANDSHAKE:
                    logger.error(
                        "KV cache of request %s could not be read from engine %s: %s%s",
                        outcome.request_id,
                        receive.source.engine_id,
                        outcome.failure,
                        _REMEDY if reading.failure is ReadFailure.TRANSFER else "",
                    )
            if peer.engine is not None and reading.failure not in _MAY_BE_ANOTHERS:
                # Who cannot be read from may be gone; that he hears nothing is no news then.
                known = reading.failure is ReadFailure.TRANSFER
                self._notifier.release(
                    receive.remote_request_id, peer.engine, known_as_broken=known
                )
            received.add(outcome.request_id)
        return received

    def _fail_unread(
        self,
        request_id: RequestId,
        receive: Receive,
        peer: Peer,
        reason: str,
        failure: ReadFailure,
    ) -> None:
        """Fail a request before any of its reads was posted, if anything was to be read."""
        if not any(receive.local_block_ids):
            return
        self._account(request_id, receive, peer, 1).failure = failure
        self._consumer.leg_failed(request_id, 0, reason)

    def _send_heartbeats(self, heartbeats: Heartbeats, now_s: float) -> None:
        """Renew leases; an engine that is not connected yet is by the next time."""
        peer = self._peers.want(heartbeats.source, now_s)
        if peer.engine is not None:
            self._notifier.renew(heartbeats.request_ids, peer.engine)


def _for_whom(request_ids: Sequence[RequestId]) -> str:
    """The requests that something was to be done for, fit for one line of a log."""
    if not request_ids:
        return ""
    more = len(request_ids) - _NAMED_REQUESTS
    named = ", ".join(request_ids[:_NAMED_REQUESTS]) + (f" and {more} more" if more > 0 else "")
    return f", and with it request{'s' * (len(request_ids) > 1)} {named}"


def _parents_cores() -> set[int] | None:
    """The cores of the process that has started this one, which nobody has bound since."""
    try:
        return os.sched_getaffinity(os.getppid())
    except (AttributeError, OSError):
        # There is no such thing on this system, or no such process any more.
        return None


def _gather(shard: Shard) -> tuple[Shard, ...]:
    """What every worker of this engine holds; all workers call it at the same time."""
    own = (shard.rank, dict(shard.holdings))
    stage: list[Any] = [None] * get_tp_group().world_size
    torch.distributed.all_gather_object(stage, own, group=get_tp_group().cpu_group)
    stages: list[Any] = [None] * get_pp_group().world_size
    torch.distributed.all_gather_object(stages, stage, group=get_pp_group().cpu_group)
    return tuple(Shard(rank, layers) for workers in stages for rank, layers in workers)
