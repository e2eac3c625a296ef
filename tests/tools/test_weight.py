# SPDX-License-Identifier: Apache-2.0
"""What a run of `.ci/run` has cost, and what counts as code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import weight


def test_code_is_counted_without_words() -> None:
    """No docstring, comment or blank line counts, and each line of a statement does."""
    source = '''"""Module."""

# A comment.
import os  # and another one


def call(
    value: str,
) -> str:
    """Says what it does.

    At length.
    """
    return f"""{value}
    {os.sep}"""


VALUE = "no docstring"
"""Says what it is."""
'''
    assert weight.code_lines(source) == 1 + 3 + 2 + 1


def test_log_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps, engines and cases, each as it was appended; without a log nothing is written."""
    path = tmp_path / "log"
    monkeypatch.delenv(weight.LOG_VARIABLE, raising=False)
    weight.log("engine", "nobody reads this")
    monkeypatch.setenv(weight.LOG_VARIABLE, str(path))
    weight.log("step", 12, "make", "test")
    weight.log("engine", "prefill")
    weight.log("cases", 3)
    weight.log("cases", 4)
    run = weight.read_log(path.read_text().splitlines())
    assert run == weight.Run([("make test", 12)], ["prefill"], 7)
    with pytest.raises(ValueError, match="neither a step"):
        weight.read_log(["something else"])


@pytest.mark.parametrize("excess", [0, 1])
def test_too_many_engines_fail(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    excess: int,
) -> None:
    """The run says how many there may be, and which were started."""
    path = tmp_path / "log"
    monkeypatch.setenv(weight.LOG_VARIABLE, str(path))
    weight.log("step", 61, "make demo")
    for number in range(weight.MAX_ENGINES + excess):
        weight.log("engine", f"engine-{number}")
    assert weight.main([]) == excess
    said = capsys.readouterr().out
    assert "61 s  make demo" in said
    assert ("error: 19 engines were started" in said) == bool(excess)
    assert ("engine-18" in said) == bool(excess)


def test_weights_stand_beside_the_last_ones() -> None:
    """What the last release did not count has none."""
    lines = weight.table({"cases": 5, "new": 1}, {"cases": 1234}, [("make lint", 3)])
    assert lines[0] == "      3 s  make lint"
    assert lines[-2:] == ["        5     1,234  cases", "        1         -  new"]
