# SPDX-License-Identifier: Apache-2.0
"""What the workers of engines would say of themselves, without weights, a GPU or a server.

A model is made stage by stage where tensors have no memory. Each layer is asked what it keeps, vLLM
plans and allocates caches of a few blocks, and the connector describes them, as when an engine
starts. `kv-plan`, which knows no vLLM, runs this module as a process of its own (`cli.asking`): it
is given one JSON object as its argument, and answers with one on standard output.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from vllm.platforms.cpu import CpuPlatform

from vllm import __version__ as vllm_version
from vllm import platforms

_NUM_BLOCKS = 64
"""Enough for any kind of cache to hold one token; `kv-plan` counts as many as a prompt needs."""

_MOST_TEXT = 300
"""Most characters of an error of vLLM's."""

_BACKENDS = "vllm.v1.attention.backends"

_Result = TypeVar("_Result")


class _AssumedGpu(CpuPlatform):
    """Chooses as a GPU's platform does where there is none, among what needs no GPU to be asked.

    Other backends for GPUs keep the same in their blocks (`cache_formats`), but those that the
    verdict names.
    """

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Choose nothing that is for CPUs."""

    @classmethod
    def update_block_size_for_backend(cls, vllm_config: Any) -> None:
        """Choose the block size as any platform does."""
        super(CpuPlatform, cls).update_block_size_for_backend(vllm_config)

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        """Return the plainest backend of a kind."""
        if attn_selector_config.use_sparse:
            return f"{_BACKENDS}.mla.flashmla_sparse.FlashMLASparseBackend"
        if attn_selector_config.use_mla:
            return f"{_BACKENDS}.mla.triton_mla.TritonMLABackend"
        return f"{_BACKENDS}.triton_attn.TritonAttentionBackend"


class _Event:
    """Stands for streams of a GPU and their events, which modules make, where there is none."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


def main() -> None:
    """Answer the question in the process's argument."""
    # vLLM logs to standard output.
    answers_to = os.dup(1)
    os.dup2(2, 1)
    answer = json.dumps(_answer(json.loads(sys.argv[1])))
    with os.fdopen(answers_to, "w", encoding="utf-8") as output:
        output.write(answer)


def _answer(question: dict[str, Any]) -> dict[str, Any]:
    """Return what each engine would be, or why vLLM would not start one."""
    here: str = platforms.current_platform.device_type
    device = question["device"] or ("cpu" if here == "cpu" else "gpu")
    has_gpu = here not in ("cpu", "")
    answer: dict[str, Any] = {"vllm": vllm_version, "device": device, "engines": []}
    answer["assumed"] = device == "gpu" and not has_gpu
    if device == "cpu" and has_gpu:
        return answer | {"fault": f"it is for {here}, and not for CPUs"}
    if answer["assumed"]:
        platforms._current_platform = _AssumedGpu()
        # Kernels whose modules only GPUs can import.
        os.environ["VLLM_KIMI_K3_GEMM_AR"] = "0"
    if not has_gpu:
        torch.cuda.Event = torch.cuda.Stream = _Event
        torch.accelerator.empty_cache = lambda: None
    from .engine.compat import ENGINES_CAN_BE_ASKED

    if not ENGINES_CAN_BE_ASKED:
        return answer | {"fault": "kv-plan asks vLLM 0.32 and later: give sizes instead of --model"}
    from vllm.model_executor.models import registry

    # vLLM imports a class that it does not know in a process of its own first, as that may
    # initialize CUDA. This process imports it in any case, and forks nothing.
    registry._run_in_subprocess = _run_here
    engines: dict[str, dict[str, Any]] = {}
    try:
        for arguments in question["engines"]:
            key = json.dumps(arguments)
            if key not in engines:
                engines[key] = _Engine(**arguments).describe(is_assumed=answer["assumed"])
            answer["engines"].append(engines[key])
    except (Exception, SystemExit) as error:
        return answer | {"fault": _in_one_line(error), "final": isinstance(error, ValueError)}
    return answer


def _run_here(function: Callable[[], _Result]) -> _Result:
    return function()


def _in_one_line(error: BaseException) -> str:
    """Return an error's first sentence; of one that is not meant for users also where it arose."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # pydantic puts a count of faults and a class before the text.
    text = next((each for each in lines if each.startswith("Value error, ")), "".join(lines[:1]))
    text = text.removeprefix("Value error, ").partition(" [type=")[0]
    text = text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]} ..."
    if isinstance(error, ValueError):
        return text.rstrip(".")
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = "" if trace is None else Path(trace.tb_frame.f_code.co_filename).name
    return f"{type(error).__name__} in {place}: {text}".rstrip(".")


class _Engine:
    """An engine that is asked.

    Args:
        arguments: What `vllm serve` would be given.
        tp_size: Number of ranks in a stage.
        pp_size: Number of stages.
        partition: Layers of each stage, as in VLLM_PP_LAYER_PARTITION; empty for vLLM's own.
    """

    def __init__(self, arguments: list[str], tp_size: int, pp_size: int, partition: str) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        self._args = EngineArgs.from_cli_args(parser.parse_args(arguments))
        self._tp_size, self._pp_size = tp_size, pp_size
        os.environ.pop("VLLM_PP_LAYER_PARTITION", None)
        if partition:
            os.environ["VLLM_PP_LAYER_PARTITION"] = partition

    def describe(self, *, is_assumed: bool) -> dict[str, Any]:
        """Return its groups and the descriptions of its workers, or why it has none.

        Args:
            is_assumed: True if the platform is not here. Then what its weights are quantized to may
                be unknown to this one; weights are left whole unless the KV cache goes with them.
        """
        from .connector import reason_for_upstream
        from .engine.caches.geometry import tokens_of_blocks
        from .engine.compat import ENGINES_CAN_BE_ASKED, kv_cache_configs
        from .errors import LocalLayoutError

        assert ENGINES_CAN_BE_ASKED
        from vllm.v1.attention.backends.utils import (
            get_supported_kv_cache_layouts,
            resolve_kv_cache_layout,
        )

        try:
            stages = [self._make_stage(stage) for stage in range(self._pp_size)]
        except Exception:
            quantized = str(self._quantization())
            if not is_assumed or quantized == "None" or "kv" in quantized:
                raise
            self._args.hf_overrides = {"quantization_config": None}
            stages = [self._make_stage(stage) for stage in range(self._pp_size)]
        config = stages[0][0]
        specs = [specs for _, specs, _ in stages]
        backends = [backends for _, _, backends in stages]
        layouts = [
            [layout.name for layout in get_supported_kv_cache_layouts([*each.values()])]
            for each in backends
            if each
        ]
        every_spec = [spec for each in specs for spec in each.values()]
        layout = resolve_kv_cache_layout(config, layouts, every_spec)
        config.model_config.max_model_len = 1
        config.cache_config.num_gpu_blocks_override = _NUM_BLOCKS
        kv_caches = kv_cache_configs(config, specs, [0] * len(stages))
        names = {backend.get_name() for each in backends for backend in each.values()}
        said: dict[str, Any] = {"backends": sorted(names), "left": None, "fault": None}
        said["state"] = any(each.has_mamba_layers for each in kv_caches)
        said["model"] = config.model_config.architecture
        num_shares = config.parallel_config.decode_context_parallel_size
        try:
            for kv_cache in kv_caches:
                said["left"] = said["left"] or reason_for_upstream(config, kv_cache)
            said["groups"] = [
                {"tokens": tokens, **_kept_by(group.kv_cache_spec)}
                for group, tokens in zip(
                    kv_caches[0].kv_cache_groups,
                    tokens_of_blocks(kv_caches[0], num_shares),
                    strict=True,
                )
            ]
            if said["left"] is None:
                said["workers"] = self._workers(config, kv_caches, backends, layout)
        except LocalLayoutError as error:
            said["fault"] = str(error)
        return said

    def _quantization(self) -> Any:
        """Return how the model's configuration says that weights are quantized."""
        from vllm.transformers_utils.config import get_config

        config = get_config(self._args.model, self._args.trust_remote_code)
        return vars(config).get("quantization_config")

    def _make_stage(self, stage: int) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        """Return a stage's configuration, and each layer's specification and backend."""
        from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
        from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
        from vllm.model_executor.model_loader.utils import initialize_model
        from vllm.utils.torch_utils import set_default_torch_dtype
        from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

        config = self._args.create_engine_config()
        with set_current_vllm_config(config):
            self._be_first_of(stage, config.parallel_config.decode_context_parallel_size)
            dtype = config.model_config.dtype
            with torch.device("meta"), set_default_torch_dtype(dtype):
                initialize_model(config)
            platforms.current_platform.update_block_size_for_backend(config)
            specs = get_kv_cache_spec(config)
            layers = get_layers_from_vllm_config(config, AttentionLayerBase, list(specs))
        return config, specs, {name: each.get_attn_backend() for name, each in layers.items()}

    def _be_first_of(self, stage: int, num_shares: int) -> None:
        """Have vLLM take this process for the first rank of a stage."""
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.v1.worker import workspace

        from vllm.distributed import parallel_state

        if not torch.distributed.is_initialized():
            workspace.init_workspace_manager(torch.device("cpu"))
            meeting = Path(tempfile.mkdtemp()) / "meeting"
            with set_current_vllm_config(VllmConfig()):
                parallel_state.init_distributed_environment(1, 0, f"file://{meeting}", 0, "gloo")
                parallel_state.initialize_model_parallel(1, 1)
        for group, size, rank in (
            (parallel_state.get_tp_group(), self._tp_size, 0),
            (parallel_state.get_pp_group(), self._pp_size, stage),
            (parallel_state.get_dcp_group(), num_shares, 0),
        ):
            group.ranks, group.world_size = list(range(size)), size
            group.rank = group.rank_in_group = rank

    def _workers(
        self, config: Any, kv_caches: list[Any], backends: list[dict[str, Any]], layout: Any
    ) -> list[str]:
        """Return what each worker would send to its readers; ranks of a stage differ by number.

        Raises:
            LocalLayoutError: The connector would refuse to start.
        """
        from .engine.caches.cache_formats import settings_fingerprint
        from .engine.caches.geometry import layers_of_worker
        from .engine.caches.ownership import refuse_shared_names, shard_of_worker
        from .engine.compat import ENGINES_CAN_BE_ASKED
        from .memory.cache import RankCache
        from .plan.shards import MeshRank, share_of_rank
        from .protocol.description import WorkerDescription, encode_worker
        from .protocol.leases import LeaseTableAddress

        assert ENGINES_CAN_BE_ASKED
        from vllm.v1.worker.utils import allocate_kv_cache, prepare_kernel_block_sizes

        parallel, settings = config.parallel_config, settings_fingerprint(config)
        described = []
        for stage, (kv_cache, own) in enumerate(zip(kv_caches, backends, strict=True)):
            groups = [
                [
                    SimpleNamespace(backend=own[name], kv_cache_spec=_spec_of(group, name))
                    for name in group.layer_names
                    if name in own
                ]
                for group in kv_cache.kv_cache_groups
            ]
            sizes = prepare_kernel_block_sizes(kv_cache, groups)
            tensors = allocate_kv_cache(kv_cache, torch.device("cpu"), layout, sizes)
            layers = layers_of_worker(tensors, kv_cache, own, settings=settings)
            cache = RankCache(
                kv_cache.num_blocks, 0, {name: each.cache for name, each in layers.items()}
            )
            for tp_rank in range(self._tp_size):
                share = share_of_rank(
                    tp_rank,
                    parallel.decode_context_parallel_size,
                    parallel.cp_kv_cache_interleave_size,
                )
                rank = MeshRank(stage, tp_rank)
                shard = shard_of_worker(rank, self._tp_size, layers, share)
                described.append(
                    WorkerDescription("planned", shard, cache, LeaseTableAddress(0, 1), b"")
                )
        refuse_shared_names([each.shard for each in described])
        return [base64.b64encode(encode_worker(each)).decode() for each in described]


def _spec_of(group: Any, name: str) -> Any:
    """Return a layer's own specification."""
    return _specs_of(group.kv_cache_spec).get(name, group.kv_cache_spec)


def _specs_of(spec: Any) -> dict[str, Any]:
    """Return the specifications of a group whose layers have each its own; empty for others."""
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    return dict(spec.kv_cache_specs) if isinstance(spec, UniformTypeKVCacheSpecs) else {}


def _kept_by(spec: Any) -> dict[str, int]:
    """Return the last tokens, or the tokens of a chunk, that a group keeps; empty for all."""
    first = next(iter(_specs_of(spec).values()), spec)
    name = type(first).__name__
    if "SlidingWindow" in name:
        return {"window": first.sliding_window}
    return {"chunk": first.attention_chunk_size} if "ChunkedLocal" in name else {}


if __name__ == "__main__":
    main()
