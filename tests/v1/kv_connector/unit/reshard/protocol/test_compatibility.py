# SPDX-License-Identifier: Apache-2.0
"""Two engines' factors are compared."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.v1.kv_connector.unit.reshard.protocol import golden
from tests.v1.kv_connector.unit.reshard.protocol.described import ANY_MESH
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import (
    RemoteIncompatibleError,
    RemoteRefusedError,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol import (
    compatibility,
    description,
    metadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.compatibility import (
    SPOKEN,
    VersionRange,
    check_compatibility,
    read_verb,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.leases import (
    Held,
    entry_of,
    look_up,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    Done,
    DoneEntry,
    GaveUp,
    GaveUpEntry,
    Renew,
    decode_notification,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.metadata import (
    decode_reply,
    encode_replies,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.packing import PackAddress
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.params import (
    remote_blocks,
    sanitize_params,
)


def test_factor_that_one_side_does_not_know():
    """A factor that only one engine names is a difference, on either side."""
    with pytest.raises(RemoteIncompatibleError, match="colour is unset there and red here"):
        check_compatibility({"colour": "red"}, {})
    with pytest.raises(RemoteIncompatibleError, match="colour is red there and unset here"):
        check_compatibility({}, {"colour": "red"})


def test_factors_that_a_peer_made_up_do_not_flood_the_log():
    """Some are named, with what makes them equal, and the others are counted."""
    with pytest.raises(RemoteIncompatibleError, match=r"15 is 15 there .*; and 4 more: ") as caught:
        check_compatibility({}, {f"{number:02}": str(number) for number in range(20)})
    assert len(str(caught.value)) < 1000


VERSIONS = range(SPOKEN.oldest, SPOKEN.newest + 1)
every_version = pytest.mark.parametrize("version", VERSIONS)
NOTIFICATIONS = {
    "done": Done("reader", [DoneEntry.of(golden.REQUEST_ID, 2, golden.OFFER)]),
    "gave-up": GaveUp("reader", [GaveUpEntry(golden.REQUEST_ID, 2, golden.SECRET)]),
    "renew": Renew([golden.REQUEST_ID, "cmpl-b2-0"]),
}


@st.composite
def ranges(draw: st.DrawFn) -> VersionRange:
    """Any versions."""
    oldest = draw(st.integers(0, 20))
    return VersionRange(oldest, oldest + draw(st.integers(0, 9)))


@given(ranges(), ranges())
def test_newest_version_of_both_is_agreed(one, other):
    """Whoever asks whom, they find the same; and nothing where they have none in common."""
    both = [version for version in range(40) if version in one and version in other]
    assert one.agreed(other) == other.agreed(one) == max(both, default=None)


@given(ranges())
def test_range_survives_a_request(versions):
    """What a peer says that it speaks is what is heard."""
    assert read_verb(str(versions).encode()) == versions


@pytest.mark.parametrize(
    "verb",
    b"reshard reshard/ reshard/x reshard/6-5 reshard/5- reshard/-5 reshard/5-6-7 reshard/1234567 "
    b"xreshard/5 get_meta_msg".split(),
)
def test_other_verbs_are_none_of_ours(verb):
    """They are refused, and not guessed at."""
    assert read_verb(verb) is None


@pytest.mark.parametrize("message", golden.MESSAGES, ids=lambda message: message.name)
def test_messages_are_written_as_ever(message):
    """What is released is read by peers that are not upgraded yet: other bytes, other version."""
    assert message.write() == golden.frames_of(SPOKEN.newest, message.name)


def test_every_spoken_version_has_its_messages():
    """As long as it is spoken."""
    kept = {int(path.name) for path in golden.DIRECTORY.iterdir()}
    assert set(VERSIONS) == kept


@every_version
def test_request_is_understood(version):
    """Its verb says what the peer speaks."""
    (frame,) = golden.frames_of(version, "request")
    verb, *numbers = msgspec.msgpack.decode(frame)
    spoken = read_verb(verb.partition(b" ")[0])
    assert spoken is not None
    assert (spoken.newest, spoken.agreed(SPOKEN)) == (version, version)
    assert numbers == [0, 0]


@every_version
def test_reply_is_understood(version):
    """All that it says is believed."""
    reply = decode_reply(golden.frames_of(version, "reply"), golden.FACTORS, ANY_MESH)
    assert (reply.version, reply.release) == (version, "the vllm_version")
    assert reply.compares_weights == (version >= 6)
    packs = version >= 7
    workers = tuple(
        each if packs else replace(each, packing=PackAddress()) for each in golden.WORKERS
    )
    assert reply.workers == workers


@every_version
def test_refusal_is_understood(version):
    """Its words are passed on."""
    with pytest.raises(RemoteRefusedError, match="not today"):
        decode_reply(golden.frames_of(version, "refusal"), golden.FACTORS, ANY_MESH)


@every_version
@pytest.mark.parametrize("name", NOTIFICATIONS)
def test_notification_is_understood(version, name):
    """Blocks of peers that are not upgraded yet are given back as ever."""
    (frame,) = golden.frames_of(version, name)
    assert decode_notification(frame) == NOTIFICATIONS[name]


def test_packing_is_asked_for_as_ever():
    """Holders of version 7 pack what it says."""
    (frame,) = golden.frames_of(7, "pack")
    assert decode_notification(frame) == golden.PACK


@every_version
def test_lease_is_found(version):
    """Under the same name, with the same digests of tokens and of blocks."""
    (frame,) = golden.frames_of(version, "bucket-of-leases")
    entry = entry_of(golden.REQUEST_ID, golden.NUM_BUCKETS)
    assert look_up(np.frombuffer(frame, np.uint64), entry.name) == Held(True, golden.OFFER)


@every_version
def test_parameters_are_understood(version):
    """A router may have them from an engine that is not upgraded yet."""
    (frame,) = golden.frames_of(version, "kv_transfer_params")
    params, fault = sanitize_params(msgspec.json.decode(frame), reads_back=False)
    assert fault is None and params is not None
    source = remote_blocks(params)
    assert not isinstance(source, str)
    assert source.remote_block_ids == [[5, 2, 9], [4]]
    assert (source.remote_num_tokens, source.secret) == (40, golden.SECRET)


def test_what_an_older_version_does_not_have_is_left_out(monkeypatch):
    """Neither said to a peer that speaks it, nor asked of one."""
    newer = VersionRange(SPOKEN.oldest, SPOKEN.newest + 1)
    monkeypatch.setattr(metadata, "SPOKEN", newer)
    monkeypatch.setattr(compatibility, "FACTORS_SINCE", {"weights": 6, "colour": newer.newest})
    factors = {**golden.FACTORS, "colour": "red"}
    said = {
        (each.shard.rank.pp_rank, 1): metadata.WorkerHandshake(
            factors, description.encode_worker(each)
        )
        for each in golden.WORKERS
    }
    replies = encode_replies(said)
    assert replies[newer.oldest] == golden.frames_of(newer.oldest, "reply")
    assert decode_reply(replies[newer.oldest], factors, ANY_MESH).version == newer.oldest
    assert decode_reply(replies[newer.newest], factors, ANY_MESH).version == newer.newest
    with pytest.raises(RemoteIncompatibleError, match="colour is red there and blue here"):
        decode_reply(replies[newer.newest], {**factors, "colour": "blue"}, ANY_MESH)
