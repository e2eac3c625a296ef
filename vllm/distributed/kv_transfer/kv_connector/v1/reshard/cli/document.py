# SPDX-License-Identifier: Apache-2.0
"""A report as one JSON object, for programs."""

from __future__ import annotations

from typing import Any

from ..plan.mesh import MeshRank
from ..plan.reshard import Read
from ..plan.shards import TokenShare
from .caches import CacheRow
from .layouts import EngineLayout
from .report import PlanReport, UpstreamReport
from .verdicts import Note


def plan_document(report: PlanReport | UpstreamReport) -> dict[str, Any]:
    """Return meshes, sizes, every read with its offsets, and the ranks that release each source.

    A read's strategy is None if sizes in bytes are unknown. The document on a model that is left to
    upstream's connector has no reads.
    """
    ends = {"prefill": _mesh(report.prefill), "decode": _mesh(report.decode)}
    told = {
        "caches": [_cache(row) for row in report.caches],
        "notes": [_note(note) for note in report.notes],
    }
    if isinstance(report, UpstreamReport):
        return ends | told
    strategies = {
        each.read: each.strategy.value if report.knows_bytes else None
        for reader in report.figures.readers
        for each in reader.reads
    }
    return (
        ends
        | told
        | {
            "num_layers": report.num_layers,
            "num_kv_heads": report.num_kv_heads,
            "mla": report.is_mla,
            "layers_that_differ": [
                {
                    "layer": layer,
                    "num_kv_heads": sizes.num_kv_heads,
                    "head_size": sizes.slot_elements,
                }
                for layer, sizes in report.layers.items()
            ],
            "reads": [
                {
                    "decode_rank": _rank(read.dst_rank),
                    "prefill_rank": _rank(read.src_rank),
                    "cache": part.name,
                    "layers": list(part.layers),
                    "global_heads": [read.units.start, read.units.stop],
                    "src_head_offset": read.src_unit_offset,
                    "dst_head_offset": read.dst_unit_offset,
                    "num_heads": read.num_units,
                    "strategy": strategies[read],
                    **(_shares(read) if report.has_shares else {}),
                }
                for reader in report.figures.readers
                for each in reader.reads
                for read, part in ((each.read, part) for part in report.parts(each))
            ],
            "state_reads": [
                {
                    "decode_rank": _rank(each.read.dst_rank),
                    "prefill_rank": _rank(each.read.src_rank),
                    "layers": list(each.layers),
                    "components": list(each.components),
                    "global_units": [each.read.units.start, each.read.units.stop],
                    "request_bytes": each.num_elements * report.state_element_bytes,
                }
                for each in report.state
            ],
            "notifiers": [
                {
                    "prefill_rank": _rank(release.src_rank),
                    "decode_ranks": [_rank(rank) for rank in release.notifiers],
                }
                for release in report.plan.releases
            ],
        }
    )


def _cache(row: CacheRow) -> dict[str, Any]:
    return {
        "cache": row.name,
        "layers": list(row.layers),
        "moved_as": row.moved,
        "tokens_per_state": row.state_tokens,
        "block_tokens": row.block_tokens and list(row.block_tokens),
        "window_tokens": row.window_tokens or None,
        "token_bytes": row.token_bytes,
    }


def _note(note: Note) -> dict[str, str]:
    return {"verdict": note.verdict.value, "where": note.where, "why": note.why}


def _mesh(layout: EngineLayout) -> dict[str, int]:
    mesh = layout.mesh
    sizes = {"tp_size": mesh.tp_size, "pp_size": mesh.pp_size}
    if layout.num_shares > 1:
        sizes |= {"dcp_size": layout.num_shares, "interleave_size": layout.run_tokens}
    if layout.num_replicas > 1:
        sizes["pcp_size"] = layout.num_replicas
    return sizes


def _shares(read: Read) -> dict[str, Any]:
    return {"src_tokens": _share(read.src_tokens), "dst_tokens": _share(read.dst_tokens)}


def _share(share: TokenShare) -> dict[str, int] | None:
    """Describe which tokens a rank holds; None if it holds all."""
    if share.is_all:
        return None
    return {"index": share.index, "of": share.num_shares, "in_runs_of": share.run_tokens}


def _rank(rank: MeshRank) -> dict[str, int]:
    return {"pp": rank.pp_rank, "tp": rank.tp_rank}
