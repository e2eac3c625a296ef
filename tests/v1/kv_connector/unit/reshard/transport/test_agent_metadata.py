# SPDX-License-Identifier: Apache-2.0
"""Room behind UCX's address in NIXL metadata: found where NIXL finds it, and refused elsewhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.agent import (
    NixlAgent,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.agent_metadata import (
    ROOM_BYTES,
    with_own_name,
    with_room,
)

TAIL = b"\x0a" + bytes(7) + b"MemSection|what follows"


def field(tag: bytes, value: bytes) -> bytes:
    """As NIXL's serializer writes it."""
    return tag + len(value).to_bytes(8, "little") + value + b"|"


def written(name: bytes, backends: list[tuple[bytes, bytes]], count: int | None = None) -> bytes:
    """Metadata of an agent with backends and their addresses."""
    number = len(backends) if count is None else count
    return b"".join(
        [
            b"nixlSerDes|",
            field(b"Agent", name),
            field(b"Conns", number.to_bytes(8, "little")),
            *(field(b"t", backend) + field(b"c", address) for backend, address in backends),
            TAIL,
        ]
    )


OTHER = st.tuples(st.binary(min_size=1, max_size=8).filter(lambda it: it != b"UCX"), st.binary())


@given(
    st.binary(min_size=1, max_size=40),
    st.lists(OTHER, max_size=3),
    st.lists(OTHER, max_size=3),
    st.binary(max_size=300),
)
def test_zeros_are_behind_ucxs_address_and_nowhere_else(name, before, after, address):
    """Whatever name and addresses hold, other backends and what follows stay as they were."""
    with_ucx = written(name, [*before, (b"UCX", address), *after])
    longer = written(name, [*before, (b"UCX", address + bytes(ROOM_BYTES)), *after])
    assert with_room(with_ucx) == longer
    without = written(name, [*before, *after])
    assert with_room(without) == without


@given(st.binary().filter(lambda it: not it.startswith(b"nixlSerDes|")))
def test_what_is_not_nixls_is_left_to_it(metadata):
    """NIXL compares the beginning, and refuses it."""
    assert with_room(metadata) == metadata


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        (b"nixlSerDes|", "no whole field 'Agent'"),
        (b"nixlSerDes|Agent" + b"\xff" * 8 + b"name|", "no whole field 'Agent'"),
        (b"nixlSerDes|" + field(b"Agent", b"a")[:-1], "no whole field 'Agent'"),
        (b"nixlSerDes|" + field(b"Agent", b"a") + field(b"Sections", b""), "field 'Conns'"),
        (written(b"a", [(b"UCX", b"1")], count=2), "no whole field 't'"),
        (written(b"a", [(b"UCX", b"1")], count=2**64 - 1), "no whole field 't'"),
        (written(b"a", [(b"UCX", b"1"), (b"UCX", b"2")]), "2 addresses of UCX"),
    ],
)
def test_what_is_not_as_nixl_writes_it_is_refused(metadata, reason):
    """NIXL might find an address where none is looked for here."""
    with pytest.raises(ValueError, match=reason):
        with_room(metadata)


@given(st.binary(max_size=300), st.lists(OTHER, max_size=2))
def test_an_agents_own_name_is_all_that_differs(name, backends):
    """It begins as the one that it said, for messages, and has nothing in it that a log obeys."""
    changed = with_own_name(written(name, backends))
    stop = changed.index(b"|Conns")
    own = changed[len(b"nixlSerDes|Agent") + 8 : stop]
    assert changed == written(own, backends)
    assert own.decode().isprintable() and len(own) <= 100
    said, _, digest = own.rpartition(b"/")
    assert len(said) == min(len(name), 64) and len(digest) == 32


@given(st.binary(max_size=40), st.binary(max_size=40), st.binary(min_size=1, max_size=40))
def test_other_metadata_lead_to_another_name(name, other, address):
    """Whatever they say, and to the same name where they are the same."""
    one, two = written(name, [(b"UCX", address)]), written(other, [(b"UCX", address)])
    assert (with_own_name(one) == with_own_name(two)) == (name == other)
    assert with_own_name(written(name, [(b"UCX", b"1" + address)])) != with_own_name(one)


@pytest.mark.parametrize("metadata", [b"nixlSerDes|", b"nixlSerDes|Agent" + b"\xff" * 8 + b"name|"])
def test_metadata_without_a_name_are_refused(metadata):
    """NIXL might find one where none is looked for here."""
    with pytest.raises(ValueError, match="no whole field 'Agent'"):
        with_own_name(metadata)
    assert with_own_name(b"other") == b"other"


def test_agents_know_each_other_by_metadata_with_room():
    """UCX looks at nothing behind a right address, and NIXL writes no other form than this."""
    one, other = NixlAgent("one", num_threads=0), NixlAgent("other", num_threads=0)
    metadata = with_room(other.metadata())
    assert len(metadata) == len(other.metadata()) + ROOM_BYTES
    assert one.connect(metadata) == "other"
    one.close()
    other.close()
