# SPDX-License-Identifier: Apache-2.0
"""Patches as commits and commits as patches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reshard_build.patchfile import Patch
from reshard_build.roundtrip import differences, read_commits
from reshard_build.scratch import init_history

BODY = "What: a\nWhy: b\nNo-subclass: c\nForwarded: not-needed\nDrop-when: d\n"


def _patch(name: str, content: bytes = b"") -> Patch:
    return Patch(name, content, "", "", ())


@pytest.mark.parametrize(
    ("again", "found"),
    [
        ([_patch("a", b"1"), _patch("b", b"2")], []),
        ([_patch("b", b"2"), _patch("a", b"1")], ["the order would change"]),
        ([_patch("a", b"1"), _patch("b", b"3")], ["b would change"]),
        ([_patch("a", b"1")], ["b would be dropped"]),
        ([_patch("a", b"1"), _patch("c", b"2")], ["b would be named c"]),
        ([_patch("a", b"1"), _patch("b", b"2"), _patch("c", b"3")], ["c would be new"]),
    ],
)
def test_differences_in_words(again: list[Patch], found: list[str]) -> None:
    """Each kind of difference is told."""
    assert differences([_patch("a", b"1"), _patch("b", b"2")], again) == found


# Git trims colons at the start of a subject and folds spaces; export refuses commits
# that would change.
WORDS = st.builds(
    lambda area, text: " ".join([area, *text.split()]),
    st.sampled_from(["area:", "[area] what"]),
    st.text(st.sampled_from("abc äß€:[]&"), max_size=90),
)
LINES = st.lists(st.sampled_from(["x", "  y", "-- ", "é", "", "diff", "\ttab"]), max_size=8)


@given(subject=WORDS, first=LINES, second=LINES)
@settings(
    max_examples=10,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_commit_survives_the_round_trip(
    tmp_path_factory: pytest.TempPathFactory,
    as_developer: Any,
    subject: str,
    first: list[str],
    second: list[str],
) -> None:
    """Whatever subject and lines a commit has, importing its patch gives the same patch."""
    old = "".join(f"{line}\n" for line in first)
    new = "".join(f"{line}\n" for line in second)
    if old == new:
        new += "end\n"

    def start(patches: tuple[Patch, ...]) -> Path:
        repository = tmp_path_factory.mktemp("scratch")
        (repository / "vllm").mkdir()
        (repository / "vllm/a.py").write_text(old)
        assert init_history(repository, patches, 1_700_000_000, "Base")
        return repository

    repository = start(())
    (repository / "vllm/a.py").write_text(new)
    as_developer(repository, "commit", "--quiet", "--all", "-m", f"{subject}\n\n{BODY}")
    patches = read_commits(repository)
    assert patches[0].description.strip() == BODY.strip()
    assert differences(patches, read_commits(start(patches))) == []
