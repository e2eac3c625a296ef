# SPDX-License-Identifier: Apache-2.0
"""Schedulers of vLLM with our connector, and whole engines of them and workers, without a model."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from vllm.config import SpeculativeConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
)
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import FinishReason
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)
from vllm.v1.outputs import KVConnectorOutput, LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.v1.kv_connector.unit.reshard import forms
from tests.v1.kv_connector.unit.reshard.engine.workers import (
    DEADLINE_S,
    NUM_BLOCKS,
    split,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard import connector as connector_module
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.metadata import (
    ReshardConnectorMetadata,
)

BLOCK_TOKENS, PROMPT_TOKENS = 16, 40
REMOTE_BLOCKS = [[5, 2, 9]]


class Serving:
    """An engine's scheduler, driven as the engine does, with a model that always says token 7."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.finished: dict[str, FinishReason] = {}
        self.answers: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[LogprobsLists | None]] = {}
        self.handed_over: dict[str, dict] = {}
        self.told = ReshardConnectorMetadata()
        # As the engine core does where it can: requests that the connector holds back.
        self.holds = hasattr(KVConnectorBase_V1, "hold_back")
        self.held: dict[str, Request] = {}
        self._resumed: deque[Request] = deque()
        self._dropped: set[str] = set()

    def add(
        self,
        request_id: str,
        params: dict | None = None,
        *,
        max_tokens: int = 1,
        num_tokens: int = PROMPT_TOKENS,
        first_token: int = 0,
        stop_token: int | None = None,
        prompt: Sequence[int] = (),
        adapter: LoRARequest | None = None,
        **asked_for: Any,
    ) -> Request:
        """Add a request; those of one first token have one prompt, unless one is given.

        What else is asked for is how to sample.
        """
        stop = [] if stop_token is None else [stop_token]
        sampling = SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, stop_token_ids=stop, **asked_for
        )
        sampling.update_from_generation_config({})
        if params is not None:
            sampling.extra_args = {**(sampling.extra_args or {}), "kv_transfer_params": params}
        request = Request(
            request_id,
            [*prompt] or [first_token + position for position in range(num_tokens)],
            sampling,
            None,
            lora_request=adapter,
            block_hasher=get_request_block_hasher(BLOCK_TOKENS, sha256),
        )
        self._take_up(request)
        return request

    def refuse(self, request_id: str, params: dict) -> None:
        """The API server refuses a request: vLLM makes one up in its place."""
        sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params})
        request = Request(request_id, [0], sampling, None)
        request.abort_immediately = True
        self._take_up(request)

    def _take_up(self, request: Request) -> None:
        """Add a request to the scheduler, unless it is held back."""
        resume = partial(self._resumed.append, request)
        if self.holds and self.scheduler.connector.hold_back(request, resume):
            if not request.abort_immediately and request.request_id not in self._dropped:
                self.held[request.request_id] = request
            return
        self.held.pop(request.request_id, None)
        self.scheduler.add_request(request)
        if request.abort_immediately:
            self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    def step(self, *, received=(), sent=(), failed=None) -> dict[str, int]:
        """One step; returns the tokens scheduled.

        Args:
            received: Requests that all workers report as received.
            sent: Requests that all workers report as sent.
            failed: Requests of the received ones that could not be read, with their blocks.
        """
        scheduled = self.begin()
        self.end(scheduled, received=received, sent=sent, failed=failed)
        return dict(scheduled.num_scheduled_tokens)

    def begin(self) -> SchedulerOutput:
        """Begin a step; with asynchronous scheduling, while another one is under way."""
        while self._resumed:
            self._take_up(self._resumed.popleft())
        scheduled = self.scheduler.schedule()
        self.told = scheduled.kv_connector_metadata
        return scheduled

    def end(
        self,
        scheduled: SchedulerOutput,
        said=(7,),
        *,
        received=(),
        sent=(),
        failed=None,
        heard: KVConnectorOutput | None = None,
        logprobs: LogprobsLists | None = None,
    ) -> None:
        """End a step, in which the model has said the same for every request.

        Args:
            scheduled: What was begun.
            said: Tokens.
            received: Requests that all workers report as received.
            sent: Requests that all workers report as sent.
            failed: Requests of the received ones that could not be read, with their blocks.
            heard: What workers report, in place of these.
            logprobs: What the model said of each request's token.
        """
        request_ids = list(scheduled.num_scheduled_tokens)
        outputs = self.scheduler.update_from_output(
            scheduled,
            ModelRunnerOutput(
                request_ids,
                {request_id: position for position, request_id in enumerate(request_ids)},
                [list(said) if self._has_said(each) else [] for each in request_ids],
                logprobs,
                kv_connector_output=heard
                or KVConnectorOutput(
                    finished_sending=set(sent),
                    finished_recving=set(received),
                    **forms.failed_reads(failed or {}),
                ),
            ),
        )
        for by_client in outputs.values():
            for output in by_client.outputs:
                self.answers.setdefault(output.request_id, []).extend(output.new_token_ids)
                self.logprobs.setdefault(output.request_id, []).append(output.new_logprobs)
                if output.finish_reason is not None:
                    self.finished[output.request_id] = output.finish_reason
                if output.kv_transfer_params is not None:
                    self.handed_over[output.request_id] = output.kv_transfer_params

    def _has_said(self, request_id: str) -> bool:
        """Whether a step made a token for a request: those within a prompt make none."""
        request = self.scheduler.requests.get(request_id)
        return request is None or request.num_computed_tokens >= request.num_prompt_tokens

    def abort(self, request_id: str) -> None:
        """The client has gone."""
        if self.held.pop(request_id, None) is not None:
            self._dropped.add(request_id)
        if self.holds:
            # Of all that are aborted, whether they are held back or not.
            self.scheduler.connector.drop_held([request_id])
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def num_used_blocks(self) -> int:
        """Blocks that somebody holds; the null block is nobody's."""
        pool = self.scheduler.kv_cache_manager.block_pool
        return NUM_BLOCKS - 1 - pool.get_num_free_blocks()

    def is_through(self) -> bool:
        """Nothing is left of any request."""
        return not self.scheduler.requests and not self.held and not self.num_used_blocks()


@pytest.fixture
def serving(make_config):
    """Makes an engine's scheduler, with its connector."""
    init_none_hash(sha256)
    made: list[Serving] = []

    def make(
        policy: str = "fail",
        *,
        asynchronous: bool = False,
        window_tokens: int | None = None,
        state: MambaSpec | None = None,
        role: str = "kv_both",
        drafts: bool = False,
        **extra_config,
    ) -> Serving:
        config = make_config("NixlConnector", extra_config=extra_config)
        config.kv_transfer_config.kv_role = role
        config.kv_transfer_config.kv_load_failure_policy = policy
        config.kv_transfer_config.engine_id = f"engine-{len(made)}"
        config.cache_config.num_gpu_blocks = NUM_BLOCKS
        config.cache_config.enable_prefix_caching = True
        spec = FullAttentionSpec(
            block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=8, dtype=torch.float32
        )
        groups = [KVCacheGroupSpec(["layers.0"], spec)]
        if window_tokens:
            groups = split(["layers.0", "layers.1"], spec, window_tokens)
        if state:
            groups.append(KVCacheGroupSpec(["layers.1"], state))
            config.cache_config.mamba_cache_mode = state.mamba_cache_mode
            config.cache_config.enable_prefix_caching = state.mamba_cache_mode != "none"
            config.scheduler_config.disable_hybrid_kv_cache_manager = False
        if drafts:
            config.speculative_config = SpeculativeConfig(
                method="ngram",
                num_speculative_tokens=2,
                prompt_lookup_max=2,
                target_model_config=config.model_config,
                target_parallel_config=config.parallel_config,
            )
        config.scheduler_config.async_scheduling = asynchronous
        scheduler = (AsyncScheduler if asynchronous else Scheduler)(
            config,
            KVCacheConfig(NUM_BLOCKS, [], groups),
            StructuredOutputManager(config),
            block_size=max(BLOCK_TOKENS, state.block_size if state else 0),
        )
        made.append(Serving(scheduler))
        return made[-1]

    yield make
    for each in made:
        each.scheduler.connector.shutdown()


def from_prefill(**changes) -> dict:
    """What a prefill engine says of a prompt's blocks, as a router passes it on."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "prefill",
        "remote_request_id": "p-a",
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "remote_block_ids": REMOTE_BLOCKS,
        "remote_num_tokens": PROMPT_TOKENS,
        "tp_size": 1,
        "pp_size": 2,
        **changes,
    }


def from_decode(**changes) -> dict:
    """What a decode engine says of the last turn's blocks, as a router passes it on."""
    return from_prefill(do_remote_prefill=False, do_remote_decode=True, **changes)


class Whole:
    """A scheduler with its engine's workers, and what vLLM has between them.

    Args:
        serving: The scheduler.
        engine: The workers.
        num_replicas: How many others hold what each of these serves.
    """

    def __init__(self, serving: Serving, engine: Any, num_replicas: int = 0) -> None:
        self.serving, self.engine = serving, engine
        scheduler = serving.scheduler
        self.connectors = []
        # Replicas are asked first: what they say is the earliest that can be.
        workers = [*engine.workers.values()]
        for worker in (*[None] * num_replicas * len(workers), *workers):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(
                    connector_module, "is_pcp_replica", lambda _, replica=not worker: replica
                )
                patch.setattr(connector_module, "ReshardWorker", lambda *_, worker=worker: worker)
                self.connectors.append(
                    KVConnectorFactory.create_connector(
                        scheduler.vllm_config, KVConnectorRole.WORKER, scheduler.kv_cache_config
                    )
                )
        self.aggregator = KVOutputAggregator(len(self.connectors))

    def step(self) -> dict[str, int]:
        """One step, as the engine and its runners take it; returns the tokens scheduled."""
        scheduled = self.serving.begin()
        self.end(scheduled)
        return dict(scheduled.num_scheduled_tokens)

    def end(self, scheduled: SchedulerOutput) -> None:
        """Let workers hear of what was begun, and the scheduler of what they report."""
        self.serving.end(scheduled, heard=self.work(scheduled))

    def work(self, scheduled: SchedulerOutput) -> KVConnectorOutput:
        """Let workers hear of what was begun; returns what they report."""
        outputs = []
        for connector in self.connectors:
            connector.bind_connector_metadata(scheduled.kv_connector_metadata)
            sent, received, failed = forms.results(connector)
            report = KVConnectorOutput(
                finished_sending=sent,
                finished_recving=received,
                kv_connector_worker_meta=connector.build_connector_worker_meta(),
                **failed,
            )
            outputs.append(ModelRunnerOutput([], {}, kv_connector_output=report))
        return self.aggregator.aggregate(outputs).kv_connector_output


@pytest.fixture
def wholes(serving, engines):
    """Makes engines of a scheduler and its workers, with side channels that answer."""

    def make(
        engine_id: str, layout: dict, *, num_replicas: int = 0, port: int = 0, **extra_config
    ) -> Whole:
        owner, engine = serving(**extra_config), engines(engine_id, **layout)
        connector_scheduler = owner.scheduler.connector.connector_scheduler
        connector_scheduler.engine_id = engine_id
        connector_scheduler.side_channel_host = "127.0.0.1"
        connector_scheduler.side_channel_port = port
        connector_scheduler.serve_handshake(
            {(rank.pp_rank, rank.tp_rank): each.handshake for rank, each in engine.workers.items()}
        )
        engine.server = connector_scheduler._server
        connector_scheduler.side_channel_port = engine.server.port
        return Whole(owner, engine, num_replicas)

    return make


def until(condition, *wholes: Whole) -> None:
    """Step engines until something is so."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        for whole in wholes:
            whole.step()
        time.sleep(1e-3)
