# SPDX-License-Identifier: Apache-2.0
"""Workers that describe themselves, and what is no description."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import strategies as st

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.cache import (
    LayerCache,
    Plane,
    RankCache,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import (
    ALL_TOKENS,
    Holding,
    MeshRank,
    Shard,
    TokenShare,
    UnitInterval,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.bounds import ReplyBounds
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.description import (
    WorkerDescription,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.leases import LeaseTableAddress

HOSTILE = [b"", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\x91" * 60_000, b"\x81\xa1\xff\x00", b"\xc0"]
"""Nothing, no type at all, 4 billion elements, deep nesting, no UTF-8, nil."""


msgpack_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


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


BOUNDS = ReplyBounds.of([describe().shard])
"""What an engine may answer that has the layers of such a worker."""


class AnyMesh(ReplyBounds):
    """Bounds for what no engine says: ranks in any places, with any layers."""

    def begin(self, last_rank: MeshRank, num_ranks: int) -> SimpleNamespace:
        """Let every rank pass."""
        return SimpleNamespace(check=lambda shard: None)


ANY_MESH = AnyMesh(dict.fromkeys(range(1 << 10), 1))


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
    cache = RankCache(draw(st.integers(1, 1 << 18)), draw(st.integers(0, 7)), layers)
    rank = MeshRank(draw(st.integers(0, 100)), draw(st.integers(0, 100)))
    engine_id = draw(st.text(min_size=1, max_size=40))
    table = LeaseTableAddress(draw(st.integers(0, 1 << 60)), draw(st.integers(1, 1 << 20)))
    return WorkerDescription(
        engine_id, Shard(rank, holdings), cache, table, draw(st.binary(max_size=100))
    )
