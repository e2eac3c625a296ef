# SPDX-License-Identifier: Apache-2.0
"""Errors of resharding, told apart by whose they are: ours or the peer's."""

from __future__ import annotations


class ReshardError(ValueError):
    """A layout cannot be served. The message is one line that ends with the remedy."""


class LocalLayoutError(ReshardError):
    """This engine's own configuration is at fault."""


class RemoteLayoutError(ReshardError):
    """What the peer says of itself does not cover what this engine needs."""


class TransferError(RuntimeError):
    """NIXL could not do what it was asked to; the message names the peer and the operation."""
