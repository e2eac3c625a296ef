# SPDX-License-Identifier: Apache-2.0
"""Messages from a scheduler to its workers, and between workers of different engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from ..errors import RemoteLayoutError, one_line
from .fingerprint import OfferFingerprint, OfferSecret
from .ids import BlockIds, EngineId, RequestId

_RequestId: TypeAlias = Annotated[str, Meta(max_length=1 << 10)]
"""A request id, no longer than a request's parameters may have."""

_Entry = TypeVar("_Entry")


@dataclass(frozen=True, slots=True)
class RemoteEngineAddress:
    """The address of an engine's side channel.

    Attributes:
        engine_id: Id of the engine that should answer; a restarted engine has another id.
        host: Host name or address.
        port: TCP port.
    """

    engine_id: EngineId
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Receive:
    """A request whose blocks are to be read from another engine.

    Attributes:
        source: The engine that holds them.
        remote_request_id: The source's id of the request.
        local_block_ids: Blocks to fill, the last ones of the request. If there are none, nothing is
            read, and the source is only notified.
        remote_block_ids: Blocks at the source, also the last ones of the request.
        local_tokens: Tokens of the request up to the last one to read into the local blocks; the
            last block may be partly filled.
        remote_tokens: The same at the source.
        fingerprint: Fingerprint that the source should offer; None if nothing is to be read and
            this engine does not know the tokens.
        secret: Secret that releases the source's offer in place of the fingerprint; None if it is
            not needed, or not known, so that the source cannot be notified.
        fault: Why the request cannot be read at all; None without a known reason.
        trace_headers: Trace headers of its client's request; None without a trace.
        attempt: Number of the source's attempt that computes it, if it is not offered yet; else 0.
    """

    source: RemoteEngineAddress
    remote_request_id: RequestId
    local_block_ids: BlockIds
    remote_block_ids: BlockIds
    local_tokens: int
    remote_tokens: int
    fingerprint: OfferFingerprint | None = None
    fault: str | None = None
    secret: OfferSecret | None = None
    trace_headers: Mapping[str, str] | None = None
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class RemoteRequest:
    """A request at the engine that holds its blocks.

    Attributes:
        source: That engine.
        request_id: That engine's id of the request.
    """

    source: RemoteEngineAddress
    request_id: RequestId


class Announcement(msgspec.Struct, frozen=True, array_like=True, tag="offer"):
    """An offer, sent to workers ahead of the step that also has it.

    Attributes:
        number: Number of the offer among all of this engine.
        request_id: The request.
        fingerprint: Fingerprint of the offer.
        block_ids: Its blocks, by KV-cache group; none where no worker packs.
    """

    number: int
    request_id: RequestId
    fingerprint: OfferFingerprint
    block_ids: tuple[list[int], ...] = ()


class DoneEntry(msgspec.Struct, frozen=True, array_like=True):
    """A request whose blocks a reader no longer needs.

    Attributes:
        request_id: The producer's id of the request.
        num_notifiers: Number of readers that notify this producer.
        num_tokens: With `content` and `blocks`, the fingerprint that the reader expected, computed
            from its own prompt and the request's parameters.
        content: See `OfferFingerprint`.
        blocks: See `OfferFingerprint`.
    """

    request_id: _RequestId
    num_notifiers: Annotated[int, Meta(ge=1, lt=1 << 31)]
    num_tokens: Annotated[int, Meta(ge=0, lt=1 << 31)]
    content: int
    blocks: int

    @classmethod
    def of(
        cls, request_id: RequestId, num_notifiers: int, fingerprint: OfferFingerprint
    ) -> DoneEntry:
        """Return the entry that one of `num_notifiers` readers sends to the producer."""
        return cls(
            request_id,
            num_notifiers,
            fingerprint.num_tokens,
            fingerprint.content,
            fingerprint.blocks,
        )

    @property
    def proof(self) -> OfferFingerprint:
        """The fingerprint that the producer must have offered."""
        return OfferFingerprint(self.num_tokens, self.content, self.blocks)


class Done(msgspec.Struct, frozen=True, tag="done", array_like=True):
    """Notification that a reader no longer needs the blocks of some requests.

    Attributes:
        notifier: Name of the reader.
        releases: The requests.
    """

    notifier: Annotated[str, Meta(max_length=1 << 11)]
    releases: list[DoneEntry]


class GaveUpEntry(msgspec.Struct, frozen=True, array_like=True):
    """A request whose blocks a reader has not read and does not need.

    Attributes:
        request_id: The producer's id of the request.
        num_notifiers: Number of readers that notify this producer.
        proof: Secret of the producer's offer.
    """

    request_id: _RequestId
    num_notifiers: Annotated[int, Meta(ge=1, lt=1 << 31)]
    proof: OfferSecret


class GaveUp(msgspec.Struct, frozen=True, tag="gave up", array_like=True):
    """Notification that a reader gives up some requests, whose tokens it does not know.

    Attributes:
        notifier: Name of the reader.
        releases: The requests.
    """

    notifier: Annotated[str, Meta(max_length=1 << 11)]
    releases: list[GaveUpEntry]


class Renew(msgspec.Struct, frozen=True, tag="renew", array_like=True):
    """Notification that a reader still needs the blocks of some requests, to renew their leases.

    Attributes:
        request_ids: The producer's ids of the requests.
    """

    request_ids: list[_RequestId]


class PackEntry(msgspec.Struct, frozen=True, array_like=True):
    """A window that a reader asks for.

    Attributes:
        ticket: Number that the reader has given it, and no other of its windows.
        request_id: The producer's id of the request.
        num_tokens: With `content` and `blocks`, the fingerprint of the offer.
        content: See `OfferFingerprint`.
        blocks: See `OfferFingerprint`.
        head_offset: With the next three, the `Slice` of each page.
        num_heads: See `Slice`.
        slot_bytes: See `Slice`.
        token_major: See `Slice`.
        planes: Positions of the planes in the producer's description, as 16-bit numbers; these and
            the next are little-endian.
        slot_offsets: Where the slice begins in a slot of each plane, in bytes, as 32-bit numbers.
        block_ids: Blocks in the order of the window, as 32-bit numbers.
    """

    ticket: Annotated[int, Meta(ge=0)]
    request_id: _RequestId
    num_tokens: Annotated[int, Meta(ge=0, lt=1 << 31)]
    content: int
    blocks: int
    head_offset: Annotated[int, Meta(ge=0, lt=1 << 20)]
    num_heads: Annotated[int, Meta(ge=1, lt=1 << 20)]
    slot_bytes: Annotated[int, Meta(ge=1, lt=1 << 32)]
    token_major: bool
    planes: Annotated[bytes, Meta(min_length=2, max_length=1 << 13)]
    slot_offsets: Annotated[bytes, Meta(min_length=4, max_length=1 << 14)]
    block_ids: Annotated[bytes, Meta(min_length=4, max_length=1 << 13)]

    @property
    def proof(self) -> OfferFingerprint:
        """The fingerprint that the producer must have offered."""
        return OfferFingerprint(self.num_tokens, self.content, self.blocks)


class Pack(msgspec.Struct, frozen=True, tag="pack", array_like=True):
    """Notification of the windows that a reader asks for, and of those that it has read.

    Attributes:
        reader: Random name of the reader, which only it and the producer know.
        asked: Windows to pack.
        returned: Tickets of windows that it needs no more, read or not.
    """

    reader: Annotated[bytes, Meta(min_length=16, max_length=16)]
    asked: Annotated[list[PackEntry], Meta(max_length=64)]
    returned: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=256)]


Notification: TypeAlias = Done | GaveUp | Renew | Pack

MAX_NOTIFICATION_BYTES = 8 << 10
"""Maximum size of a notification; more entries go into several.

NIXL states no limit, and UCX splits messages that do not fit a packet. But the receiver's progress
thread copies a notification in one piece, so many short ones are better than one of a megabyte.
"""

_NUMBERS_BYTES = 1 + 3 + 2 * 5 + 2 * 9
"""Maximum size of an encoded release without its request id: msgpack headers and numbers."""

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Notification] = msgspec.msgpack.Decoder(Notification)
_ANNOUNCEMENT_DECODER: msgspec.msgpack.Decoder[Announcement] = msgspec.msgpack.Decoder(Announcement)


def encode_notification(notification: Notification) -> bytes:
    """Encode a notification."""
    return _ENCODER.encode(notification)


def decode_notification(data: bytes) -> Notification:
    """Decode a notification.

    Raises:
        RemoteLayoutError: It is not one of ours.
    """
    try:
        notification = _DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        # msgspec lets the last two through, for strings that are not UTF-8 and for deep nesting.
        raise RemoteLayoutError(
            f"a notification of {len(data)} bytes is not understood ({one_line(error)}): run the "
            "same version of the connector on both engines"
        ) from error
    return notification


def encode_announcement(announcement: Announcement) -> bytes:
    """Encode an announcement for workers of the same engine."""
    return _ENCODER.encode(announcement)


def decode_announcement(data: bytes) -> Announcement:
    """Decode an announcement of this engine's own scheduler."""
    return _ANNOUNCEMENT_DECODER.decode(data)


def encode_done(notifier: str, entries: Iterable[DoneEntry]) -> list[bytes]:
    """Encode a reader's releases for one producer, in as few notifications as fit."""
    return _encode_all(partial(Done, notifier), entries, lambda entry: entry.request_id)


def encode_gave_up(notifier: str, entries: Iterable[GaveUpEntry]) -> list[bytes]:
    """Encode the requests that a reader gives up, in as few notifications as fit."""
    return _encode_all(partial(GaveUp, notifier), entries, lambda entry: entry.request_id)


def encode_renewals(request_ids: Iterable[RequestId]) -> list[bytes]:
    """Encode the renewal of some requests' leases, in as few notifications as fit."""
    return _encode_all(Renew, sorted(request_ids), lambda request_id: request_id)


def _encode_all(
    make: Callable[[list[_Entry]], Notification],
    entries: Iterable[_Entry],
    id_of: Callable[[_Entry], RequestId],
) -> list[bytes]:
    """Encode entries in as few notifications as fit `MAX_NOTIFICATION_BYTES`.

    Args:
        make: Makes a notification from some entries.
        entries: All entries.
        id_of: Returns an entry's request id.
    """
    room_bytes = MAX_NOTIFICATION_BYTES - len(_ENCODER.encode(make([]))) - 4
    return [encode_notification(make(part)) for part in _cut(entries, room_bytes, id_of)]


def _cut(
    entries: Iterable[_Entry], room_bytes: int, id_of: Callable[[_Entry], RequestId]
) -> Iterator[list[_Entry]]:
    """Cut entries into lists that fit a message; a list of one entry need not fit.

    Args:
        entries: All entries.
        room_bytes: Room for entries in a message.
        id_of: Returns an entry's request id, the only field larger than a few bytes.
    """
    part: list[_Entry] = []
    part_bytes = 0
    for entry in entries:
        entry_bytes = len(id_of(entry).encode()) + _NUMBERS_BYTES
        if part and part_bytes + entry_bytes > room_bytes:
            yield part
            part, part_bytes = [], 0
        part.append(entry)
        part_bytes += entry_bytes
    if part:
        yield part
