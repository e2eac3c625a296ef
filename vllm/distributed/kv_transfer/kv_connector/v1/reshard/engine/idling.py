# SPDX-License-Identifier: Apache-2.0
"""When an engine's core need take no steps: see decision 36.

vLLM's takes one each millisecond while a request waits for another engine, or blocks are held for
one. Each asks all workers, and looks up each request that waits for blocks in the prefix cache.
Where all that it could do is to hear from workers it rests here instead, and these ring when they
have something to tell.
"""

from __future__ import annotations

from collections.abc import Callable

from ..transport.doorbell import Doorbell, open_doorbell
from ..transport.sockets import InternalAddress

LONGEST_REST_S = 0.25
"""What a ring that is lost may cost, and how late a scheduler sees what nothing rings for, such as
blocks whose lease has run out."""


class Idling:
    """Says how long an engine's core may wait between two steps. Belongs to the scheduler's thread.

    A step may be under way while the next one is scheduled, and a worker that has told it something
    does not ring for that any more. So as many steps in a row as there may be at once must have had
    nothing to do, and nothing to tell, before the core rests.
    """

    def __init__(self) -> None:
        self._num_workers = self._max_concurrent_steps = 0
        self._doorbell: Doorbell | None = None
        # As long as workers were not told.
        self._address: InternalAddress | None = None
        # Written by the doorbell's thread, and taken back by this one.
        self._has_rung = False
        # Steps in a row that had nothing to do.
        self._num_idle_steps = 0
        # Requests that wait for another engine's prefill: in this step so far, and in the last one.
        self._num_deferred = 0
        self._num_parked = 0

    def begin(
        self, host: str, wake: Callable[[], None], *, num_workers: int, max_concurrent_steps: int
    ) -> None:
        """Let the core rest from now on.

        Args:
            host: Address of this machine that all workers reach.
            wake: Ends its rest; may be called by any thread.
            num_workers: How many ring.
            max_concurrent_steps: How many steps are under way at once, at most.
        """
        self._num_workers, self._max_concurrent_steps = num_workers, max_concurrent_steps

        def ring() -> None:
            self._has_rung = True
            wake()

        self._doorbell = open_doorbell(host, ring)
        if self._doorbell is not None:
            self._address = self._doorbell.address

    def take_address(self) -> InternalAddress | None:
        """Where workers ring; None where they know, or cannot."""
        address, self._address = self._address, None
        return address

    def defer(self) -> None:
        """A request waits in this step for another engine's prefill."""
        self._num_deferred += 1

    def end_schedule(self, *, is_idle: bool) -> bool:
        """A step is scheduled.

        Args:
            is_idle: It computes nothing, and asks workers for nothing.

        Returns:
            Whether the core may rest after it, so that workers are to ring.
        """
        self._num_parked, self._num_deferred = self._num_deferred, 0
        self._num_idle_steps = self._num_idle_steps + 1 if is_idle else 0
        return is_idle and self._doorbell is not None

    def hear(self) -> None:
        """A step had something to tell."""
        self._num_idle_steps = 0

    def timeout_s(self, num_running: int, num_waiting: int, num_loading: int) -> float | None:
        """For how long the core may wait for what is new.

        Args:
            num_running: Requests that are computed.
            num_waiting: Requests that are not.
            num_loading: Those of them whose blocks are read by workers.

        Returns:
            Seconds; None where it is to take steps as ever.
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
        """Hear no worker any more; may be called repeatedly."""
        if self._doorbell is not None:
            self._doorbell.close()
            self._doorbell = None
