# SPDX-License-Identifier: Apache-2.0
"""Whole workers that read what has arrived once more, over real NIXL."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.v1.kv_connector.unit.reshard.engine.workers import (
    DEADLINE_S,
    Engine,
    Progress,
    assert_received,
    failures,
    fill,
    receive,
    stats_with,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.connecting import dialer
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.reading import verifying
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.reading.verifying import Verifier
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import TransferError
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.cache import Plane, RankCache
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport import packed_windows
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.arena import ArenaCopier
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.connection import PeerConnection

NHD = dict(token_major=True)

both_ways = pytest.mark.parametrize("engines", ["auto", "packed"], indirect=True)
"""What has arrived in either way is read in the other."""

EQUAL = "were read again and compared, and are equal."


@pytest.fixture(autouse=True)
def _waits(monkeypatch):
    """A loaded machine may take long until it has packed; no step is in flight for long."""
    monkeypatch.setattr(packed_windows, "PACKED_WITHIN_S", DEADLINE_S)
    monkeypatch.setattr(verifying, "_PAUSES_S", (0.0, 0.0))


class Pair:
    """Two engines, and a sequence that one of them has.

    Args:
        engines: Makes engines.
        prefill: Layout of the one that has it.
        decode: Layout of the one that reads it.
    """

    def __init__(self, engines, prefill: dict, decode: dict) -> None:
        self.p: Engine = engines("prefill", **prefill)
        self.d: Engine = engines("decode", **{"verify_reads": 1, **decode})
        self.progress = Progress(self.p, self.d)
        self.address = self.p.serve()
        self.whole = fill(self.p, [5, 2, 9])

    def start(self, name: str) -> None:
        """Begin to read the sequence."""
        self.p.offer(f"p-{name}", block_ids=([5, 2, 9],))
        wanted = receive(self.address, [3, 4, 1], [5, 2, 9], remote_request_id=f"p-{name}")
        self.d.start(receive={name: wanted})

    def read(self, name: str) -> None:
        """Read the sequence."""
        self.start(name)
        self.progress.until(self.d, received=name)
        assert_received(self.d, [3, 4, 1], self.whole)

    def fail(self, name: str) -> None:
        """Have the sequence not be read, as other bytes have arrived."""
        self.start(name)
        for each in self.d.workers.values():
            assert failures(each, self.progress) == {name: {3, 4, 1}}
            counted = stats_with(each, "read_failures", self.progress)
            assert counted.data["read_failures"] == ["content"]
        self.progress.until(self.d, received=name)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (dict(tp=2, **NHD), NHD),
        (dict(pp=2, **NHD), dict(tp=2)),
        (dict(pp=2, mla=True, heads=1), dict(tp=2, mla=True, heads=1)),
    ],
    ids=["ranks gathered", "stages to ranks", "latents"],
)
@both_ways
def test_first_request_is_read_once_more(engines, caplog_vllm, prefill, decode):
    """The first request of a connection is found equal, and those after it are not looked at."""
    pair = Pair(engines, prefill, decode)
    pair.read("a")
    lines = [each for each in caplog_vllm.messages if "were read again" in each]
    assert len(lines) == len(pair.d.workers)
    for line in lines:
        assert EQUAL in line
        # All windows, and at least one.
        verified, wanted = line.split(", ")[1].split(" windows")[0].split(" of ")
        assert verified == wanted != "0"
    pair.read("b")
    assert [each for each in caplog_vllm.messages if "were read again" in each] == lines


@pytest.mark.parametrize("engines", ["auto"], indirect=True)
def test_as_many_are_verified_as_are_wanted(engines, caplog_vllm):
    """`verify_reads` says how many requests of each connection are read once more."""
    for number in (0, 2):
        pair = Pair(engines, NHD, dict(verify_reads=number, **NHD))
        for name in ("a", "b", "c"):
            pair.read(name)
        assert sum("were read again" in each for each in caplog_vllm.messages) == number


def with_planes(cache: RankCache, change: Callable[[Plane], Plane]) -> RankCache:
    """A cache with another form of each plane."""
    layers = {
        name: replace(layer, planes=tuple(map(change, layer.planes)))
        for name, layer in cache.layers.items()
    }
    return replace(cache, layers=layers)


def wrong_strides(cache: RankCache) -> RankCache:
    """Heads and tokens in the other order."""

    def head_major(plane: Plane) -> Plane:
        size_bytes = plane.slot_bytes
        head_bytes = plane.block_tokens * size_bytes
        return replace(plane, head_stride_bytes=head_bytes, slot_stride_bytes=size_bytes)

    return with_planes(cache, head_major)


def swapped_planes(cache: RankCache) -> RankCache:
    """Planes of other layers."""
    others = [*reversed(cache.layers.values())]
    return replace(cache, layers=dict(zip(cache.layers, others, strict=True)))


def a_head_off_by_one(cache: RankCache) -> RankCache:
    """Every page from its second head on."""
    # Behind the last block there is no other.
    return with_planes(
        replace(cache, num_block_ids=cache.num_block_ids - 1),
        lambda plane: replace(plane, address=plane.address + plane.head_stride_bytes),
    )


@pytest.mark.parametrize("mistake", [wrong_strides, swapped_planes, a_head_off_by_one])
@both_ways
def test_mistakes_are_found(engines, monkeypatch, caplog_vllm, mistake):
    """What a reader has wrong of the other engine's memory fails requests, and names the place."""
    lower = dialer.lower_engine
    monkeypatch.setattr(
        dialer,
        "lower_engine",
        lambda descriptions, *rest: lower(
            {rank: replace(each, cache=mistake(each.cache)) for rank, each in descriptions.items()},
            *rest,
        ),
    )
    pair = Pair(engines, NHD, NHD)
    pair.fail("a")
    assert "pieces differ from what" in caplog_vllm.text
    assert "layer layers.0 of KV-cache groups 0 there and 0 here" in caplog_vllm.text
    assert "a head every" in caplog_vllm.text
    # Nor is the next one believed.
    pair.fail("b")
    assert EQUAL not in caplog_vllm.text


@pytest.fixture
def before_comparing(monkeypatch):
    """Sets what happens each time before a request is compared."""

    def set_(act: Callable[[], None]) -> None:
        compare = Verifier._compare

        async def acted(*each):
            act()
            return await compare(*each)

        monkeypatch.setattr(Verifier, "_compare", acted)

    return set_


@both_ways
def test_bytes_of_another_request_are_found(engines, before_comparing, caplog_vllm):
    """A block that has another request's bytes however often it is read is not taken."""
    pair = Pair(engines, NHD, NHD)
    before_comparing(lambda: fill(pair.d, [4], seed=2))
    pair.fail("a")
    assert "in block 2 there and 4 here" in caplog_vllm.text


@both_ways
def test_what_was_written_late_is_read_anew(engines, before_comparing, caplog_vllm):
    """A step in flight at the holder may write once it has been read, which fails no request."""
    pair = Pair(engines, NHD, NHD)
    seeds = iter((5, 6))

    def write_late() -> None:
        if (seed := next(seeds, None)) is not None:
            pair.whole = fill(pair.p, [5, 2, 9], seed=seed)

    before_comparing(write_late)
    pair.read("a")
    assert "request a was read anew: at first, " in caplog_vllm.text
    assert EQUAL in caplog_vllm.text


@pytest.mark.parametrize("engines", ["auto"], indirect=True)
def test_only_one_of_many_at_once_is_verified(engines, caplog_vllm):
    """Those that arrive while the first one is compared wait for that, and are believed."""
    pair = Pair(engines, NHD, NHD)
    names = [f"r{number}" for number in range(4)]
    for name in names:
        pair.start(name)
    for name in names:
        pair.progress.until(pair.d, received=name)
    assert sum(EQUAL in each for each in caplog_vllm.messages) == 1


@pytest.mark.parametrize("engines", ["auto"], indirect=True)
def test_nothing_is_believed_before_one_was_equal(engines, before_comparing):
    """However many arrive at once."""
    pair = Pair(engines, NHD, NHD)
    before_comparing(lambda: fill(pair.d, [4], seed=2))
    names = [f"r{number}" for number in range(4)]
    for name in names:
        pair.start(name)
    for each in pair.d.workers.values():
        assert failures(each, pair.progress, 4).keys() == set(names)


@pytest.mark.parametrize("engines", ["auto"], indirect=True)
def test_what_has_differed_and_cannot_be_compared_again_fails(
    engines, monkeypatch, before_comparing
):
    """It is not taken for right because the holder packs nothing more."""
    pair = Pair(engines, NHD, NHD)
    served = iter((True,))

    def pack_once() -> None:
        fill(pair.d, [4], seed=2)
        serves = next(served, False)
        monkeypatch.setattr(packed_windows.PackedWindows, "serves", lambda *_: serves)

    before_comparing(pack_once)
    pair.fail("a")


@pytest.mark.parametrize("engines", ["auto"], indirect=True)
def test_holder_that_packs_nothing_is_believed(engines, caplog_vllm):
    """Nothing is verified where the holder has no arena, and one line says so."""
    pair = Pair(engines, dict(packing_arena_bytes=0), {})
    pair.read("a")
    pair.read("b")
    assert sum("nothing is verified" in each for each in caplog_vllm.messages) == 1
    assert EQUAL not in caplog_vllm.text


@pytest.mark.parametrize("engines", ["auto"], indirect=True)
def test_what_was_not_packed_in_time_is_verified_later(engines, monkeypatch, caplog_vllm):
    """It counts for nothing, and the next request is compared in its place."""
    pair = Pair(engines, NHD, NHD)
    with monkeypatch.context() as patch:
        patch.setattr(packed_windows, "PACKED_WITHIN_S", 0.0)
        pair.read("a")
    assert "0 of 1 windows of request a were compared: not all" in caplog_vllm.text
    monkeypatch.setattr(packed_windows.PackedWindows, "serves", lambda *_: True)
    pair.read("b")
    assert "windows of request b were read again and compared" in caplog_vllm.text


@pytest.mark.parametrize("engines", ["auto"], indirect=True)
def test_what_cannot_be_compared_costs_no_request(engines, monkeypatch, caplog_vllm):
    """As where the device has no memory left for it: what has arrived is served."""
    monkeypatch.setattr(ArenaCopier, "differing", lambda *_: 1 / 0)
    pair = Pair(engines, NHD, NHD)
    for name in ("a", "b", "c", "d"):
        pair.read(name)
    assert EQUAL not in caplog_vllm.text
    # Nor is it tried for ever.
    assert sum("could not be compared: " in each for each in caplog_vllm.messages) == 3


@pytest.mark.parametrize("engines", ["auto"], indirect=True)
def test_comparison_that_breaks_off_costs_no_request(engines, monkeypatch, caplog_vllm):
    """What has arrived waits for no read that only verifies, nor do its blocks."""
    pair = Pair(engines, NHD, NHD)
    read, num_read = PeerConnection.read, 0

    def refused(*each):
        nonlocal num_read
        num_read += 1
        if num_read == 2:
            raise TransferError("refused")
        return read(*each)

    monkeypatch.setattr(PeerConnection, "read", refused)
    pair.read("a")
    assert num_read >= 2 and "0 of 1 windows of request a were compared: " in caplog_vllm.text


@pytest.mark.parametrize("engines", ["auto"], indirect=True)
def test_comparison_ends_halfway_to_the_deadline(engines, monkeypatch, caplog_vllm):
    """A request goes on without what cannot be compared until then."""
    pair = Pair(engines, NHD, dict(kv_read_timeout_s=1.0, **NHD))
    monkeypatch.setattr(packed_windows.PackedWindows, "has_room", False)
    pair.read("a")
    assert "0 of 1 windows of request a were compared: not all" in caplog_vllm.text
