# SPDX-License-Identifier: Apache-2.0
"""A decode worker that hears of engines of many ranks, and connects with none of them.

All else of a handshake is done as the connector does it, in a thread of its own: an answer is read
within bounds, its reads are planned, and each is lowered. Hundreds of ranks do not fit a small
machine; what they say does.
"""

from __future__ import annotations

import sys
import threading

from vllm.utils.gc_utils import freeze_gc_heap

from tools.pdstack.layout import Layout
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.connecting.dialer import Planner
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.connector_thread import SWITCH_S
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.cache import (
    LayerCache,
    Plane,
    RankCache,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.lowering import lower_read
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import (
    ParallelMesh,
    Shard,
    shard_model,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.bounds import ReplyBounds
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

from .cases import Shape
from .errors import BenchmarkError
from .specs import PauseSummary, Watch
from .watching import Pauses

_NUM_BLOCKS = 10_000
_AGENT_METADATA = bytes(2000)
"""About as much as NIXL says of an agent."""


class AnswersHost:
    """The first rank of a decode engine.

    Args:
        shape: The model, and both layouts.
    """

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        shards = _shards(shape, shape.decode)
        self._rank, self._cache = shards[0].rank, _cache(shape, shards[0])
        self._bounds = ReplyBounds.of(shards)
        self._planner = Planner(shards, 0, "refuse")
        # As vLLM's engines do once they have started: what is there by then is garbage to nobody.
        freeze_gc_heap()
        # As the connector does when it begins.
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))

    def read_answers(self, num_engines: int, watch: Watch) -> PauseSummary:
        """Hear of engines, one after another, while this thread works in Python.

        Raises:
            BenchmarkError: There would be nothing to read from them.
        """
        answer, num_legs = self._answer(), 0

        def read() -> None:
            nonlocal num_legs
            for _ in range(num_engines):
                num_legs += self._prepare(answer)

        pauses = Pauses()
        thread = threading.Thread(target=read, name="opener")
        thread.start()
        reads = True
        while reads:
            # Also where all was over before this thread had the interpreter back.
            reads = thread.is_alive()
            pauses.begin_step()
            pauses.compute(watch.step_s)
        if num_legs < num_engines:
            raise BenchmarkError(f"{num_engines} engines are read from with {num_legs} legs")
        return pauses.summary()

    def _answer(self) -> list[bytes]:
        """What a prefill engine says."""
        said = {}
        for shard in _shards(self._shape, self._shape.prefill):
            description = WorkerDescription(
                "prefill",
                shard,
                _cache(self._shape, shard),
                LeaseTableAddress(0, 1),
                _AGENT_METADATA,
            )
            rank = shard.rank.pp_rank, shard.rank.tp_rank
            said[rank] = WorkerHandshake({}, encode_worker(description))
        return encode_reply(said)

    def _prepare(self, answer: list[bytes]) -> int:
        """Do with an answer what is done before any agent is asked; returns the number of legs."""
        descriptions = decode_reply(answer, {}, self._bounds).workers
        plan = self._planner.plan([each.shard for each in descriptions]).plan
        caches = {each.shard.rank: each.cache for each in descriptions}
        reads = plan.reads_of(self._rank)
        return sum(len(lower_read(read, caches[read.src_rank], self._cache)) for read in reads)


def _shards(shape: Shape, layout: Layout) -> tuple[Shard, ...]:
    mesh = ParallelMesh(layout.pp_size, layout.tp_size)
    return shard_model(mesh, shape.num_layers, shape.num_heads)


def _cache(shape: Shape, shard: Shard) -> RankCache:
    """A rank's cache, in memory that nobody has."""
    layers = {}
    for number, (layer, holding) in enumerate(shard.holdings.items()):
        num_heads = len(holding.units)
        page_bytes = shape.block_tokens * shape.slot_bytes
        planes = tuple(
            Plane(
                address=(number * shape.planes_per_layer + plane) << 32,
                block_stride_bytes=num_heads * page_bytes,
                head_stride_bytes=page_bytes,
                slot_stride_bytes=shape.slot_bytes,
                slot_bytes=shape.slot_bytes,
                num_heads=num_heads,
                block_tokens=shape.block_tokens,
            )
            for plane in range(shape.planes_per_layer)
        )
        layers[layer] = LayerCache(planes, 0)
    return RankCache(_NUM_BLOCKS, 0, layers)
