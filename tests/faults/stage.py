# SPDX-License-Identifier: Apache-2.0
"""Healthy engines that stay up while faults are acted out, and what a router does with them."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.e2e.layouts import ONE, RANKS, STAGES
from tests.e2e.pairs import ask, ask_unaided, metric, post, samples, text_of
from tests.faults.logs import Log
from tests.tools.pdstack.helpers import wait_until
from tools.pdstack.engine import EngineSpec, KVTransfer
from tools.pdstack.layout import Layout
from tools.pdstack.ports import PortAllocator
from tools.pdstack.stack import Engine, PDStack, Router, Server
from tools.pdstack.tiny_models import write_tiny_llama

LEASE_S = 20.0
"""Longer than a slow machine keeps an honest reader waiting, and short enough to be waited for."""

HANDSHAKE_LIMIT_S = 10.0
"""How long a handshake may take."""

SLACK_S = 60.0
"""How much later than it should a slow machine may do something."""

LEASE_RAN_OUT = "Freeing the blocks of request"
"""What a log says of requests that were abandoned, also by tests before."""

TRANSPORTS = "all"
"""What UCX chooses by itself, whatever the environment says."""

PROMPT_TOKENS = 300
EMBEDS = "--enable-prompt-embeds"
Params = dict[str, Any]


def spec(
    name: str,
    *args: str,
    layout: Layout = ONE,
    policy: str | None = None,
    options: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    **fields: Any,
) -> EngineSpec:
    """Return how an engine is started that holds blocks for a short time.

    Args:
        args: more of its command line.
        layout: its ranks and stages.
        policy: what becomes of a request whose blocks cannot be read; by default vLLM's choice.
        options: more of the connector's.
        env: more of its environment.
        fields: of the transfer's configuration.
    """
    extra_config = {"kv_lease_duration": LEASE_S, **(options or {})}
    return EngineSpec(
        name,
        layout,
        kv_transfer=KVTransfer(extra_config=extra_config, load_failure_policy=policy, **fields),
        env={"UCX_TLS": TRANSPORTS, **(env or {})},
        extra_args=("--num-gpu-blocks-override", "64", *args),
        max_model_len=1024,
        grace_s=SLACK_S,
    )


def answer_of(reply: httpx.Response) -> str:
    """Return the answer that a reply holds."""
    assert reply.status_code == httpx.codes.OK, reply.text
    answer: str = reply.json()["choices"][0]["message"]["content"]
    return answer


def assert_failed(reply: httpx.Response) -> None:
    """The client is told that its request has failed, in the way of the OpenAI API."""
    assert reply.status_code == httpx.codes.INTERNAL_SERVER_ERROR
    assert reply.json()["error"] == {
        "message": "Internal server error",
        "type": "InternalServerError",
        "param": None,
        "code": 500,
    }


@contextmanager
def stopped(engine: Engine) -> Iterator[None]:
    """Within this block an engine lives, but does nothing."""
    processes = engine.child.processes()
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            # It may have been killed.
            with suppress(psutil.NoSuchProcess):
                process.resume()


@contextmanager
def hung(engine: Engine) -> Iterator[None]:
    """Within this block the workers of an engine do nothing, and its other processes go on."""
    workers = [each for each in engine.child.processes() if "Worker" in " ".join(each.cmdline())]
    assert workers, [each.cmdline() for each in engine.child.processes()]
    for worker in workers:
        worker.suspend()
    wait_until(lambda: all(each.status() == psutil.STATUS_STOPPED for each in workers), "the stop")
    try:
        yield
    finally:
        for worker in workers:
            worker.resume()


def kill(server: Server) -> None:
    """End all processes of a server at once, as when its machine is lost."""
    for process in server.child.processes():
        process.send_signal(signal.SIGKILL)
    wait_until(lambda: server.child.exit_status is not None, f"the end of {server.name}")


@dataclass
class Stage:
    """The engines that every fault has to leave as they were, or that are started anew after it.

    Attributes:
        prefill: of two stages, where layouts decide nothing else.
        decode: an engine that fails requests whose blocks cannot be read, of one rank.
        recomputing: one that computes them, of two ranks.
        router: in front of `prefill` and `decode`.
        abandoned: requests whose blocks `prefill` holds until their lease runs out.
        prefill_log: what `prefill` says, since it was started.
    """

    stack: PDStack
    prefill: Engine
    decode: Engine
    recomputing: Engine
    router: Router
    prefill_log: Log = field(init=False)
    abandoned: int = 0

    def __post_init__(self) -> None:
        self._labels = map(str, itertools.count())
        self._pool = ThreadPoolExecutor(8)
        self.prefill_log = Log(self.prefill)

    @property
    def model(self) -> str:
        """The name of what they serve."""
        return self.stack.model.name

    def text(self) -> str:
        """Return a message that nobody has seen before, of two blocks and a part of one."""
        return text_of(f"fault {next(self._labels)}", PROMPT_TOKENS)

    def right_answer(self, text: str) -> str:
        """Return what one engine by itself answers."""
        return ask_unaided(self.prefill, self.model, text)

    def prefilled(self, text: str) -> Params:
        """Let a prompt be computed, as a router does, and return where its blocks are."""
        what_for = {"do_remote_decode": True, "do_remote_prefill": False}
        reply = post(self.prefill, self.model, text, max_tokens=1, kv_transfer_params=what_for)
        answer_of(reply)
        params: Params = reply.json()["kv_transfer_params"]
        return params

    def decoded(self, text: str, params: Params, by: Engine | None = None) -> httpx.Response:
        """Let a request be answered whose blocks are elsewhere, as a router does."""
        return post(by or self.decode, self.model, text, kv_transfer_params=params)

    def being_decoded(
        self, text: str, params: Params, by: Engine | None = None
    ) -> Future[httpx.Response]:
        """The same, without waiting for the answer."""
        return self.in_background(self.decoded, text, params, by)

    def in_background(
        self, function: Callable[..., httpx.Response], *args: Any
    ) -> Future[httpx.Response]:
        """Begin something, and return what will come of it."""
        return self._pool.submit(function, *args)

    def connect(self, decode: Engine) -> None:
        """Let another decode engine shake hands with the prefill engine."""
        text = self.text()
        answer_of(self.decoded(text, self.prefilled(text), decode))

    @contextmanager
    def router_to(self, prefill: Engine, decode: Engine) -> Iterator[Router]:
        """Put another router in front of two engines for a while."""
        router = self.stack.start_router([prefill], [decode])
        try:
            yield router
        finally:
            self.stack.stop(router)

    def assert_serving(self) -> None:
        """A new request passes through both engines, and is answered as one would answer it."""
        text = self.text()
        right = self.right_answer(text)
        before = self.decode.nixl_counters()
        assert ask(self.router, self.model, text) == right
        wait_until(
            lambda: (self.decode.nixl_counters() - before).bytes_moved > 0,
            "the report of what was read",
            SLACK_S,
        )

    def holds_blocks(self) -> bool:
        """Whether blocks of the prefill engine are in use."""
        names = ("vllm:kv_cache_usage_perc", "vllm:nixl_held_blocks")
        return any(metric(self.prefill, name) for name in names)

    def assert_blocks_come_back(self) -> None:
        """All blocks of the prefill engine are free once leases have run out, each told once.

        That is a long wait: one serves all that was abandoned before it.
        """
        assert self.abandoned
        wait_until(lambda: not self.holds_blocks(), "the return of all blocks", LEASE_S + SLACK_S)
        freed = self.prefill_log.find(LEASE_RAN_OUT)
        assert len(freed) == self.abandoned, freed

    def assert_blocks_are_free(self, *decode: Engine) -> None:
        """No block of decode engines is in use once they are idle."""
        wait_until(
            lambda: all(samples(each, "vllm:kv_cache_usage_perc") == [0] for each in decode),
            f"the return of all blocks of {', '.join(each.name for each in decode)}",
            SLACK_S,
        )

    def restart_decode(self) -> None:
        """Start the decode engine anew, after it was killed."""
        self.decode = self._restart(self.decode)
        self._replace_router()

    def restart_prefill(self) -> None:
        """Start the prefill engine anew where others look for it, after it was killed."""
        self.prefill = self._restart(self.prefill)
        # What the one before held was lost with it.
        self.abandoned, self.prefill_log = 0, Log(self.prefill)
        self._replace_router()

    def _restart(self, engine: Engine) -> Engine:
        self.stack.stop(engine)
        # The log of the one before is kept.
        again = replace(engine.spec, name=f"{engine.name}-again", port=engine.port)
        return self.stack.start_engines(again)[0]

    def _replace_router(self) -> None:
        """Put a new router in front of the engines, which remembers no fault."""
        self.stack.stop(self.router)
        self.router = self.stack.start_router([self.prefill], [self.decode])

    def close(self) -> None:
        """End threads that wait for answers."""
        self._pool.shutdown()


@contextmanager
def running(model_dir: Path, run_dir: Path) -> Iterator[Stage]:
    """Start the engines that layouts and faults share; all of them end when they are told to.

    Args:
        model_dir: Where the model is written.
        run_dir: Where logs go.
    """
    model = write_tiny_llama(model_dir / "llama")
    # The others begin answers with tokens of their like, as they do by default.
    unseeded = {"seed_first_token": False}
    with PDStack(model, run_dir) as stack:
        prefill, decode, recomputing = stack.start_engines(
            replace(
                # Stages of three layers and of one.
                spec(
                    "stages",
                    EMBEDS,
                    layout=STAGES,
                    env={"VLLM_PP_LAYER_PARTITION": "3,1"},
                ),
                # Where one that has restarted is looked for.
                side_channel_port=PortAllocator().take(STAGES.world_size),
            ),
            spec("one", EMBEDS, options=unseeded),
            spec(
                "ranks",
                EMBEDS,
                layout=RANKS,
                policy="recompute",
                options={"transfer_strategy": "packed"},
            ),
        )
        stage = Stage(stack, prefill, decode, recomputing, stack.start_router([prefill], [decode]))
        stage.assert_serving()
        # What libraries say once, of a first forward, is said before tests read the log.
        ask_unaided(recomputing, model.name, stage.text())
        yield stage
        stage.close()
        servers = [stage.prefill, stage.decode, stage.recomputing]
        stack.stop(*servers)
    killed = [each.name for each in servers if each.child.exit_status == 128 + signal.SIGKILL]
    assert not killed, "they did not end when they were told to"
