# SPDX-License-Identifier: Apache-2.0
"""What the user gets to see."""

from __future__ import annotations

import io
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tools.pdstack import report
from tools.pdstack.chat import Answer
from tools.pdstack.errors import ProcessDiedError
from tools.pdstack.report import AnswerView, Exchange, Progress, Step

ANSWER = Answer("It is Paris.", 0.5, 1.0, 37, 5, "stop")


def _console(terminal: bool = False) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=80, force_terminal=terminal, color_system=None), out


@pytest.mark.parametrize(
    ("changed", "equal"),
    [
        ({}, True),
        ({"ttft_s": 9.0}, True),
        ({"text": "It is paris."}, False),
        ({"finish_reason": "length"}, False),
        ({"completion_tokens": 6}, False),
    ],
)
def test_answers_are_compared_strictly(changed: dict[str, object], equal: bool) -> None:
    """Text, number of tokens and reason of the end have to match; times need not."""
    other = replace(ANSWER, **changed)  # type: ignore[arg-type]
    assert Exchange("p", ANSWER, other, 1).equal is equal


def test_the_table_holds_a_row_for_each_prompt_and_one_for_all() -> None:
    """Layout, times, bytes and verdict of every prompt, and the sum in 80 columns."""
    console, out = _console()
    wrong = replace(ANSWER, text="no")
    exchanges = [Exchange("a", ANSWER, ANSWER, 2048), Exchange("b", ANSWER, wrong, 0)]
    console.print(report.summary_table(exchanges, "tp1pp1 -> tp1pp1"))
    rows = [" ".join(line.split()) for line in out.getvalue().splitlines() if " tok " in line]
    assert rows == [
        "tp1pp1 -> tp1pp1 37 tok 0.50 s 0.50 s 2.00 KiB yes",
        "tp1pp1 -> tp1pp1 37 tok 0.50 s 0.50 s 0 B NO",
        "all 74 tok 2.00 KiB NO",
    ]


def test_the_table_holds_early_answers_beside_the_others() -> None:
    """Their times in a column, their bytes and verdicts with those of the serial ones."""
    console, out = _console()
    exchanges = [Exchange("a", ANSWER, ANSWER, 2048)] * 2
    sooner = replace(ANSWER, ttft_s=0.25)
    early = [
        Exchange("a", sooner, ANSWER, 1024),
        Exchange("a", sooner, replace(ANSWER, text=""), 0),
    ]
    console.print(report.summary_table(exchanges, "tp1pp1 -> tp1pp1", early))
    rows = [" ".join(line.split()) for line in out.getvalue().splitlines() if " tok " in line]
    assert rows == [
        "tp1pp1 -> tp1pp1 37 tok 0.50 s 0.25 s 0.50 s 3.00 KiB yes",
        "tp1pp1 -> tp1pp1 37 tok 0.50 s 0.25 s 0.50 s 2.00 KiB NO",
        "all 74 tok 5.00 KiB NO",
    ]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (5898240, "5.62 MiB"),
        (3 << 30, "3.00 GiB"),
    ],
)
def test_sizes_have_binary_units(count: int, text: str) -> None:
    """Bytes are exact, larger units have two decimals."""
    assert report.format_bytes(count) == text


@given(st.text())
def test_shortened_prompts_are_short(prompt: str) -> None:
    """Any prompt becomes one line of limited length with the same end."""
    shown = report.shorten(prompt)
    assert "\n" not in shown
    assert len(shown) <= 170
    assert " ".join(prompt.split())[-40:] == shown[-40:] or len(prompt) < 40


@pytest.mark.parametrize("terminal", [True, False])
def test_both_answers_are_shown_side_by_side(terminal: bool) -> None:
    """Prompt, streamed answer and reference end up on the screen, on a terminal and in a file."""
    console, out = _console(terminal)
    with AnswerView(console, "Where?", "tp1pp1 -> tp3pp1", ANSWER) as view:
        view.add("It is ")
        view.add("Rome.")
    shown = out.getvalue()
    assert "> Where?" in shown
    assert "tp1pp1 -> tp3pp1" in shown
    assert any("It is Rome." in line and "It is Paris." in line for line in shown.splitlines())
    assert shown.count("> Where?") == 1 or terminal


def test_brackets_in_answers_are_not_markup() -> None:
    """What a model says is printed as it is."""
    console, out = _console()
    with AnswerView(console, "[bold]x", "l", ANSWER) as view:
        view.add("[red]y[/red]")
    assert "[bold]x" in out.getvalue()
    assert "[red]y[/red]" in out.getvalue()


def test_progress_is_a_line_now_and_then_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a file only one line appears every ten seconds."""
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    console, out = _console()
    with Progress(console) as progress:
        for now in (0.0, 9.0, 10.0, 11.0, 19.0, 20.5):
            progress.update([Step("prefill", "loading", now), Step("decode", "loading", now)])
    assert out.getvalue().splitlines() == [
        "prefill: loading (10 s)   decode: loading (10 s)",
        "prefill: loading (20 s)   decode: loading (20 s)",
    ]


def test_progress_changes_one_line_on_a_terminal() -> None:
    """On a terminal the line is redrawn and gone in the end."""
    console, out = _console(terminal=True)
    with Progress(console) as progress:
        progress.update([Step("prefill", "loading", 3.0)])
    assert "prefill: loading (3 s)" in out.getvalue()
    assert out.getvalue().endswith("\x1b[2K")


def test_a_death_is_shown_with_the_end_of_the_log(tmp_path: Path) -> None:
    """First the cause, then the log, then where the rest of it is."""
    console, out = _console()
    error = ProcessDiedError("decode", "ended", "ValueError: [x]", ["line one", "[b]line two"])
    report.print_error(console, error, tmp_path)
    lines = out.getvalue().splitlines()
    assert lines[0] == "error: decode ended: ValueError: [x]"
    assert lines[1] == "The last 2 lines of decode's log:"
    assert lines[2:4] == ["  | line one", "  | [b]line two"]
    assert lines[4] == f"Logs are kept in {tmp_path}"


def test_hints_can_be_copied() -> None:
    """The shell command is well-formed for any model name, and the program compiles."""
    words = shlex.split(report.curl_hint("http://127.0.0.1:1", "o'model"))
    assert words[0] == "curl"
    assert '"model": "o\'model"' in words[-1]
    compile(report.python_hint("http://127.0.0.1:1", "m"), "hint", "exec")
