# SPDX-License-Identifier: Apache-2.0
"""One running engine of each layout, which serves all pairs that it is part of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.e2e.pairs import Pair, ask_unaided
from tools.pdstack.engine import Device, EngineSpec, KVTransfer, ServedModel
from tools.pdstack.layout import Layout, read_model_shape
from tools.pdstack.metrics import NixlCounters
from tools.pdstack.stack import Engine, PDStack
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.packing import PACK_UNIT_BYTES

FLOAT32_BYTES = 4
ONE, STAGES, RANKS, BOTH = Layout(1, 1), Layout(1, 2), Layout(2, 1), Layout(2, 2)
_CACHE_TOKENS = 8192


@dataclass(frozen=True)
class Case:
    """A pair of layouts.

    Attributes:
        reads: number of reads that fill the decode engine's blocks.
        is_seeded: whether answers begin with the prefill engine's token.
        is_packed: whether reads are packed, each of which is of whole units.
    """

    prefill: Layout
    decode: Layout
    reads: int
    is_seeded: bool = False
    is_packed: bool = False

    @property
    def sides(self) -> tuple[Layout, Layout]:
        """Both layouts."""
        return self.prefill, self.decode

    def __str__(self) -> str:
        return f"{self.prefill}-{self.decode}"


@dataclass(frozen=True)
class Engines:
    """The engines.

    Attributes:
        block_tokens: size of a block.
        block_bytes: the same, of the whole model.
    """

    stack: PDStack
    by_layout: dict[Layout, Engine]
    block_tokens: int
    block_bytes: int

    @classmethod
    def of(cls, stack: PDStack, by_layout: dict[Layout, Engine]) -> Engines:
        """Return running engines of a stack, with the sizes of its model's blocks."""
        model = stack.model
        per_token = read_model_shape(model.directory).kv_bytes_per_token(FLOAT32_BYTES)
        return cls(stack, by_layout, model.block_tokens, per_token * model.block_tokens)

    @contextmanager
    def pair(self, case: Case) -> Iterator[Pair]:
        """Put a router in front of two of them for a while."""
        prefill, decode = self.by_layout[case.prefill], self.by_layout[case.decode]
        router = self.stack.start_router([prefill], [decode])
        yield Pair(self.stack.model.name, prefill, decode, router)
        self.stack.stop(router)

    def right_answer(self, text: str) -> str:
        """Return what one engine of one rank answers."""
        return ask_unaided(self.by_layout[ONE], self.stack.model.name, text)


def assert_read_and_right(
    engines: Engines, case: Case, pair: Pair, text: str, tokens: int, copies: int = 1
) -> str:
    """See that a first answer is right, and that all of its prompt's blocks were read.

    Args:
        tokens: of the prompt.
        copies: how often each byte is read.

    Returns:
        The answer.
    """
    right = engines.right_answer(text)
    before = pair.decode.nixl_counters()
    assert pair.ask(text) == right
    blocks = -(-tokens // engines.block_tokens)
    assert_read(case, pair.read_since(before, case.reads), blocks * engines.block_bytes * copies)
    return right


def assert_read(case: Case, counted: NixlCounters, num_bytes: int) -> None:
    """See that so many bytes were read, in as many reads as a case has."""
    spare_bytes = counted.bytes_moved - num_bytes
    assert 0 <= spare_bytes <= case.is_packed * case.reads * PACK_UNIT_BYTES
    assert counted == NixlCounters(
        bytes_moved=counted.bytes_moved, transfers=case.reads, first_tokens=case.is_seeded
    )


@dataclass(frozen=True)
class Options:
    """How engines of a layout are started, beyond what all have in common.

    Attributes:
        args: more of the command line.
        env: more of the environment.
        connector: more of the connector's options.
    """

    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    connector: Mapping[str, object] = field(default_factory=dict)


@contextmanager
def running(
    model: ServedModel,
    run_dir: Path,
    cases: Sequence[Case],
    *,
    also: Sequence[Layout] = (),
    options: Mapping[Layout, Options] | None = None,
    device: Device | None = None,
    kv_transfer: KVTransfer | None = None,
) -> Iterator[Engines]:
    """Start one of each layout; which of them work together is settled when they first do.

    Args:
        also: layouts that are wanted beside those of the cases.
        options: by layout.
        device: where they run; by default what the installed vLLM was built for.
        kv_transfer: their connector, where it is not the usual one.
    """
    chosen, plain = options or {}, Options()
    layouts = dict.fromkeys([*also, *(side for each in cases for side in each.sides)])
    transfer = kv_transfer or KVTransfer()
    blocks = str(_CACHE_TOKENS // model.block_tokens)
    specs = [
        EngineSpec(
            str(layout),
            layout,
            env=chosen.get(layout, plain).env,
            extra_args=("--num-gpu-blocks-override", blocks, *chosen.get(layout, plain).args),
            max_model_len=1024,
            kv_transfer=replace(
                transfer,
                # So that engines of all releases and builds read as much as the others.
                extra_config={
                    "seed_first_token": False,
                    **transfer.extra_config,
                    **chosen.get(layout, plain).connector,
                },
            ),
        )
        for layout in layouts
    ]
    with PDStack(model, run_dir, device=device) as stack:
        by_layout = {each.spec.layout: each for each in stack.start_engines(*specs)}
        yield Engines.of(stack, by_layout)
