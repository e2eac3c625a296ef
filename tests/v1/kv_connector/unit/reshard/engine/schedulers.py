# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of a connector, and requests for it."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from vllm.config import KVTransferConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.scheduling.scheduler import (
    ReshardScheduler,
)

PARAMS = {
    "do_remote_prefill": True,
    "remote_engine_id": "prefill",
    "remote_request_id": "p-a",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "remote_block_ids": [[5, 2, 9]],
    "remote_num_tokens": 40,
    "tp_size": 2,
}


def request(params, num_prompt_tokens: int = 40, request_id: str = "d-a") -> Request:
    """A request with the given parameters, whose prompt counts as computed."""
    sampling = SamplingParams(extra_args={"kv_transfer_params": params and dict(params)})
    made = Request(request_id, list(range(num_prompt_tokens)), sampling, None)
    made.num_computed_tokens = num_prompt_tokens
    return made


def scheduler(
    *,
    bidirectional: bool = False,
    block_size: int = 16,
    stages: int = 3,
    replicas: int = 1,
    ahead: bool = False,
    role: str = "kv_both",
    shares: int = 1,
) -> ReshardScheduler:
    """A scheduler of an engine with one KV-cache group."""
    spec = FullAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=8, dtype=torch.float32
    )
    config = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=block_size),
        parallel_config=SimpleNamespace(
            data_parallel_index=0,
            tensor_parallel_size=2,
            pipeline_parallel_size=stages,
            data_parallel_size=replicas,
            decode_context_parallel_size=shares,
            prefill_context_parallel_size=1,
            world_size=1,
            distributed_executor_backend="mp",
            nnodes_within_dp=1,
        ),
        num_prefill_lookahead_tokens=0,
        speculative_config=None,
        model_config=SimpleNamespace(max_model_len=4 * block_size),
        kv_transfer_config=KVTransferConfig(
            kv_connector="NixlConnector",
            kv_role=role,
            kv_connector_extra_config={
                "bidirectional_kv_xfer": bidirectional,
                "seed_first_token": False,
            },
        ),
        scheduler_config=SimpleNamespace(
            disable_hybrid_kv_cache_manager=True, async_scheduling=ahead
        ),
    )
    return ReshardScheduler(
        config, "engine", KVCacheConfig(16, [], [KVCacheGroupSpec(["layer"], spec)])
    )
