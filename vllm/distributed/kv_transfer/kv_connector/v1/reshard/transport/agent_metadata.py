# SPDX-License-Identifier: Apache-2.0
"""What of NIXL metadata is ours before NIXL has it: the agent's name, and room behind its address.

*The name.* NIXL knows a peer by the name that its metadata begin with, and metadata of a second one
with that name are refused, or take the first one's place. Any host can say what another one is
called. So each is given a name that its metadata are digested into. It is printable as well, as
NIXL writes names into its log.

*The room.* NIXL hands UCX an address without its length, and UCX goes by the lengths in it: one
wrong byte, and it reads on in whatever lies behind. As that differs from process to process, a
trial would tell little (`probe`). With zeros there, what is wrong in one process is as wrong in
any: UCX refuses a transport without bandwidth. (nixl 1.5.1: an address that ended one process in
ten was refused 80 times in 80.) It never looks at what lies behind a right address.

NIXL's serializer, `nixlSerDes`, writes a field as a tag, 8 bytes of length, the value, and a bar.
Metadata begin with `Agent`, and `Conns`, the number of backends; `t` and `c` are the name and the
address of each.
"""

from __future__ import annotations

import re
from hashlib import sha256

ROOM_BYTES = 4096
"""Several times what the lengths in a header of UCX's, of a byte each, can skip."""

_BEGINNING = b"nixlSerDes|"
_LENGTH_BYTES = 8
_NAME_BYTES = 64
"""So much of a name is kept, for messages: those of this connector's agents are shorter."""
_UNUSUAL = re.compile(rb"[^A-Za-z0-9_.:/-]")


def with_own_name(metadata: bytes) -> bytes:
    """Return NIXL metadata whose agent bears a name that no other metadata lead to.

    What does not begin as NIXL's is left as it is: NIXL refuses it.

    Raises:
        ValueError: It goes on otherwise than NIXL writes it.
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
    """Return NIXL metadata with zeros behind the UCX address, if there is one.

    What does not begin as NIXL's is left as it is: NIXL looks at nothing else in it.

    Raises:
        ValueError: It goes on otherwise than NIXL writes it.
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
    """Where the value of a field is that begins at a place and has a tag."""
    value = start + len(tag) + _LENGTH_BYTES
    stop = value + int.from_bytes(metadata[value - _LENGTH_BYTES : value], "little")
    if not metadata.startswith(tag, start) or stop >= len(metadata):
        raise ValueError(f"it has no whole field {tag.decode()!r} where NIXL has one")
    return slice(value, stop)
