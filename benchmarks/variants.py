# SPDX-License-Identifier: Apache-2.0
"""Pairs of engines, one for each variant, that take turns."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tools.pdstack.layout import Layout
from tools.pdstack.ports import PortAllocator

from .cases import Shape
from .children import Child, call_all, end_all
from .model import write_model
from .network import HERE, Site
from .specs import EngineSpec, Offer, PauseSummary, Reading, RequestSpec, Sealed, Variant, Watch

_PORTS = PortAllocator()
_NUMBERS = itertools.count()


@dataclass(frozen=True)
class Tables:
    """Blocks of a request at both ends, of as many tokens.

    Attributes:
        source: Where it is read from.
        destination: Where to.
        num_tokens: Tokens of the request.
    """

    source: list[int]
    destination: list[int]
    num_tokens: int


def side_by_side(num_requests: int, blocks: int, num_tokens: int) -> list[Tables]:
    """Requests of as many blocks each, one behind the other, at the same places of both ends."""
    tables = []
    for first in range(1, 1 + num_requests * blocks, blocks):
        ids = list(range(first, first + blocks))
        tables.append(Tables(ids, ids, num_tokens))
    return tables


def duration_s(readings: Sequence[Reading]) -> float:
    """How long it took until the last rank had read everything."""
    return max(each.ended_s for each in readings) - min(each.began_s for each in readings)


class Pair:
    """Two engines: processes that are stopped but in their turn.

    Args:
        variant: What runs in them.
        shape: The model and both layouts.
        num_blocks: Blocks of each decode rank's cache; prefill ranks have room for as many tokens.
        directory: For logs and configurations.
        sites: Where the prefill and the decode engine run.
    """

    factory: str

    def __init__(
        self,
        variant: Variant,
        shape: Shape,
        num_blocks: int,
        directory: Path,
        sites: tuple[Site, Site] = (HERE, HERE),
    ) -> None:
        self._prefill_site, self._decode_site = sites
        self.variant = variant
        self.shape, self._num_blocks, self._directory = shape, num_blocks, directory
        model = Path("model", f"{shape.num_layers}-{shape.num_heads}-{shape.head_size}")
        self._model = write_model(shape, directory / model).resolve()
        self.prefill: list[Child] = []
        self.decode: list[Child] = []

    def start(self) -> None:
        """Start both engines, and let them meet."""
        raise NotImplementedError

    def read(self, requests: Sequence[Tables]) -> list[Reading]:
        """Read requests that are asked for at once; what each decode rank has measured."""
        raise NotImplementedError

    def check(self, tables: Tables) -> None:
        """Read a request into cleared caches, and see that the right bytes were read.

        Raises:
            BenchmarkError: Others were.
        """
        call_all(self.decode, "clear")
        self.read([tables])
        call_all(
            self.decode, "check", tables.destination, tables.source, self.shape.blocks_tokens[0]
        )

    def fill(self) -> None:
        """Give the prefill engine known bytes, and touch all memory of both."""
        call_all(self.prefill, "fill")
        call_all(self.decode, "clear")

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let it have the machine; afterwards its processes are stopped."""
        for child in self.prefill + self.decode:
            child.thaw()
        yield
        for child in self.prefill + self.decode:
            child.freeze()

    def end(self) -> None:
        """End all processes at once."""
        end_all(self.prefill + self.decode)
        self.prefill, self.decode = [], []

    def _start(self, role: str, layout: Layout) -> list[Child]:
        """Start the ranks of an engine; each is ready once it has a first result."""
        engine_id = f"{self.variant.name.replace(' ', '-')}-{role}-{next(_NUMBERS)}"
        shape, prefills = self.shape, role == "prefill"
        spec = EngineSpec(
            self.variant,
            engine_id,
            layout,
            shape,
            shape.prefill_blocks(self._num_blocks) if prefills else self._num_blocks,
            shape.blocks_tokens[not prefills],
            shape.nhd[not prefills],
            _PORTS.take(),
            str(self._model),
            str(self._directory.resolve() / f"{engine_id}.meeting"),
            self._prefill_site if prefills else self._decode_site,
        )
        running = self.prefill if prefills else self.decode
        before = len(running)
        for rank in range(layout.world_size):
            running.append(Child(f"{engine_id}-{rank}", self._directory, self.factory, spec, rank))
        return running[before:]


class ConnectorPair(Pair):
    """A decode engine with a connector, and the prefill engine that it reads from, or several."""

    factory = "benchmarks.host:ConnectorHost"
    _idle: Sealed = b""

    def start(self) -> None:
        """Start both engines, and let them answer handshakes."""
        started = [
            self._start("prefill", self.shape.prefill),
            self._start("decode", self.shape.decode),
        ]
        self._idle, _ = map(_ready, started)

    def start_prefill(self, count: int = 1) -> None:
        """Start the prefill engines alone; `start_decode` is to follow.

        One after another: each takes the machine for a moment, and less so without the others.
        """
        for _ in range(count):
            self._idle = _ready(self._start("prefill", self.shape.prefill))

    def start_decode(self) -> None:
        """Start a decode engine, which knows nobody."""
        _ready(self._start("decode", self.shape.decode))

    def end_decode(self) -> None:
        """End the decode engine, and give its memory back."""
        end_all(self.decode)
        self.decode = []

    def call_prefill(self, method: str, *args: object) -> None:
        """Call a method in all ranks of the prefill engine."""
        call_all(self.prefill, method, *args)

    def call_decode(self, method: str, *args: object) -> None:
        """Call a method in all ranks of the decode engine."""
        call_all(self.decode, method, *args)

    def read(self, requests: Sequence[Tables], watch: Watch | None = None) -> list[Reading]:
        """Read requests that are asked for at once; what each decode rank has measured.

        Where there are several prefill engines, they have the requests in turns.
        """
        names = [f"request-{next(_NUMBERS)}" for _ in requests]
        pairs = list(zip(names, requests, strict=True))
        engines = self._prefill_engines()
        params = {}
        for number, engine in enumerate(engines):
            share = pairs[number :: len(engines)]
            offer = _offer(engine, [_offered(name, each) for name, each in share])
            call_all(engine, "hold", offer.metadata)
            params.update(offer.params)
        wanted = [
            RequestSpec(name, each.destination, each.num_tokens, params[name])
            for name, each in pairs
        ]
        watch = watch or Watch()
        ((first, others),) = call_all(self.decode[:1], "ask", wanted, watch.computes)
        readings: list[Reading] = call_all(self.decode, "read", first, others, names, watch)
        call_all(self.decode[:1], "forget", names)
        for number, engine in enumerate(engines):
            call_all(engine, "release", self._idle, names[number :: len(engines)])
        return readings

    def watch_holding(self, requests: Sequence[Tables], watch: Watch) -> list[PauseSummary]:
        """Hold requests at the prefill engine, and see what that costs the steps of its ranks."""
        names = [f"request-{next(_NUMBERS)}" for _ in requests]
        specs = [_offered(name, each) for name, each in zip(names, requests, strict=True)]
        offer = _offer(self.prefill, specs, computes=watch.computes)
        call_all(self.prefill, "hold", offer.metadata)
        summaries: list[PauseSummary] = call_all(self.prefill, "watch_holding", offer.others, watch)
        return summaries

    def _prefill_engines(self) -> list[list[Child]]:
        """The ranks of each prefill engine."""
        size = self.shape.prefill.world_size
        return [self.prefill[at : at + size] for at in range(0, len(self.prefill), size)]


class RawPair(Pair):
    """Engines without a connector."""

    factory = "benchmarks.raw:RawHost"

    def start(self) -> None:
        """Start both engines, and connect them."""
        self._start("prefill", self.shape.prefill)
        self._start("decode", self.shape.decode)
        for child in self.prefill + self.decode:
            child.result()
        call_all(self.decode, "connect", call_all(self.prefill, "describe"))

    def read(self, requests: Sequence[Tables]) -> list[Reading]:
        """Read one request."""
        (tables,) = requests
        return call_all(self.decode, "read", tables.destination, tables.source)


class MemcpyPair(Pair):
    """One process that copies."""

    factory = "benchmarks.raw:MemcpyHost"

    def start(self) -> None:
        """Start it."""
        for child in self._start("decode", Layout(1, 1)):
            child.result()

    def fill(self) -> None:
        """It has been, already."""

    def read(self, requests: Sequence[Tables]) -> list[Reading]:
        """Copy one request's bytes."""
        (tables,) = requests
        return call_all(self.decode, "read", tables.destination, tables.source)

    def check(self, tables: Tables) -> None:
        """There is nothing that could be wrong; only caches are warmed, as for others."""
        self.read([tables])


@contextmanager
def started_pairs(
    variants: Sequence[Variant],
    shape: Shape,
    num_blocks: int,
    directory: Path,
    sites: tuple[Site, Site] = (HERE, HERE),
) -> Iterator[list[Pair]]:
    """Start a pair for each variant, fill its caches, and stop it until its turn.

    One after another: threads that spin in one would slow down the start of the others.
    """
    kinds = {"raw": RawPair, "memcpy": MemcpyPair}
    pairs: list[Pair] = []
    try:
        for variant in variants:
            kind = kinds.get(variant.connector, ConnectorPair)
            pair = kind(variant, shape, num_blocks, directory, sites)
            pairs.append(pair)
            pair.start()
            pair.fill()
            with pair.turn():
                pass
        yield pairs
    finally:
        for pair in pairs:
            pair.end()


def _offered(name: str, tables: Tables) -> RequestSpec:
    """A request at the engine that prefills it."""
    return RequestSpec(name, tables.source, tables.num_tokens)


def _offer(
    engine: Sequence[Child], specs: Sequence[RequestSpec], *, computes: bool = False
) -> Offer:
    """Prefill requests, as far as an engine's scheduler sees it."""
    offers: list[Offer] = call_all(engine[:1], "offer", specs, computes)
    return offers[0]


def _ready(children: Sequence[Child]) -> Sealed:
    """Wait for the ranks of an engine, and let it answer handshakes; what idle workers are told."""
    for child in children:
        child.result()
    described = dict(call_all(children, "describe"))
    (idle,) = call_all(children[:1], "serve", described)
    return bytes(idle)
