# SPDX-License-Identifier: Apache-2.0
"""What a simulation runs in."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

from tests.v1.kv_connector.unit.reshard.simulation.schedule import Simulation
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine import producer
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.leases import LeaseTable
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport import lease_check


@contextmanager
def simulated() -> Iterator[None]:
    """Small tables, and no log of what goes wrong on purpose."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            mock.patch.object(lease_check, "_NUM_LOOKUPS", 4),
            mock.patch.object(producer, "LeaseTable", partial(LeaseTable, 16)),
        ):
            yield
    finally:
        logging.disable(disabled)


def run(seed: int) -> Simulation:
    """Run one schedule.

    Raises:
        Violation: See `Simulation.run`.
    """
    simulation = Simulation(seed)
    simulation.run()
    return simulation
