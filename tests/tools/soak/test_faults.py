# SPDX-License-Identifier: Apache-2.0
"""Faults are named as on the command line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.pdstack.errors import UsageError
from tools.soak.faults import DESCRIPTIONS, FaultKind, names_of, parse_kinds


@given(st.lists(st.sampled_from(FaultKind), min_size=1, unique=True))
def test_names_are_understood_again(kinds):
    """What is printed to repeat a soak means the same faults, in the same order."""
    assert list(parse_kinds(names_of(kinds))) == kinds


def test_beginnings_are_enough():
    """A whole name means that fault alone, a beginning all that begin so."""
    assert parse_kinds("stop-prefill") == (FaultKind.STOP_PREFILL,)
    assert set(parse_kinds("stop, kill-router")) == {
        FaultKind.STOP_PREFILL_WORKER,
        FaultKind.STOP_DECODE_WORKER,
        FaultKind.STOP_PREFILL,
        FaultKind.STOP_DECODE,
        FaultKind.KILL_ROUTER,
    }


@pytest.mark.parametrize(("text", "words"), [("kil,burn", "'burn'"), (" , ", "no fault was named")])
def test_unknown_names_are_refused(text, words):
    """The message names the word and what there is."""
    with pytest.raises(UsageError, match=words):
        parse_kinds(text)


def test_every_kind_is_described():
    """The help tells all of them."""
    assert set(DESCRIPTIONS) == set(FaultKind)
