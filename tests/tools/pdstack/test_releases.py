# SPDX-License-Identifier: Apache-2.0
"""Pairs of two releases: which there are, what they start, and what is kept of them."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

from tools.pdstack import cli, installation, releases, sweep_cli
from tools.pdstack.accuracy import Accuracy
from tools.pdstack.errors import UsageError
from tools.pdstack.families import FAMILIES, SUBSETS, across, choose
from tools.pdstack.installation import Installation, ask, release_here
from tools.pdstack.sweep import Result, _spec

OTHER = Installation("9.8.7", Path("/other/bin"))
FOUND = Accuracy(64, 62, 1, 0.98765, 1e-5, 0.3, 0.2)


@pytest.fixture
def family():
    """One with unequal ends."""
    (found,) = choose(["TP not divisible"])
    return found


def test_a_family_is_run_with_either_release_at_either_end(family):
    """Everything else is as it was, and the engine that says what is right is of this release."""
    forth, back = across(family, "0.32.0", OTHER)
    assert (forth.prefill, back.decode) == (family.prefill, family.decode)
    assert forth.decode.installation == back.prefill.installation == OTHER
    assert forth.decode.layout == family.decode.layout
    assert back.prefill.layout == family.prefill.layout
    assert forth.one == back.one == family.one
    assert forth.name == "TP not divisible, 0.32.0 to 9.8.7"
    assert back.name == "TP not divisible, 9.8.7 to 0.32.0"


def test_an_engine_of_another_installation_is_its_own(family):
    """It runs what is installed there, and its log is not that of one of the same layout here."""
    forth, _ = across(family, "0.32.0", OTHER)
    here, there = _spec(family.decode, (), 0, 128), _spec(forth.decode, (), 0, 128)
    assert (here.scripts, there.scripts) == (None, OTHER.scripts)
    assert here.name != there.name and "9.8.7" in there.name


def test_releases_are_compared_with_each_kind_of_cache_and_of_draft():
    """With unequal layouts, and of no family that fills caches as GPUs do."""
    chosen = choose(SUBSETS["releases"])
    assert all(family.prefill.layout != family.decode.layout for family in chosen)
    assert not any(side.caches for each in chosen for side in (each.prefill, each.decode))
    # DeepSeek V4 has its prompts computed by an interpreter, and Step-3.5 is two models.
    left_out = ("deepseek 4", "step 3.5")
    served = {each.model for each in FAMILIES if not each.prefill.caches} - {*left_out}
    assert {each.model for each in chosen} | {"llama, 2 KV heads"} == served


def test_rows_take_the_place_of_earlier_ones(tmp_path, family):
    """Of the same family and releases; the others stay, in their order."""
    path = tmp_path / "new/releases.json"
    forth, back = across(family, release_here(), OTHER)
    releases.store(path, [Result(forth, None, 0, "died"), Result(back, FOUND, 10, None)])
    releases.store(path, [Result(forth, FOUND, 20, None)])
    first, second = releases.read(path)
    assert (first.family, first.fault, first.bytes_moved) == (family.name, "", 20)
    assert (first.requests, first.equal, first.tied, first.agreement) == (64, 62, 1, 0.9877)
    assert first.prefill == (release_here(), "tp3pp1") and first.decode == ("9.8.7", "tp2pp1")
    assert second.prefill == ("9.8.7", "tp3pp1") and second.bytes_moved == 10


def test_a_file_of_something_else_is_refused(tmp_path):
    """And not written over."""
    path = tmp_path / "x.json"
    path.write_text('[{"other": 1}]')
    with pytest.raises(UsageError, match="is not what a sweep has written"):
        releases.store(path, [])
    assert releases.read(tmp_path / "none.json") == []


def test_an_installation_says_what_it_is():
    """This one, asked as another one would be."""
    found, left_out = ask(Path(sys.executable).parent, ["PP on P"])
    assert found.release == importlib.metadata.version("vllm").partition("+")[0]
    assert left_out == {}


def test_an_installation_that_cannot_say_is_refused(tmp_path):
    """With what it said last."""
    for name, text in (
        ("vllm", ""),
        ("python", "#!/bin/sh\necho first >&2; echo last >&2; exit 1"),
    ):
        script = tmp_path / name
        script.write_text(text)
        script.chmod(0o755)
    with pytest.raises(UsageError, match=r"that a sweep can use: last$"):
        ask(tmp_path, ["PP on P"])


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["--results", "x.json"], "needs --across"),
        (["--across", str(Path(sys.executable).parent)], "name another release's"),
        (["--across", "nowhere"], "vllm is not installed in"),
    ],
)
def test_what_is_no_pair_of_releases_is_refused(args, complaint, capsys):
    """Before anything is started."""
    assert cli.main(["sweep", "--only", "PP on P", *args]) == 2
    assert complaint in " ".join(capsys.readouterr().err.split())


def test_what_the_other_cannot_serve_is_left_out(monkeypatch):
    """Both pairs of it, with its reason, beside what is left out here."""
    monkeypatch.setattr(sweep_cli, "ask", lambda *_: (OTHER, {"MTP": "too old"}))
    pairs, left_out = sweep_cli._across(OTHER.scripts, choose(["MTP", "PP on P"]), {"EAGLE": "no"})
    assert [pair.name for pair in pairs] == [
        f"PP on P, {release_here()} to 9.8.7",
        f"PP on P, 9.8.7 to {release_here()}",
    ]
    assert left_out == {"EAGLE": "no", "MTP": "too old"}


def test_the_release_is_what_stands_before_the_fork():
    """A version tells it first."""
    assert installation.release_of("0.33.0+reshard.1.cpu") == "0.33.0"
