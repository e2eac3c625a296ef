# SPDX-License-Identifier: Apache-2.0
"""A plan as one JSON object, for programs."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..plan.mesh import MeshRank
from ..plan.shards import TokenShare
from .engines import Answer
from .layouts import EngineLayout
from .planning import Part, Planned
from .verdict import Verdict


def plan_document(
    verdict: Verdict, answer: Answer | None, planned: Planned | None, *, is_summary: bool
) -> dict[str, Any]:
    """Return the verdict, engines, kinds of cache, totals, every read, and who releases whom.

    Without a plan there is the verdict, and what is known of the engines. A summary has no reads.
    """
    stock = verdict.against_stock is None if verdict.knows_stock else None
    document: dict[str, Any] = {
        "verdict": {
            "outcome": verdict.outcome.value,
            "why": verdict.why,
            "stock_would_serve": stock,
            "against_stock": verdict.against_stock,
        }
    }
    if answer is not None:
        prefill, decode = answer.engines
        document |= {"prefill": _layout(prefill.layout), "decode": _layout(decode.layout)}
        document |= {"model": answer.model, "sizes": answer.source, "device": answer.device}
    if planned is None:
        return document
    num_bytes, state_bytes, descriptors = planned.totals
    document |= {
        "caches": [dataclasses.asdict(row) for row in planned.rows],
        "request": {
            "tokens": planned.num_tokens,
            "bytes": num_bytes,
            "state_bytes": state_bytes,
            "descriptors": descriptors,
        },
    }
    if is_summary:
        return document
    return document | {
        "reads": [_read(part) for part in planned.parts],
        "notifiers": [
            {
                "prefill_rank": _rank(release.src_rank),
                "decode_ranks": [_rank(rank) for rank in release.notifiers],
            }
            for release in planned.plan.releases
        ],
    }


def _read(part: Part) -> dict[str, Any]:
    read = part.read
    return {
        "decode_rank": _rank(read.dst_rank),
        "prefill_rank": _rank(read.src_rank),
        "cache": part.kind,
        "layers": list(part.layers),
        "units": [read.units.start, read.units.stop],
        "src_unit_offset": read.src_unit_offset,
        "dst_unit_offset": read.dst_unit_offset,
        "src_tokens": _share(read.src_tokens),
        "dst_tokens": _share(read.dst_tokens),
        "is_state": part.has_state,
        "bytes": part.num_bytes,
        "descriptors": part.descriptors,
        "strategy": part.how,
    }


def _layout(layout: EngineLayout) -> dict[str, int]:
    return {
        "tp_size": layout.mesh.tp_size,
        "pp_size": layout.mesh.pp_size,
        "dcp_size": layout.num_shares,
        "pcp_size": layout.num_copies,
        "dp_size": layout.num_replicas,
    }


def _share(share: TokenShare) -> dict[str, int] | None:
    """Describe which tokens a rank holds; None if it holds all."""
    if share.is_all:
        return None
    return {"index": share.index, "of": share.num_shares, "in_runs_of": share.run_tokens}


def _rank(rank: MeshRank) -> dict[str, int]:
    return {"pp": rank.pp_rank, "tp": rank.tp_rank}
