# SPDX-License-Identifier: Apache-2.0
"""Types of the ids of requests, engines and blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

RequestId: TypeAlias = str

EngineId: TypeAlias = str

BlockIds: TypeAlias = Sequence[Sequence[int]]
"""A request's block ids, one sequence for each KV-cache group."""
