# SPDX-License-Identifier: Apache-2.0
"""Whole workers that pack for one another, over real NIXL."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.v1.kv_connector.unit.reshard.engine.workers import (
    DEADLINE_S,
    OFFER,
    Engine,
    Progress,
    assert_received,
    fill,
    receive,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine import stats
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport import packed_windows

NHD = dict(token_major=True)

packed = pytest.mark.parametrize("engines", ["packed"], indirect=True)


def strategies(engine: Engine) -> set[str]:
    """How all that its workers have read since the last call was read."""
    found: set[str] = set()
    for worker in engine.workers.values():
        taken = worker.report.take_stats() or stats.ReshardStats()
        found |= set(taken.data["read_strategies"])
    return found


def read(engines, prefill: dict, decode: dict, *, held: list[int]) -> set[str]:
    """Read blocks of an offer that says which it has; returns how they were read."""
    p, d = engines("prefill", **prefill), engines("decode", **decode)
    address = p.serve()
    whole = fill(p, [5, 2, 9])
    p.offer("p-a", block_ids=(held,))
    d.start(receive={"d-a": receive(address, [3, 4, 1], [5, 2, 9])})
    progress = Progress(p, d)
    progress.until(d, received="d-a")
    progress.until(p, sent="p-a")
    assert_received(d, [3, 4, 1], whole)
    return strategies(d)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (dict(tp=2, **NHD), NHD),
        (NHD, dict(tp=2, **NHD)),
        (dict(pp=2, **NHD), dict(tp=2)),
        (dict(pp=2, mla=True, heads=1), dict(tp=2, mla=True, heads=1)),
    ],
    ids=["ranks gathered", "ranks parted", "stages to ranks", "latents"],
)
@packed
def test_packed_bytes_are_those_of_the_blocks(engines, monkeypatch, prefill, decode):
    """However its pieces lie, a request that is packed arrives whole."""
    # A loaded machine may take long until it has packed.
    monkeypatch.setattr(packed_windows, "PACKED_WITHIN_S", DEADLINE_S)
    assert read(engines, prefill, decode, held=[5, 2, 9]) == {"packed"}


def wait_for_refusal(monkeypatch, caplog_vllm, refusal: str) -> None:
    """Have readers wait for windows until the holder has said that it packs none."""
    look = packed_windows.PackedWindows.look

    def look_once_it_is_said(windows, now_s: float) -> None:
        if refusal in caplog_vllm.text:
            windows.lose_all()
        look(windows, now_s)

    monkeypatch.setattr(packed_windows, "PACKED_WITHIN_S", DEADLINE_S)
    monkeypatch.setattr(packed_windows.PackedWindows, "look", look_once_it_is_said)


@packed
def test_only_blocks_of_the_offer_are_packed(engines, monkeypatch, caplog_vllm):
    """A reader that asks for others gets nothing packed, and reads direct what it was told of."""
    wait_for_refusal(monkeypatch, caplog_vllm, "some blocks are not its own")
    assert read(engines, NHD, dict(tp=2, **NHD), held=[5, 2]) == {"direct"}


@packed
def test_worker_without_an_arena_packs_nothing(engines):
    """`packing_arena_bytes` 0 at the holder: its readers choose between the other ways."""
    without = dict(packing_arena_bytes=0, **NHD)
    assert "packed" not in read(engines, without, dict(tp=2, **NHD), held=[5, 2, 9])


@packed
def test_another_offers_tokens_are_not_packed(engines, monkeypatch, caplog_vllm):
    """Who names a request and not its tokens learns nothing of it by asking."""
    ask = packed_windows.PackedWindows.ask

    def ask_for_another(windows, claim, *rest, **more):
        return ask(windows, replace(claim, fingerprint=replace(OFFER, content=9)), *rest, **more)

    monkeypatch.setattr(packed_windows.PackedWindows, "ask", ask_for_another)
    wait_for_refusal(monkeypatch, caplog_vllm, "fingerprint of another offer")
    assert read(engines, NHD, dict(tp=2, **NHD), held=[5, 2, 9]) == {"direct"}


@packed
def test_holder_that_hears_nothing_is_not_waited_for(engines, monkeypatch):
    """Its readers read direct, and ask it for nothing more for a while."""
    monkeypatch.setattr(packed_windows, "encode_notification", lambda _: b"")
    monkeypatch.setattr(packed_windows, "_DIRECT_FOR_S", DEADLINE_S)
    asked = []
    ask = packed_windows.PackedWindows.ask
    monkeypatch.setattr(
        packed_windows.PackedWindows,
        "ask",
        lambda *each, **more: asked.append(each) or ask(*each, **more),
    )
    p, d = engines("prefill", **NHD), engines("decode", tp=2, **NHD)
    address = p.serve()
    whole = fill(p, [5, 2, 9])
    progress = Progress(p, d)
    for name in ("a", "b"):
        p.offer(f"p-{name}", block_ids=([5, 2, 9],))
        wanted = receive(address, [3, 4, 1], [5, 2, 9], remote_request_id=f"p-{name}")
        d.start(receive={name: wanted})
        progress.until(d, received=name)
        assert_received(d, [3, 4, 1], whole)
        assert strategies(d) == {"direct"}
    # One window of each rank.
    assert len(asked) == 2
