# SPDX-License-Identifier: Apache-2.0
"""The checker finds what is planted in a history, says what it is, and finds nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tools.soak.histories import (
    ANSWERS,
    ENGINES,
    fault,
    footprint,
    pool,
    request,
    sound_history,
)
from tools.soak.checker import Bounds, Invariant, allowed_s, check, check_whole
from tools.soak.faults import STOPS, FaultKind
from tools.soak.history import End, History, Lull, Strike

Plant = Callable[[History], None]
BOUNDS = Bounds()


def _requests(**fields: object) -> Plant:
    return lambda history: history.requests.append(request(**fields))


def _footprint(**fields: object) -> Plant:
    return lambda history: history.footprints.append(footprint(at_s=300.0, **fields))


def _lull(*readings: object) -> Plant:
    def plant(history: History) -> None:
        history.pools += readings
        history.lulls.append(Lull(round=2, began_s=100.0, ended_s=150.0, engines=ENGINES[:1]))

    return plant


def _end(history: History) -> None:
    history.ends.append(
        End(round=1, at_s=44.0, engine=ENGINES[0], incarnation=1, wanted=False, how="SIGABRT")
    )


def _struck(history: History) -> None:
    history.strikes.append(Strike(round=3, label="struck", at_s=20.0, limit_s=6.0))
    history.requests += [
        request(round=3, label="struck", ended_s=ended_s) for ended_s in (26.0, 26.5)
    ]
    # Others have nothing to do with it.
    history.requests += [
        request(round=3, ended_s=30.0),
        request(round=4, label="struck", ended_s=30.0),
    ]


PLANTED: dict[str, tuple[Plant, Invariant, str]] = {
    "a token is another one": (
        _requests(answers=("the first_answer",)),
        Invariant.ANSWERS,
        "instead of 'the first answer'",
    ),
    "an answer of another turn": (
        _requests(answers=(ANSWERS[1],)),
        Invariant.ANSWERS,
        "turn 0",
    ),
    "an answer that is called complete is short": (
        _requests(answers=(ANSWERS[0][:-1],)),
        Invariant.ANSWERS,
        "instead of",
    ),
    "one of several answers is wrong": (
        _requests(num_answers=2, answers=(ANSWERS[0], "garbage")),
        Invariant.ANSWERS,
        "'garbage'",
    ),
    "one of several answers is missing": (
        _requests(num_answers=2),
        Invariant.ANSWERS,
        "1 answers instead of 2",
    ),
    "what a client saw before it left is wrong": (
        _requests(answers=("tha",), complete=False, left=True),
        Invariant.ANSWERS,
        "'tha'",
    ),
    "a stream goes on past the answer": (
        _requests(answers=(ANSWERS[0] + "!",), complete=False),
        Invariant.ANSWERS,
        "answer!",
    ),
    "a request never ends": (
        _requests(ended_s=200.0, status=None, answers=(), complete=False, gave_up=True),
        Invariant.DEADLINES,
        "no end within 190 s",
    ),
    "a request ends late": (
        _requests(sent_s=45.0, ended_s=105.5),
        Invariant.DEADLINES,
        "it took 60 s, of 60 s",
    ),
    "a failure comes late": (
        _requests(sent_s=45.0, ended_s=106.0, status=500, answers=(), complete=False),
        Invariant.DEADLINES,
        "it took 61 s",
    ),
    "a read waits for a stopped worker": (
        _requests(sent_s=20.0, ended_s=40.0, deadline_s=15.0, strict=True),
        Invariant.DEADLINES,
        "of 15 s",
    ),
    "a probe is refused": (
        _requests(must_answer=True, status=500, answers=(), complete=False, error="why"),
        Invariant.SERVICE,
        "status 500: why",
    ),
    "a probe loses its connection": (
        _requests(must_answer=True, status=None, answers=(), complete=False),
        Invariant.SERVICE,
        "no status",
    ),
    "blocks stay in use": (_lull(pool(at_s=149.0, usage=0.25)), Invariant.POOLS, "25% of the pool"),
    "blocks stay held": (_lull(pool(at_s=149.0, held_blocks=2.0)), Invariant.POOLS, "2 blocks"),
    "blocks stay in doubt": (
        _lull(pool(at_s=149.0, blocks_in_doubt=7.0)),
        Invariant.POOLS,
        "7 in doubt",
    ),
    "a request stays": (_lull(pool(at_s=149.0, waiting=1.0)), Invariant.POOLS, "1 requests"),
    "a pool that was whole is so no more": (
        _lull(pool(at_s=120.0), pool(at_s=149.0, usage=0.5)),
        Invariant.POOLS,
        "50%",
    ),
    "an engine tells nothing": (_lull(pool(at_s=99.0)), Invariant.POOLS, "could not be read"),
    "memory grows": (
        _footprint(rss_bytes=(1 << 30) + BOUNDS.rss_bytes + 1),
        Invariant.FOOTPRINT,
        "rss_bytes",
    ),
    "descriptors grow": (
        _footprint(descriptors=200 + BOUNDS.descriptors + 1),
        Invariant.FOOTPRINT,
        "descriptors",
    ),
    "threads grow": (_footprint(threads=80 + BOUNDS.threads + 1), Invariant.FOOTPRINT, "threads"),
    "an engine ends": (_end, Invariant.LIFE, "SIGABRT"),
    "a struck request waits": (_struck, Invariant.EARLY, "it ended 6.5 s later, of 6 s"),
}


def test_sound_history_has_no_violation():
    """Failures, lost connections, clients that leave and engines that were killed are in order."""
    assert check(sound_history(), ANSWERS) == []


@pytest.mark.parametrize("planted", PLANTED)
def test_what_is_planted_is_found(planted):
    """It is found once, under its name, and nothing else is."""
    plant, invariant, words = PLANTED[planted]
    history = sound_history()
    plant(history)
    (violation,) = check(history, ANSWERS)
    assert violation.invariant is invariant
    assert words in violation.what


@given(st.lists(st.sampled_from(sorted(PLANTED)), unique=True, max_size=6), st.randoms())
def test_all_that_is_planted_is_found_in_order(planted, rng):
    """Whatever comes together, every invariant concerned is named, the first one first."""
    history = sound_history()
    for name in planted:
        PLANTED[name][0](history)
    for entries in (history.requests, history.faults, history.ends):
        rng.shuffle(entries)
    found = check(history, ANSWERS)
    assert {each.invariant for each in found} == {PLANTED[name][1] for name in planted}
    assert [each.at_s for each in found] == sorted(each.at_s for each in found)


@given(st.text(alphabet="ab", max_size=6), st.text(alphabet="ab", max_size=6), st.booleans())
def test_answers_are_compared_token_by_token(right, answer, complete):
    """A whole answer is right if it is the same, and a broken one if the right one begins so."""
    history = History(requests=[request(answers=(answer,), complete=complete)])
    is_right = answer == right if complete else right.startswith(answer)
    assert (check(history, (right,)) == []) is is_right


@given(
    sent_s=st.floats(0, 100),
    took_s=st.floats(0, 100),
    began_s=st.floats(0, 200),
    lasted_s=st.floats(0, 100),
    kind=st.sampled_from(FaultKind),
)
def test_only_time_that_both_share_is_allowed_for(sent_s, took_s, began_s, lasted_s, kind):
    """A stopped engine excuses as long as it was stopped while the request was there, no longer."""
    asked = request(sent_s=sent_s, ended_s=sent_s + took_s)
    span = fault(kind=kind, began_s=began_s, healed_s=began_s + lasted_s)
    extra_s = allowed_s(asked, History(faults=[span])) - asked.deadline_s
    if kind not in STOPS or began_s >= sent_s + took_s or sent_s >= began_s + lasted_s:
        assert extra_s == 0
    assert 0 <= extra_s <= min(took_s, lasted_s) + 1e-9


def test_new_incarnation_starts_from_its_own_footprint():
    """An engine that follows another one may be of another layout, and larger."""
    history = sound_history()
    history.footprints.append(footprint(incarnation=2, rss_bytes=9 << 30, at_s=90.0))
    assert check(history, ANSWERS) == []


def test_growth_is_told_once():
    """What has grown stays so; each lull would tell of it again."""
    history = sound_history()
    history.footprints += [footprint(at_s=at_s, threads=900) for at_s in (100.0, 200.0, 300.0)]
    (violation,) = check(history, ANSWERS)
    assert violation.at_s == 100.0


def test_soak_that_tested_nothing_early_is_told():
    """All else holds as well where no prompt is waited for, or none prefetched."""
    history = sound_history()
    assert check_whole(history) == []
    history.pools = [pool(prefetched_bytes=0.0)]
    (violation,) = check_whole(history)
    assert violation.invariant is Invariant.TESTED and "no byte" in violation.what
    assert len(check_whole(History())) == 2


def test_state_that_was_not_seen_is_told():
    """A fault that has struck no engine in its state has tested nothing."""
    history = sound_history()
    unseen = fault(kind=FaultKind.EARLY_KILL_KNOWN, round=3, detail="prefill-1 was not full")
    history.faults.append(unseen)
    (violation,) = check_whole(history)
    assert (violation.invariant, violation.what) == (Invariant.TESTED, "prefill-1 was not full")
    history.strikes.append(Strike(round=3, label="struck", at_s=20.0, limit_s=6.0))
    assert check_whole(history) == []
