# SPDX-License-Identifier: Apache-2.0
"""Command line: ``handover``."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import shlex
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import held_blocks, report
from .demo import engine_specs
from .engine import (
    UPSTREAM_PUSH_AT_REST,
    EngineSpec,
    KVTransfer,
    ServedModel,
    on_host,
    why_no_push,
)
from .errors import PDStackError, UsageError
from .handover import REQUEST_LIMIT_S, UNSEEDED_WAYS, WAYS, Pair, Row, Turn, Way, rows
from .hosts import Link, Network, hosts, visiting
from .invocation import StackProgress, add_options, check_options, invoke
from .layout import Layout, check_layout, parse_layout, read_model_shape
from .model import cache_dir, given_model, prepare_default_model
from .stack import Engine, PDStack

_SAID_EVERY = 8
"""Rounds, of which the last one is told of."""
_ROLES = ("prefill", "decode")
OURS, PUSH = "ours", "push"
_TRANSFERS: Mapping[str, KVTransfer] = {OURS: KVTransfer(), PUSH: UPSTREAM_PUSH_AT_REST}
_COLUMNS = ("requests", "prefill", "handover", "TTFT", "requests/s", "blocks x s")


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
        help="how often each way has its turn (default: %(default)d)",
    )
    handover.add_argument(
        "--each",
        type=int,
        default=1,
        metavar="N",
        help="how many requests each client sends in a turn, one when the last is answered "
        "(default: %(default)d)",
    )
    handover.add_argument(
        "--connector",
        choices=list(_TRANSFERS),
        action="append",
        help="ours, or upstream's NixlPushConnector; repeat it, and pairs of engines with each "
        "take turns, of half of the rounds each, without seeded answers (default: ours)",
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
        rounds: how often each way has its turn.
        num_tokens: of a prompt.
        link_mbit: what the prefill engine's host can send; ``None`` for one host.
        each: how many requests each client sends in a turn.
        connectors: what pairs of engines have, by turns; the last is what others are compared with.
    """

    prefill: Layout
    decode: Layout
    clients: Sequence[int]
    rounds: int
    num_tokens: int
    engine_args: Sequence[str] = ()
    link_mbit: float | None = None
    each: int = 1
    connectors: Sequence[str] = (OURS,)

    @property
    def ways(self) -> Sequence[Way]:
        """Those that all connectors know."""
        return WAYS if tuple(self.connectors) == (OURS,) else UNSEEDED_WAYS

    @property
    def visits(self) -> Sequence[str]:
        """The connector of each pair of engines, one pair after the other.

        There and back, so that a machine that becomes slower or faster favours none.
        """
        if len(self.connectors) == 1:
            return self.connectors
        return (*self.connectors, *reversed(self.connectors))

    @classmethod
    def of(cls, args: argparse.Namespace) -> HandoverSettings:
        """Return what arguments ask for.

        Raises:
            UsageError: it cannot be.
        """
        clients = args.clients or [1, 4]
        link_mbit = math.inf if args.link_mbit is None else args.link_mbit
        if min(args.tokens, args.rounds, args.each, *clients) < 1 or not link_mbit > 0:
            raise UsageError(
                "--tokens, --rounds, --each, --clients and --link-mbit have to be positive"
            )
        connectors = args.connector or [OURS]
        if len({*connectors}) < len(connectors):
            raise UsageError("--connector names one of them twice")
        if PUSH in connectors and (why := why_no_push()):
            raise UsageError(why)
        return cls(
            parse_layout(args.prefill),
            parse_layout(args.decode),
            clients,
            args.rounds,
            args.tokens,
            shlex.split(args.engine_args),
            args.link_mbit,
            args.each,
            connectors,
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
        turns: list[Turn] = []
        with between(settings.link_mbit) as network:
            for number, connector in enumerate(settings.visits):
                if len(settings.visits) > 1:
                    say(f"{connector}: pair {number + 1} of {len(settings.visits)}")
                place = run_dir / f"{number + 1}-{connector}"
                place.mkdir()
                with PDStack(
                    model, place, startup_timeout_s=args.startup_timeout, on_wait=progress
                ) as stack:
                    turns += measure(stack, settings, connector, say, network)
        found = rows(turns)
        report.wide(console).print(handover_table(found))
        if args.output is not None:
            args.output.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps(to_json(settings, model, turns, found), indent=1)
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
    connector: str,
    say: Callable[[str], None] = lambda _: None,
    network: Network | None = None,
) -> list[Turn]:
    """Start a pair of engines, and ask it in all ways.

    Args:
        stack: where they are started.
        settings: what is asked for.
        connector: theirs.
        say: told how far it is.
        network: what they have hosts in, if they do.

    Raises:
        PDStackError: an engine cannot be started, or does not answer as it should; or a way was not
            what it is called.
    """
    book = stack.run_dir / "held-blocks"
    prefill_spec, decode_spec = _specs(settings, connector, network)
    prefill, decode = stack.start_engines(prefill_spec, held_blocks.watched(decode_spec, book))
    rounds = math.ceil(settings.rounds * len(settings.connectors) / len(settings.visits))

    async def ask() -> list[Turn]:
        turns: list[Turn] = []
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            timeout=REQUEST_LIMIT_S, limits=limits, trust_env=False
        ) as client:
            pair = Pair(
                *(prefill.url, decode.url, stack.model.name, settings.num_tokens, client),
                ways=settings.ways,
            )
            for clients in settings.clients:
                said = f"clients at once: {clients}"

                def on_round(number: int, said: str = said) -> None:
                    stack.check()
                    if number % _SAID_EVERY == 0 or number == rounds:
                        say(f"{said}; round {number} of {rounds} is over")

                turns += await pair.measure(clients, rounds, on_round, each=settings.each)
        return turns

    try:
        turns = asyncio.run(ask())
    except httpx.HTTPError as error:
        raise stack.explain(error) from error
    _check_ways(connector, settings.ways, prefill, decode)
    held = held_blocks.read(book)
    if not held.changes:
        raise PDStackError("the decode engine has not written down which blocks it holds")
    return [
        replace(turn, connector=connector, block_s=held.between(turn.began_s, turn.ended_s))
        for turn in turns
    ]


def _specs(
    settings: HandoverSettings, connector: str, network: Network | None
) -> Iterator[EngineSpec]:
    """How the prefill engine and the decode engine are started."""
    options = {} if connector == PUSH else {"early_dispatch": True}
    if any(way.is_seeded for way in settings.ways):
        options["seed_first_token"] = True
    for role, layout in zip(_ROLES, (settings.prefill, settings.decode), strict=True):
        (spec,) = engine_specs(
            *(role, [layout], settings.engine_args),
            options=options,
            transfer=_TRANSFERS[connector],
        )
        yield spec if network is None else on_host(spec, network.hosts[role])


def _check_ways(connector: str, ways: Sequence[Way], prefill: Engine, decode: Engine) -> None:
    """See that requests went as they were told to.

    Raises:
        PDStackError: an option was taken, and does nothing.
    """
    if connector == PUSH:
        if not prefill.nixl_counters().transfers:
            raise PDStackError("the prefill engine has not written anything")
        return
    counters = decode.nixl_counters()
    is_seeded = any(way.is_seeded for way in ways)
    if not counters.prefill_waits or (is_seeded and not counters.first_tokens):
        raise PDStackError(
            "the ways are not what they are called: of all answers "
            f"{counters.first_tokens} began with the prefill engine's token, and "
            f"{counters.prefill_waits} prompts were waited for"
        )


def to_json(
    settings: HandoverSettings, model: ServedModel, turns: Sequence[Turn], found: Sequence[Row]
) -> dict[str, Any]:
    """Return what was measured, and of what."""
    return {
        "layouts": f"{settings.prefill} to {settings.decode}",
        "model": model.name,
        "prompt_tokens": round(
            statistics.median(each.prompt_tokens for turn in turns for each in turn.samples)
        ),
        "link_mbit": settings.link_mbit,
        "rounds": settings.rounds,
        "each": settings.each,
        "rows": [asdict(each) for each in found],
    }


def handover_table(found: Sequence[Row]) -> Table:
    """Return the table that it ends with: behind each figure, its share of serial requests'."""
    connectors = list(dict.fromkeys(row.connector for row in found))
    are_several = len(connectors) > 1
    table = Table(box=box.SIMPLE_HEAD, title="In brackets: the share of what serial requests have")
    table.add_column("clients", justify="right")
    for title in (*(["connector"] if are_several else []), "way"):
        table.add_column(title)
    for title in _COLUMNS:
        table.add_column(title, justify="right")
    if are_several:
        for title in ("handover", "blocks x s"):
            table.add_column(f"{title} / {connectors[-1]}'s", justify="right")
    for row in found:
        table.add_row(
            str(row.clients),
            *([row.connector] if are_several else []),
            row.way,
            str(row.requests),
            f"{row.prefill_s * 1e3:.0f} ms ({row.prefill_of_serial:.2f})",
            f"{row.handover_s * 1e3:.1f} ms ({row.of_serial:.2f})",
            f"{row.ttft_s * 1e3:.0f} ms ({row.ttft_of_serial:.2f})",
            f"{row.requests_s:.2f} ({row.requests_of_serial:.2f})",
            f"{row.block_s:.1f}",
            *([f"{row.of_last:.2f}", f"{row.blocks_of_last:.2f}"] if are_several else []),
        )
    return table
