# SPDX-License-Identifier: Apache-2.0
"""What is measured: shapes of caches, pairs of layouts, requests. Values alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from tools.pdstack.layout import Layout, parse_layout

from .base import planes_of_attention
from .network import Link
from .tables import TableOrder

ITEM_BYTES = 2
"""Bytes of an element: bfloat16."""

_MLA_SLOT = 576
"""Elements of a token in an MLA cache: what DeepSeek models have."""

_REQUEST_LIMIT_BYTES = 128 << 20
"""Bytes of the largest request of a shape, by which its number of layers is chosen: more than any
cache of the processor holds, and few enough for all variants to be in memory at once."""

_MOST_PLANES = 32


class Depth(Enum):
    """How much is measured."""

    QUICK = "quick"
    DEFAULT = "default"
    FULL = "full"


@dataclass(frozen=True)
class Shape:
    """A model's KV cache, and a prefill and a decode layout for it.

    Attributes:
        prefill: Layout of the engine that is read.
        decode: Layout of the engine that reads.
        num_layers: Layers of the model.
        num_heads: KV heads of the model; with MLA, 1.
        head_size: Elements of a head of a token.
        block_tokens: Tokens in a block of the decode engine.
        mla: One latent vector instead of keys and values, on every rank.
        attention_planes: Planes of a layer without MLA: 2 where keys and values lie apart, 1 where
            they lie side by side.
        prefill_block_tokens: Tokens in a block of the prefill engine; None for as many.
        nhd: Whether a token's heads are adjacent (NHD) at the prefill and at the decode engine;
            else a head's tokens are (HND).
    """

    prefill: Layout
    decode: Layout
    num_layers: int
    num_heads: int
    head_size: int
    block_tokens: int
    mla: bool = False
    attention_planes: int = field(default_factory=planes_of_attention)
    prefill_block_tokens: int | None = None
    nhd: tuple[bool, bool] = (False, False)

    @property
    def layouts(self) -> str:
        """Who reads from whom, as tables have it."""
        return "->".join(
            ("NHD " if nhd else "") + _say(layout)
            for layout, nhd in zip((self.prefill, self.decode), self.nhd, strict=True)
        )

    @property
    def blocks_tokens(self) -> tuple[int, int]:
        """Tokens in a block of the prefill and of the decode engine."""
        return self.prefill_block_tokens or self.block_tokens, self.block_tokens

    @property
    def planes_per_layer(self) -> int:
        """Parts of a layer's cache that lie apart, each with all blocks."""
        return 1 if self.mla else self.attention_planes

    @property
    def num_planes(self) -> int:
        """Those of all layers."""
        return self.num_layers * self.planes_per_layer

    @property
    def slot_bytes(self) -> int:
        """Bytes of a head of a token in one plane."""
        vectors = 1 if self.mla else 2 // self.attention_planes
        return vectors * self.head_size * ITEM_BYTES

    @property
    def chunk_bytes(self) -> int:
        """Bytes that are contiguous at both ends: some heads of some tokens of a block."""
        tp_sizes = {1} if self.mla else {self.prefill.tp_size, self.decode.tp_size}
        heads, tokens = self.num_heads // max(tp_sizes), math.gcd(*self.blocks_tokens)
        if heads > 1 and self.nhd[0] != self.nhd[1]:
            return self.slot_bytes
        if self.nhd[0] and len(tp_sizes) > 1:
            return heads * self.slot_bytes
        if not self.nhd[0] and len(set(self.blocks_tokens)) > 1:
            heads = 1
        return heads * tokens * self.slot_bytes

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block in all layers and heads."""
        return self.num_planes * self.num_heads * self.block_tokens * self.slot_bytes

    def bytes_read(self, tokens: int) -> int:
        """Bytes that all decode ranks read together for a request."""
        copies = self.decode.tp_size if self.mla else 1
        return copies * self.num_blocks(tokens) * self.bytes_per_block

    def num_chunks(self, tokens: int) -> int:
        """Descriptors of one chunk each that a request takes."""
        return self.bytes_read(tokens) // self.chunk_bytes

    def num_blocks(self, tokens: int) -> int:
        """Blocks of the decode engine that a request fills; the last one in full."""
        return -(-tokens // self.block_tokens)

    def prefill_blocks(self, num_blocks: int) -> int:
        """Blocks of the prefill engine that hold as many tokens as so many of the decode engine."""
        prefill, decode = self.blocks_tokens
        return -(-num_blocks * decode // prefill)

    def __str__(self) -> str:
        heads = "MLA" if self.mla else f"{self.chunk_bytes / 1024:g} KiB chunks"
        blocks = "->".join(map(str, dict.fromkeys(self.blocks_tokens)))
        return f"{self.layouts}, blocks of {blocks}, {heads}"


@dataclass(frozen=True)
class HandshakeCase:
    """A first request to an engine that nobody has asked before."""

    shape: Shape
    num_blocks: int

    @property
    def descriptors(self) -> int:
        """Blocks of all planes: what a rank has to make known where each is by itself."""
        return self.shape.num_planes * self.num_blocks

    @property
    def name(self) -> str:
        """What it is called in tables, and unique among all cases."""
        shape = self.shape
        return f"{shape.layouts}, {shape.num_layers} layers x {_thousands(self.num_blocks)} blocks"


@dataclass(frozen=True)
class TransferCase:
    """A request that is read."""

    shape: Shape
    tokens: int
    order: TableOrder

    @property
    def name(self) -> str:
        """What it is called in tables, and unique among all cases."""
        shape = self.shape
        heads = "" if shape.mla else f", {shape.num_heads} heads of {shape.head_size}"
        return f"{shape}{heads}, {_thousands(self.tokens)} tokens, {self.order.value}"


@dataclass(frozen=True)
class RequestPathCase:
    """Requests that are asked for in one step."""

    shape: Shape
    num_requests: int
    tokens: int

    @property
    def name(self) -> str:
        """What it is called in tables, and unique among all cases."""
        return f"{self.shape.layouts}, {self.num_requests} in flight"


@dataclass(frozen=True)
class IdleCase:
    """Engines that have met and have nothing to do."""

    shape: Shape

    @property
    def name(self) -> str:
        """What it is called in tables."""
        return f"{self.shape.layouts}, connected"


@dataclass(frozen=True)
class PauseCase:
    """Requests that are asked for in one step, while the engine's thread works.

    Attributes:
        shape: The model and both layouts.
        num_requests: As many.
        tokens: Of each.
        connected: The engines have met; else, all wait for one handshake.
        num_peers: Prefill engines that they are read from, in turns.
    """

    shape: Shape
    num_requests: int
    tokens: int
    connected: bool
    num_peers: int = 1

    @property
    def name(self) -> str:
        """What it is called in tables, and unique among all cases."""
        what = "in flight" if self.connected else "waiting for a handshake"
        peers = f" from {self.num_peers} engines" if self.num_peers > 1 else ""
        return f"{self.shape.layouts}, {self.num_requests} {what}{peers}"


@dataclass(frozen=True)
class HoldingCase:
    """Requests that a prefill engine holds, while its thread works and nobody asks for them.

    Attributes:
        shape: The model and both layouts.
        num_requests: As many, of one block each.
    """

    shape: Shape
    num_requests: int

    @property
    def name(self) -> str:
        """What it is called in tables, and unique among all cases."""
        return f"{self.shape.layouts}, {self.num_requests} held"


@dataclass(frozen=True)
class AnswersCase:
    """Engines of one layout that a decode engine hears of, one after another; none is connected.

    Attributes:
        shape: The model and both layouts.
        num_engines: Prefill engines.
    """

    shape: Shape
    num_engines: int

    @property
    def name(self) -> str:
        """What it is called in tables, and unique among all cases."""
        return f"{self.shape.layouts}, {self.num_engines} engines answer"


@dataclass(frozen=True)
class PeersCase:
    """A decode worker that knows prefill engines, from each of which it has read once.

    Attributes:
        shape: The model and both layouts.
        num_peers: As many engines.
    """

    shape: Shape
    num_peers: int

    @property
    def name(self) -> str:
        """What it is called in tables, and unique among all cases."""
        return f"{self.shape.layouts}, {self.num_peers} engines"


@dataclass(frozen=True)
class NetworkCase:
    """A request that is read over TCP.

    Attributes:
        shape: The model and both layouts.
        tokens: Of the request.
        link: What lies between the engines; None for the loopback device.
        step_s: How long a step of the decode engine takes.
    """

    shape: Shape
    tokens: int
    link: Link | None
    step_s: float

    @property
    def name(self) -> str:
        """What it is called in tables, and unique among all cases."""
        size = f"{self.shape.bytes_read(self.tokens) >> 20} MiB"
        steps = f"steps of {self.step_s * 1e3:g} ms"
        return f"{self.shape.layouts}, {size}, {self.link or 'TCP, loopback'}, {steps}"


def handshake_cases(depth: Depth) -> list[HandshakeCase]:
    """The handshakes to measure, in the order of their costs."""

    def case(layouts: str, num_layers: int, num_blocks: int) -> HandshakeCase:
        prefill, decode = _layouts(layouts)
        shape = Shape(prefill, decode, num_layers, 8, 128, 32)
        return HandshakeCase(shape, num_blocks)

    if depth is Depth.QUICK:
        return [case("tp1pp1 tp1pp1", 80, 1_000)]
    cases = [
        case("tp8pp1 tp1pp1", 32, 1_000),
        case("tp2pp1 tp1pp1", 80, 10_000),
        case("tp1pp2 tp1pp1", 80, 100_000),
        case("tp1pp1 tp1pp1", 80, 1_000),
        case("tp1pp1 tp1pp1", 80, 10_000),
        case("tp1pp1 tp1pp1", 80, 100_000),
    ]
    if depth is Depth.FULL:
        layouts = ("tp1pp1 tp1pp1", "tp2pp1 tp1pp1", "tp8pp1 tp1pp1", "tp1pp2 tp1pp1")
        whole = itertools.product(layouts, (32, 80), (1_000, 10_000, 100_000))
        cases += [case("tp2pp2 tp1pp2", 80, 100_000), *(case(*sizes) for sizes in whole)]
    return list(dict.fromkeys(cases))


def transfer_cases(depth: Depth) -> list[TransferCase]:
    """The requests to read, those of one shape together."""
    if depth is Depth.QUICK:
        orders = (TableOrder.CONTIGUOUS, TableOrder.SHUFFLED)
        return list(_transfers("tp2pp1 tp1pp1", 32, 1, 128, [1024], orders))
    if depth is Depth.FULL:
        return list(_all_transfers())
    contiguous, reversed_, shuffled = every = tuple(TableOrder)
    cases = [
        *_transfers("tp1pp1 tp1pp1", 32, 1, 128, [1024, 8192, 32768], [contiguous]),
        *_transfers("tp1pp1 tp1pp1", 32, 1, 128, [8192], [reversed_, shuffled], longest=32768),
        *_transfers("tp1pp1 tp1pp1", 128, 8, 256, [8192], [contiguous, shuffled]),
        *_transfers("tp2pp1 tp1pp1", 32, 1, 128, [1024, 8192, 32768], [contiguous]),
        *_transfers("tp2pp1 tp1pp1", 32, 1, 128, [8192], [reversed_, shuffled], longest=32768),
        *_transfers("tp2pp1 tp1pp1", 32, 1, 256, [8192], every),
        *_transfers("tp2pp1 tp1pp1", 128, 8, 256, [8192], [contiguous]),
        *_transfers("tp2pp1 tp1pp1", 32, 1, 16, [32768], [contiguous, shuffled]),
        *_transfers("tp2pp1 tp1pp1", 32, 1, 32, [16384], [contiguous, shuffled]),
        *_transfers("tp2pp1 tp1pp1", 32, 1, 512, [1024], [contiguous, shuffled]),
        *_transfers("tp2pp1 tp1pp1", 32, 1, 8192, [64], [contiguous]),
        *_transfers("tp4pp1 tp1pp1", 32, 1, 128, [8192], every),
        *_transfers("tp4pp1 tp1pp1", 32, 1, 256, [8192], every),
        *_transfers("tp1pp1 tp2pp1", 32, 1, 256, [8192], [contiguous]),
        *_transfers("tp4pp1 tp1pp1", 32, 2, 256, [8192], every, nhd=(True, True)),
        *_transfers("tp1pp1 tp4pp1", 32, 2, 256, [8192], [contiguous, shuffled], nhd=(True, True)),
        *_transfers("tp2pp1 tp1pp1", 32, 8, 512, [8192], [contiguous, shuffled], nhd=(True, True)),
        *_transfers("tp1pp1 tp1pp1", 32, 4, 256, [8192], [contiguous, shuffled], nhd=(True, False)),
        *_transfers("tp1pp1 tp1pp1", 32, 4, 256, [8192], [contiguous, shuffled], nhd=(False, True)),
        *_transfers(
            "tp1pp1 tp1pp1", 64, 4, 256, [8192], [contiguous, shuffled], prefill_block_tokens=16
        ),
        *_transfers(
            "tp1pp1 tp1pp1", 16, 4, 256, [8192], [contiguous, shuffled], prefill_block_tokens=64
        ),
        *_mla_transfers("tp2pp1 tp1pp1", 32, [8192], [contiguous]),
    ]
    # One start of all processes serves all cases of a shape.
    shapes = dict.fromkeys(case.shape for case in cases)
    return [case for shape in shapes for case in cases if case.shape == shape]


def _all_transfers() -> Iterator[TransferCase]:
    """Every layout with every block and slot size, number of heads, length and order."""
    tokens = [1024, 8192, 32768]
    for layouts in ("tp1pp1 tp1pp1", "tp2pp1 tp1pp1", "tp4pp1 tp1pp1", "tp1pp1 tp2pp1"):
        for sizes in itertools.product((32, 128), (1, 2, 8), (128, 256)):
            yield from _transfers(layouts, *sizes, tokens, TableOrder)
    for block_tokens in (32, 128):
        yield from _mla_transfers("tp2pp1 tp1pp1", block_tokens, tokens, TableOrder)


def request_path_cases(depth: Depth) -> list[RequestPathCase]:
    """The numbers of requests to ask for at once."""
    prefill, decode = _layouts("tp2pp1 tp1pp1")
    shape = Shape(prefill, decode, 32, 2, 64, 32)
    counts = (16,) if depth is Depth.QUICK else (1, 16, 256)
    return [RequestPathCase(shape, count, 128) for count in counts]


def idle_cases() -> list[IdleCase]:
    """The engines that are left alone."""
    return [IdleCase(_small_shape(2))]


def peers_cases(depth: Depth) -> list[PeersCase]:
    """The numbers of engines, in ascending order."""
    counts = (1, 8) if depth is Depth.QUICK else (1, 8, 64, 200)
    return [PeersCase(_small_shape(1), count) for count in counts]


def pause_cases(depth: Depth) -> list[PauseCase | HoldingCase | AnswersCase]:
    """What could keep the engine's thread: many posts, many that wait, many ranks, many peers."""
    if depth is Depth.QUICK:
        return []
    one, few, many = map(_small_shape, (1, 2, 8))
    vast = Shape(*_layouts("tp16pp8 tp16pp8"), 80, 8, 128, 32)
    # Minutes go by until 64 engines have started.
    crowds = (8, 64) if depth is Depth.FULL else (8,)
    return [
        PauseCase(few, 256, 128, connected=True),
        *(PauseCase(one, 256, 128, connected=True, num_peers=count) for count in crowds),
        PauseCase(few, 1000, 32, connected=False),
        PauseCase(many, 1, 32, connected=False),
        AnswersCase(vast, 200),
        HoldingCase(one, 10_000),
    ]


def network_cases(depth: Depth) -> list[NetworkCase]:
    """Links and steps, those of a link together."""
    if depth is Depth.QUICK:
        return []
    shape = _small_shape(2)
    links = (None, Link(1), Link(10), Link(10, 0.1), Link(1, 1.0))
    return [
        NetworkCase(shape, 1024, link, step_s)
        for link, step_s in itertools.product(links, (1e-3, 10e-3, 50e-3))
    ]


def _small_shape(prefill_tp_size: int) -> Shape:
    """Eight layers, of which many blocks fit into memory."""
    return Shape(*_layouts(f"tp{prefill_tp_size}pp1 tp1pp1"), 8, 8, 64, 32)


def _transfers(
    layouts: str,
    block_tokens: int,
    heads_per_rank: int,
    slot_bytes: int,
    tokens: Iterable[int],
    orders: Iterable[TableOrder],
    longest: int | None = None,
    *,
    prefill_block_tokens: int | None = None,
    nhd: tuple[bool, bool] = (False, False),
) -> Iterator[TransferCase]:
    """Requests of one shape.

    Args:
        layouts: Prefill and decode.
        block_tokens: Tokens in a block of the decode engine.
        heads_per_rank: KV heads of each rank of the engine that has more of them.
        slot_bytes: Of a head of a token in one plane; the head size follows from it, so that chunks
            are as large on every base.
        longest: Tokens of the longest request of this shape; None for that of `tokens`.
        prefill_block_tokens: Tokens in a block of the prefill engine; None for as many.
        nhd: Whether a token's heads are adjacent at the prefill and at the decode engine.
    """
    prefill, decode = _layouts(layouts)
    num_heads = heads_per_rank * max(prefill.tp_size, decode.tp_size)
    head_size = slot_bytes * planes_of_attention() // (2 * ITEM_BYTES)
    shape = Shape(
        prefill,
        decode,
        1,
        num_heads,
        head_size,
        block_tokens,
        prefill_block_tokens=prefill_block_tokens,
        nhd=nhd,
    )
    yield from _requests(shape, list(tokens), list(orders), longest)


def _mla_transfers(
    layouts: str, block_tokens: int, tokens: Iterable[int], orders: Iterable[TableOrder]
) -> Iterator[TransferCase]:
    """Requests of one shape, of a model with MLA."""
    shape = Shape(*_layouts(layouts), 1, 1, _MLA_SLOT, block_tokens, mla=True)
    yield from _requests(shape, list(tokens), list(orders), None)


def _requests(
    shape: Shape, tokens: list[int], orders: list[TableOrder], longest: int | None
) -> Iterator[TransferCase]:
    """Requests of a shape with one layer, given as many layers as are measured."""
    fitting = _REQUEST_LIMIT_BYTES // shape.bytes_read(longest or max(tokens))
    layers = max(1, min(_MOST_PLANES // shape.planes_per_layer, fitting))
    deep = Shape(**{**vars(shape), "num_layers": layers})
    for count, order in itertools.product(tokens, orders):
        yield TransferCase(deep, count, order)


def _layouts(text: str) -> tuple[Layout, Layout]:
    prefill, decode = map(parse_layout, text.split())
    return prefill, decode


def _say(layout: Layout) -> str:
    stages = f"xPP{layout.pp_size}" if layout.pp_size > 1 else ""
    return f"TP{layout.tp_size}{stages}"


def _thousands(count: int) -> str:
    for base, unit in ((1024, "k"), (1000, "k")):
        if count >= base and count % base == 0:
            return f"{count // base}{unit}"
    return str(count)
