# SPDX-License-Identifier: Apache-2.0
"""Engine layouts on the command line of `kv-plan`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..plan.shards import ParallelMesh
from ..protocol.bounds import MAX_RANKS, MAX_STAGE_RANKS

_AXES = ("tp", "pp", "dcp", "pcp", "dp", "ep")
_ITEM = re.compile(rf"({'|'.join(_AXES)})=?(\d{{1,6}}),?", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """The parallel sizes of an engine.

    Attributes:
        mesh: The workers of one data-parallel replica.
        num_shares: Number of workers that divide a head's tokens: its decode context parallel size.
        num_copies: Number of workers with the same cache: its prefill context parallel size.
        num_replicas: Number of data-parallel replicas. Each reads, or is read from, by itself.
        partition: Number of layers of each stage; empty for vLLM's default.
        block_tokens: Tokens in a block; None for vLLM's choice.
        run_tokens: Consecutive tokens that are dealt to one of the sharing workers at a time; None
            for vLLM's choice, a block.
    """

    mesh: ParallelMesh
    num_shares: int = 1
    num_copies: int = 1
    num_replicas: int = 1
    partition: tuple[int, ...] = ()
    block_tokens: int | None = None
    run_tokens: int | None = None

    def __str__(self) -> str:
        num_ranks = self.mesh.world_size * self.num_copies
        text = str(self.mesh)
        if self.num_copies > 1:
            text += f" x PCP{self.num_copies}"
        if self.num_shares > 1:
            text += f" x DCP{self.num_shares}"
        text += f", {num_ranks} rank{'s' * (num_ranks != 1)}"
        if self.num_copies > 1:
            text += ", the first of each PCP group read from"
        if self.num_replicas > 1:
            text += f", in each of {self.num_replicas} replicas, which take part one by one"
        return text


def parse_layout(
    text: str,
    partition: str | None = None,
    block_tokens: int | None = None,
    run_tokens: int | None = None,
    *,
    reads: bool = False,
) -> EngineLayout:
    """Parse a layout such as `tp=4,pp=2`, `tp8`, `tp4pp2` or `tp=8,dp=2,ep=16`.

    Args:
        text: The layout; sizes that are missing are 1.
        partition: Layers of each stage, such as `10,22`; None for vLLM's default.
        block_tokens: Tokens in a block; None for vLLM's choice.
        run_tokens: Consecutive tokens for each sharing rank; None for vLLM's choice.
        reads: True for an engine that reads.

    Raises:
        ValueError: It is malformed, too large, or not of an engine that can be.
    """
    items = _ITEM.findall(text.replace(" ", ""))
    sizes = {axis.lower(): int(size) for axis, size in items}
    if "".join(_ITEM.split(text.replace(" ", ""))[::3]) or len(items) != len(sizes) or not sizes:
        raise ValueError(
            f"{text!r} is not understood: write tp=N,pp=N or tpNppN, with any of "
            f"{', '.join(_AXES)}, each at most once"
        )
    tp_size, pp_size, num_shares, num_copies, num_replicas, num_experts = (
        sizes.get(axis, 1) for axis in _AXES
    )
    for axis, size in sizes.items():
        if size < 1:
            raise ValueError(f"{axis} is {size} but must be at least 1")
    if max(tp_size, num_copies) > MAX_STAGE_RANKS or tp_size * pp_size > MAX_RANKS:
        raise ValueError(
            f"{text!r} has more than {MAX_STAGE_RANKS} ranks in a stage, or {MAX_RANKS} in all, "
            "and engines refuse larger ones: give fewer"
        )
    if min(num_shares, num_copies) > 1:
        raise ValueError(
            f"with dcp={num_shares}, the ranks of pcp={num_copies} are read as those of a stage: "
            f"write tp={tp_size * num_copies},dcp={num_shares}, whose reads are the same"
        )
    if num_copies > 1 and reads:
        raise ValueError("an engine with prefill context parallelism cannot read: leave pcp out")
    if num_experts not in (1, expected := tp_size * num_copies * num_replicas):
        raise ValueError(
            f"ep is {num_experts} but vLLM divides experts among all {expected} ranks of a stage "
            "in all replicas: leave ep out, as experts keep no KV"
        )
    for name, tokens in (("block size", block_tokens), ("interleave size", run_tokens)):
        if tokens is not None and not 1 <= tokens <= 1 << 14:
            raise ValueError(f"its {name} is {tokens} but must be between 1 and {1 << 14}")
    try:
        layers = tuple(int(size) for size in partition.split(",")) if partition else ()
    except ValueError:
        raise ValueError(
            f"its layer partition {partition!r} is not understood: write one number a stage, "
            "separated by commas"
        ) from None
    return EngineLayout(
        *(ParallelMesh(pp_size=pp_size, tp_size=tp_size), num_shares, num_copies, num_replicas),
        *(layers, block_tokens, run_tokens),
    )
