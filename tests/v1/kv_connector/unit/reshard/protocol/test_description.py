# SPDX-License-Identifier: Apache-2.0
"""What a worker says of itself, to the wire and back, and what comes of anything else."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.v1.kv_connector.unit.reshard.protocol.described import (
    HOSTILE,
    describe,
    descriptions,
    msgpack_values,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import (
    LocalLayoutError,
    RemoteHandshakeError,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import (
    Holding,
    Shard,
    TokenShare,
    UnitInterval,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.description import (
    decode_worker,
    encode_worker,
)

encode = msgspec.msgpack.encode


@given(descriptions())
def test_description_survives_the_wire(said):
    """What is decoded equals what was encoded, in the same order of layers."""
    decoded = decode_worker(encode_worker(said))
    assert decoded == said
    assert list(decoded.shard.holdings) == list(said.shard.holdings)


def sharing(*shares: tuple[int, int, int]) -> bytes:
    """What a worker says that shares tokens out, whatever that is."""
    shard = describe().shard
    holdings = {
        name: dataclasses.replace(held, tokens=TokenShare(1, 2, 4))
        for name, held in shard.holdings.items()
    }
    said = dataclasses.replace(describe(), shard=Shard(shard.rank, holdings))
    wire = msgspec.msgpack.decode(encode_worker(said))
    return encode([*wire[:-1], list(shares)])


@pytest.mark.parametrize(
    ("shares", "reason"),
    [
        ([(1, 2, 4)], "says which tokens it holds of 1 layers, but describes 2"),
        ([(2, 2, 4)] * 2, r"cannot hold what it says of layer layer 0 \(share 2 of 2 in runs"),
        ([(0, 2, 3)] * 2, "runs of 3, which do not fit its blocks of 16 tokens: set --cp-kv"),
        ([(0, 65, 1)] * 2, "is not understood"),
        ([(0, 2, 0)] * 2, "is not understood"),
    ],
)
def test_impossible_shares_of_tokens_are_refused(shares, reason):
    """By the number of layers, of ranks and of a block's tokens."""
    assert decode_worker(sharing((1, 2, 4), (1, 2, 4))).shard.holdings["layer 0"].tokens.index == 1
    with pytest.raises(RemoteHandshakeError, match=reason):
        decode_worker(sharing(*shares))


def test_who_shares_nothing_out_says_what_it_always_said():
    """So that a build reads it that knows of no shares."""
    fields = msgspec.msgpack.decode(encode_worker(describe()))
    assert len(fields) == 10
    assert len(msgspec.msgpack.decode(sharing((1, 2, 4), (1, 2, 4)))) == 11
    # What older builds said of a board means nothing.
    older = msgspec.msgpack.encode([*fields, [], 1 << 41])
    assert decode_worker(older) == describe()


def test_description_is_small():
    """80 layers of two planes take a few kilobytes."""
    assert len(encode_worker(describe(num_layers=80))) < 5000


@given(st.data())
def test_damaged_description_is_refused_or_read(data):
    """A byte that changed gives another description or a typed error, nothing else."""
    damaged = bytearray(encode_worker(data.draw(descriptions())))
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode_worker(bytes(damaged))
    except RemoteHandshakeError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize("data", HOSTILE, ids=lambda data: data[:6].hex())
def test_hostile_bytes_are_refused(data):
    """What kills careless decoders ends as a typed error."""
    with pytest.raises(RemoteHandshakeError):
        decode_worker(data)


@pytest.mark.parametrize("value", [b"\x91" * 6_000, b"\xa2\xff\xfe"], ids=["nesting", "text"])
def test_hostile_fields_are_refused(value):
    """Nesting and broken text are errors also where a field is expected."""
    with pytest.raises(RemoteHandshakeError, match="not understood"):
        decode_worker(b"\x98" + value)


@given(st.binary() | msgpack_values.map(encode))
def test_random_bytes_are_refused(data):
    """Neither noise nor well-formed msgpack of other types is taken for a worker."""
    with pytest.raises(RemoteHandshakeError):
        decode_worker(data)


def wire(**changes: object) -> bytes:
    """An encoded description with some values replaced, by path such as `layers.0.planes`."""
    names = ("engine_id", "pp_rank", "tp_rank", "num_block_ids", "device_id")
    fields = dict(
        zip(
            (*names, "lease_address", "num_lease_buckets", "agent_metadata", "meanings", "layers"),
            msgspec.msgpack.decode(encode_worker(describe())),
            strict=True,
        )
    )
    fields.update(changes)
    return encode(list(fields.values()))


def layer(
    name: object = "a",
    start: object = 0,
    stop: object = 2,
    group: object = 0,
    *,
    num_units: object = 4,
    may_repeat: object = False,
    blocks_per_id: object = 1,
    **plane,
):
    """A layer as it is written, with some values of its plane replaced."""
    fields = dict(address=0, block=8, head=4, token=2, slot=2, heads=2, tokens=2, slot_tokens=1)
    fields |= dict(heads_per_unit=1, per_sequence=False)
    fields.update(plane)
    return [
        *(name, start, stop, num_units, may_repeat, group, blocks_per_id, 0),
        [list(fields.values())],
    ]


FAULTS: dict[str, tuple[dict, str]] = {
    "no engine": (dict(engine_id=""), "not understood"),
    "negative rank": (dict(pp_rank=-1), "not understood"),
    "no blocks": (dict(num_block_ids=0), "not understood"),
    "no room for leases": (dict(num_lease_buckets=0), "not understood"),
    "blocks of too many tokens": (
        dict(layers=[layer(tokens=(1 << 14) + 1)]),
        "not understood",
    ),
    "too many blocks to an id": (dict(layers=[layer(blocks_per_id=1 << 11)]), "not understood"),
    "too many blocks": (dict(num_block_ids=1 << 31), "not understood"),
    "no blocks to an id": (dict(layers=[layer(blocks_per_id=0)]), "not understood"),
    "more heads than the model's": (
        dict(layers=[layer(num_units=1)]),
        r"of layer a \(units \[0, 2\) of 1 cannot be held\): run the same build",
    ),
    "no heads to a unit": (dict(layers=[layer(heads_per_unit=0)]), "not understood"),
    "too many heads to a unit": (
        dict(layers=[layer(heads=2 << 15, heads_per_unit=1 << 15)]),
        "not understood",
    ),
    "fewer channels than its units have": (
        dict(layers=[layer(heads=4, heads_per_unit=3)]),
        r"2 heads of 3 channels of layer a, but its cache has 4:",
    ),
    "several heads that may be replicas": (
        dict(layers=[layer(may_repeat=True)]),
        r"of layer a \(units \[0, 2\) of 4 cannot be held by a rank that holds one\)",
    ),
    "negative device": (dict(device_id=-1), "not understood"),
    "no layers": (dict(layers=[]), "not understood"),
    "too many layers": (dict(layers=[layer(index) for index in range(5000)]), "not understood"),
    "a layer twice": (dict(layers=[layer(), layer()]), "layer a twice"),
    "nameless layer": (dict(layers=[layer(name="")]), "not understood"),
    "negative layer": (dict(layers=[layer(name=-1)]), "not understood"),
    "lines in a name": (dict(layers=[layer(name="a\nb", stop=3)]), "is not understood"),
    "no heads": (dict(layers=[layer(start=2)]), r"of layer a \(units \[2, 2\) are no"),
    "heads out of order": (dict(layers=[layer(start=3)]), r"of layer a \(units \[3, 2\) are no"),
    "negative head": (dict(layers=[layer(start=-1)]), "not understood"),
    "other heads in the cache": (
        dict(layers=[layer(heads=1)]),
        r"2 heads of layer a, but its cache has 1:",
    ),
    "negative group": (dict(layers=[layer(group=-1)]), "not understood"),
    "no planes": (dict(layers=[[*layer()[:-1], []]]), "not understood"),
    "too many planes": (dict(layers=[[*layer()[:-1], layer()[-1] * 5]]), "not understood"),
    "negative address": (dict(layers=[layer(address=-1)]), "not understood"),
    "address out of bounds": (dict(layers=[layer(address=1 << 62)]), "not understood"),
    "negative stride": (dict(layers=[layer(block=-1)]), "not understood"),
    "stride out of bounds": (dict(layers=[layer(token=1 << 40)]), "not understood"),
    "blocks beyond all addresses": (
        dict(num_block_ids=1 << 30, layers=[layer(block=1 << 30, blocks_per_id=4)]),
        "keeps 4294967296 blocks of layer a 1073741824 bytes apart, which no memory holds: run",
    ),
    "slots of no bytes": (dict(layers=[layer(slot=0)]), "not understood"),
    "blocks of no tokens": (dict(layers=[layer(tokens=0)]), "not understood"),
    "a number for a flag": (dict(layers=[layer(per_sequence=1)]), "not understood"),
    "slots that do not fill a block": (
        dict(layers=[layer(slot_tokens=3)]),
        "3 tokens in a slot of layer a, which do not divide the 2 of a block",
    ),
    "a meaning that is not said": (
        dict(layers=[[*layer()[:7], 1, layer()[-1]]]),
        "layer a means what is not among the 1 meanings",
    ),
    "no meanings": (dict(meanings=[]), "not understood"),
    "too many meanings": (dict(meanings=[{}] * 257), "not understood"),
    "a meaning of too many parts": (
        dict(meanings=[{str(part): "" for part in range(17)}]),
        "not understood",
    ),
}


@pytest.mark.parametrize(("changes", "message"), FAULTS.values(), ids=FAULTS.keys())
def test_faults_in_a_description_are_named(changes, message):
    """Everything that the planner would rely on is checked."""
    assert decode_worker(wire()) == describe()
    with pytest.raises(RemoteHandshakeError, match=message):
        decode_worker(wire(**changes))


def test_what_a_peer_would_refuse_is_not_said():
    """The same rules hold for both directions."""
    said = describe()
    shard = Shard(said.shard.rank, dict.fromkeys(said.cache.layers, Holding(UnitInterval(0, 3), 3)))
    with pytest.raises(LocalLayoutError, match=r"3 heads of layer .* its cache has 2:"):
        encode_worker(dataclasses.replace(said, shard=shard))
