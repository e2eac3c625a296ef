# SPDX-License-Identifier: Apache-2.0
"""Ends a request whose read has failed, and keeps its blocks until nothing can write into them.

A worker learns of a failed read in two stages: that it has failed, and, perhaps minutes later, that
it has drained: nothing can write into its blocks any more. vLLM has a report for each, but holds
the first back until all workers have made the second, which never happens if a peer hangs. What
workers send to their connector's scheduler is not held back. So a request takes one round of
reports if every worker reads it, and two if any of them fails:

    worker       its read fails: notifies the scheduler, and reports nothing to vLLM
    scheduler    notifies all workers in the next step
    workers      report the request as failed and received, all in that step
    scheduler    lets vLLM end the request or recompute it, and keeps its blocks
    workers      report it as received again, each once its read has drained
    scheduler    frees the blocks

vLLM counts each round over all workers. A worker that had already finished when another failed has
thereby made its first report, and makes its second when it is notified.

On 0.22.1 failed reads are reported by their blocks, and not held back: every request takes one
round there. What the scheduler does is in `scheduling.remote_reads`.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto

from ..protocol.ids import RequestId


class _Read(Enum):
    """State of a request that a worker has not made its last report of."""

    GOING_ON = auto()
    FAILED = auto()
    FAILED_AND_DRAINED = auto()
    TOLD = auto()


class LoadReports:
    """A worker's reports of the requests that it reads. Belongs to the engine's thread."""

    def __init__(self) -> None:
        self._reads: dict[RequestId, _Read] = {}
        self._told: set[RequestId] = set()
        self._once_more: set[RequestId] = set()

    def __len__(self) -> int:
        """Return the number of requests for which a report is still due."""
        return len(self._reads.keys() | self._once_more)

    def note_started(self, begun: Iterable[RequestId], told: Iterable[RequestId]) -> None:
        """Note what the scheduler sends with a step.

        Args:
            begun: Requests that have something to read from this step on.
            told: Requests whose reads have failed, here or at another worker.
        """
        for request_id in begun:
            # Of one that is read before it is offered, more than one step says so.
            self._reads.setdefault(request_id, _Read.GOING_ON)
        self._told.update(told)

    def advance(
        self, failed: Iterable[RequestId], drained: Iterable[RequestId]
    ) -> tuple[set[RequestId], set[RequestId]]:
        """Return what to report in this step.

        Args:
            failed: Requests whose reads have failed at this worker, and of which the scheduler is
                told with this step, whether another worker's has failed before or not.
            drained: Requests that nothing at this worker can write for any more, whether or not
                they have failed. Each is passed once.

        Returns:
            The requests to report as received, and those of them to report as failed.
        """
        received, self._once_more = self._once_more, set()
        told, self._told = self._told, set()
        for request_id in told:
            received.add(request_id)
            read = self._reads.get(request_id)
            if read is _Read.FAILED_AND_DRAINED:
                del self._reads[request_id]
                self._once_more.add(request_id)
            elif read is not None:
                self._reads[request_id] = _Read.TOLD
        for request_id in failed:
            if self._reads.get(request_id) is _Read.GOING_ON:
                self._reads[request_id] = _Read.FAILED
        for request_id in drained:
            if self._reads[request_id] is _Read.FAILED:
                self._reads[request_id] = _Read.FAILED_AND_DRAINED
                continue
            del self._reads[request_id]
            # Reports are sets, so a request's two rounds need two steps.
            (self._once_more if request_id in received else received).add(request_id)
        return received, told
