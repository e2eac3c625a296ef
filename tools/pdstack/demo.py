# SPDX-License-Identifier: Apache-2.0
"""The demo: the same prompts to a single engine and to prefill/decode engines, compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rich.console import Console

from .chat import Answer, ChatClient, while_alive
from .engine import EngineSpec, KVTransfer
from .errors import PDStackError
from .layout import Layout
from .metrics import NixlCounters, settled
from .report import AnswerView, Exchange
from .stack import Engine, PDStack, Router

_METRICS_LIMIT_S = 10.0
_KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


@dataclass(frozen=True)
class Prompt:
    """A user message, and how long its answer may become."""

    text: str
    max_tokens: int


def _garden(days: int) -> str:
    """Return a text whose length is under control: about 25 tokens for each day."""
    return " ".join(
        f"On day {day} the gardener planted {day * 3} tulips and {day + 2} roses "
        "beside the old stone wall."
        for day in range(1, days + 1)
    )


DEMO_PROMPTS = (
    Prompt("What is the capital of France?", 32),
    # About 600 tokens: several blocks of 128 tokens, and a last one that is not full.
    Prompt(f"Here is a text. {_garden(24)} What did the gardener plant?", 48),
    Prompt("Write one sentence about the sea.", 48),
)
_FIRST_PROMPT = Prompt("Hello.", 1)


def engine_specs(
    role: str,
    layouts: Sequence[Layout],
    extra_args: Sequence[str] = (),
    *,
    prefix: str = "",
    options: Mapping[str, Any] | None = None,
    transfer: KVTransfer | None = None,
) -> list[EngineSpec]:
    """Return one spec for each layout, named ``prefill`` or ``prefill-1``, ``prefill-2``, ...

    Args:
        role: ``prefill`` or ``decode``.
        prefix: what names begin with.
        options: more of the connector's.
        transfer: the connector; by default ours.
    """
    transfer = replace(transfer or KVTransfer(), role=_KV_ROLES[role])
    transfer = replace(transfer, extra_config={**transfer.extra_config, **(options or {})})
    first = prefix + role
    names = [first] if len(layouts) == 1 else [f"{first}-{i + 1}" for i in range(len(layouts))]
    return [
        EngineSpec(name, layout, transfer, tuple(extra_args), spawns=True)
        for name, layout in zip(names, layouts, strict=True)
    ]


def reference_spec(extra_args: Sequence[str] = ()) -> EngineSpec:
    """Return the engine whose answers count as right: one process, no connector."""
    return replace(EngineSpec("single", extra_args=tuple(extra_args)), kv_transfer=None)


def describe_layouts(prefill: Sequence[Layout], decode: Sequence[Layout]) -> str:
    """Return ``tp1pp2 -> tp1pp1``."""
    return f"{'+'.join(map(str, prefill))} -> {'+'.join(map(str, decode))}"


def moved(decode: Sequence[Engine]) -> NixlCounters:
    """Return the counters of all decode engines together; they are the ones that read."""
    return sum((engine.nixl_counters() for engine in decode), NixlCounters())


def ask_watched(
    stack: PDStack,
    client: ChatClient,
    prompt: Prompt,
    on_token: Callable[[str], None] = lambda _: None,
) -> Answer:
    """Ask while the stack is watched.

    Raises:
        PDStackError: a server died, or the request failed.
    """
    try:
        stream = while_alive(partial(client.ask, prompt.text, prompt.max_tokens), stack.check)
        for piece in stream:
            on_token(piece)
        return stream.result
    except PDStackError:
        raise
    # openai lets errors of its transport through while an answer streams.
    except Exception as error:
        raise stack.explain(error) from error


def ask_first(stack: PDStack, router: Router, num_prefill: int) -> None:
    """Have each prefill engine answer once before times are compared.

    By that answer the router knows whether it may send the next request to both engines at once,
    and engines are connected.

    Raises:
        PDStackError: a server died, or a request failed.
    """
    with ChatClient(router.url, stack.model.name) as client:
        for _ in range(num_prefill):
            ask_watched(stack, client, _FIRST_PROMPT)


def reference_answers(
    stack: PDStack, prompts: Sequence[Prompt], extra_args: Sequence[str] = ()
) -> list[Answer]:
    """Start the single engine, ask it everything, and stop it again.

    It is gone before the others start: a small machine holds two engines, not three, and the
    times that it is compared by are those of an engine that has the machine to itself.
    """
    (engine,) = stack.start_engines(reference_spec(extra_args))
    with ChatClient(engine.url, stack.model.name) as client:
        answers = [ask_watched(stack, client, prompt) for prompt in prompts]
    stack.stop(engine)
    return answers


def compare(
    stack: PDStack,
    router: Router,
    decode: Sequence[Engine],
    prompts: Sequence[Prompt],
    references: Sequence[Answer],
    console: Console,
    layouts: str,
) -> list[Exchange]:
    """Stream every prompt through the router, shown beside the reference answer."""
    exchanges: list[Exchange] = []
    with ChatClient(router.url, stack.model.name) as client:
        for prompt, single in zip(prompts, references, strict=True):
            before = moved(decode)
            with AnswerView(console, prompt.text, layouts, single) as view:
                answer = ask_watched(stack, client, prompt, view.add)
            # Once is enough to wait in vain.
            failed = any(each.bytes_moved == 0 for each in exchanges)
            limit_s = 0.0 if failed else _METRICS_LIMIT_S
            after = settled(partial(moved, decode), before, limit_s)
            bytes_moved = (after - before).bytes_moved
            exchanges.append(Exchange(prompt.text, answer, single, bytes_moved))
    return exchanges
