# SPDX-License-Identifier: Apache-2.0
"""What a simulation runs in."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from unittest import mock

from tests.v1.kv_connector.unit.reshard.simulation.device import devices
from tests.v1.kv_connector.unit.reshard.simulation.schedule import Simulation
from tests.v1.kv_connector.unit.reshard.simulation.wire import Violation
from vllm.distributed.kv_transfer.kv_connector.v1 import reshard as connector
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine import producer
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.leases import LeaseTable
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport import lease_check, limits

NUM_SCHEDULES_OF_MAKE_TEST = 1200
"""Half a minute of one core. `make simulate` runs as many as it is told."""


@contextmanager
def simulated() -> Iterator[None]:
    """Small tables, late devices, and no log of what goes wrong on purpose; all is foreseen."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    # What is there already is left out of collections. With it they come so seldom that worlds, of
    # some megabytes each, pile up to gigabytes within a thousand schedules.
    gc.collect()
    gc.freeze()
    try:
        with (
            devices(),
            mock.patch.object(lease_check, "_NUM_CHECKS", 4),
            mock.patch.object(limits, "count_files", lambda: 1),
            _small_windows(),
            mock.patch.object(logging.Logger, "exception", _unforeseen),
            mock.patch.object(producer, "LeaseTable", partial(LeaseTable, 16)),
        ):
            yield
    finally:
        gc.unfreeze()
        logging.disable(disabled)


_SMALL: dict[str, float] = {
    "PACK_UNIT_BYTES": 16,
    "MAX_WINDOW_BYTES": 32,
    "MAX_PACKED_BLOCKS": 2,
    "MOST_ASKED_AT_ONCE": 3,
    "NUM_ROWS": 4,
    "TABLE_BYTES": 64,
    "_NUM_PACK_LOOKS": 3,
    "PACKED_WITHIN_S": 1.0,
    "_RETURNED_WITHIN_S": 0.1,
}
"""Windows of a few blocks, and room for so few that it is used again all the time."""


@contextmanager
def _small_windows() -> Iterator[None]:
    """Within this block, packed reads have these sizes and times, in all modules that use them."""
    package = connector.__name__ + "."
    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith((package, __package__ + ".")):
                small = {each: value for each, value in _SMALL.items() if hasattr(module, each)}
                if small:
                    stack.enter_context(mock.patch.multiple(module, **small))
        yield


def _unforeseen(*_: object) -> None:
    raise Violation(f"the connector is not prepared for {sys.exc_info()[1]!r}")


def run(seed: int, *, length: int = 1, **weights: float) -> Simulation:
    """Run one schedule; some events can be made more frequent, or rarer, or all of them more.

    Raises:
        Violation: See `Simulation.run`.
    """
    simulation = Simulation(seed, weights, length)
    simulation.run()
    return simulation
