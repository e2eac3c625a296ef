# SPDX-License-Identifier: Apache-2.0
"""States of a request: at the worker that holds its blocks, and at the worker that reads them.

The values appear in the log.
"""

from __future__ import annotations

from enum import Enum


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

    AWAITING_PREFILL = "waiting for its prefill"
    """It was sent to both engines; no progress was seen at the other one yet."""

    IN_PREFILL = "having its prompt computed"
    """The other engine was seen to have computed some of its prompt."""

    IN_LAST_CHUNK = "having its last chunk computed"
    """The other engine was seen to run the step that completes its prompt."""

    OFFERED = "offered"
    """The producer holds it; it has no blocks here yet."""

    PREFETCHING = "being read while its prompt is computed"
    """It is not offered yet. Its computed part is read, and may have to be read again."""

    WAITING = "waiting for its peer"
    """It waits for its peer to be connected, and for its turn."""

    READING = "being read"
    """Its parts are queued, posted, or copied from the arena to its blocks."""

    CHECKING = "having its lease looked up"
    """All of it was read; the lease check, of the hold and of the fingerprint, is pending."""

    FAILED = "failed"
    """It has failed, and reads may still write into its blocks."""

    ENDED = "over"
    """It was received, or it has failed and no read can write into its blocks any more."""
