# SPDX-License-Identifier: Apache-2.0
"""What an engine answers, to the wire and back, and what comes of anything else."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlHandshakePayload

from tests.v1.kv_connector.unit.reshard.protocol.described import (
    ANY_MESH,
    BOUNDS,
    HOSTILE,
    describe,
    descriptions,
    msgpack_values,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import (
    LocalLayoutError,
    RemoteHandshakeError,
    RemoteIncompatibleError,
    RemoteRefusedError,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol import metadata
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.bounds import MAX_GREETING_BYTES
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.compatibility import (
    CONNECTOR_NAME,
    RELEASE_FACTOR,
    SPOKEN,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.description import (
    WorkerDescription,
    encode_worker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.metadata import (
    WorkerHandshake,
    decode_reply,
    encode_refusal,
    encode_refusal_for_upstream,
    encode_reply,
    factors_digest,
)

FACTORS = {"dtype": "bfloat16", "num_kv_heads": "2"}
encode = msgspec.msgpack.encode


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


@given(st.lists(descriptions(), min_size=1, max_size=4, unique_by=lambda said: said.shard.rank))
def test_engine_survives_the_wire(workers):
    """All workers arrive, in the order of ranks, whatever order they were given in."""
    workers = [dataclasses.replace(worker, engine_id="engine") for worker in workers]
    decoded = decode_reply(encode_reply(handshakes(*workers)), FACTORS, ANY_MESH)
    assert (decoded.version, decoded.release) == (SPOKEN.newest, None)
    assert decoded.workers == tuple(sorted(workers, key=lambda worker: worker.shard.rank))


@pytest.mark.parametrize("data", HOSTILE, ids=lambda data: data[:6].hex())
def test_hostile_bytes_are_refused(data):
    """What kills careless decoders ends as a typed error."""
    with pytest.raises(RemoteHandshakeError):
        decode_reply([data], FACTORS, BOUNDS)


def test_hostile_fields_are_refused():
    """Nesting and broken text are errors also where a field is expected, or skipped."""
    for value in (b"\x91" * 6_000, b"\xa2\xff\xfe"):
        with pytest.raises(RemoteHandshakeError, match="not understood"):
            decode_reply([b"\x81" + encode("connector") + value], FACTORS, BOUNDS)
        with pytest.raises(RemoteHandshakeError):
            decode_reply([b"\x81" + encode("unknown") + value], FACTORS, BOUNDS)


@given(st.binary() | msgpack_values.map(encode))
def test_random_bytes_are_refused(data):
    """Neither noise nor well-formed msgpack of other types is taken for a peer."""
    with pytest.raises(RemoteHandshakeError):
        decode_reply([data], FACTORS, BOUNDS)


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
        decode_reply([encode(greeting), *workers], FACTORS, BOUNDS)


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

    def test_weights_that_one_worker_does_not_know(self):
        """A node may lack the checkpoint's files: its engine then tells no weights."""
        told = {**FACTORS, "weights": "5ca1ab1e"}
        workers = handshakes(describe((0, 0)), factors=told) | handshakes(describe((0, 1)))
        reply = decode_reply(encode_reply(workers), told, ANY_MESH)
        assert not reply.compares_weights
        workers |= handshakes(describe((0, 1)), factors={**told, "weights": "other"})
        with pytest.raises(LocalLayoutError, match="weights is 5ca1ab1e on rank pp0tp0 but other"):
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


@pytest.mark.parametrize("changed", FACTORS, ids=str)
def test_digest_is_of_all_that_must_be_equal(changed):
    """In any order, from the frames of an answer; the release, which may differ, is not in it."""

    def digest(factors):
        return factors_digest(encode_reply(handshakes(describe(), factors=factors)))

    same = digest({name: FACTORS[name] for name in reversed(FACTORS)} | {RELEASE_FACTOR: "9.9"})
    assert digest(FACTORS) == same
    assert digest({**FACTORS, changed: "another"}) != same


class TestPeer:
    """`decode_reply` on peers that do not fit."""

    def test_upstreams_connector(self):
        """It is recognised by the beginning of its own handshake."""
        message = r"runs upstream's NixlConnector.*install the plugin vllm-kv-reshard"
        with pytest.raises(RemoteIncompatibleError, match=message):
            decode_reply([encode(NixlHandshakePayload("5ca1ab1e", b""))], FACTORS, BOUNDS)

    def test_another_connector(self):
        """It is named."""
        with pytest.raises(RemoteIncompatibleError, match=r"connector other, but .* reshard/5"):
            decode_reply([encode({"connector": "other"})], FACTORS, BOUNDS)

    def test_another_version_is_not_read_further(self):
        """Both versions are named, however else that version writes what follows."""
        for change in ({"factors": 1}, {"refusal": f"request {SPOKEN} is unknown"}):
            greeting, *_ = with_greeting(**change, version=SPOKEN.newest + 1)
            for reply in ([greeting], [greeting, b"\xc1"]):
                with pytest.raises(
                    RemoteIncompatibleError,
                    match=rf"peer speaks reshard/{SPOKEN.newest + 1}.* {SPOKEN}",
                ):
                    decode_reply(reply, FACTORS, BOUNDS)

    def test_version_before_frames_is_told_apart(self):
        """It answered in one frame, and refuses in one that is read as ever."""
        refusal = {"connector": "reshard", "version": 3, "refusal": "request reshard/5 is unknown"}
        for answer in (refusal, {**refusal, "refusal": "", "factors": {}, "workers": [b"x"]}):
            with pytest.raises(
                RemoteIncompatibleError, match=r"peer speaks reshard/3, .* reshard/5"
            ):
                decode_reply([encode(answer)], FACTORS, BOUNDS)

    def test_factors_are_checked_before_workers_are_read(self):
        """A description is only read where its meaning is agreed upon."""
        reply = [*with_greeting()[:1], b"\xc1"]
        with pytest.raises(RemoteIncompatibleError, match="num_kv_heads is 2 there and 4 here"):
            decode_reply(reply, {**FACTORS, "num_kv_heads": "4"}, BOUNDS)
        with pytest.raises(RemoteHandshakeError, match="worker's description of 1 bytes"):
            decode_reply(reply, FACTORS, BOUNDS)

    def test_refusal(self):
        """The peer's reason is passed on."""
        with pytest.raises(RemoteRefusedError, match="the peer refuses: not today"):
            decode_reply([encode_refusal("not today")], FACTORS, BOUNDS)

    def test_rank_described_twice(self):
        """A rank is in one place."""
        greeting, worker = with_greeting()
        with pytest.raises(RemoteHandshakeError, match="2 ranks, the last of them pp0tp0"):
            decode_reply([greeting, worker, worker], FACTORS, BOUNDS)

    def test_several_engines(self):
        """One side channel serves one engine."""
        other = encode_worker(describe((0, 1), "other"))
        with pytest.raises(RemoteHandshakeError, match="several engines, engine and other"):
            decode_reply([*with_greeting(), other], FACTORS, BOUNDS)

    def test_no_workers(self):
        """An engine has at least one worker."""
        with pytest.raises(RemoteHandshakeError, match="describes 0 ranks, but an engine has 1 to"):
            decode_reply(with_greeting()[:1], FACTORS, BOUNDS)

    def test_greeting_that_is_too_long(self):
        """It is not decoded, whatever it says."""
        with pytest.raises(RemoteHandshakeError, match=r"begins with 65537 bytes, .* 65536"):
            decode_reply([bytes(MAX_GREETING_BYTES + 1)], FACTORS, BOUNDS)

    def test_new_fields_are_no_harm(self):
        """What a later build adds to this version is passed over."""
        assert decode_reply(with_greeting(more=1), FACTORS, BOUNDS)


def test_refusal_for_upstream_is_what_upstream_reads():
    """Its decoder accepts it, no hash equals it, and it says what is wrong."""
    payload = msgspec.msgpack.decode(encode_refusal_for_upstream(), type=NixlHandshakePayload)
    assert "does not run upstream's NixlConnector" in payload.compatibility_hash
    assert payload.agent_metadata_bytes == b""
