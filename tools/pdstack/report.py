# SPDX-License-Identifier: Apache-2.0
"""What the user sees: progress, answers, the table, errors, and how to talk to the stack."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from .chat import Answer
from .errors import PDStackError, ProcessDiedError

_PLAIN_INTERVAL_S = 10.0
_PROMPT_SHOWN = 160
_FILE_COLUMNS = 160


@dataclass(frozen=True)
class Step:
    """Something that is being waited for."""

    name: str
    phase: str
    waited_s: float


@dataclass(frozen=True)
class Exchange:
    """One prompt, and the answers it got.

    Attributes:
        bytes_moved: what the decode engines read over NIXL for it.
    """

    prompt: str
    disaggregated: Answer
    single: Answer
    bytes_moved: int

    @property
    def equal(self) -> bool:
        """Whether both answers are the same, to the character, and end for the same reason."""
        return (
            self.disaggregated.text == self.single.text
            and self.disaggregated.finish_reason == self.single.finish_reason
            and self.disaggregated.completion_tokens == self.single.completion_tokens
        )


class Progress:
    """Shows steps: one line that changes on a terminal, else a line every ten seconds.

    Use it as a context manager around the waiting.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, transient=True, refresh_per_second=4)
        self._printed_at = time.monotonic()

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def update(self, steps: Sequence[Step]) -> None:
        """Show where each step stands now."""
        line = Text(
            "   ".join(f"{each.name}: {each.phase} ({each.waited_s:.0f} s)" for each in steps),
            overflow="ellipsis",
            no_wrap=True,
        )
        if self._console.is_terminal:
            self._live.update(line)
        elif time.monotonic() - self._printed_at >= _PLAIN_INTERVAL_S:
            self._printed_at = time.monotonic()
            self._console.print(line, soft_wrap=True)


class AnswerView:
    """One prompt with two answers side by side; the left one grows while it arrives."""

    def __init__(self, console: Console, prompt: str, layouts: str, single: Answer) -> None:
        self._console = console
        self._prompt = prompt
        self._layouts = layouts
        self._single = single
        self._text = ""
        self._live = Live(console=console, refresh_per_second=10, vertical_overflow="visible")

    def __enter__(self) -> AnswerView:
        if self._console.is_terminal:
            self._live.start()
            self._live.update(self._render())
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.update(self._render())
            self._live.stop()
        else:
            self._console.print(self._render())

    def add(self, piece: str) -> None:
        """Append what has just arrived."""
        self._text += piece
        if self._console.is_terminal:
            self._live.update(self._render())

    def _render(self) -> RenderableType:
        table = Table(
            title=Text(f"> {shorten(self._prompt)}", style="bold"),
            title_justify="left",
            box=box.SIMPLE_HEAD,
            expand=True,
        )
        table.add_column(f"prefill -> decode ({self._layouts})", ratio=1)
        table.add_column("single engine", ratio=1)
        table.add_row(Text(self._text), Text(self._single.text))
        return table


def shorten(prompt: str) -> str:
    """Return a long prompt with its middle left out, so that its question stays visible."""
    text = " ".join(prompt.split())
    if len(text) <= _PROMPT_SHOWN:
        return text
    return f"{text[: _PROMPT_SHOWN // 2]} [...] {text[-_PROMPT_SHOWN // 2 :]}"


def format_bytes(count: int) -> str:
    """Return a size with a binary unit and, where that is rounded, two decimals."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def summary_table(
    exchanges: Sequence[Exchange], layouts: str, early: Sequence[Exchange] = ()
) -> Table:
    """Return the table that ends a demo: a row for each prompt, and one for all.

    Args:
        exchanges: one for each prompt.
        layouts: those of the engines.
        early: the same prompts, sent to both engines at once; none where that was not asked for.
    """
    title = "Time to first token: prefill/decode (P/D), and a single engine"
    table = Table(box=box.SIMPLE_HEAD, title=title)
    table.add_column("layout", no_wrap=True)
    times = ["P/D", *(["early"] if early else []), "single"]
    for column in ("prompt", *times, "over NIXL"):
        table.add_column(column, justify="right")
    table.add_column("equal")
    for each in zip(exchanges, *([early] if early else []), strict=True):
        answers = (*(way.disaggregated for way in each), each[0].single)
        table.add_row(
            escape(layouts),
            f"{answers[0].prompt_tokens} tok",
            *(f"{answer.ttft_s:.2f} s" for answer in answers),
            format_bytes(sum(way.bytes_moved for way in each)),
            yes_no(all(way.equal for way in each)),
        )
    table.add_section()
    table.add_row(
        "all",
        f"{sum(each.disaggregated.prompt_tokens for each in exchanges)} tok",
        *("" for _ in times),
        format_bytes(sum(each.bytes_moved for each in (*exchanges, *early))),
        yes_no(all(each.equal for each in (*exchanges, *early))),
    )
    return table


def yes_no(value: bool) -> Text:
    """Return the word, such that the bad one is seen."""
    return Text("yes", style="green") if value else Text("NO", style="bold red")


def wide(console: Console) -> Console:
    """Return a console for tables: they are not cut off where the output goes to a file."""
    return console if console.is_terminal else Console(width=_FILE_COLUMNS)


def print_error(console: Console, error: PDStackError, run_dir: Path | None) -> None:
    """Print an error; for a process that died, also the end of its log."""
    console.print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)
    if isinstance(error, ProcessDiedError):
        if error.log_tail:
            console.print(f"The last {len(error.log_tail)} lines of {error.name}'s log:")
        for line in error.log_tail:
            console.print(Text("  | " + line), soft_wrap=True)
    if run_dir is not None and run_dir.is_dir():
        console.print(Text(f"Logs are kept in {run_dir}"), soft_wrap=True)


def curl_hint(url: str, model: str) -> str:
    """Return a shell command that chats with the stack."""
    body = (
        f'{{"model": "{model}", "max_tokens": 32, "temperature": 0,\n'
        '       "messages": [{"role": "user", "content": "What is the capital of France?"}]}'
    )
    return (
        f"curl --noproxy '*' {url}/v1/chat/completions \\\n"
        f"  -H 'Content-Type: application/json' \\\n"
        f"  -d {shlex.quote(body)}"
    )


def python_hint(url: str, model: str) -> str:
    """Return a Python program that chats with the stack through the OpenAI client."""
    return (
        "from openai import OpenAI\n"
        f'client = OpenAI(base_url="{url}/v1", api_key="none")\n'
        "answer = client.chat.completions.create(\n"
        f'    model="{model}", temperature=0, max_tokens=32,\n'
        '    messages=[{"role": "user", "content": "What is the capital of France?"}])\n'
        "print(answer.choices[0].message.content)"
    )
