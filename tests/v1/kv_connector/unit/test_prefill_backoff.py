# SPDX-License-Identifier: Apache-2.0
"""The hook that keeps the window of a prompt's last token, in vLLM's own scheduler.

The engine that decodes computes that token anew. A prefill engine that stops one token before it
keeps the window that the token attends to, and not one that begins a token later.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.bases import skip_module_unless_base
from tests.v1.kv_connector.unit.conftest import RecordingConnector

skip_module_unless_base("0.32.0", "0.33.0", reason="its scheduler has no such hook")

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import (  # noqa: E402
    NixlPullConnectorScheduler,
)

BLOCK_TOKENS, WINDOW_TOKENS = 4, 8
Blocks = tuple[list[int], ...]
REMOTE = {
    "remote_engine_id": "prefill",
    "remote_request_id": "there",
    "remote_host": "127.0.0.1",
    "remote_port": 1,
    "remote_block_ids": ([1], [1]),
    "tp_size": 1,
}


class StoppingShort(NixlPullConnectorScheduler):
    """Upstream's scheduler of the connector, whose prefill engine stops one token short."""

    @override
    def _prefill_backoff(self) -> int:
        return 1


class HookConnector(RecordingConnector, SupportsHMA):
    """Asks the connector's scheduler, and keeps what it was handed over."""

    scheduler_class = StoppingShort

    def __init__(self, vllm_config, role, kv_cache_config) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.scheduler = self.scheduler_class(vllm_config, "engine", kv_cache_config)
        self.handed_over: list[tuple[int, Blocks]] = []

    @override
    def on_new_request(self, request) -> None:
        self.scheduler.on_new_request(request)

    @override
    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return self.scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    @override
    def request_finished_all_groups(self, request, block_ids):
        self.handed_over.append((request.num_computed_tokens, block_ids))
        return False, None


@pytest.fixture
def scheduler(make_config: Callable, monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    """A scheduler of a model with full attention and windows."""
    monkeypatch.setitem(KVConnectorFactory._registry, "HookConnector", lambda: HookConnector)
    config = make_config("HookConnector")
    config.scheduler_config.disable_hybrid_kv_cache_manager = False
    config.cache_config.num_gpu_blocks = 100
    init_none_hash(sha256)
    common = {
        "block_size": BLOCK_TOKENS,
        "num_kv_heads": 1,
        "head_size": 8,
        "dtype": torch.float32,
    }
    groups = [
        KVCacheGroupSpec(["full"], FullAttentionSpec(**common)),
        KVCacheGroupSpec(["window"], SlidingWindowSpec(**common, sliding_window=WINDOW_TOKENS)),
    ]
    return Scheduler(
        config,
        KVCacheConfig(100, [], groups),
        StructuredOutputManager(config),
        block_size=BLOCK_TOKENS,
        hash_block_size=BLOCK_TOKENS,
    )


def add(scheduler: Scheduler, num_tokens: int, kv_transfer_params: dict) -> Request:
    """Add a request with a prompt of so many tokens."""
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    params.update_from_generation_config({})
    params.extra_args = {"kv_transfer_params": kv_transfer_params}
    hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
    request = Request("a", list(range(num_tokens)), params, None, block_hasher=hasher)
    scheduler.add_request(request)
    return request


def step(scheduler: Scheduler) -> None:
    """One step, with a model that always says token 7."""
    scheduled = scheduler.schedule()
    ids = list(scheduled.num_scheduled_tokens)
    scheduler.update_from_output(
        scheduled, ModelRunnerOutput(ids, {a: i for i, a in enumerate(ids)}, [[7]] * len(ids))
    )


def first_kept(blocks: list[int]) -> int:
    """Position of the first block that is not the null block."""
    return next(position for position, block in enumerate(blocks) if block)


@pytest.mark.parametrize("num_tokens", range(24, 32))
def test_prefill_keeps_the_window_of_the_last_prompt_token(scheduler, num_tokens):
    """Wherever the window begins, its blocks are there for the engine that decodes."""
    add(scheduler, num_tokens, {"do_remote_decode": True})
    step(scheduler)
    ((num_computed, (full, window)),) = scheduler.connector.handed_over
    assert num_computed == num_tokens - 1
    assert 0 not in full
    assert first_kept(window) == (num_tokens - WINDOW_TOKENS) // BLOCK_TOKENS


@pytest.mark.parametrize("num_tokens", range(24, 32))
def test_decode_makes_room_for_the_same_window(scheduler, num_tokens):
    """The engine that decodes reads all tokens but the last, into blocks of the same positions."""
    request = add(scheduler, num_tokens, {"do_remote_prefill": True, **REMOTE})
    step(scheduler)
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    assert request.num_computed_tokens == num_tokens - 1
    full, window = scheduler.kv_cache_manager.get_block_ids("a")
    assert len(full) == len(window) == -(-(num_tokens - 1) // BLOCK_TOKENS)
    assert first_kept(window) == (num_tokens - WINDOW_TOKENS) // BLOCK_TOKENS


def test_without_the_hook_the_window_begins_too_late(scheduler):
    """A token's window that begins with a block is short of it, as upstream has no such backoff."""
    scheduler.connector.scheduler.__class__ = NixlPullConnectorScheduler
    num_tokens = WINDOW_TOKENS + 4 * BLOCK_TOKENS - 1
    add(scheduler, num_tokens, {"do_remote_decode": True})
    step(scheduler)
    ((_, (_, window)),) = scheduler.connector.handed_over
    assert first_kept(window) == (num_tokens - WINDOW_TOKENS) // BLOCK_TOKENS + 1
