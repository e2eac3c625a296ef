# SPDX-License-Identifier: Apache-2.0
"""Engine layouts on the command line of `kv-plan`."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass

from ..plan.mesh import ParallelMesh
from ..protocol.bounds import MAX_STAGE_RANKS
from .limits import require_mesh, require_size

_ONE_WORD = re.compile(r"tp(\d+)pp(\d+)", re.ASCII | re.IGNORECASE)
"""The short form of a layout, as in `make demo` and the tests of pairs."""

_AXES = ("tp", "pp", "dcp", "pcp")


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """The parallel sizes of an engine.

    Attributes:
        mesh: Its workers.
        num_shares: Number of workers that divide a head's tokens: its decode context parallel size.
        run_tokens: Consecutive tokens dealt to one of these workers at a time.
        num_replicas: Number of workers with the same cache: its prefill context parallel size.
    """

    mesh: ParallelMesh
    num_shares: int = 1
    run_tokens: int = 1
    num_replicas: int = 1

    @property
    def num_ranks(self) -> int:
        """Number of workers, including those that are not read from."""
        return self.mesh.world_size * self.num_replicas

    def __str__(self) -> str:
        text = str(self.mesh)
        if self.num_replicas > 1:
            text += f" x PCP{self.num_replicas}"
        if self.num_shares > 1:
            text += f" x DCP{self.num_shares} in runs of {self.run_tokens} tokens"
        return text


def parse_layout(text: str, run_tokens: int) -> EngineLayout:
    """Parse a layout such as `tp=4,pp=2,dcp=2`, `tp=4,pcp=2` or `tp4pp2`; missing sizes are 1.

    Args:
        text: The layout.
        run_tokens: Consecutive tokens per rank, used if the layout divides tokens.

    Raises:
        ValueError: The layout is malformed, or too large.
    """
    if in_one_word := _ONE_WORD.fullmatch(text.strip()):
        text = "tp={},pp={}".format(*in_one_word.groups())
    sizes: dict[str, int] = {}
    for item in text.split(","):
        axis, _, size = item.strip().partition("=")
        if axis not in _AXES or axis in sizes or not size.isdecimal():
            raise ValueError(
                f"{item!r} is not understood: write tp=N,pp=N or tp=N,pp=N,dcp=N, each axis at "
                "most once, or tpNppN; of a prefill engine also tp=N,pp=N,pcp=N"
            )
        sizes[axis] = int(size)
    tp_size, pp_size, num_shares, num_replicas = (sizes.get(axis, 1) for axis in _AXES)
    require_mesh(tp_size, pp_size)
    for axis in ("dcp", "pcp"):
        if sizes.get(axis, 1) < 1:
            raise ValueError(f"{axis} is {sizes[axis]} but must be at least 1")
    require_size("pcp", num_replicas, MAX_STAGE_RANKS)
    if min(num_shares, num_replicas) > 1:
        raise ValueError(
            f"with dcp={num_shares}, the ranks of pcp={num_replicas} are read as those of a stage: "
            f"write tp={tp_size * num_replicas},dcp={num_shares}, whose reads are the same"
        )
    mesh = ParallelMesh(pp_size=pp_size, tp_size=tp_size)
    return EngineLayout(mesh, num_shares, run_tokens, num_replicas)


def parse_partition(role: str, text: str | None) -> list[int] | None:
    """Parse a layer partition such as `10,22`; return None without one."""
    if text is None:
        return None
    try:
        return [int(size) for size in text.split(",")]
    except ValueError:
        raise ValueError(
            f"--{role}-layer-partition {text!r} is not understood: write one number a stage, "
            "separated by commas"
        ) from None


def read_run_tokens(args: argparse.Namespace, role: str, block_tokens: int) -> int:
    """Return the consecutive tokens that an engine deals to a rank: one block by default.

    Raises:
        ValueError: They do not divide a block.
    """
    name = f"{role}_interleave_size"
    run_tokens = getattr(args, name)
    if run_tokens is None:
        return block_tokens
    if run_tokens < 1 or block_tokens % run_tokens:
        raise ValueError(
            f"--{name.replace('_', '-')} is {run_tokens} but must divide the {block_tokens} tokens "
            "of a block"
        )
    return int(run_tokens)
