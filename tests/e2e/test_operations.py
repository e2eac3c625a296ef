# SPDX-License-Identifier: Apache-2.0
"""Operations of vLLM's that stop or change an engine, while blocks are held or requests wait.

What schedulers and workers do about them without engines is tested in the connector's
`test_operations`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

from tests.e2e.layouts import ONE, STAGES
from tests.e2e.pairs import BLOCK_TOKENS, REQUEST_LIMIT_S, metric
from tests.e2e.turns import Turns, prompt_of
from tests.tools.pdstack.helpers import wait_until
from tools.pdstack.engine import EngineSpec, KVTransfer
from tools.pdstack.stack import Engine, PDStack
from tools.pdstack.tiny_models import write_tiny_llama

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

LEASE_S = 10.0
LIMIT_S = 60.0
ANSWER_TOKENS = 8
NUM_WORKERS = STAGES.world_size
RANK = 8
NUM_LAYERS, HIDDEN = 4, 128
PAUSES = pytest.mark.parametrize(
    ("stop", "go_on"),
    [
        ("/pause?mode=keep", "/resume"),
        ("/pause?mode=wait", "/resume"),
        ("/pause?mode=abort", "/resume"),
        ("/sleep?level=1", "/wake_up"),
        ("/sleep?level=0&mode=keep", "/wake_up?tags=scheduling"),
    ],
)


def write_adapter(directory: Path, seed: int) -> Path:
    """Write a LoRA adapter of the tiny Llama, with weights large enough to change answers."""
    generator = torch.Generator().manual_seed(seed)
    weights = {
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{side}.weight": torch.randn(
            shape, generator=generator
        )
        for layer in range(NUM_LAYERS)
        for side, shape in {"A": (RANK, HIDDEN), "B": (HIDDEN, RANK)}.items()
    }
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": ["q_proj"]}
    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(weights, directory / "adapter_model.safetensors")
    return directory


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Turns]:
    """Start a prefill engine of two stages and a decode engine, with the routes for operators."""
    model = write_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama")
    transfer = KVTransfer(extra_config={"kv_lease_duration": LEASE_S})
    lora = ("--enable-lora", "--max-lora-rank", str(RANK))
    few = ("--num-gpu-blocks-override", "64", *lora)
    env = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    with PDStack(model, tmp_path_factory.mktemp("run")) as pdstack:
        prefill, decode = pdstack.start_engines(
            EngineSpec("prefill", STAGES, transfer, few, env, max_model_len=1024),
            EngineSpec("decode", ONE, transfer, few, env, max_model_len=1024),
        )
        yield Turns(pdstack, prefill, decode, ANSWER_TOKENS)


@pytest.fixture
def in_background() -> Iterator[Callable[..., Any]]:
    """Calls something, and returns what will come of it."""
    with ThreadPoolExecutor(4) as pool:
        yield pool.submit


labels = iter(range(1000))


def new_prompt() -> list[int]:
    """Return a prompt of two blocks and a part of one, that nobody has seen."""
    return prompt_of(next(labels), 2 * BLOCK_TOKENS + 16)


def operate(engine: Engine, path: str, **body: Any) -> httpx.Response:
    """Ask an engine for an operation, which it does."""
    reply = httpx.post(
        f"{engine.url}{path}", json=body or None, timeout=REQUEST_LIMIT_S, trust_env=False
    )
    reply.raise_for_status()
    return reply


def expired(stack: Turns) -> int:
    """Return how many leases the prefill engine's workers have let run out."""
    return stack.prefill.nixl_counters().expired_requests


def outlast_a_lease(stack: Turns) -> None:
    """Wait until a lease that begins now has run out."""
    before = expired(stack)
    stack.prefilled(new_prompt())
    wait_until(
        lambda: expired(stack) == before + NUM_WORKERS, "the end of a lease", LEASE_S + LIMIT_S
    )


def wait_for_blocks(stack: Turns) -> None:
    """Wait until the prefill engine holds nothing."""
    names = ("vllm:kv_cache_usage_perc", "vllm:nixl_held_blocks")
    wait_until(
        lambda: not any(metric(stack.prefill, name) for name in names), "the blocks", LIMIT_S
    )


@pytest.mark.parametrize(
    ("stop", "go_on"),
    [
        ("/pause?mode=keep", "/resume"),
        ("/pause?mode=wait", "/resume"),
        ("/sleep?level=0&mode=keep", "/wake_up?tags=scheduling"),
    ],
)
def test_decode_engine_that_is_paused_for_two_leases(
    stack: Turns, in_background: Callable[..., Any], stop: str, go_on: str
) -> None:
    """What reaches it meanwhile is read and answered when it goes on."""
    prompt = new_prompt()
    right = stack.unaided(prompt)
    before = stack.decode.nixl_counters()
    operate(stack.decode, stop)
    params = stack.prefilled(prompt)
    asked = partial(stack.ask, stack.decode, prompt, kv_transfer_params=params)
    answer = in_background(asked)
    abandoned = expired(stack)
    for _ in range(2):
        outlast_a_lease(stack)
    assert not answer.done()
    operate(stack.decode, go_on)
    assert answer.result(LIMIT_S).tokens == right
    assert expired(stack) == abandoned + 2 * NUM_WORKERS
    assert stack.decode.nixl_counters().failed_reads == before.failed_reads
    wait_for_blocks(stack)


@PAUSES
def test_prefill_engine_that_is_paused_serves_what_it_holds(
    stack: Turns, in_background: Callable[..., Any], stop: str, go_on: str
) -> None:
    """The pause is complete once that has been read, and costs no lease."""
    prompt = new_prompt()
    right = stack.unaided(prompt)
    params, before = stack.prefilled(prompt), expired(stack)
    done = in_background(operate, stack.prefill, stop)
    wait_until(lambda: is_paused(stack.prefill), "the pause", LIMIT_S)
    assert stack.ask(stack.decode, prompt, kv_transfer_params=params).tokens == right
    done.result(LIMIT_S)
    operate(stack.prefill, go_on)
    assert expired(stack) == before
    wait_for_blocks(stack)


def is_paused(engine: Engine) -> bool:
    """Whether an engine computes nothing new."""
    reply = httpx.get(f"{engine.url}/is_paused", timeout=LIMIT_S, trust_env=False)
    return bool(reply.json()["is_paused"])


def test_pause_that_aborts_gives_back_what_was_to_be_read(
    stack: Turns, in_background: Callable[..., Any]
) -> None:
    """Nothing waits for the end of its lease."""
    prompt, before = new_prompt(), expired(stack)
    operate(stack.decode, "/pause?mode=keep")
    params = stack.prefilled(prompt)
    asked = partial(stack.ask, stack.decode, prompt, kv_transfer_params=params)
    answer = in_background(asked)
    wait_until(lambda: metric(stack.decode, "vllm:num_requests_waiting") == 1.0, "it", LIMIT_S)
    operate(stack.decode, "/pause?mode=abort")
    assert answer.result(LIMIT_S).tokens == []
    wait_for_blocks(stack)
    operate(stack.decode, "/resume")
    assert expired(stack) == before


def test_reset_of_the_prefix_cache_takes_no_blocks_from_readers(stack: Turns) -> None:
    """It is not done as long as blocks are held, also where running requests are reset."""
    prompt = new_prompt()
    right, params = stack.unaided(prompt), stack.prefilled(prompt)
    reset = "/reset_prefix_cache?reset_external=true"
    assert operate(stack.prefill, reset).json() == {"success": False}
    with pytest.raises(httpx.HTTPStatusError):
        operate(stack.prefill, f"{reset}&reset_running_requests=true")
    assert stack.ask(stack.decode, prompt, kv_transfer_params=params).tokens == right
    wait_for_blocks(stack)
    for engine in (stack.prefill, stack.decode):
        assert operate(engine, reset).json() == {"success": True}
    assert (
        stack.ask(stack.decode, prompt, kv_transfer_params=stack.prefilled(prompt)).tokens == right
    )


def test_collective_rpc_costs_nothing(stack: Turns) -> None:
    """It is a step that computes nothing, at both ends."""
    prompt = new_prompt()
    right, params = stack.unaided(prompt), stack.prefilled(prompt)
    for engine in (stack.prefill, stack.decode):
        operate(engine, "/collective_rpc", method="check_health")
    assert stack.ask(stack.decode, prompt, kv_transfer_params=params).tokens == right
    wait_for_blocks(stack)


def test_adapters_come_and_go_while_their_blocks_are_held(stack: Turns, tmp_path: Path) -> None:
    """What was computed with an adapter is read with it after the prefill engine unloads it."""
    adapter = write_adapter(tmp_path / "adapter", seed=1)
    engines = (stack.prefill, stack.decode)
    for engine in engines:
        operate(engine, "/v1/load_lora_adapter", lora_name="sql", lora_path=str(adapter))
    prompt = new_prompt()
    right = stack.unaided(prompt, model="sql")
    assert right != stack.unaided(prompt)
    offer = {"do_remote_decode": True, "do_remote_prefill": False}
    prefilled = stack.ask(
        stack.prefill, prompt, model="sql", max_tokens=1, kv_transfer_params=offer
    )
    operate(stack.prefill, "/v1/unload_lora_adapter", lora_name="sql")
    answer = stack.ask(stack.decode, prompt, model="sql", kv_transfer_params=prefilled.params)
    assert answer.tokens == right
    operate(stack.decode, "/v1/unload_lora_adapter", lora_name="sql")
    wait_for_blocks(stack)


def test_several_answers_and_prompts_leave_nothing_held(stack: Turns) -> None:
    """The router passes `n` and the list on; one prompt is read once, and the rest computed."""
    prompts = [new_prompt() for _ in range(3)]
    right = [stack.unaided(prompt) for prompt in prompts]
    router = stack.pdstack.start_router([stack.prefill], [stack.decode])
    before, num_expired = stack.decode.nixl_counters(), expired(stack)
    for asked, wanted in (
        ({"prompt": prompts}, right),
        ({"prompt": (again := new_prompt()), "n": 3}, [stack.unaided(again)] * 3),
    ):
        body = {
            "model": stack.pdstack.model.name,
            "temperature": 0.0,
            # Greedy, as far as the tokens go, and yet more than one.
            **({"temperature": 1.0, "top_k": 1} if "n" in asked else {}),
            "ignore_eos": True,
            "return_token_ids": True,
            "max_tokens": ANSWER_TOKENS,
        }
        reply = httpx.post(
            f"{router.url}/v1/completions",
            json={**body, **asked},
            timeout=REQUEST_LIMIT_S,
            trust_env=False,
        )
        reply.raise_for_status()
        assert [each["token_ids"] for each in reply.json()["choices"]] == wanted
        wait_for_blocks(stack)
    stack.pdstack.stop(router)
    assert expired(stack) == num_expired
    assert (stack.decode.nixl_counters() - before).transfers == 4
