# SPDX-License-Identifier: Apache-2.0
"""Failed loads of a model with several KV-cache groups, in vLLM's own scheduler."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import FinishReason
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.bases import skip_module_unless_base
from tests.v1.kv_connector.unit.conftest import RecordingConnector

skip_module_unless_base("0.22.1", reason="its scheduler tells failed loads by request")

from vllm.v1.core.sched.invalid_blocks import (  # noqa: E402
    RunningRequestError,
    blocks_in_order_of_validity,
)

BLOCK_TOKENS, WINDOW_TOKENS, PROMPT_TOKENS = 4, 8, 30
Blocks = list[list[int]]


class LoadingConnector(RecordingConnector, SupportsHMA):
    """Loads the prompts of requests that say so, once each, in the background or at once."""

    @override
    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        load = (request.kv_transfer_params or {}).pop("load", None)
        if load is None:
            return 0, False
        return PROMPT_TOKENS - 1 - num_computed_tokens, load == "async"

    @override
    def request_finished_all_groups(self, request, block_ids):
        return False, None


class Steps:
    """The real scheduler, driven as the engine does, with a model that always says token 7."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.finished: dict[str, FinishReason] = {}

    def add(self, request_id: str, *, load: str | None = None, first_token: int = 0) -> Request:
        """Add a request; those of one first token have one prompt."""
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        params.update_from_generation_config({})
        params.extra_args = {"kv_transfer_params": {"load": load}} if load else None
        tokens = [first_token + position for position in range(PROMPT_TOKENS)]
        request = Request(
            request_id,
            tokens,
            params,
            None,
            block_hasher=get_request_block_hasher(BLOCK_TOKENS, sha256),
        )
        self.scheduler.add_request(request)
        return request

    def step(
        self, *, lost: Callable[[], set[int]] = set, received: str | None = None
    ) -> dict[str, int]:
        """One step; returns the tokens scheduled.

        Args:
            lost: Called once the step is scheduled; blocks that workers report as invalid.
            received: A request that workers report as received.
        """
        scheduled = self.scheduler.schedule()
        request_ids = list(scheduled.num_scheduled_tokens)
        kv_output = KVConnectorOutput(
            invalid_block_ids=lost(), finished_recving={received} if received else None
        )
        outputs = self.scheduler.update_from_output(
            scheduled,
            ModelRunnerOutput(
                request_ids,
                {request_id: position for position, request_id in enumerate(request_ids)},
                [[7]] * len(request_ids),
                kv_connector_output=kv_output,
            ),
        )
        for by_client in outputs.values():
            for output in by_client.outputs:
                if output.finish_reason is not None:
                    self.finished[output.request_id] = output.finish_reason
        return dict(scheduled.num_scheduled_tokens)

    def blocks(self, request_id: str) -> Blocks:
        """A request's blocks that are not the null block, for each group."""
        null_id = self.scheduler.kv_cache_manager.block_pool.null_block.block_id
        groups = self.scheduler.kv_cache_manager.get_block_ids(request_id)
        return [[block for block in group if block != null_id] for group in groups]

    def num_free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


@pytest.fixture
def make_steps(make_config: Callable, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Steps]:
    """Makes a scheduler of a model with full attention and windows, with a failure policy."""

    def make(policy: str) -> Steps:
        monkeypatch.setitem(
            KVConnectorFactory._registry, "LoadingConnector", lambda: LoadingConnector
        )
        config = make_config("LoadingConnector")
        config.scheduler_config.disable_hybrid_kv_cache_manager = False
        config.kv_transfer_config.kv_load_failure_policy = policy
        config.cache_config.num_gpu_blocks = 100
        config.cache_config.enable_prefix_caching = True
        init_none_hash(sha256)
        common = dict(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=8, dtype=torch.float32)
        groups = [
            KVCacheGroupSpec(["full"], FullAttentionSpec(**common)),
            KVCacheGroupSpec(
                ["sliding"], SlidingWindowSpec(**common, sliding_window=WINDOW_TOKENS)
            ),
        ]
        scheduler = Scheduler(
            config,
            KVCacheConfig(100, [], groups),
            StructuredOutputManager(config),
            block_size=BLOCK_TOKENS,
        )
        return Steps(scheduler)

    return make


def test_failed_load_is_computed_anew(make_steps):
    """The request starts over, also when another group's blocks arrived, and others go on."""
    steps = make_steps("recompute")
    steps.add("running", first_token=100)
    assert steps.step() == {"running": PROMPT_TOKENS}
    request = steps.add("loading", load="async")
    assert steps.step() == {"running": 1}
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    full, sliding = steps.blocks("loading")
    assert len(sliding) < len(full)

    assert steps.step(lost=lambda: {sliding[-1]}) == {"running": 1}
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    # Another worker fails later; only then does the last one report the end.
    assert steps.step(lost=lambda: {full[0]}, received="loading") == {"running": 1}
    assert steps.finished == {"running": FinishReason.LENGTH}
    assert steps.step() == {"loading": PROMPT_TOKENS}
    for _ in range(3):
        steps.step()
    assert steps.finished["loading"] == FinishReason.LENGTH
    assert not steps.scheduler.requests


def test_start_over_takes_what_the_prefix_cache_has(make_steps):
    """What a request before it left in the cache is not computed again, nor is it harmed."""
    steps = make_steps("recompute")
    steps.add("before")
    for _ in range(4):
        steps.step()
    num_free = steps.num_free_blocks()
    steps.add("loading", load="async")
    steps.step()
    _, sliding = steps.blocks("loading")
    steps.step(lost=lambda: {sliding[-1]}, received="loading")
    assert steps.step()["loading"] == PROMPT_TOKENS % BLOCK_TOKENS
    for _ in range(3):
        steps.step()
    assert steps.finished["loading"] == FinishReason.LENGTH
    assert steps.num_free_blocks() == num_free


def test_failed_load_ends_its_request_only(make_steps):
    """With policy fail the request ends with an error; its blocks come back once all is read."""
    steps = make_steps("fail")
    steps.add("running", first_token=100)
    steps.step()
    num_free = steps.num_free_blocks()
    steps.add("loading", load="async")
    steps.step()
    full, _ = steps.blocks("loading")
    steps.step(lost=lambda: {full[-1]})
    assert steps.finished == {"loading": FinishReason.ERROR}
    assert steps.num_free_blocks() < num_free
    steps.step(received="loading")
    assert steps.finished["running"] == FinishReason.LENGTH
    assert not steps.scheduler.requests
    assert steps.num_free_blocks() == 99


def test_failed_load_of_a_running_request_ends_it_with_policy_fail(make_steps):
    """What was loaded at once and failed is an error of its request, and leaves the cache."""
    steps = make_steps("fail")
    steps.add("running", first_token=100)
    steps.step()
    steps.add("loading", load="sync")
    assert steps.step(lost=lambda: {steps.blocks("loading")[1][0]}) == {"running": 1, "loading": 1}
    assert steps.finished == {"loading": FinishReason.ERROR}
    steps.add("again")
    assert steps.step() == {"running": 1, "again": PROMPT_TOKENS}


@pytest.mark.parametrize("num_tokens", range(24, 32))
def test_a_finished_request_keeps_its_last_tokens_window(make_steps, monkeypatch, num_tokens):
    """Wherever the window begins, its blocks are there for the engine that goes on."""
    handed_over: list[Blocks] = []

    def finished(connector, request, block_ids):
        handed_over.extend(block_ids)
        return False, None

    monkeypatch.setattr(LoadingConnector, "request_finished_all_groups", finished)
    monkeypatch.setattr(f"{__name__}.PROMPT_TOKENS", num_tokens)
    steps = make_steps("fail")
    steps.add("prefilled").max_tokens = 1
    steps.step()
    assert steps.finished == {"prefilled": FinishReason.LENGTH}
    full, sliding = handed_over
    assert 0 not in full
    first_kept = next(position for position, block in enumerate(sliding) if block)
    assert first_kept == (num_tokens - WINDOW_TOKENS) // BLOCK_TOKENS


groups = st.lists(st.lists(st.integers(1, 40), unique=True), min_size=2, max_size=4)


@given(blocks=groups, invalid=st.sets(st.integers(1, 40)))
def test_an_invalid_block_of_any_group_leaves_nothing_valid(blocks, invalid):
    """The first block is an invalid one if any is, all are there, and valid requests have none."""
    ordered = blocks_in_order_of_validity("a", blocks, invalid, continues_in_place=False)
    together = [block for group in blocks for block in group]
    if invalid & set(together):
        assert ordered[0] in invalid
        assert sorted(ordered) == sorted(together)
    else:
        assert ordered == []


@given(blocks=st.lists(st.integers(1, 40)), invalid=st.sets(st.integers(1, 40)), in_place=...)
def test_one_group_is_walked_through_as_it_is(blocks: list[int], invalid: set[int], in_place: bool):
    """Nothing changes for models with one KV-cache group that keeps all blocks."""
    assert (
        blocks_in_order_of_validity("a", [blocks], invalid, continues_in_place=in_place) is blocks
    )


def test_recomputing_a_running_request_in_place_is_refused():
    """The message names the request and the remedy; a running request that lost nothing is well."""
    with pytest.raises(RunningRequestError, match=r"blocks \[5\] of running request a .* to fail"):
        blocks_in_order_of_validity("a", [[3, 4], [0, 5]], {5}, continues_in_place=True)
    assert blocks_in_order_of_validity("b", [[6], [0, 7]], {5}, continues_in_place=True) == []


def test_window_of_a_single_group_starts_over():
    """What stands behind null blocks cannot be computed in place: they hold no prefix."""
    ordered = blocks_in_order_of_validity("a", [[0, 0, 7, 8]], {7, 8}, continues_in_place=False)
    assert ordered[0] in (7, 8)
    with pytest.raises(RunningRequestError):
        blocks_in_order_of_validity("a", [[0, 0, 7, 8]], {8}, continues_in_place=True)
