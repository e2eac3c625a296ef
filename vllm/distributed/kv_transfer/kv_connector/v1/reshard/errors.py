# SPDX-License-Identifier: Apache-2.0
"""Errors of resharding, named by the side at fault: this engine or the peer."""

from __future__ import annotations


class ReshardError(ValueError):
    """A layout or a peer cannot be served. The message is one line that ends with the remedy."""


_UPSTREAMS_MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"

ASK_FOR_UPSTREAMS = (
    f"with one pipeline stage, set kv_connector_module_path to {_UPSTREAMS_MODULE} on both "
    "engines, for upstream's"
)
"""Remedy where upstream's connector may serve what this one cannot. That is known only when workers
have their caches, too late to fall back to upstream's automatically."""

MEET_UPSTREAMS = (
    "see why in that engine's log, where it was left to upstream's ('Using upstream's "
    "NixlConnector'), and leave out what the line names, or set kv_connector_module_path to "
    f"{_UPSTREAMS_MODULE} on the other one, too"
)
"""Remedy where one of two engines runs upstream's connector, as it stands in messages between them,
whose bytes are those of a released protocol."""

INSTALL_THERE = (
    f"install the fork or the plugin vllm-kv-reshard there; where that is, {MEET_UPSTREAMS}"
)
"""The same in this engine's log: mostly the other one is vLLM as released."""


class LocalLayoutError(ReshardError):
    """This engine's own configuration is at fault."""


class RemoteLayoutError(ReshardError):
    """The peer's description of itself does not cover this engine's needs."""


class RemoteHandshakeError(ReshardError):
    """The peer's side channel gave no answer that this engine can use."""


class RemoteUnreachableError(RemoteHandshakeError):
    """No connection to the peer was possible, or it did not answer in time."""


class RemoteMisdirectedError(RemoteHandshakeError):
    """This engine itself answers at the peer's address."""


class RemoteUntrustedError(RemoteHandshakeError):
    """The peer's address is in none of the networks that this engine may contact."""


class RemoteRefusedError(RemoteHandshakeError):
    """The peer understood the handshake and declined it."""


class RemoteIncompatibleError(RemoteHandshakeError):
    """The peer runs another connector, another version of it, or another model or cache format."""


class RemoteEngineChangedError(RemoteHandshakeError):
    """An engine other than the expected one answers at the peer's address.

    Args:
        message: The error's text.
        found: Id of the engine that answers; empty if it gave none.
    """

    def __init__(self, message: str, found: str = "") -> None:
        super().__init__(message)
        self.found = found


class LocalChannelError(ReshardError):
    """This engine's own side channel cannot be opened."""


class LocalLimitError(ReshardError):
    """This process has no file descriptor, thread or place left for what is asked of it."""


class ConnectorThreadError(RuntimeError):
    """The connector's thread cannot go on, and neither can its engine; the message says why."""


class TransferError(RuntimeError):
    """A NIXL operation failed; the message names the peer and the operation."""


class InDoubtError(TransferError):
    """NIXL refused a read that it had begun, so some of its bytes may still arrive."""
