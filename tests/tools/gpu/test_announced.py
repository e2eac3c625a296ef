# SPDX-License-Identifier: Apache-2.0
"""What announcing offers gains: that it is withheld by turns, and what is made of what was seen."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from tools.gpu import announced
from tools.gpu.announced import Gain
from tools.pdstack.modules.offers_by_turns import offers_by_turns
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.scheduling import offers
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.scheduling.offers import OfferBook
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.fingerprint import (
    OfferFingerprint,
)

PROMPTS = [[1, 2], [3]]
FASTER_S, SLOWER_S = 0.25, 0.75


@pytest.fixture
def book(monkeypatch, tmp_path):
    """Offers of a scheduler whose engine has the module, and what workers heard of them."""
    heard: list[bytes] = []
    announcer = SimpleNamespace(address=None, send=heard.append, close=lambda: None)
    monkeypatch.setattr(offers, "open_announcer", lambda _: announcer)
    # What the module takes the place of, comes back.
    monkeypatch.setattr(OfferBook, "announce", OfferBook.announce)
    monkeypatch.setenv("OFFERS_BY_TURNS", str(tmp_path))
    monkeypatch.setenv("OFFERS_OF", announced._FORK)
    offers_by_turns.register()
    offers_by_turns.register()
    made = OfferBook()
    made.announce_from("127.0.0.1")
    return made, heard


def offer(book: OfferBook, name: str) -> None:
    """Make an offer."""
    book.offer(name, 1, OfferFingerprint(1, 2, 3))


def test_offers_are_announced_by_turns(book, tmp_path):
    """While the file is there workers hear nothing before the step, and each way is counted."""
    made, heard = book
    offer(made, "a")
    assert len(heard) == 1
    (tmp_path / "withhold").touch()
    offer(made, "b")
    assert len(heard) == 1
    (tmp_path / "withhold").unlink()
    offer(made, "c")
    assert len(heard) == 2
    assert [(tmp_path / name).stat().st_size for name in ("told", "withheld")] == [2, 1]
    metadata = SimpleNamespace()
    made.write_to(metadata, dict.fromkeys("abc", 30.0))
    assert set(metadata.offered) == {"a", "b", "c"} and metadata.num_offers == 3


def test_an_engine_that_announces_nothing_is_not_counted(book, tmp_path):
    """Where steps are not scheduled ahead."""
    offer(OfferBook(), "a")
    assert not (tmp_path / "told").exists() and book[1] == []


def test_an_engine_that_is_not_asked_stays_as_it_is(monkeypatch):
    """Without the variable."""
    monkeypatch.delenv("OFFERS_BY_TURNS", raising=False)
    before = OfferBook.announce
    offers_by_turns.register()
    assert OfferBook.announce is before


class Pair:
    """Engines that answer sooner where offers are announced, if they hear of any."""

    def __init__(self, marks, is_ahead: bool) -> None:
        self.marks, self.is_ahead, self.salts = marks, is_ahead, []

    def complete_all(self, url, model, prompts, *, salt):
        """As `accuracy.complete_all`."""
        assert (url, model) == ("http://router", "m")
        self.salts.append(salt)
        is_withheld = (self.marks / "withhold").exists()
        if self.is_ahead:
            with (self.marks / ("withheld" if is_withheld else "told")).open("ab") as count:
                count.write(b"." * len(prompts))
        return [SimpleNamespace(ttft_s=SLOWER_S if is_withheld else FASTER_S) for _ in prompts]

    def nixl_counters(self):
        """As a decode engine's."""
        return SimpleNamespace(bytes_moved=5)


def ask(pair: Pair, monkeypatch) -> Gain:
    """Three rounds of either way."""
    monkeypatch.setattr(announced.accuracy, "complete_all", pair.complete_all)
    router = SimpleNamespace(url="http://router")
    return announced.ask(router, pair, "m", pair.marks, rounds=3, prompts=PROMPTS)


def test_both_ways_have_as_many_rounds(monkeypatch, tmp_path):
    """Each with prefixes of its own; those that come first are not counted."""
    pair = Pair(tmp_path, is_ahead=True)
    gain = ask(pair, monkeypatch)
    assert gain.ttft_s == {"announced": [[FASTER_S] * 2] * 3, "withheld": [[SLOWER_S] * 2] * 3}
    assert (gain.told, gain.withheld, gain.fault) == (6, 6, "")
    assert len(set(pair.salts)) == 7
    assert "gain       500.0 ms of the median; 500.0 to 500.0 ms in pairs" in str(gain)


def test_a_pair_that_announces_nothing_says_nothing(monkeypatch, tmp_path):
    """A difference of times is none of announcements then."""
    gain = ask(Pair(tmp_path, is_ahead=False), monkeypatch)
    assert gain.fault.startswith("0 offers were announced and 0 withheld")
    assert "is scheduling asynchronous" in gain.fault


def test_a_pair_that_moves_nothing_says_nothing(tmp_path):
    """And the report has it, as all else."""
    gain = Gain({"announced": [[0.5]], "withheld": [[1.0]]}, 1, 1, 0)
    path = tmp_path / "announced.json"
    announced.report(gain, path)
    written = json.loads(path.read_text())
    assert written["fault"] == gain.fault == "nothing was moved over NIXL"
    assert written["ttft_s"]["withheld"] == [[1.0]]
