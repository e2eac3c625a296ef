# SPDX-License-Identifier: Apache-2.0
"""What engines say of themselves, to the wire and back, and what comes of anything else."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlHandshakePayload

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import (
    LocalLayoutError,
    RemoteHandshakeError,
    RemoteIncompatibleError,
    RemoteRefusedError,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.cache import (
    LayerCache,
    Plane,
    RankCache,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.mesh import MeshRank
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import (
    ALL_TOKENS,
    Holding,
    Shard,
    TokenShare,
    UnitInterval,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol import metadata
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.bounds import MAX_GREETING_BYTES
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.leases import LeaseTableAddress
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.metadata import (
    WorkerDescription,
    WorkerHandshake,
    decode_reply,
    decode_worker,
    encode_refusal,
    encode_refusal_for_upstream,
    encode_reply,
    encode_worker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.versions import (
    CONNECTOR_NAME,
    SPOKEN,
)

FACTORS = {"dtype": "bfloat16", "num_kv_heads": "2"}
encode = msgspec.msgpack.encode


def describe(
    rank: tuple[int, int] = (0, 0), engine_id: str = "engine", num_layers: int = 2
) -> WorkerDescription:
    """A worker with two heads of each layer."""
    names = [f"layer {index}" for index in range(num_layers)]
    planes = tuple(Plane(4096 * plane, 2048, 1024, 64, 64, 2, 16) for plane in (1, 2))
    return WorkerDescription(
        engine_id,
        Shard(MeshRank(*rank), dict.fromkeys(names, Holding(UnitInterval(0, 2), 4))),
        RankCache(8, 0, dict.fromkeys(names, LayerCache(planes, 0))),
        LeaseTableAddress(1 << 20, 4),
        b"agent",
    )


def handshakes(
    *descriptions: WorkerDescription, factors: dict[str, str] | None = None
) -> dict[tuple[int, int], WorkerHandshake]:
    """What the workers hand to their scheduler."""
    return {
        (said.shard.rank.pp_rank, said.shard.rank.tp_rank): WorkerHandshake(
            FACTORS if factors is None else factors, encode_worker(said)
        )
        for said in descriptions
    }


@st.composite
def descriptions(draw: st.DrawFn) -> WorkerDescription:
    """Any worker."""
    stride = st.integers(0, (1 << 40) - 1)
    layers, holdings = {}, {}
    text = st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=20)
    names = st.one_of(st.integers(0, 1000), text)
    for name in draw(st.lists(names, min_size=1, max_size=5, unique=True)):
        start, num_heads = draw(st.integers(0, 100)), draw(st.integers(1, 100))
        may_repeat = num_heads == 1 and draw(st.booleans())
        block_tokens = draw(st.integers(1, 1 << 12))
        planes = st.builds(
            Plane,
            st.integers(0, (1 << 62) - 1),
            stride,
            stride,
            stride,
            st.integers(1, 1 << 20),
            st.just(num_heads),
            st.just(block_tokens),
            st.sampled_from([1, block_tokens]),
        )
        units = UnitInterval(start, start + num_heads)
        tokens = draw(st.sampled_from([ALL_TOKENS, TokenShare(1, 2), TokenShare(3, 64)]))
        num_units = units.stop + draw(st.integers(0, 100))
        holdings[name] = Holding(units, num_units, may_repeat, tokens)
        layers[name] = LayerCache(
            draw(st.lists(planes, min_size=1, max_size=2).map(tuple)),
            draw(st.integers(0, 9)),
            draw(st.integers(1, 8)),
            draw(st.sampled_from([{"numbers": "half"}, {"numbers": "half", "a": "b"}, {}])),
        )
    cache = RankCache(draw(st.integers(1, 1 << 20)), draw(st.integers(0, 7)), layers)
    rank = MeshRank(draw(st.integers(0, 100)), draw(st.integers(0, 100)))
    engine_id = draw(st.text(min_size=1, max_size=40))
    table = LeaseTableAddress(draw(st.integers(0, 1 << 60)), draw(st.integers(1, 1 << 20)))
    return WorkerDescription(
        engine_id, Shard(rank, holdings), cache, table, draw(st.binary(max_size=100))
    )


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
        ([(2, 2, 4)] * 2, "share 2 of 2 of the tokens of layer layer 0, which is none"),
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


@given(st.lists(descriptions(), min_size=1, max_size=4, unique_by=lambda said: said.shard.rank))
def test_engine_survives_the_wire(workers):
    """All workers arrive, in the order of ranks, whatever order they were given in."""
    workers = [dataclasses.replace(worker, engine_id="engine") for worker in workers]
    decoded = decode_reply(encode_reply(handshakes(*workers)), FACTORS)
    assert (decoded.version, decoded.release) == (SPOKEN.newest, None)
    assert decoded.workers == tuple(sorted(workers, key=lambda worker: worker.shard.rank))


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


HOSTILE = [b"", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\x91" * 60_000, b"\x81\xa1\xff\x00", b"\xc0"]
"""Nothing, no type at all, 4 billion elements, deep nesting, no UTF-8, nil."""


@pytest.mark.parametrize("data", HOSTILE, ids=lambda data: data[:6].hex())
def test_hostile_bytes_are_refused(data):
    """What kills careless decoders ends as a typed error."""
    with pytest.raises(RemoteHandshakeError):
        decode_worker(data)
    with pytest.raises(RemoteHandshakeError):
        decode_reply([data], FACTORS)


def test_hostile_fields_are_refused():
    """Nesting and broken text are errors also where a field is expected, or skipped."""
    for value in (b"\x91" * 6_000, b"\xa2\xff\xfe"):
        with pytest.raises(RemoteHandshakeError, match="not understood"):
            decode_worker(b"\x98" + value)
        with pytest.raises(RemoteHandshakeError, match="not understood"):
            decode_reply([b"\x81" + encode("connector") + value], FACTORS)
        with pytest.raises(RemoteHandshakeError):
            decode_reply([b"\x81" + encode("unknown") + value], FACTORS)


msgpack_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(st.binary() | msgpack_values.map(encode))
def test_random_bytes_are_refused(data):
    """Neither noise nor well-formed msgpack of other types is taken for a peer."""
    with pytest.raises(RemoteHandshakeError):
        decode_worker(data)
    with pytest.raises(RemoteHandshakeError):
        decode_reply([data], FACTORS)


@given(
    st.fixed_dictionaries(
        {"connector": st.just(CONNECTOR_NAME), "version": st.just(SPOKEN.newest)},
        optional={name: msgpack_values for name in ("factors", "refusal")},
    ),
    st.lists(st.binary() | msgpack_values.map(encode), max_size=3),
)
def test_random_replies_of_our_own_version_are_refused(greeting, workers):
    """Whoever knows our name still has to say something that makes sense."""
    with pytest.raises(RemoteHandshakeError):
        decode_reply([encode(greeting), *workers], FACTORS)


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
        r"heads \[0, 2\) of 1 of layer a, which it cannot",
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
        r"heads \[0, 2\) of 4 of layer a, which it cannot",
    ),
    "negative device": (dict(device_id=-1), "not understood"),
    "no layers": (dict(layers=[]), "not understood"),
    "too many layers": (dict(layers=[layer(index) for index in range(5000)]), "not understood"),
    "a layer twice": (dict(layers=[layer(), layer()]), "layer a twice"),
    "nameless layer": (dict(layers=[layer(name="")]), "not understood"),
    "negative layer": (dict(layers=[layer(name=-1)]), "not understood"),
    "lines in a name": (dict(layers=[layer(name="a\nb", stop=3)]), "is not understood"),
    "no heads": (dict(layers=[layer(start=2)]), r"heads \[2, 2\) of 4 of layer a"),
    "heads out of order": (dict(layers=[layer(start=3)]), r"heads \[3, 2\) of 4 of layer a"),
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


def test_shard_and_cache_must_hold_the_same_layers():
    """A worker that contradicts itself fails at start-up."""
    said = describe()
    cache = dataclasses.replace(said.cache, layers={"layer 0": said.cache.layers["layer 0"]})
    with pytest.raises(LocalLayoutError, match="they differ in layer 1"):
        encode_worker(dataclasses.replace(said, cache=cache))


def test_what_a_peer_would_refuse_is_not_said():
    """The same rules hold for both directions."""
    said = describe()
    shard = Shard(said.shard.rank, dict.fromkeys(said.cache.layers, Holding(UnitInterval(0, 3), 3)))
    with pytest.raises(LocalLayoutError, match=r"3 heads of layer .* its cache has 2:"):
        encode_worker(dataclasses.replace(said, shard=shard))


class TestOwnEngine:
    """`encode_reply` on workers that do not fit together."""

    def test_no_workers(self):
        """There is nothing to serve."""
        with pytest.raises(LocalLayoutError, match="no worker has handshake metadata"):
            encode_reply({})

    def test_differing_factor(self):
        """It is named, with the ranks, the values and what to do."""
        workers = handshakes(describe((0, 0))) | handshakes(
            describe((1, 0)), factors={**FACTORS, "dtype": "float16"}
        )
        with pytest.raises(
            LocalLayoutError,
            match=r"dtype is bfloat16 on rank pp0tp0 but float16 on rank pp1tp0.*same --dtype",
        ):
            encode_reply(workers)

    def test_missing_factor(self):
        """A factor that one worker does not name differs."""
        workers = handshakes(describe((0, 0)), factors={}) | handshakes(describe((0, 1)))
        with pytest.raises(LocalLayoutError, match="dtype is unset on rank pp0tp0"):
            encode_reply(workers)

    def test_worker_in_another_place(self):
        """A worker's rank is what the engine takes it for."""
        ((_, handshake),) = handshakes(describe((0, 1))).items()
        with pytest.raises(LocalLayoutError, match=r"rank pp1tp1 .* that it is rank pp0tp1"):
            encode_reply({(1, 1): handshake})

    def test_workers_of_two_engines(self):
        """All workers are of one engine."""
        with pytest.raises(LocalLayoutError, match="rank pp0tp1 of engine other"):
            encode_reply(handshakes(describe((0, 0)), describe((0, 1), "other")))

    def test_size(self, monkeypatch):
        """A reply that peers would not accept is not served."""
        monkeypatch.setattr(metadata, "MAX_REPLY_BYTES", 100)
        with pytest.raises(LocalLayoutError, match="but peers accept 100"):
            encode_reply(handshakes(describe()))

    def test_size_of_the_greeting(self):
        """What peers would not accept is not said."""
        factors = {"model": "x" * MAX_GREETING_BYTES}
        with pytest.raises(LocalLayoutError, match="but peers accept 65536: give shorter --hf-ov"):
            encode_reply(handshakes(describe(), factors=factors))


def with_greeting(**changes: object) -> list[bytes]:
    """A good reply of one worker, whose greeting is changed."""
    greeting, *workers = encode_reply(handshakes(describe()))
    return [encode(msgspec.msgpack.decode(greeting) | changes), *workers]


class TestPeer:
    """`decode_reply` on peers that do not fit."""

    def test_upstreams_connector(self):
        """It is recognised by the beginning of its own handshake."""
        message = r"runs upstream's NixlConnector.*kv_connector_module_path"
        with pytest.raises(RemoteIncompatibleError, match=message):
            decode_reply([encode(NixlHandshakePayload("5ca1ab1e", b""))], FACTORS)

    def test_another_connector(self):
        """It is named."""
        with pytest.raises(RemoteIncompatibleError, match=r"connector other, but .* reshard/5"):
            decode_reply([encode({"connector": "other"})], FACTORS)

    def test_another_version_is_not_read_further(self):
        """Both versions are named, however else that version writes what follows."""
        for change in ({"factors": 1}, {"refusal": "request reshard/5 is unknown"}):
            greeting, *_ = with_greeting(**change, version=6)
            for reply in ([greeting], [greeting, b"\xc1"]):
                with pytest.raises(
                    RemoteIncompatibleError, match=r"peer speaks reshard/6.* reshard/5"
                ):
                    decode_reply(reply, FACTORS)

    def test_version_before_frames_is_told_apart(self):
        """It answered in one frame, and refuses in one that is read as ever."""
        refusal = {"connector": "reshard", "version": 3, "refusal": "request reshard/5 is unknown"}
        for answer in (refusal, {**refusal, "refusal": "", "factors": {}, "workers": [b"x"]}):
            with pytest.raises(
                RemoteIncompatibleError, match=r"peer speaks reshard/3, .* reshard/5"
            ):
                decode_reply([encode(answer)], FACTORS)

    def test_factors_are_checked_before_workers_are_read(self):
        """A description is only read where its meaning is agreed upon."""
        reply = [*with_greeting()[:1], b"\xc1"]
        with pytest.raises(RemoteIncompatibleError, match="num_kv_heads is 2 there and 4 here"):
            decode_reply(reply, {**FACTORS, "num_kv_heads": "4"})
        with pytest.raises(RemoteHandshakeError, match="worker's description of 1 bytes"):
            decode_reply(reply, FACTORS)

    def test_refusal(self):
        """The peer's reason is passed on."""
        with pytest.raises(RemoteRefusedError, match="the peer refuses: not today"):
            decode_reply([encode_refusal("not today")], FACTORS)

    def test_rank_described_twice(self):
        """A rank is in one place."""
        greeting, worker = with_greeting()
        with pytest.raises(RemoteHandshakeError, match="rank pp0tp0 twice"):
            decode_reply([greeting, worker, worker], FACTORS)

    def test_several_engines(self):
        """One side channel serves one engine."""
        other = encode_worker(describe((0, 1), "other"))
        with pytest.raises(RemoteHandshakeError, match="several engines, engine and other"):
            decode_reply([*with_greeting(), other], FACTORS)

    def test_no_workers(self):
        """An engine has at least one worker."""
        with pytest.raises(RemoteHandshakeError, match="describes 0 ranks, but an engine has 1 to"):
            decode_reply(with_greeting()[:1], FACTORS)

    def test_greeting_that_is_too_long(self):
        """It is not decoded, whatever it says."""
        with pytest.raises(RemoteHandshakeError, match=r"begins with 65537 bytes, .* 65536"):
            decode_reply([bytes(MAX_GREETING_BYTES + 1)], FACTORS)

    def test_new_fields_are_no_harm(self):
        """What a later build adds to this version is passed over."""
        assert decode_reply(with_greeting(more=1), FACTORS)


def test_refusal_for_upstream_is_what_upstream_reads():
    """Its decoder accepts it, no hash equals it, and it says what is wrong."""
    payload = msgspec.msgpack.decode(encode_refusal_for_upstream(), type=NixlHandshakePayload)
    assert "does not run upstream's NixlConnector" in payload.compatibility_hash
    assert payload.agent_metadata_bytes == b""
