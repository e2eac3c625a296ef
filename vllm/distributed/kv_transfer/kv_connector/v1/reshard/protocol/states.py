# SPDX-License-Identifier: Apache-2.0
"""States of a request: at the worker that holds its blocks, and at the worker that reads them.

The values appear in the log. `READ_TRANSITIONS` are all transitions at the worker that reads: the
diagram of `docs/architecture.md` is drawn from it.
"""

from __future__ import annotations

from enum import Enum

from ..errors import quote


class HeldState(Enum):
    """State of a request that a producer computes or holds for readers."""

    ADMITTED = "admitted"
    """It is being computed."""

    OFFERED = "offered"
    """Its blocks are held until all readers have notified this worker or its lease expires."""

    RELEASED = "released"
    """All readers have notified this worker."""

    EXPIRED = "expired"
    """Its lease expired before all readers had notified this worker."""

    WITHDRAWN = "withdrawn"
    """It will not be offered after all."""


class ReadState(Enum):
    """State of a request that a consumer reads."""

    PREFETCHING = "being read while its prompt is computed"
    """It is not offered yet. Its computed part is read, and may have to be read again."""

    WAITING = "waiting for its peer"
    """It waits for its peer to be connected, and for its turn. It does so once more if its read has
    failed and nothing of it has arrived."""

    READING = "being read"
    """Its parts are queued, posted, or copied from the arena to its blocks."""

    CHECKING = "having its lease looked up"
    """All of it was read; the lease check, of the hold and of the fingerprint, is pending."""

    FAILED = "failed"
    """It has failed, and reads may still write into its blocks."""

    ENDED = "over"
    """It was received, or it has failed and no read can write into its blocks any more."""


READ_TRANSITIONS: dict[ReadState, frozenset[ReadState]] = {
    ReadState.PREFETCHING: frozenset({ReadState.WAITING, ReadState.FAILED}),
    ReadState.WAITING: frozenset({ReadState.READING, ReadState.FAILED}),
    ReadState.READING: frozenset({ReadState.CHECKING, ReadState.WAITING, ReadState.FAILED}),
    ReadState.CHECKING: frozenset({ReadState.ENDED, ReadState.FAILED}),
    ReadState.FAILED: frozenset({ReadState.ENDED}),
    ReadState.ENDED: frozenset(),
}
"""The states that may follow each state of a request that a consumer reads."""


def expect_transition(before: ReadState, after: ReadState) -> None:
    """Raise an AssertionError for a transition that is not in `READ_TRANSITIONS`."""
    is_known = after in READ_TRANSITIONS[before]
    assert is_known, f"no transition: {quote(before.name)} to {quote(after.name)}"
