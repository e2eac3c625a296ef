# SPDX-License-Identifier: Apache-2.0
"""One running engine of each layout, which serves all pairs that it is part of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.pairs import Pair, ask_unaided
from tools.pdstack.engine import EngineSpec, ServedModel
from tools.pdstack.layout import Layout, read_model_shape
from tools.pdstack.stack import Engine, PDStack

FLOAT32_BYTES = 4
ONE, STAGES, RANKS, BOTH = Layout(1, 1), Layout(1, 2), Layout(2, 1), Layout(2, 2)
_CACHE_TOKENS = 8192


@dataclass(frozen=True)
class Case:
    """A pair of layouts, and the number of reads that fill the decode engine's blocks."""

    prefill: Layout
    decode: Layout
    reads: int

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


@contextmanager
def running(
    model: ServedModel,
    run_dir: Path,
    layouts: Sequence[Layout],
    env: Mapping[Layout, Mapping[str, str]],
) -> Iterator[Engines]:
    """Start them all; which of them work together is settled when they first do.

    Args:
        env: more of the environment, by layout.
    """
    per_token = read_model_shape(model.directory).kv_bytes_per_token(FLOAT32_BYTES)
    blocks = str(_CACHE_TOKENS // model.block_tokens)
    specs = [
        EngineSpec(
            str(layout),
            layout,
            env=env.get(layout, {}),
            extra_args=("--num-gpu-blocks-override", blocks),
            max_model_len=1024,
        )
        for layout in layouts
    ]
    with PDStack(model, run_dir) as stack:
        by_layout = {each.spec.layout: each for each in stack.start_engines(*specs)}
        yield Engines(stack, by_layout, model.block_tokens, per_token * model.block_tokens)
