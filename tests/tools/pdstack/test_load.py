# SPDX-License-Identifier: Apache-2.0
"""Clients that ask and compare, and what is counted of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tools.pdstack.fake_engines import WORDS, FakeEngine, fake_engine
from tests.tools.pdstack.helpers import wait_until
from tools.pdstack.accuracy import Completion
from tools.pdstack.load import Figures, Load, Sample, figures, percentile

PROMPTS = [[1, 2], [3]]
RIGHT = [Completion(WORDS, (), 0.1)] * len(PROMPTS)


def _load(engine: FakeEngine) -> Load:
    return Load(engine.url, "m", PROMPTS, RIGHT, clients=3)


@given(st.lists(st.floats(0, 100), min_size=1), st.floats(0.01, 1))
def test_a_percentile_is_the_least_that_enough_do_not_exceed(
    values: list[float], share: float
) -> None:
    """And nothing below it is."""
    found = percentile(values, share)
    assert sum(each <= found for each in values) >= share * len(values)
    assert sum(each < found for each in values) < share * len(values)


def test_requests_are_counted_by_their_phase() -> None:
    """Times are those of requests that were answered, and a phase without any has none."""
    samples = [
        Sample("before", 0, 1, 0.1),
        Sample("before", 0, 1, 0.3),
        Sample("before", 0, 1, None, "gone"),
        Sample("after", 0, 1, 0.2, differs=True),
    ]
    assert figures(samples, ("before", "during", "after")) == [
        Figures("before", 3, 1, 0, pytest.approx(0.2), 0.3),
        Figures("during", 0, 0, 0, None, None),
        Figures("after", 1, 0, 1, 0.2, 0.2),
    ]


def _wrong(engine: FakeEngine) -> None:
    engine.words = WORDS[::-1]


def _short(engine: FakeEngine) -> None:
    engine.words = WORDS[:3]


def _failing(engine: FakeEngine) -> None:
    engine.status = 500


@pytest.mark.parametrize(
    ("change", "differs", "failure"),
    [
        (lambda _: None, False, ""),
        (_wrong, True, ""),
        (_short, False, "answered with 3 tokens instead"),
        (_failing, False, "answered with status 500"),
    ],
)
def test_every_answer_is_compared(
    change: Callable[[FakeEngine], None], differs: bool, failure: str
) -> None:
    """One that is another, one that is not whole and one that is none are told apart."""
    with fake_engine() as engine:
        change(engine)
        with _load(engine) as load:
            load.phase = "x"
            wait_until(lambda: any(each.phase == "x" for each in load.samples), "a request")
        samples = load.samples
    assert all(each.differs is differs for each in samples)
    assert all(failure in each.failure for each in samples)
    assert all((each.ttft_s is None) is bool(failure) for each in samples)


def test_requests_differ_in_their_salts() -> None:
    """Some find blocks of others, and some must not."""
    with fake_engine() as engine:
        with _load(engine) as load:
            wait_until(lambda: len(load.samples) > 20, "some requests")
        salts = [body.get("cache_salt") for body in engine.received]
    given_ones = [salt for salt in salts if salt is not None]
    assert None in salts and given_ones
    assert len(set(given_ones)) == len(given_ones)


def test_what_does_not_end_is_broken_off() -> None:
    """An error beside the load ends it at once, with what was answered until then."""
    with fake_engine() as engine:
        with pytest.raises(ZeroDivisionError), _load(engine) as load:
            wait_until(lambda: load.samples, "a request")
            raise ZeroDivisionError
        assert not load._thread.is_alive()
        assert load.samples
