# SPDX-License-Identifier: Apache-2.0
"""Command line: ``handover``."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import shlex
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import report
from .demo import engine_specs
from .engine import ServedModel, on_host
from .errors import PDStackError, UsageError
from .handover import REQUEST_LIMIT_S, Pair, Row, Sample, rows
from .hosts import Link, Network, hosts, visiting
from .invocation import StackProgress, add_options, check_options, invoke
from .layout import Layout, check_layout, parse_layout, read_model_shape
from .model import cache_dir, given_model, prepare_default_model
from .stack import PDStack

_SAID_EVERY = 8
"""Rounds, of which the last one is told of."""
_ROLES = ("prefill", "decode")
_OPTIONS = {"early_dispatch": True, "seed_first_token": True}


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``handover``, which measures what follows a prompt's end."""
    handover = commands.add_parser(
        "handover",
        help="measure the time from a prompt's end to the first token: serial, early and seeded",
    )
    for role in ("prefill", "decode"):
        handover.add_argument(
            f"--{role}", default="tp1pp1", metavar="LAYOUT", help="(default: %(default)s)"
        )
    handover.add_argument(
        "--tokens", type=int, default=512, metavar="N", help="of a prompt (default: %(default)d)"
    )
    handover.add_argument(
        "--clients",
        type=int,
        action="append",
        metavar="N",
        help="how many ask at once; repeat it (default: 1 and 4)",
    )
    handover.add_argument(
        "--rounds",
        type=int,
        default=24,
        metavar="N",
        help="how often each client asks in each way (default: %(default)d)",
    )
    handover.add_argument(
        "--model", type=Path, metavar="DIR", help="a model directory (default: SmolLM2-135M)"
    )
    handover.add_argument(
        "--engine-args", default="", metavar="ARGS", help="for every `vllm serve`"
    )
    handover.add_argument(
        "--link-mbit",
        type=float,
        metavar="N",
        help="have both engines on hosts of their own, with a link of so many Mbit/s from the "
        "prefill engine's on; needs root (default: both here, and no network between them)",
    )
    handover.add_argument("--output", type=Path, metavar="FILE", help="write the rows as JSON")
    add_options(handover, startup_timeout_s=600.0)


@dataclass(frozen=True)
class HandoverSettings:
    """A measurement, as it is asked for.

    Attributes:
        clients: numbers of clients that ask at once, one after the other.
        rounds: how often each client asks in each way.
        num_tokens: of a prompt.
        link_mbit: what the prefill engine's host can send; ``None`` for one host.
    """

    prefill: Layout
    decode: Layout
    clients: Sequence[int]
    rounds: int
    num_tokens: int
    engine_args: Sequence[str] = ()
    link_mbit: float | None = None

    @classmethod
    def of(cls, args: argparse.Namespace) -> HandoverSettings:
        """Return what arguments ask for.

        Raises:
            UsageError: it cannot be.
        """
        clients = args.clients or [1, 4]
        link_mbit = math.inf if args.link_mbit is None else args.link_mbit
        if min(args.tokens, args.rounds, *clients) < 1 or not link_mbit > 0:
            raise UsageError("--tokens, --rounds, --clients and --link-mbit have to be positive")
        return cls(
            parse_layout(args.prefill),
            parse_layout(args.decode),
            clients,
            args.rounds,
            args.tokens,
            shlex.split(args.engine_args),
            args.link_mbit,
        )


def execute(args: argparse.Namespace, console: Console) -> int:
    """Measure, and return the exit status.

    Raises:
        UsageError: what was asked for cannot work.
    """
    check_options(args)
    settings = HandoverSettings.of(args)
    given = None if args.model is None else given_model(args.model)

    def command(run_dir: Path, progress: StackProgress) -> bool:
        def say(text: str) -> None:
            console.print(Text(text), soft_wrap=True)

        model = given or prepare_default_model(cache_dir(), run_dir, lambda _: None)
        shape = read_model_shape(model.directory)
        for layout in (settings.prefill, settings.decode):
            check_layout(layout, shape)
        say(f"{settings.prefill} -> {settings.decode}, {model.name}; logs in {run_dir}")
        with (
            between(settings.link_mbit) as network,
            PDStack(
                model, run_dir, startup_timeout_s=args.startup_timeout, on_wait=progress
            ) as stack,
        ):
            samples = measure(stack, settings, say, network)
        found = rows(samples)
        report.wide(console).print(handover_table(found))
        if args.output is not None:
            args.output.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps(to_json(settings, model, samples, found), indent=1)
            args.output.write_text(text + "\n")
        return True

    return invoke(args, console, command)


@contextmanager
def between(link_mbit: float | None) -> Iterator[Network | None]:
    """Have hosts for both engines, and be on the decode engine's.

    Args:
        link_mbit: what the prefill engine's can send; ``None`` for no hosts.

    Raises:
        NetworkError: this machine cannot have them.
    """
    if link_mbit is None:
        yield None
        return
    slow = Link(bytes_s=max(int(link_mbit * 1e6 / 8), 1))
    with (
        hosts(*_ROLES) as network,
        network.link(_ROLES[0], outward=slow),
        visiting(network.hosts[_ROLES[1]].namespace),
    ):
        yield network


def measure(
    stack: PDStack,
    settings: HandoverSettings,
    say: Callable[[str], None] = lambda _: None,
    network: Network | None = None,
) -> list[Sample]:
    """Start a pair of engines, and ask it in all ways.

    Args:
        stack: where they are started.
        settings: what is asked for.
        say: told how far it is.
        network: what they have hosts in, if they do.

    Raises:
        PDStackError: an engine cannot be started, or does not answer as it should; or no answer
            began with the prefill engine's token.
    """
    specs = [
        spec if network is None else on_host(spec, network.hosts[role])
        for role, layout in zip(_ROLES, (settings.prefill, settings.decode), strict=True)
        for spec in engine_specs(role, [layout], settings.engine_args, options=_OPTIONS)
    ]
    prefill, decode = stack.start_engines(*specs)

    async def ask() -> list[Sample]:
        samples: list[Sample] = []
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            timeout=REQUEST_LIMIT_S, limits=limits, trust_env=False
        ) as client:
            pair = Pair(prefill.url, decode.url, stack.model.name, settings.num_tokens, client)
            for clients in settings.clients:
                said = f"clients at once: {clients}"

                def on_round(number: int, said: str = said) -> None:
                    stack.check()
                    if number % _SAID_EVERY == 0 or number == settings.rounds:
                        say(f"{said}; round {number} of {settings.rounds} is over")

                samples += await pair.measure(clients, settings.rounds, on_round)
        return samples

    try:
        samples = asyncio.run(ask())
    except httpx.HTTPError as error:
        raise stack.explain(error) from error
    counters = decode.nixl_counters()
    if not (counters.first_tokens and counters.prefill_waits):
        raise PDStackError(
            "the ways are not what they are called: of all answers "
            f"{counters.first_tokens} began with the prefill engine's token, and "
            f"{counters.prefill_waits} prompts were waited for"
        )
    return samples


def to_json(
    settings: HandoverSettings, model: ServedModel, samples: Sequence[Sample], found: Sequence[Row]
) -> dict[str, Any]:
    """Return what was measured, and of what."""
    return {
        "layouts": f"{settings.prefill} to {settings.decode}",
        "model": model.name,
        "prompt_tokens": round(statistics.median(each.prompt_tokens for each in samples)),
        "link_mbit": settings.link_mbit,
        "rows": [asdict(each) for each in found],
    }


def handover_table(found: Sequence[Row]) -> Table:
    """Return the table that it ends with."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("way")
    for title in ("clients", "requests", "prefill", "handover", "of serial", "TTFT", "of serial"):
        table.add_column(title, justify="right")
    for row in found:
        table.add_row(
            row.way,
            str(row.clients),
            str(row.requests),
            f"{row.prefill_s * 1e3:.0f} ms",
            f"{row.handover_s * 1e3:.1f} ms",
            f"{row.of_serial:.2f}",
            f"{row.ttft_s * 1e3:.0f} ms",
            f"{row.ttft_of_serial:.2f}",
        )
    return table
