# SPDX-License-Identifier: Apache-2.0
"""Lease checks, and other looks, that a test waits for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.fingerprint import (
    OfferFingerprint,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.ids import RequestId
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.tasks import Body, Tasks
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.lease_check import (
    LeaseChecker,
    PreparedTable,
)

DUE_S = 1e12


class _Looks:
    """Something that looks at tables, and has begun.

    Attributes:
        error: What it has raised; None if it has not.
    """

    def __init__(self, leases: LeaseChecker, begin: Callable[[Tasks], Body]) -> None:
        self._leases, self._tasks = leases, Tasks()
        self.error: Exception | None = None
        self._task = self._tasks.start(begin(self._tasks), self._leave)
        self._tasks.run(time.monotonic())

    def is_over(self) -> bool:
        """Advance it; return whether it has ended."""
        self._leases.advance()
        self._tasks.run(time.monotonic())
        return self._task.is_over

    async def _leave(self, error: Exception | None) -> None:
        self.error = error


class Check(_Looks):
    """A check of one request in some tables."""

    def __init__(
        self,
        leases: LeaseChecker,
        request_id: RequestId,
        offer: OfferFingerprint,
        tables: Sequence[PreparedTable],
    ) -> None:
        super().__init__(
            leases, lambda tasks: leases.confirm(tasks, request_id, offer, tables, DUE_S)
        )


class Reach(_Looks):
    """Looks at tables for the sake of it."""

    def __init__(self, leases: LeaseChecker, tables: Sequence[PreparedTable]) -> None:
        super().__init__(leases, lambda tasks: leases.reach(tasks, tables))
