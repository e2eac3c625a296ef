# SPDX-License-Identifier: Apache-2.0
"""Asks the installed vLLM what engines would keep, in a process of its own.

This process knows neither vLLM nor torch; the other one runs `dry_run`, which knows both.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from ..protocol.description import decode_worker
from .engines import Answer, Engine, Group, NoAnswerError
from .layouts import EngineLayout

_IN_VLLM = "vllm.distributed.kv_transfer.kv_connector.v1.reshard"
_DEADLINE_S = 600


def can_ask() -> bool:
    """Return whether vLLM is installed, without importing it."""
    return find_spec("vllm") is not None and find_spec("torch") is not None


def ask(
    model: str, layouts: Sequence[EngineLayout], device: str | None, more: Sequence[str]
) -> Answer:
    """Ask vLLM to make the model of both engines without weights.

    Args:
        model: Directory or name of the model.
        layouts: Layout of the engine that is read from, and of the one that reads.
        device: "cpu" or "gpu"; None for what the installed vLLM runs on.
        more: Further arguments of `vllm serve`, for both engines.

    Raises:
        NoAnswerError: vLLM would not start such engines.
        ValueError: The process gave no answer.
    """
    question = {"device": device, "engines": [_engine(model, each, more) for each in layouts]}
    package = __name__.rpartition(".cli.")[0]
    # The fork's script loads the package under a name of its own, without vLLM.
    package = _IN_VLLM if package.startswith("_") else package
    try:
        done = subprocess.run(
            [sys.executable, "-m", f"{package}.dry_run", json.dumps(question)],
            capture_output=True,
            text=True,
            env={"VLLM_LOGGING_LEVEL": "ERROR", **os.environ},
            timeout=_DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"--model {model}: vLLM did not make the model within {_DEADLINE_S} seconds: give "
            "--num-layers, --num-kv-heads and --head-size instead"
        ) from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(f"--model {model}: vLLM cannot be asked ({last}): see whether it starts")
    answer = json.loads(done.stdout)
    vllm = f"vLLM {answer['vllm']}"
    if "fault" in answer:
        raise NoAnswerError(f"{vllm} here: {answer['fault']}", is_final=answer.get("final", True))
    prefill, decode = (
        _decode(said, layout) for said, layout in zip(answer["engines"], layouts, strict=True)
    )
    first = answer["engines"][0]
    return Answer(
        first["model"],
        f"from {vllm}, asked layer by layer",
        answer["device"],
        first["state"],
        (prefill, decode),
    )


def _engine(model: str, layout: EngineLayout, more: Sequence[str]) -> dict[str, Any]:
    transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    text = (
        f"--skip-tokenizer-init --enforce-eager --distributed-executor-backend mp "
        f"--tensor-parallel-size {layout.mesh.tp_size} "
        f"--pipeline-parallel-size {layout.mesh.pp_size} "
        f"--decode-context-parallel-size {layout.num_shares}"
    )
    arguments = ["--model", model, "--tokenizer", model, *text.split()]
    arguments += ["--kv-transfer-config", json.dumps(transfer)]
    if layout.block_tokens is not None:
        arguments += ["--block-size", str(layout.block_tokens)]
    if layout.run_tokens is not None:
        arguments += ["--cp-kv-cache-interleave-size", str(layout.run_tokens)]
    return {
        "arguments": [*arguments, *more],
        "tp_size": layout.mesh.tp_size,
        "pp_size": layout.mesh.pp_size,
        "partition": ",".join(map(str, layout.partition)),
    }


def _decode(said: dict[str, Any], layout: EngineLayout) -> Engine:
    """Return an engine from what was said of it; without workers if it has none to read."""
    workers = [decode_worker(base64.b64decode(each)) for each in said.get("workers", ())]
    states: set[int] = {
        layer.group
        for worker in workers
        for layer in worker.cache.layers.values()
        if layer.planes[0].per_sequence
    }
    return Engine(
        layout,
        tuple(worker.shard for worker in workers),
        [worker.cache for worker in workers],
        tuple(
            Group(each["tokens"], each.get("window", 0), each.get("chunk", 0), number in states)
            for number, each in enumerate(said.get("groups", ()))
        ),
        tuple(said["backends"]),
        said["left"],
        said["fault"],
    )
