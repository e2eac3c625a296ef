# SPDX-License-Identifier: Apache-2.0
"""Errors of resharding, named by the side at fault, and text of others in a line of ours.

Clients name engines, hosts and requests, engines name themselves, and libraries quote these names
in their errors. A line feed in a name would let a client forge a line of the log. So all such text
is quoted where it is put into a line, and a test finds places that do not quote it.
"""

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
    "install the plugin vllm-kv-reshard, or the fork, on all nodes of the engine with upstream's, "
    "and restart it; where it is installed, leave out what that engine's log names in the line "
    "'Using upstream's NixlConnector'"
)
"""Remedy where one of two engines runs upstream's connector: mostly it is vLLM as released. It
stands in both engines' logs."""


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


_NAME_CHARACTERS = 200
_LINE_CHARACTERS = 4000


def quote(name: str | None) -> str:
    """Return a name in printable characters, shortened if it is long; "unset" for None."""
    return "unset" if name is None else _printable(name, _NAME_CHARACTERS)


def one_line(message: object) -> str:
    """Return a message or an error, which may contain names, as one printable line."""
    return _printable(str(message), _LINE_CHARACTERS)


def _printable(text: str, max_characters: int) -> str:
    head = text[:max_characters]
    printable = head if head.isprintable() else ascii(head)
    if max(len(text), len(printable)) > max_characters:
        return f"{printable[:max_characters]}..."
    return printable
