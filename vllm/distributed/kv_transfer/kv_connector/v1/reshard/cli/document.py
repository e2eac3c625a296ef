# SPDX-License-Identifier: Apache-2.0
"""A plan as one JSON object, for programs. It has the names that the plan has."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from .engines import Answer
from .planning import Planned
from .verdict import Verdict


def plan_document(
    verdict: Verdict, answer: Answer | None, planned: Planned | None, *, is_summary: bool
) -> dict[str, Any]:
    """Return the verdict, engines, kinds of cache, totals, every read, and who releases whom.

    Without a plan there is the verdict, and what is known of the engines. A summary has no reads.
    """
    document: dict[str, Any] = {"verdict": asdict(verdict) | {"outcome": verdict.outcome.value}}
    if answer is not None:
        prefill, decode = (asdict(each.layout) for each in answer.engines)
        document |= {"prefill": prefill, "decode": decode, "device": answer.device}
        document |= {"model": answer.model, "sizes": answer.source}
    if planned is None:
        return document
    names = ("bytes", "state_bytes", "descriptors")
    totals = dict(zip(names, planned.totals, strict=True))
    document |= {"request": totals | {"tokens": planned.num_tokens}}
    document |= {"caches": [asdict(row) for row in planned.rows]}
    if not is_summary:
        reads = [asdict(part) | {"strategies": part.how} for part in planned.parts]
        document |= {"reads": reads, "releases": [asdict(each) for each in planned.plan.releases]}
    return document
