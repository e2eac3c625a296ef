# SPDX-License-Identifier: Apache-2.0
"""Changes to NIXL metadata before NIXL loads them: a unique name, and zeros after the address.

*The name.* NIXL identifies a peer by the name at the start of its metadata. A second peer with that
name is refused, or replaces the first, and any host can use another's name. So each peer's name is
replaced by one that ends in a digest of its metadata. The new name is also printable, because NIXL
logs it.

*The room.* NIXL passes UCX an address without its length, and UCX relies on the lengths within it:
after one wrong byte, it reads whatever memory follows. That memory differs from process to process,
so a trial would show little (`probe`). With zeros there, a wrong address fails alike in every
process: UCX refuses a transport without bandwidth. (nixl 1.5.1: an address that ended one process
in ten was refused 80 times in 80.) UCX never reads beyond a correct address.

NIXL's serializer, `nixlSerDes`, writes a field as a tag, 8 bytes of length, the value, and a bar.
Metadata begin with the fields `Agent`, and `Conns`, the number of backends; then `t` and `c` are
the name and the address of each backend.
"""

from __future__ import annotations

import re
from hashlib import sha256

ROOM_BYTES = 4096
"""Several times the distance that the one-byte lengths in a UCX header can skip."""

_BEGINNING = b"nixlSerDes|"
_LENGTH_BYTES = 8
_NAME_BYTES = 64
"""Part of a name that is kept, for messages. Names of this connector's agents are shorter."""
_UNUSUAL = re.compile(rb"[^A-Za-z0-9_.:/-]")


def with_own_name(metadata: bytes) -> bytes:
    """Return NIXL metadata with an agent name that is unique to them.

    Data without NIXL's first bytes are returned unchanged: NIXL refuses them.

    Raises:
        ValueError: The rest is not in NIXL's format.
    """
    if not metadata.startswith(_BEGINNING):
        return metadata
    field = _value_of(metadata, b"Agent", len(_BEGINNING))
    said = _UNUSUAL.sub(b"~", metadata[field][:_NAME_BYTES])
    name = said + b"/" + sha256(metadata).hexdigest()[:32].encode()
    return b"".join(
        (
            metadata[: field.start - _LENGTH_BYTES],
            len(name).to_bytes(_LENGTH_BYTES, "little"),
            name,
            metadata[field.stop :],
        )
    )


def with_room(metadata: bytes) -> bytes:
    """Return NIXL metadata with zeros after the UCX address, if there is one.

    Data without NIXL's first bytes are returned unchanged: NIXL reads nothing else in them.

    Raises:
        ValueError: The rest is not in NIXL's format.
    """
    if not metadata.startswith(_BEGINNING):
        return metadata
    name = _value_of(metadata, b"Agent", len(_BEGINNING))
    field = count = _value_of(metadata, b"Conns", name.stop + 1)
    addresses = []
    for _ in range(int.from_bytes(metadata[count], "little")):
        backend = _value_of(metadata, b"t", field.stop + 1)
        field = _value_of(metadata, b"c", backend.stop + 1)
        if metadata[backend] == b"UCX":
            addresses.append(field)
    if not addresses:
        return metadata
    if len(addresses) > 1:
        raise ValueError(f"it has {len(addresses)} addresses of UCX, where NIXL has one")
    (address,) = addresses
    length = address.stop - address.start + ROOM_BYTES
    return b"".join(
        (
            metadata[: address.start - _LENGTH_BYTES],
            length.to_bytes(_LENGTH_BYTES, "little"),
            metadata[address],
            bytes(ROOM_BYTES),
            metadata[address.stop :],
        )
    )


def _value_of(metadata: bytes, tag: bytes, start: int) -> slice:
    """Return where the value lies of the field with this tag that begins at `start`."""
    value = start + len(tag) + _LENGTH_BYTES
    stop = value + int.from_bytes(metadata[value - _LENGTH_BYTES : value], "little")
    if not metadata.startswith(tag, start) or stop >= len(metadata):
        raise ValueError(f"it has no whole field {tag.decode()!r} where NIXL has one")
    return slice(value, stop)
