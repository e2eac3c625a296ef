# SPDX-License-Identifier: Apache-2.0
"""`vllm kv-plan`: show how a decode engine would read the KV cache of a prefill engine.

It plans with the modules that the engines plan with, from sizes alone: no GPU, no model, no server.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.entrypoints.cli.types import CLISubcommand

if TYPE_CHECKING:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from vllm.distributed.kv_transfer.kv_connector.v1.reshard.mesh import MeshRank, ParallelMesh
    from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan import ReshardPlan

NAME = "kv-plan"

_DESCRIPTION = """Show which decode rank reads which layers and KV heads from which prefill rank.

  vllm kv-plan --prefill tp=4,pp=2 --decode tp=2 --num-layers 32 --num-kv-heads 8
"""


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
            document = _plan_document(args)
        except ValueError as error:
            print(f"vllm {NAME}: error: {error}", file=sys.stderr)
            sys.exit(2)
        print(json.dumps(document) if args.json else _as_text(document))

    def subparser_init(
        self, subparsers: argparse._SubParsersAction[FlexibleArgumentParser]
    ) -> FlexibleArgumentParser:
        """Add the arguments of this subcommand."""
        parser = subparsers.add_parser(
            self.name,
            help="Plan KV-cache transfer between two parallel layouts.",
            description=_DESCRIPTION,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            usage=f"vllm {NAME} --prefill tp=N,pp=N --decode tp=N,pp=N --num-layers N [options]",
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
        parser.add_argument("--num-layers", type=int, required=True, help="layers of the model")
        parser.add_argument(
            "--num-kv-heads", type=int, help="KV heads of each layer; not needed with --mla"
        )
        parser.add_argument(
            "--mla", action="store_true", help="the model has one latent KV head (MLA)"
        )
        parser.add_argument("--json", action="store_true", help="print one JSON object")
        return parser


def cmd_init() -> list[CLISubcommand]:
    """The subcommands of this module."""
    return [KVPlanSubcommand()]


def _plan_document(args: argparse.Namespace) -> dict[str, Any]:
    """Plan what the arguments describe.

    Raises:
        ValueError: An argument is malformed, or vLLM could not run one of the layouts.
    """
    # Importing vllm.distributed takes seconds: only for the subcommand that needs it.
    from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan import plan_reshard
    from vllm.distributed.kv_transfer.kv_connector.v1.reshard.shards import shard_model
    from vllm.distributed.kv_transfer.kv_connector.v1.reshard.verify import verify_plan

    if args.num_layers < 1:
        raise ValueError(f"--num-layers is {args.num_layers} but must be at least 1")
    if args.num_kv_heads is None and not args.mla:
        raise ValueError("--num-kv-heads is missing: give the model's KV heads, or --mla")
    num_kv_heads = 1 if args.mla else args.num_kv_heads
    meshes, shards = {}, {}
    for role in ("prefill", "decode"):
        partition = _parse_partition(role, getattr(args, f"{role}_layer_partition"))
        try:
            meshes[role] = _parse_mesh(getattr(args, role))
            shards[role] = shard_model(meshes[role], args.num_layers, num_kv_heads, partition)
        except ValueError as error:
            raise ValueError(f"--{role} {getattr(args, role)}: {error}") from error
    plan = plan_reshard(shards["prefill"], shards["decode"])
    faults = verify_plan(shards["prefill"], shards["decode"], plan)
    assert not faults, faults
    return {
        **{role: _mesh_document(mesh) for role, mesh in meshes.items()},
        "num_layers": args.num_layers,
        "num_kv_heads": num_kv_heads if args.num_kv_heads is None else args.num_kv_heads,
        "mla": args.mla,
        **_reads_and_notifiers(plan),
    }


def _parse_mesh(text: str) -> ParallelMesh:
    """Read `tp=4,pp=2`; what is left out is 1."""
    from vllm.distributed.kv_transfer.kv_connector.v1.reshard.mesh import ParallelMesh

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


def _reads_and_notifiers(plan: ReshardPlan) -> dict[str, list[dict[str, Any]]]:
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


def _as_text(document: dict[str, Any]) -> str:
    """The same plan for people: one line a read, one line a released rank."""
    lines = [
        "{role}: PP{pp_size} x TP{tp_size}".format(role=role, **document[role])
        for role in ("prefill", "decode")
    ]
    lines.append("reads:")
    for read in document["reads"]:
        start, stop = read["global_heads"]
        lines.append(
            f"  decode {_rank_text(read['decode_rank'])} <- prefill "
            f"{_rank_text(read['prefill_rank'])}: layers {_ranges_text(read['layers'])}, "
            f"heads [{start}, {stop}), offset {read['src_head_offset']} -> "
            f"{read['dst_head_offset']}"
        )
    lines.append("released by:")
    for entry in document["notifiers"]:
        ranks = ", ".join(_rank_text(rank) for rank in entry["decode_ranks"])
        lines.append(f"  prefill {_rank_text(entry['prefill_rank'])}: decode {ranks}")
    return "\n".join(lines)


def _rank_text(rank: dict[str, int]) -> str:
    return f"pp{rank['pp']}tp{rank['tp']}"


def _ranges_text(layers: Sequence[int]) -> str:
    """Write ascending indices as ranges: 0-9, 20-31."""
    ranges: list[list[int]] = []
    for layer in layers:
        if ranges and ranges[-1][1] == layer - 1:
            ranges[-1][1] = layer
        else:
            ranges.append([layer, layer])
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in ranges)
