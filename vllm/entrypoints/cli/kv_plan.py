# SPDX-License-Identifier: Apache-2.0
"""`vllm kv-plan`: show how a decode engine would read the KV cache of a prefill engine.

It plans with the modules that the engines plan with, from sizes alone: no GPU, no model, no server.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

from vllm.entrypoints.cli.types import CLISubcommand

if TYPE_CHECKING:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.summary import (
        CacheFormat,
        PlanFigures,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.mesh import (
        MeshRank,
        ParallelMesh,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.reshard import Read, ReshardPlan
    from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import Shard
    from vllm.entrypoints.cli.kv_plan_model import ModelSizes

NAME = "kv-plan"

_DESCRIPTION = """Show which decode rank reads which layers and KV heads from which prefill rank.

  vllm kv-plan --prefill tp=4,pp=2 --decode tp=2 --num-layers 32 --num-kv-heads 8
  vllm kv-plan --prefill tp=4,pp=2 --decode tp=2 --model DIR --svg plan.svg
"""

_DEFAULT_BLOCK_TOKENS = 16
_MAX_PROMPT_TOKENS = 1 << 21


@dataclass(frozen=True, slots=True)
class _Planned:
    """A plan, and what it was made from: meshes, shards by role, and the model's sizes."""

    meshes: dict[str, ParallelMesh]
    shards: dict[str, tuple[Shard, ...]]
    plan: ReshardPlan
    num_layers: int
    num_kv_heads: int
    is_mla: bool
    model: ModelSizes | None


def reserve_stdout(arguments: Sequence[str]) -> None:
    """Send warnings to standard error, and log nothing less, when `kv-plan` is asked for.

    Its standard output is one JSON object, or one table, for another program to read. vLLM logs to
    standard output by default, and begins to do so while the other subcommands are imported.

    Args:
        arguments: The process's arguments, its own name first.
    """
    if arguments[1:2] == [NAME]:
        for handler in logging.getLogger("vllm").handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stdout:
                handler.setStream(sys.stderr)
                handler.setLevel(logging.WARNING)


class KVPlanSubcommand(CLISubcommand):
    """The `kv-plan` subcommand of the vLLM CLI."""

    name = NAME

    @staticmethod
    def cmd(args: argparse.Namespace) -> None:
        """Print the plan; exit with 2 and one line for a layout that vLLM could not run."""
        try:
            planned = _plan(args)
            if args.svg is not None:
                _write_svg(planned, args.svg)
            if args.json:
                print(json.dumps(_document(planned, args)))
            else:
                _print_text(planned, args)
        except ValueError as error:
            print(f"vllm {NAME}: error: {error}", file=sys.stderr)
            sys.exit(2)

    def subparser_init(
        self, subparsers: argparse._SubParsersAction[FlexibleArgumentParser]
    ) -> FlexibleArgumentParser:
        """Add the arguments of this subcommand."""
        parser = subparsers.add_parser(
            self.name,
            help="Plan KV-cache transfer between two parallel layouts.",
            description=_DESCRIPTION,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            usage=f"vllm {NAME} --prefill tp=N,pp=N --decode tp=N,pp=N "
            "(--model DIR | --num-layers N --num-kv-heads N) [options]",
        )
        for role in ("prefill", "decode"):
            parser.add_argument(
                f"--{role}",
                metavar="tp=N,pp=N",
                required=True,
                help=f"layout of the {role} engine; what is left out is 1",
            )
            parser.add_argument(
                f"--{role}-layer-partition",
                metavar="N,N,...",
                help=f"layers of each {role} stage, as in VLLM_PP_LAYER_PARTITION",
            )
        parser.add_argument(
            "--model",
            type=Path,
            metavar="DIR",
            help="directory with the model's config.json; options below take its place",
        )
        parser.add_argument("--num-layers", type=int, help="layers of the model")
        parser.add_argument(
            "--num-kv-heads", type=int, help="KV heads of each layer; not needed with --mla"
        )
        parser.add_argument(
            "--mla", action="store_true", help="the model has one latent KV head (MLA)"
        )
        parser.add_argument(
            "--head-size", type=int, help="elements of a head of a token; of the latent with --mla"
        )
        parser.add_argument("--dtype", help="type of the KV cache's elements; bfloat16 by default")
        parser.add_argument(
            "--block-size",
            type=int,
            default=_DEFAULT_BLOCK_TOKENS,
            help="tokens in a block (default: %(default)s)",
        )
        for role in ("prefill", "decode"):
            parser.add_argument(
                f"--{role}-block-size", type=int, help=f"the same, of the {role} engine alone"
            )
        parser.add_argument(
            "--disable-hybrid-kv-cache-manager",
            action=argparse.BooleanOptionalAction,
            help="as given to both engines: layers with windows keep and read all tokens; by "
            "default their windows only, unless these are chunks",
        )
        parser.add_argument(
            "--prompt-tokens",
            type=int,
            default=1024,
            help="length of the prompt of a request (default: %(default)s)",
        )
        parser.add_argument("--json", action="store_true", help="print one JSON object")
        parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the plan too")
        # vLLM's own parser lists groups of options, for commands with hundreds of them.
        parser.format_help = MethodType(argparse.ArgumentParser.format_help, parser)
        return parser


def cmd_init() -> list[CLISubcommand]:
    """The subcommands of this module."""
    return [KVPlanSubcommand()]


def _plan(args: argparse.Namespace) -> _Planned:
    """Plan what the arguments describe.

    Raises:
        ValueError: An argument is malformed, or vLLM could not run one of the layouts.
    """
    # Importing vllm.distributed takes seconds: only for the subcommand that needs it.
    from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.reshard import plan_reshard
    from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import shard_model
    from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.verify import verify_plan
    from vllm.entrypoints.cli.kv_plan_model import read_model

    model = None if args.model is None else read_model(args.model)
    is_mla = args.mla or (model is not None and model.is_mla and args.num_kv_heads is None)
    num_layers, num_kv_heads = args.num_layers, args.num_kv_heads
    if model is not None:
        num_layers = model.num_layers if num_layers is None else num_layers
        num_kv_heads = model.num_kv_heads if num_kv_heads is None else num_kv_heads
    if num_layers is None:
        raise ValueError("--num-layers is missing: give the model's layers, or --model")
    if num_layers < 1:
        raise ValueError(f"--num-layers is {num_layers} but must be at least 1")
    if num_kv_heads is None and not is_mla:
        raise ValueError("--num-kv-heads is missing: give the model's KV heads, or --mla")
    num_kv_heads = 1 if is_mla else num_kv_heads
    meshes, shards = {}, {}
    for role in ("prefill", "decode"):
        partition = _parse_partition(role, getattr(args, f"{role}_layer_partition"))
        try:
            meshes[role] = _parse_mesh(getattr(args, role))
            shards[role] = shard_model(meshes[role], num_layers, num_kv_heads, partition)
        except ValueError as error:
            raise ValueError(f"--{role} {getattr(args, role)}: {error}") from error
    plan = plan_reshard(shards["prefill"], shards["decode"])
    faults = verify_plan(shards["prefill"], shards["decode"], plan)
    assert not faults, faults
    return _Planned(meshes, shards, plan, num_layers, num_kv_heads, is_mla, model)


def _document(planned: _Planned, args: argparse.Namespace) -> dict[str, Any]:
    """The plan as JSON, with the number of KV heads that was given where one was."""
    given_kv_heads = args.num_kv_heads
    head_size, dtype = _element(planned, args)
    figures = _measure(planned, args, _cache_format(planned, args, head_size, dtype))
    strategies = {
        each.read: None if head_size is None else each.strategy.value
        for reader in figures.readers
        for each in reader.reads
    }
    return {
        **{role: _mesh_document(mesh) for role, mesh in planned.meshes.items()},
        "num_layers": planned.num_layers,
        "num_kv_heads": planned.num_kv_heads if given_kv_heads is None else given_kv_heads,
        "mla": planned.is_mla,
        **_reads_and_notifiers(planned.plan, strategies),
    }


def _print_text(planned: _Planned, args: argparse.Namespace) -> None:
    """Print the plan for people, and what it costs."""
    from rich.console import Console

    from vllm.entrypoints.cli.kv_plan_text import PlanReport, print_report

    head_size, dtype = _element(planned, args)
    cache_format = _cache_format(planned, args, head_size, dtype)
    src, dst = planned.shards["prefill"], planned.shards["decode"]
    print_report(
        PlanReport(
            prefill=planned.meshes["prefill"],
            decode=planned.meshes["decode"],
            src=src,
            dst=dst,
            plan=planned.plan,
            figures=_measure(planned, args, cache_format),
            model=_model_text(planned, args, head_size, dtype),
            is_mla=planned.is_mla,
            cache_format=cache_format,
            knows_bytes=head_size is not None,
            prompt_tokens=args.prompt_tokens,
        ),
        Console(),
    )


def _measure(planned: _Planned, args: argparse.Namespace, cache_format: CacheFormat) -> PlanFigures:
    """What the plan costs.

    Raises:
        ValueError: The prompt has a length that is not planned for.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.summary import measure_plan

    if not 1 <= args.prompt_tokens <= _MAX_PROMPT_TOKENS:
        raise ValueError(
            f"--prompt-tokens is {args.prompt_tokens} but must be between 1 and "
            f"{_MAX_PROMPT_TOKENS}"
        )
    src, dst = planned.shards["prefill"], planned.shards["decode"]
    return measure_plan(planned.plan, src, dst, cache_format, args.prompt_tokens)


def _keeps_windows(planned: _Planned, args: argparse.Namespace) -> bool:
    """Whether engines keep windows only: vLLM's hybrid KV-cache manager is on.

    With this connector it is, unless somebody turns it off, or vLLM does, as with chunks.
    """
    if args.disable_hybrid_kv_cache_manager is not None:
        return not args.disable_hybrid_kv_cache_manager
    return planned.model is not None and not planned.model.is_chunked


def _element(planned: _Planned, args: argparse.Namespace) -> tuple[int | None, str]:
    """The elements of a head of a token, where they are known, and their type."""
    model = planned.model
    head_size = args.head_size
    if head_size is None and model is not None and model.is_mla == planned.is_mla:
        head_size = model.slot_elements
    if head_size is not None and head_size < 1:
        raise ValueError(f"--head-size is {head_size} but must be at least 1")
    return head_size, args.dtype or (model and model.dtype) or "bfloat16"


def _cache_format(
    planned: _Planned, args: argparse.Namespace, head_size: int | None, dtype: str
) -> CacheFormat:
    """How the caches lie in memory; of one byte a slot where its size is not known."""
    from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.summary import CacheFormat
    from vllm.entrypoints.cli.kv_plan_model import element_bytes

    block_tokens = []
    for role in ("prefill", "decode"):
        own = getattr(args, f"{role}_block_size")
        name = "--block-size" if own is None else f"--{role}-block-size"
        block_tokens.append(args.block_size if own is None else own)
        if block_tokens[-1] < 1:
            raise ValueError(f"{name} is {block_tokens[-1]} but must be at least 1")
    return CacheFormat(
        slot_bytes=element_bytes(dtype) * (1 if head_size is None else head_size),
        num_planes=1 if planned.is_mla else 2,
        src_block_tokens=block_tokens[0],
        dst_block_tokens=block_tokens[1],
        window_tokens_by_layer=(
            {
                layer: tokens
                for layer, tokens in planned.model.window_tokens_by_layer.items()
                if layer < planned.num_layers
            }
            if planned.model is not None and _keeps_windows(planned, args)
            else {}
        ),
    )


def _model_text(
    planned: _Planned, args: argparse.Namespace, head_size: int | None, dtype: str
) -> str:
    """The model in words: 32 layers, 8 KV heads of 128 bfloat16."""
    heads = (
        "one latent (MLA)"
        if planned.is_mla
        else f"{planned.num_kv_heads} KV head{'s' * (planned.num_kv_heads != 1)}"
    )
    text = f"{planned.num_layers} layer{'s' * (planned.num_layers != 1)}, {heads}"
    if head_size is not None:
        text += f" of {head_size} {dtype.removeprefix('torch.')}"
    windows = {} if planned.model is None else planned.model.window_tokens_by_layer
    if windows:
        sizes = ", ".join(map(str, sorted(set(windows.values()))))
        kept = (
            "no more is read"
            if _keeps_windows(planned, args)
            else "read in full without the hybrid KV-cache manager"
        )
        text += f"; windows of {sizes} tokens in {len(windows)} layers, {kept}"
    return text


def _write_svg(planned: _Planned, path: Path) -> None:
    """Draw the plan.

    Raises:
        ValueError: The file cannot be written.
    """
    from vllm.entrypoints.cli.kv_plan_svg import draw_plan

    drawing = draw_plan(
        planned.meshes["prefill"],
        planned.meshes["decode"],
        planned.shards["prefill"],
        planned.shards["decode"],
        planned.plan,
    )
    try:
        path.write_text(drawing, encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"--svg {path} cannot be written ({error.strerror}): name a file in a directory that "
            "exists and is yours"
        ) from error


def _parse_mesh(text: str) -> ParallelMesh:
    """Read `tp=4,pp=2`; what is left out is 1."""
    from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.mesh import ParallelMesh

    sizes: dict[str, int] = {}
    for item in text.split(","):
        axis, _, size = item.strip().partition("=")
        if axis not in ("tp", "pp") or axis in sizes or not size.isdecimal():
            raise ValueError(f"{item!r} is not understood: write tp=N,pp=N, each axis at most once")
        sizes[axis] = int(size)
    return ParallelMesh(pp_size=sizes.get("pp", 1), tp_size=sizes.get("tp", 1))


def _parse_partition(role: str, text: str | None) -> list[int] | None:
    """Read `10,22`."""
    if text is None:
        return None
    try:
        return [int(size) for size in text.split(",")]
    except ValueError:
        raise ValueError(
            f"--{role}-layer-partition {text!r} is not understood: write one number a stage, "
            "separated by commas"
        ) from None


def _mesh_document(mesh: ParallelMesh) -> dict[str, int]:
    return {"tp_size": mesh.tp_size, "pp_size": mesh.pp_size}


def _rank_document(rank: MeshRank) -> dict[str, int]:
    return {"pp": rank.pp_rank, "tp": rank.tp_rank}


def _reads_and_notifiers(
    plan: ReshardPlan, strategies: Mapping[Read, str | None]
) -> dict[str, list[dict[str, Any]]]:
    return {
        "reads": [
            {
                "decode_rank": _rank_document(read.dst_rank),
                "prefill_rank": _rank_document(read.src_rank),
                "layers": list(read.layers),
                "global_heads": [read.heads.start, read.heads.stop],
                "src_head_offset": read.src_head_offset,
                "dst_head_offset": read.dst_head_offset,
                "num_heads": read.num_heads,
                "strategy": strategies[read],
            }
            for read in plan.reads
        ],
        "notifiers": [
            {
                "prefill_rank": _rank_document(release.src_rank),
                "decode_ranks": [_rank_document(rank) for rank in release.notifiers],
            }
            for release in plan.releases
        ],
    }
