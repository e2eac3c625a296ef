# SPDX-License-Identifier: Apache-2.0
"""Where a request is: at the worker that holds its blocks, and at the one that reads them.

The values are words for the log.
"""

from __future__ import annotations

from enum import Enum


class HeldState(Enum):
    """Where a request is that a producer computes or holds for others."""

    ADMITTED = "admitted"
    """It is being computed."""

    OFFERED = "offered"
    """Its blocks are held until its readers were heard, or its lease has run out."""

    RELEASED = "released"
    """All readers were heard."""

    EXPIRED = "expired"
    """Its lease ran out before."""

    WITHDRAWN = "withdrawn"
    """It is not offered after all."""


class ReadState(Enum):
    """Where a request is that a consumer reads."""

    AWAITING_PREFILL = "waiting for its prefill"
    """It was sent to both engines, and the other one has computed nothing of it that was seen."""

    IN_PREFILL = "having its prompt computed"
    """Some of its prompt was seen to be computed there."""

    IN_LAST_CHUNK = "having its last chunk computed"
    """The step that completes its prompt was seen to be under way there."""

    OFFERED = "offered"
    """It is held there, and has no blocks here yet."""

    PREFETCHING = "being read while its prompt is computed"
    """It is not offered yet. What has been computed of it is read, and may have to be read anew."""

    WAITING = "waiting for its peer"
    """It waits until its peer is connected, and for its turn."""

    READING = "being read"
    """Its parts are queued, posted, or copied to where they belong."""

    CHECKING = "having its lease looked up"
    """All of it was read; whether it was still held, and what was wanted, is to be seen."""

    FAILED = "failed"
    """It has failed, and something may still write into its blocks."""

    ENDED = "over"
    """It was received, or has failed and nothing writes into its blocks any more."""
