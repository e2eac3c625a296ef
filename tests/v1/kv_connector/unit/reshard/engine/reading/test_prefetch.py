# SPDX-License-Identifier: Apache-2.0
"""What of a request is read while its prompt is computed, and what is left at the end."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.reading.prefetch import (
    FullGroups,
    Prefetched,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    Receive,
    RemoteEngineAddress,
)

ADDRESS = RemoteEngineAddress("prefill", "10.0.0.1", 5600)
CONNECTION = object()


def leg(groups: dict[tuple[int, int], tuple[int, int]], *, shares=(1, 1), per_sequence=False):
    """A leg of some pairs of groups, with how many tokens a block of a rank holds at both ends."""
    ((src_tokens, dst_tokens),) = set(groups.values())
    return SimpleNamespace(
        per_sequence=per_sequence,
        planes_by_groups=[(pair, np.zeros(1, np.int64)) for pair in groups],
        src=SimpleNamespace(tokens_per_id=src_tokens),
        dst=SimpleNamespace(tokens_per_id=dst_tokens),
        read=SimpleNamespace(
            src_tokens=SimpleNamespace(num_shares=shares[0]),
            dst_tokens=SimpleNamespace(num_shares=shares[1]),
        ),
    )


def blocks(num_tokens: int, block_tokens: int, first: int = 100) -> list[int]:
    """The blocks of so many tokens, whose numbers are in no order."""
    return [first + (7 * number) % 97 for number in range(-(-num_tokens // block_tokens))]


def request(num_tokens: int, src_ids, dst_ids, *, attempt: int = 1, name: str = "p-a") -> Receive:
    """A request of so many tokens at both ends."""
    return Receive(ADDRESS, name, dst_ids, src_ids, num_tokens, num_tokens, attempt=attempt)


def begun(groups: FullGroups) -> Prefetched:
    """Nothing is read yet."""
    return Prefetched(groups, CONNECTION)


def read(prefetched: Prefetched, part: Receive) -> Receive | None:
    """Prefetch what is computed, as a consumer does."""
    wanted = prefetched.next(part)
    if wanted is not None:
        prefetched.take(part, wanted)
    return wanted


@given(st.data())
def test_each_block_is_read_once_and_only_when_it_is_computed(data):
    """Blocks of any sizes, a prefix that is cached here, and chunks as they come."""
    sizes = st.sampled_from([1, 2, 3, 4, 6, 8, 16])
    src_tokens, dst_tokens = data.draw(sizes), data.draw(sizes)
    num_tokens = data.draw(st.integers(1, 100))
    num_cached = data.draw(st.integers(0, num_tokens - 1)) // dst_tokens
    src_ids, dst_ids = blocks(num_tokens, src_tokens), blocks(num_tokens, dst_tokens)
    whole = request(num_tokens, [src_ids], [dst_ids[num_cached:]])
    found: list[int] = []
    for computed in sorted(
        data.draw(st.sets(st.integers(1, num_tokens - 1) if num_tokens > 1 else st.nothing()))
    ):
        told = [src_ids[: computed // src_tokens]]
        groups = FullGroups.of([leg({(0, 0): (src_tokens, dst_tokens)})], told, ())
        part = replace(whole, remote_block_ids=told, remote_tokens=computed)
        if not found:
            prefetched = begun(groups)
        wanted = read(prefetched, part)
        if wanted is None:
            continue
        assert wanted.local_tokens == wanted.remote_tokens <= computed
        (src,), (dst,) = wanted.remote_block_ids, wanted.local_block_ids
        stop = wanted.local_tokens
        assert src == src_ids[stop // src_tokens - len(src) : stop // src_tokens]
        assert dst == dst_ids[stop // dst_tokens - len(dst) : stop // dst_tokens]
        # The blocks there begin no later than those here.
        assert stop - len(src) * src_tokens <= stop - len(dst) * dst_tokens
        found += dst
    if found:
        assert prefetched.is_of(whole, CONNECTION)
        rest = prefetched.rest_of(whole)
        assert rest == replace(whole, local_block_ids=rest.local_block_ids)
        found += rest.local_block_ids[0]
        assert found == dst_ids[num_cached:]


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 9))
def test_ranks_that_share_tokens_out_have_larger_blocks(src_shares, dst_shares, num_blocks):
    """A block id of theirs stands for the tokens of all of them."""
    groups = FullGroups.of([leg({(0, 0): (4, 8)}, shares=(src_shares, dst_shares))], [[1]], ())
    assert groups == FullGroups({0: 4 * src_shares}, {0: 8 * dst_shares})
    assert groups.unit_tokens % (4 * src_shares) == groups.unit_tokens % (8 * dst_shares) == 0


def test_what_keeps_no_tokens_is_left_to_the_end():
    """Windows and state are whole at the end only, and are read whole then."""
    legs = [
        leg({(0, 1): (4, 4), (1, 0): (4, 4)}),
        leg({(2, 2): (1, 1)}, per_sequence=True),
    ]
    groups = FullGroups.of(legs, [[5, 6], [], []], {0})
    assert groups == FullGroups({0: 4}, {1: 4})
    whole = request(12, [[5, 6, 7], [8, 9], [3]], [[0, 22, 23], [31, 32, 33], [41]])
    part = replace(whole, remote_block_ids=[[5, 6], [], []], remote_tokens=9)
    prefetched = begun(groups)
    wanted = read(prefetched, part)
    assert wanted is not None and wanted.local_tokens == 8
    assert wanted.remote_block_ids == [[5, 6], [], []]
    assert wanted.local_block_ids == [[], [31, 32], []]
    rest = prefetched.rest_of(whole)
    assert rest.local_block_ids == [[0, 22, 23], [33], [41]]


@pytest.mark.parametrize("dst_tokens", [2, 8, 16])
def test_group_whose_first_block_is_full_later_is_read_at_the_end(dst_tokens):
    """Blocks of one group may be many times as long as another's: none of its is left out."""
    legs = [leg({(0, 0): (2, 2)}), leg({(1, 1): (8, dst_tokens)})]
    prefetched = begun(FullGroups.of(legs, [[1], []], ()))
    src_ids = [blocks(16, 2), blocks(16, 8)]
    dst_ids = [blocks(16, 2, 1), blocks(16, dst_tokens, 1)]
    whole = request(16, src_ids, dst_ids)
    found: list[int] = []
    for computed in (6, 9, 15):
        told = [src_ids[0][: computed // 2], src_ids[1][: computed // 8]]
        part = replace(whole, remote_block_ids=told, remote_tokens=computed)
        wanted = read(prefetched, part)
        assert wanted is not None and not wanted.local_block_ids[1]
        found += wanted.local_block_ids[0]
    rest = prefetched.rest_of(whole).local_block_ids
    assert [found + rest[0], rest[1]] == dst_ids


SRC, DST = [11, 12, 13, 14], [21, 22, 23, 24]


def prefetched_half() -> Prefetched:
    """Two blocks of four that were read."""
    prefetched = begun(FullGroups({0: 4}, {0: 4}))
    part = request(16, [SRC[:2]], [DST])
    assert read(prefetched, replace(part, remote_tokens=9))
    return prefetched


@pytest.mark.parametrize(
    "change",
    [
        {"attempt": 2},
        {"name": "p-b"},
        {"src_ids": [[11, 99, 13, 14]]},
        {"src_ids": [[11]]},
        {"src_ids": []},
    ],
    ids=["another attempt", "another request", "another block", "fewer blocks", "no group"],
)
def test_what_is_not_of_the_offer_does_not_count(change):
    """It is read anew."""
    changed = {"src_ids": [SRC], "dst_ids": [DST], **change}
    assert not prefetched_half().is_of(request(16, **changed), CONNECTION)
    assert prefetched_half().is_of(request(16, [SRC], [DST]), CONNECTION)


def test_what_another_connection_has_read_does_not_count():
    """The engine may have begun anew, with the same names and numbers."""
    prefetched = prefetched_half()
    assert not prefetched.is_of(request(16, [SRC], [DST]), object())
    prefetched.is_invalid = True
    assert not prefetched.is_of(request(16, [SRC], [DST]), CONNECTION)


@given(
    st.lists(st.integers(0, 99), max_size=6),
    st.integers(1, 6),
    st.integers(1, 8),
    st.integers(0, 7),
)
def test_source_that_tells_of_fewer_blocks_is_not_believed(told, num_full, block_tokens, more):
    """It may say anything: nothing is read that it does not name."""
    groups = FullGroups({0: block_tokens}, {0: block_tokens})
    part = request(60, [told], [blocks(60, block_tokens)])
    computed = num_full * block_tokens + more % block_tokens
    wanted = begun(groups).next(replace(part, remote_tokens=computed))
    read_ids = None if wanted is None else wanted.remote_block_ids
    assert read_ids == ([told[:num_full]] if len(told) >= num_full else None)
