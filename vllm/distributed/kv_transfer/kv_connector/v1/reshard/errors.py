# SPDX-License-Identifier: Apache-2.0
"""Errors of resharding, told apart by their side: ours or the peer's."""

from __future__ import annotations


class ReshardError(ValueError):
    """A layout or a peer cannot be served. The message is one line that ends with the remedy."""


_UPSTREAMS_MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"

ASK_FOR_UPSTREAMS = (
    f"with one pipeline stage, set kv_connector_module_path to {_UPSTREAMS_MODULE} on both "
    "engines, for upstream's"
)
"""The remedy where upstream's connector may serve what this one cannot, which is known too late to
leave it to that one: when workers have their caches."""

MEET_UPSTREAMS = (
    "see why in that engine's log, where it was left to upstream's ('Using upstream's "
    "NixlConnector'), and leave out what the line names, or set kv_connector_module_path to "
    f"{_UPSTREAMS_MODULE} on the other one, too"
)
"""The remedy where one of two engines runs upstream's connector. Said at both of them."""


class LocalLayoutError(ReshardError):
    """This engine's own configuration is at fault."""


class RemoteLayoutError(ReshardError):
    """What the peer says of itself does not cover what this engine needs."""


class RemoteHandshakeError(ReshardError):
    """The peer's side channel said nothing that this engine can use."""


class RemoteUnreachableError(RemoteHandshakeError):
    """The peer could not be connected to, or did not answer in time."""


class RemoteUntrustedError(RemoteHandshakeError):
    """The peer's address is in none of the networks that this engine may ask in."""


class RemoteRefusedError(RemoteHandshakeError):
    """The peer understood that it was asked, and declined."""


class RemoteIncompatibleError(RemoteHandshakeError):
    """The peer runs another connector, another version of it, or another model or cache format."""


class RemoteEngineChangedError(RemoteHandshakeError):
    """Another engine than the expected one answers at the peer's address.

    Args:
        message: What there is to say.
        found: The engine that answers; empty where it has not said.
    """

    def __init__(self, message: str, found: str = "") -> None:
        super().__init__(message)
        self.found = found


class LocalChannelError(ReshardError):
    """This engine's own side channel cannot be opened."""


class ConnectorThreadError(RuntimeError):
    """The connector's thread cannot go on, and neither can its engine; the message says why."""


class TransferError(RuntimeError):
    """NIXL could not do what it was asked to; the message names the peer and the operation."""


class InDoubtError(TransferError):
    """NIXL refused a read that it had begun: what it has read of it may still arrive."""
