# SPDX-License-Identifier: Apache-2.0
"""A rank of an engine: its connector, driven as vLLM's worker would, and rank 0's scheduler too."""

from __future__ import annotations

import gc
import os
import pickle
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.parallel_state import (
    get_pp_group,
    get_tp_group,
    init_distributed_environment,
    initialize_model_parallel,
    set_custom_all_reduce,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.gc_utils import freeze_gc_heap
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from tools.pdstack.modules.upstream_at_rest import at_rest
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.connector import NixlConnector

from .compat import results
from .config import RankConfig, rank_config
from .errors import BenchmarkError
from .memory import PeakMemory
from .network import move_to
from .specs import EngineSpec, Offer, PauseSummary, Reading, RequestSpec, Sealed, Watch
from .watching import ArrivalWatch, Pauses, Post, ThreadTimes, watch_posts

_STEP_S = Watch().step_s
_LIMIT_S = 540.0
_HOLDING_STEPS = 500
_SETTLED_S = 30.0
_REST_S = 0.3
"""Children that use no processor for so long have nothing left to do."""


def _used_by_children_s() -> float:
    """Processor time of all processes that this one has started."""
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return float(sum(each.user + each.system for each in times))


class ConnectorHost:
    """One rank.

    Args:
        spec: The engine.
        rank: Its position in the engine's mesh, stages outermost.
    """

    def __init__(self, spec: EngineSpec, rank: int) -> None:
        # Before there is any other thread.
        move_to(spec.site)
        os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = spec.site.host
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(spec.port)
        # Ranks with different ones share no memory, which would outlive them.
        os.environ["VLLM_DIST_IDENT"] = f"{spec.engine_id}-{rank}"
        pp_rank, tp_rank = divmod(rank, spec.layout.tp_size)
        self._rank = pp_rank, tp_rank
        self._config: RankConfig = rank_config(spec, pp_rank, tp_rank)
        config, kv_cache_config = self._config.vllm_config, self._config.kv_cache_config
        self._scheduler: KVConnectorBase_V1 | None = None
        self._requests: dict[str, Request] = {}
        with set_current_vllm_config(config):
            meeting = Path(spec.meeting).as_uri()
            init_distributed_environment(
                spec.layout.world_size, rank, meeting, local_rank=0, backend="gloo"
            )
            set_custom_all_reduce(False)
            initialize_model_parallel(spec.layout.tp_size, spec.layout.pp_size)
            assert (get_pp_group().rank_in_group, get_tp_group().rank_in_group) == self._rank
            # Those of torch's groups, of which an engine has as many with any connector.
            self._others = ThreadTimes.now()
            with at_rest() if spec.variant.at_rest else _as_shipped():
                self._worker: KVConnectorBase_V1 = KVConnectorFactory.create_connector(
                    config, KVConnectorRole.WORKER, kv_cache_config
                )
            if rank == 0:
                self._scheduler = KVConnectorFactory.create_connector(
                    config, KVConnectorRole.SCHEDULER, kv_cache_config
                )
            # Ours leaves some configurations to upstream's: then nothing would be compared.
            assert isinstance(self._worker, NixlConnector) == (spec.variant.connector == "ours")
            self._worker.register_kv_caches(self._config.tensors)
        self._posts: list[Post] = []
        watch_posts(self._posts)
        # As vLLM's engines do once they have started: what is there by then is garbage to nobody.
        # Without it, ranks collect it before they read, and begin up to 100 ms apart.
        freeze_gc_heap()

    def describe(self) -> tuple[tuple[int, int], Sealed]:
        """This rank, and what it says of itself in handshakes."""
        return self._rank, pickle.dumps(self._worker.get_handshake_metadata())

    def serve(self, descriptions: Mapping[tuple[int, int], Sealed]) -> Sealed:
        """Answer handshakes; returns what workers are told in a step without requests."""
        assert self._scheduler is not None
        self._scheduler.set_xfer_handshake_metadata_pp_aware(
            {rank: pickle.loads(description) for rank, description in descriptions.items()}
        )
        return self._scheduled()

    def fill(self) -> None:
        """Give all blocks known bytes."""
        self._config.caches.fill()

    def clear(self) -> None:
        """Give all blocks bytes that are no request's."""
        self._config.caches.clear()

    def touch(self, block_ids: Sequence[int]) -> None:
        """Have some blocks backed by memory, so that they count as nobody's need."""
        self._config.caches.touch(block_ids)

    def settle(self) -> None:
        """Wait until what the connector has started beside this process has come to rest.

        Raises:
            BenchmarkError: It does not.
        """
        limit_s, before = time.monotonic() + _SETTLED_S, None
        while (now := _used_by_children_s()) != before:
            if time.monotonic() > limit_s:
                raise BenchmarkError(f"processes of the connector's are busy after {_SETTLED_S} s")
            before = now
            time.sleep(_REST_S)

    def check(
        self, block_ids: Sequence[int], source_block_ids: Sequence[int], source_block_tokens: int
    ) -> None:
        """See that blocks hold what they were read from.

        Raises:
            BenchmarkError: They do not.
        """
        self._config.caches.check(block_ids, source_block_ids, source_block_tokens)

    def offer(self, specs: Sequence[RequestSpec], computes: bool = False) -> Offer:
        """Prefill requests, as far as the scheduler sees it; the model may compute others'."""
        assert self._scheduler is not None
        params = {}
        for spec in specs:
            request = _request(spec, {"do_remote_decode": True})
            self._scheduler.on_new_request(request)
            self._scheduler.get_num_new_matched_tokens(request, 0)
            self._scheduler.update_state_after_alloc(request, _blocks(spec), 0)
            request.num_computed_tokens = spec.num_tokens
            # The answer's first token, which is sampled and not computed.
            request.append_output_token_ids(0)
            request.status = RequestStatus.FINISHED_LENGTH_CAPPED
            # The one that engines call depends on the number of groups; it is the same for one.
            delayed, found = self._scheduler.request_finished(request, spec.block_ids)
            assert delayed and found is not None
            params[spec.request_id] = found
        offered = self._scheduled(computes=computes)
        return Offer(offered, self._scheduled(computes=computes), params)

    def ask(self, specs: Sequence[RequestSpec], computes: bool) -> tuple[Sealed, Sealed]:
        """Schedule requests that another engine has prefilled.

        Args:
            specs: The requests.
            computes: Whether the model computes something for others meanwhile.

        Returns:
            What workers are told in the first step, and in those that follow.
        """
        assert self._scheduler is not None
        for spec in specs:
            request = _request(spec, spec.params or {})
            self._requests[spec.request_id] = request
            self._scheduler.on_new_request(request)
            count, is_async = self._scheduler.get_num_new_matched_tokens(request, 0)
            assert count == spec.num_tokens and is_async
            self._scheduler.update_state_after_alloc(request, _blocks(spec), count)
            request.num_computed_tokens = spec.num_tokens
        return self._scheduled(computes=computes), self._scheduled(computes=computes)

    def hold(self, metadata: Sealed) -> None:
        """Hold requests for other engines."""
        self._step(pickle.loads(metadata))

    def read(
        self, first: Sealed, others: Sealed, request_ids: Sequence[str], watch: Watch
    ) -> Reading:
        """Read requests, step by step, and measure it.

        Args:
            first: What the worker is told in the first step.
            others: The same in the others.
            request_ids: What is to be reported.
            watch: What else to look at.
        """
        self._posts.clear()
        metadata, idle = pickle.loads(first), pickle.loads(others)
        awaited, worker, pauses = set(request_ids), self._worker, Pauses()
        start_cpu_s = finished_cpu_s = 0.0
        began: list[float] = []
        gc.collect()
        memory = PeakMemory() if watch.memory else None
        arrival = None
        if watch.arrival_in:
            arrival = ArrivalWatch(self._config.caches.arrival(watch.arrival_in))
        worker_at_first_s = time.process_time()
        while True:
            pauses.begin_step()
            began.append(time.monotonic())
            at_first_s = time.thread_time()
            # Ours takes it up in the first call, and upstream's in the second.
            worker.bind_connector_metadata(metadata)
            worker.start_load_kv(None)
            started_s = time.thread_time()
            found = results(worker)
            finished_s = time.thread_time()
            worker.clear_connector_metadata()
            ended_s = time.monotonic()
            pauses.add(ended_s - began[-1])
            metadata = idle
            start_cpu_s += started_s - at_first_s
            finished_cpu_s += finished_s - started_s
            if found.num_failed:
                raise BenchmarkError(f"{found.num_failed} blocks or requests could not be read")
            awaited -= found.received
            if not awaited:
                break
            if ended_s - began[0] > _LIMIT_S:
                raise BenchmarkError(f"{len(awaited)} requests were not read in {_LIMIT_S:.0f} s")
            _act_out(watch, pauses)
        worker_cpu_s = time.process_time() - worker_at_first_s
        peak_bytes = 0 if memory is None else memory.risen_bytes()
        arrived_s = None if arrival is None else arrival.end()
        if not self._posts:
            raise BenchmarkError("requests were reported that nothing was read for")
        if arrival is not None and arrived_s is None:
            raise BenchmarkError("requests were reported before their last byte was there")
        if self._scheduler is not None:
            done = KVConnectorOutput(finished_recving=set(request_ids))
            self._scheduler.update_connector_output(done)
        worker.get_kv_connector_stats()
        return Reading(
            began[0],
            ended_s,
            self._posts[0].at_s,
            start_cpu_s,
            finished_cpu_s,
            sum(post.cpu_s for post in self._posts if post.thread_id == threading.get_ident()),
            worker_cpu_s,
            len(began),
            None if arrived_s is None else sum(at_s > arrived_s for at_s in began),
            pauses.summary(),
            peak_bytes,
        )

    def watch_holding(self, idle: Sealed, watch: Watch) -> PauseSummary:
        """Take steps in which nobody asks for what is held.

        Args:
            idle: What the worker is told in each.
            watch: What is acted out between two of them.
        """
        metadata = pickle.loads(idle)
        for _ in range(_HOLDING_STEPS):
            # First for as long as it takes the connector to get to know what it holds.
            self._step(metadata)
            time.sleep(watch.step_s)
        gc.collect()
        pauses = Pauses()
        for _ in range(_HOLDING_STEPS):
            pauses.begin_step()
            began_s = time.monotonic()
            self._step(metadata)
            pauses.add(time.monotonic() - began_s)
            _act_out(watch, pauses)
        return pauses.summary()

    def idle(self, duration_s: float) -> float:
        """CPU time of the connector's threads while nothing is to be done and no step is taken."""
        before = ThreadTimes.now()
        time.sleep(duration_s)
        return ThreadTimes.now().since(before, but=self._others)

    def release(self, idle: Sealed, request_ids: Sequence[str]) -> None:
        """Wait until other engines are through with requests.

        Raises:
            BenchmarkError: They do not say so.
        """
        awaited, deadline_s = set(request_ids), time.monotonic() + _LIMIT_S
        while awaited:
            sent, _ = self._step(pickle.loads(idle))
            awaited -= sent
            if time.monotonic() > deadline_s:
                raise BenchmarkError(f"{len(awaited)} requests were not released")
            time.sleep(_STEP_S)
        self._worker.get_kv_connector_stats()

    def forget(self, request_ids: Sequence[str]) -> None:
        """End requests on the scheduler's side of a decode engine."""
        assert self._scheduler is not None
        for request_id in request_ids:
            request = self._requests.pop(request_id)
            request.status = RequestStatus.FINISHED_LENGTH_CAPPED
            self._scheduler.request_finished(request, [])

    def _scheduled(self, *, computes: bool = False) -> Sealed:
        """What the scheduler asks of the workers next."""
        assert self._scheduler is not None
        output = SchedulerOutput.make_empty()
        output.total_num_scheduled_tokens = int(computes)
        return pickle.dumps(self._scheduler.build_connector_meta(output))

    def _step(self, metadata: Any) -> tuple[set[str], set[str]]:
        self._worker.bind_connector_metadata(metadata)
        self._worker.start_load_kv(None)
        found = results(self._worker)
        self._worker.clear_connector_metadata()
        return found.sent, found.received


def _act_out(watch: Watch, pauses: Pauses) -> None:
    """What an engine's thread does between two steps of the connector's."""
    if watch.in_python:
        pauses.compute(watch.step_s)
    else:
        time.sleep(watch.step_s)


def _request(spec: RequestSpec, params: dict[str, Any]) -> Request:
    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": dict(params)})
    return Request(spec.request_id, [0] * spec.num_tokens, sampling, None)


def _blocks(spec: RequestSpec) -> KVCacheBlocks:
    return KVCacheBlocks(([KVCacheBlock(block_id) for block_id in spec.block_ids],))


@contextmanager
def _as_shipped() -> Iterator[None]:
    yield
