# SPDX-License-Identifier: Apache-2.0
"""What a reply may hold, by what we are, and what it costs to say no."""

from __future__ import annotations

import ipaddress
import time
import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import RemoteHandshakeError
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.cache import (
    LayerCache,
    Plane,
    RankCache,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import (
    Holding,
    MeshRank,
    ParallelMesh,
    Shard,
    UnitInterval,
    shard_model,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.bounds import (
    MAX_GREETING_BYTES,
    MAX_STAGE_RANKS,
    ReplyBounds,
    TrustedPeers,
    numeric,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.compatibility import (
    CONNECTOR_NAME,
    SPOKEN,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.description import (
    WorkerDescription,
    encode_worker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.leases import LeaseTableAddress
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.metadata import (
    WorkerHandshake,
    decode_reply,
    encode_reply,
)

encode = msgspec.msgpack.encode
NUM_LAYERS, NUM_HEADS = 200, 1024
MAX_REFUSAL_S = 0.050
"""What a reply may cost that is refused: several times the 10.5 ms of the slowest core seen."""


def body_of(shard: Shard, engine_id: str = "engine", agent_metadata: bytes = b"") -> bytes:
    """What a rank says, with one plane to a layer."""
    layers = {
        layer: LayerCache((Plane(0, 0, 0, 0, 1, len(holding.units), 1),), 0)
        for layer, holding in shard.holdings.items()
    }
    return encode_worker(
        WorkerDescription(
            engine_id, shard, RankCache(1, 0, layers), LeaseTableAddress(0, 1), agent_metadata
        )
    )


def reply_of(*bodies: bytes, **more: object) -> list[bytes]:
    """A reply with these ranks, whatever they say."""
    greeting = {"connector": CONNECTOR_NAME, "version": SPOKEN.newest, "factors": {}}
    return [encode({**greeting, **more}), *bodies]


def ours(num_layers: int = NUM_LAYERS, num_heads: int = NUM_HEADS) -> ReplyBounds:
    """The bounds of an engine of two ranks."""
    return ReplyBounds.of(shard_model(ParallelMesh(1, 2), num_layers, num_heads))


@given(
    st.sampled_from([(1, 1), (4, 1), (1, 4), (3, 2), (2, 12), (8, 16)]),
    st.integers(8, 12),
    st.sampled_from([1, 2, 12, 48]),
)
def test_engines_of_our_model_are_within_bounds(mesh, num_layers, num_heads):
    """Whatever their layout: none is asked for another model's sake."""
    pp_size, tp_size = mesh
    if max(tp_size, num_heads) % min(tp_size, num_heads):
        tp_size = 1
    shards = shard_model(ParallelMesh(pp_size, tp_size), num_layers, num_heads)
    said = {
        (shard.rank.pp_rank, shard.rank.tp_rank): WorkerHandshake({}, body_of(shard))
        for shard in shards
    }
    bounds = ours(num_layers, 1 if num_heads == 1 else num_heads)
    workers = decode_reply(encode_reply(said), {}, bounds).workers
    assert [worker.shard for worker in workers] == list(shards)


def test_engines_that_share_tokens_out_are_within_bounds():
    """Of our model, of as many ranks as share them out; not more than there are."""
    shards = shard_model(ParallelMesh(2, 4), 8, 1, None, 4, 1)
    said = {
        (shard.rank.pp_rank, shard.rank.tp_rank): WorkerHandshake({}, body_of(shard))
        for shard in shards
    }
    bounds = ReplyBounds.of(shard_model(ParallelMesh(1, 4), 8, 1, None, 2, 1))
    workers = decode_reply(encode_reply(said), {}, bounds).workers
    assert [worker.shard for worker in workers] == list(shards)
    lone = shard_model(ParallelMesh(1, 8), 8, 1, None, 8, 1)[0]
    with pytest.raises(RemoteHandshakeError, match=r"one of 8 shares of .* but there are 1 ranks"):
        decode_reply(reply_of(body_of(lone)), {}, bounds)


def test_engine_with_a_draft_model_of_its_own_is_within_bounds():
    """What it has beside our layers is nothing to us, unless it is too much."""
    heads = Holding(UnitInterval(0, 8), 8)
    bounds = ReplyBounds({"a": 8, "b": 8})
    for more, fits in ((2, True), (3, False)):
        names = ["a", "b", *(f"draft {n}" for n in range(more))]
        reply = reply_of(body_of(Shard(MeshRank(0, 0), dict.fromkeys(names, heads))))
        if fits:
            assert decode_reply(reply, {}, bounds)
        else:
            with pytest.raises(RemoteHandshakeError, match=r"5 layers, but at most 4 are read"):
                decode_reply(reply, {}, bounds)


def all_of(
    rank: tuple[int, int], num_layers: int = NUM_LAYERS, num_heads: int = NUM_HEADS
) -> bytes:
    """A rank that says that it holds everything."""
    return body_of(
        Shard(
            MeshRank(*rank),
            dict.fromkeys(range(num_layers), Holding(UnitInterval(0, num_heads), num_heads)),
        )
    )


def every_rank_holds_everything() -> list[bytes]:
    """Fifty ranks, each with all layers and all heads."""
    return reply_of(*(all_of((0, tp_rank)) for tp_rank in range(50)))


def many_stages_hold_everything() -> list[bytes]:
    """The same, one to a stage."""
    return reply_of(*(all_of((pp_rank, 0)) for pp_rank in range(50)))


def far_too_many_ranks() -> list[bytes]:
    """More than any engine has."""
    return reply_of(*[b""] * 5000)


def too_many_ranks_in_a_stage() -> list[bytes]:
    """One more than is read."""
    bodies = (all_of((0, tp_rank), 1, 1) for tp_rank in range(MAX_STAGE_RANKS + 1))
    return reply_of(*bodies)


def mesh_with_a_hole() -> list[bytes]:
    """Two ranks of a mesh of four."""
    return reply_of(all_of((0, 0), 1, 1), all_of((1, 1), 1, 1))


def rank_in_anothers_place() -> list[bytes]:
    """The same rank twice."""
    return reply_of(all_of((0, 1), 1, 1), all_of((0, 1), 1, 1))


def rank_of_a_larger_model() -> list[bytes]:
    """More heads than ours has."""
    return reply_of(all_of((0, 0), 1, 2 * NUM_HEADS))


def rank_that_says_too_much() -> list[bytes]:
    """Two MiB of small values."""
    return reply_of(b"\xdd\x00\x20\x00\x00" + bytes(2 << 20))


def rank_of_many_layers() -> list[bytes]:
    """As many as its description may have, and are not ours."""
    return reply_of(all_of((0, 0), 4096, 1))


def greeting_that_is_too_long() -> list[bytes]:
    """Eight MiB of small values, where nobody looks."""
    return reply_of(b"", more=[0] * (8 << 20))


def greeting_of_many_values() -> list[bytes]:
    """As many as it may have, and no rank that can be read."""
    return reply_of(b"", more=[[]] * (MAX_GREETING_BYTES - 100))


def many_factors() -> list[bytes]:
    """More than there are."""
    return reply_of(b"", factors={str(number): "" for number in range(3000)})


@pytest.mark.parametrize(
    ("hostile", "message"),
    [
        (every_rank_holds_everything, r"rank pp0tp0 holds heads \[0, 1024\) .* at most 21 of them"),
        (many_stages_hold_everything, r"describes 600 layers on ranks up to pp2tp0, of 1 in a"),
        (far_too_many_ranks, "describes 5000 ranks, but an engine has 1 to 1024"),
        (too_many_ranks_in_a_stage, "65 ranks, the last of them pp0tp64, .* at most 64 in"),
        (mesh_with_a_hole, "describes 2 ranks, the last of them pp1tp1"),
        (rank_in_anothers_place, "describes rank pp0tp1 in the place of rank pp0tp0"),
        (rank_of_a_larger_model, r"heads \[0, 2048\) of 2048 of a layer with 1024"),
        (rank_that_says_too_much, "describes a rank in 2097157 bytes, but 1269760 are enough"),
        (rank_of_many_layers, "rank pp0tp0 describes 4096 layers, but at most 400 are read"),
        (greeting_that_is_too_long, f"which are more than {MAX_GREETING_BYTES}"),
        (greeting_of_many_values, "a worker's description of 0 bytes is not understood"),
        (many_factors, "not understood .*length <= 256"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_refusing_a_reply_is_cheap(hostile, message):
    """Whoever is named by a client cannot make us work or remember: here are twelve ways to try."""
    reply, bounds = hostile(), ours()
    costs_s = []
    # Others use the machine, too: the cheapest of some tries is what it costs.
    for _ in range(5):
        began_s = time.thread_time()
        with pytest.raises(RemoteHandshakeError, match=message) as caught:
            decode_reply(reply, {}, bounds)
        costs_s.append(time.thread_time() - began_s)
    assert "\n" not in str(caught.value)
    assert min(costs_s) < MAX_REFUSAL_S
    tracemalloc.start()
    with pytest.raises(RemoteHandshakeError):
        decode_reply(reply, {}, bounds)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 4 << 20


TRUSTED = TrustedPeers.parse(["10.0.0.0/8", "192.0.2.7", "fd00::/8"])


@pytest.mark.parametrize(
    ("host", "trusted"),
    [
        ("10.255.0.1", True),
        ("11.0.0.1", False),
        ("192.0.2.7", True),
        ("192.0.2.8", False),
        ("fd00::1", True),
        ("fe80::1", False),
        ("fe80::1%eth0", False),
        ("::ffff:10.0.0.1", True),
        ("::ffff:11.0.0.1", False),
    ],
)
def test_addresses_are_looked_up_in_the_networks(host, trusted):
    """Of both kinds, and of the one written as the other."""
    fault = TRUSTED.fault(host)
    assert (fault is None) is trusted
    if fault is not None:
        assert "is not among trusted_peers (10.0.0.0/8, 192.0.2.7/32, fd00::/8)" in fault


@pytest.mark.parametrize("host", ["engine.example", "localhost", "127.1", "0x7f000001", "", "a\nb"])
def test_names_are_left_to_who_looks_them_up(host):
    """That includes the spellings of addresses that only a resolver reads."""
    assert numeric(host) is None
    assert TRUSTED.fault(host) is None


@pytest.mark.parametrize("zone", ["", "lo]:7777;[fd00::2", "a b", "eth0\n", "a%b", "\u00e9"])
def test_zones_are_names_of_interfaces(zone):
    """What else is written behind a trusted address makes it no address."""
    assert numeric("fd00::1%eth0.1_a-b") is not None
    assert numeric(f"fd00::1%{zone}") is None


def test_no_network_trusts_nobody():
    """An empty list is none at all, rather than all."""
    assert "none at all" in (TrustedPeers.parse([]).fault("127.0.0.1") or "")


@pytest.mark.parametrize("network", ["10.0.0.1/8", "example.com", "10.0.0.0/33", ""])
def test_what_is_no_network_is_refused(network):
    """A slip of the pen does not become a wider network."""
    with pytest.raises(ValueError):
        TrustedPeers.parse([network])


@given(st.ip_addresses(v=4), st.integers(0, 32))
def test_addresses_are_in_the_networks_made_of_them(address, prefix):
    """Whatever the length of the prefix, also when written as an address of IPv6."""
    trusted = TrustedPeers((ipaddress.ip_network((address, prefix), strict=False),))
    assert trusted.allows(address)
    assert trusted.fault(f"::ffff:{address}") is None
