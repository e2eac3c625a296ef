# SPDX-License-Identifier: Apache-2.0
"""Messages of every version of the protocol that is spoken, as bytes, and what they say.

    python -m tests.v1.kv_connector.unit.reshard.protocol.golden

writes those of the newest version, once: what has been released is never written again.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from tests.v1.kv_connector.unit.reshard.protocol.tables import entries
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.cache import (
    LayerCache,
    Plane,
    RankCache,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import (
    Holding,
    MeshRank,
    Shard,
    UnitInterval,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.compatibility import SPOKEN
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.description import (
    WorkerDescription,
    encode_worker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.fingerprint import (
    OfferFingerprint,
    fingerprint,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.leases import (
    LeaseTable,
    LeaseTableAddress,
    entry_of,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    DoneEntry,
    GaveUpEntry,
    Pack,
    PackEntry,
    encode_done,
    encode_gave_up,
    encode_notification,
    encode_renewals,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.metadata import (
    OUR_REQUEST,
    WorkerHandshake,
    encode_refusal,
    encode_refusal_for_upstream,
    encode_reply,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.packing import PackAddress
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.params import (
    Params,
    write_secret,
)

DIRECTORY = Path(__file__).with_name("golden")

FACTORS = {
    name: f"the {name}"
    for name in (
        "vllm_version",
        "model",
        "num_hidden_layers",
        "num_kv_heads",
        "head_size",
        "mla",
        "dtype",
        "kv_cache_dtype",
        "hybrid_kv_cache_manager",
        "multimodal_items_named_by",
        "multimodal_items_hashed_as",
        "draft_method",
        "draft_model",
        "draft_layers",
        "draft_aux_layers",
        "draft_kv_cache_dtype",
        "draft_lookahead",
        "parallel_drafting",
        "weights",
    )
}
"""All that an engine says in version 7. Another one wants another version."""

OFFER: OfferFingerprint = fingerprint(
    range(7, 47),
    40,
    [("lora", "sql"), ("cache_salt", "tenant"), ("mm", "hash", 2, 3), ("embeds", "digest")],
    ([5, 2, 9], [4]),
)
PACK = Pack(
    b"reader of 16 byt",
    [
        PackEntry(
            3,
            "cmpl-a1-0",
            *(OFFER.num_tokens, OFFER.content, OFFER.blocks),
            *(2, 1, 64, True),
            b"\x01\x00\x03\x00",
            b"\x00\x00\x00\x00\x40\x00\x00\x00",
            b"\x05\x00\x00\x00\x09\x00\x00\x00",
        )
    ],
    [1, 2],
)
SECRET = 0x0123456789ABCDEF
REQUEST_ID = "cmpl-a1-0"
NUM_BUCKETS = 4


def worker(pp_rank: int) -> WorkerDescription:
    """A worker with heads in two planes, a latent, and recurrent state."""
    shard = Shard(
        MeshRank(pp_rank, 1),
        {
            "model.layers.0.self_attn.attn": Holding(UnitInterval(2, 4), 4),
            "model.layers.1.self_attn.attn": Holding(UnitInterval(0, 1), 1, True),
            "model.layers.2.mixer/x": Holding(UnitInterval(8, 16), 16),
        },
    )
    slots, state = {"arrangement": "slots", "numbers": "bfloat16"}, {"state": "MAMBA2_ATTN on cpu"}
    layers = (
        LayerCache(
            tuple(Plane(at, 2048, 1024, 64, 64, 2, 16) for at in (4096, 1 << 40)), 0, 1, slots
        ),
        LayerCache((Plane(1 << 50, 9216, 9216, 576, 576, 1, 16, 4),), 0, 2, slots),
        LayerCache((Plane(1 << 51, 4096, 2, 512, 2, 512, 3, 1, 64, True),), 1, 1, state),
    )
    return WorkerDescription(
        "engine-a1",
        shard,
        RankCache(1000, 3, dict(zip(shard.holdings, layers, strict=True))),
        LeaseTableAddress(1 << 41, 1 << 15),
        b"agent",
        PackAddress(1 << 42, 1 << 43, 1 << 26),
    )


WORKERS = tuple(worker(pp_rank) for pp_rank in range(2))

PARAMS: Params = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "engine-a1",
    "remote_request_id": REQUEST_ID,
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "remote_block_ids": [[5, 2, 9], [4]],
    "remote_num_tokens": 40,
    "remote_adapter": "5ca1ab1e5ca1ab1e",
    "remote_secret": write_secret(SECRET),
    "tp_size": 2,
    "pp_size": 2,
}


def _reply() -> list[bytes]:
    said = {
        (each.shard.rank.pp_rank, each.shard.rank.tp_rank): WorkerHandshake(
            FACTORS, encode_worker(each)
        )
        for each in WORKERS
    }
    return encode_reply(said)


def _bucket() -> bytes:
    table = LeaseTable(NUM_BUCKETS)
    table.add(REQUEST_ID)
    table.publish(REQUEST_ID, OFFER)
    return np.array(entries(table.address)[entry_of(REQUEST_ID, NUM_BUCKETS).bucket]).tobytes()


class Message(NamedTuple):
    """A message that this build writes."""

    name: str
    write: Callable[[], list[bytes]]


MESSAGES = (
    Message("request", lambda: [msgspec.msgpack.encode((OUR_REQUEST, 0, 0))]),
    Message("reply", _reply),
    Message("refusal", lambda: [encode_refusal("not today")]),
    Message("refusal-for-upstream", lambda: [encode_refusal_for_upstream()]),
    Message("done", lambda: encode_done("reader", [DoneEntry.of(REQUEST_ID, 2, OFFER)])),
    Message("gave-up", lambda: encode_gave_up("reader", [GaveUpEntry(REQUEST_ID, 2, SECRET)])),
    Message("renew", lambda: encode_renewals([REQUEST_ID, "cmpl-b2-0"])),
    Message("pack", lambda: [encode_notification(PACK)]),
    Message("bucket-of-leases", lambda: [_bucket()]),
    Message("kv_transfer_params", lambda: [msgspec.json.encode(PARAMS)]),
)


def frames_of(version: int, name: str) -> list[bytes]:
    """A message as a version has it."""
    path = DIRECTORY / str(version) / f"{name}.hex"
    return [bytes.fromhex(line) for line in path.read_text().split()]


def main() -> None:
    """Write the messages of the newest version."""
    directory = DIRECTORY / str(SPOKEN.newest)
    directory.mkdir(parents=True)
    for message in MESSAGES:
        lines = [frame.hex() for frame in message.write()]
        (directory / f"{message.name}.hex").write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
