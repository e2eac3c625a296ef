# SPDX-License-Identifier: Apache-2.0
"""When an engine's core may skip steps: see decision 36.

vLLM's core takes a step each millisecond while a request waits for another engine, or blocks are
held for one. Each step polls all workers, and looks up every request that waits for blocks in the
prefix cache. Where a step could do nothing but collect reports, the core rests here instead, and
workers ring when they have something to report.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ...transport.doorbell import Doorbell, open_doorbell
from ...transport.sockets import InternalAddress

if TYPE_CHECKING:
    from vllm.config import VllmConfig

#: interval rest: an engine's core that only waits for workers to ring takes a step.
LONGEST_REST_S = 0.25
"""The delay that a lost ring may cost, and with which the scheduler may see what nothing rings for,
such as expired leases."""


def may_rest(config: VllmConfig) -> bool:
    """Return whether an engine's core may rest.

    False with data parallelism, where engines step together, with prefill context parallelism,
    where some workers never ring, and with a connector for encoder caches, which depends on regular
    steps.
    """
    return (
        config.parallel_config.data_parallel_size == 1
        and config.parallel_config.prefill_context_parallel_size == 1
        and config.ec_transfer_config is None
    )


class Idling:
    """Decides how long an engine's core may rest between steps. Belongs to the scheduler's thread.

    A step may be under way while the next one is scheduled, and a worker that has reported
    something with it does not ring for that again. So before the core rests, as many steps in a row
    as can be under way at once must have had nothing to do and nothing to report.
    """

    def __init__(self) -> None:
        self._num_workers = self._max_concurrent_steps = 0
        self._doorbell: Doorbell | None = None
        # The doorbell's address, until it is sent to the workers.
        self._address: InternalAddress | None = None
        # Set by the doorbell's thread, cleared by the scheduler's.
        self._has_rung = False
        # Consecutive steps that had nothing to do.
        self._num_idle_steps = 0
        # Requests that wait for another engine's prefill: so far in this step, and in the last one.
        self._num_deferred = 0
        self._num_parked = 0

    def begin(
        self, host: str, wake: Callable[[], None], *, num_workers: int, max_concurrent_steps: int
    ) -> None:
        """Let the core rest from now on.

        Args:
            host: Address of this machine that all workers reach.
            wake: Ends the core's rest; any thread may call it.
            num_workers: How many workers ring.
            max_concurrent_steps: Maximum number of steps under way at once.
        """
        self._num_workers, self._max_concurrent_steps = num_workers, max_concurrent_steps

        def ring() -> None:
            self._has_rung = True
            wake()

        self._doorbell = open_doorbell(host, ring)
        if self._doorbell is not None:
            self._address = self._doorbell.address

    def take_address(self) -> InternalAddress | None:
        """Return where workers ring, once; None afterwards, and where there is no doorbell."""
        address, self._address = self._address, None
        return address

    def defer(self) -> None:
        """Count a request that waits in this step for another engine's prefill."""
        self._num_deferred += 1

    def end_schedule(self, *, is_idle: bool) -> bool:
        """Note that a step has been scheduled.

        Args:
            is_idle: Whether it computes nothing and requests nothing from workers.

        Returns:
            Whether the core may rest after it, so that workers must ring.
        """
        self._num_parked, self._num_deferred = self._num_deferred, 0
        self._num_idle_steps = self._num_idle_steps + 1 if is_idle else 0
        return is_idle and self._doorbell is not None

    def hear(self) -> None:
        """Note that a step had something to report."""
        self._num_idle_steps = 0

    def timeout_s(self, num_running: int, num_waiting: int, num_loading: int) -> float | None:
        """Return for how long the core may wait for new work.

        Args:
            num_running: Number of running requests.
            num_waiting: Number of waiting requests.
            num_loading: Number of waiting requests whose blocks workers are reading.

        Returns:
            Seconds; None if the core must take steps as usual.
        """
        if self._has_rung:
            self._has_rung, self._num_idle_steps = False, 0
        may_rest = (
            self._doorbell is not None
            and self._doorbell.num_ringers >= self._num_workers
            and self._num_idle_steps >= self._max_concurrent_steps
            and num_running == 0
            and num_waiting == self._num_parked + num_loading
        )
        return LONGEST_REST_S if may_rest else None

    def close(self) -> None:
        """Close the doorbell; may be called repeatedly."""
        if self._doorbell is not None:
            self._doorbell.close()
            self._doorbell = None
