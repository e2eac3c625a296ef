# SPDX-License-Identifier: Apache-2.0
"""What the project weighs, and where the time of `.ci/run` went, beside the last release.

`.ci/run` names a file in the variable ``WEIGHT_LOG``. Its steps, the launcher and the tests append
a line each: ``step SECONDS COMMAND``, ``engine NAME``, ``cases NUMBER``. `python -m tools.weight`
reads it, prints a table, and fails where more engines were started than a change may start. With
``--keep`` it stores what it has found as what the last release weighs.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import tokenize
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "vllm/distributed/kv_transfer/kv_connector/v1/reshard"
LAST = ROOT / "docs/results/weight.json"
LOG_VARIABLE = "WEIGHT_LOG"

MAX_ENGINES = 18
"""Engines that a change may start. Each takes 20 to 100 s of two cores."""

_NO_CODE = frozenset(
    {
        *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
        *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER),
    }
)


@dataclass
class Run:
    """What one run of `.ci/run` has logged.

    Attributes:
        steps: Commands, with the seconds that each took.
        engines: Names of all engines that were started.
        cases: Number of tests that were run.
    """

    steps: list[tuple[str, int]] = field(default_factory=list)
    engines: list[str] = field(default_factory=list)
    cases: int = 0


def log(kind: str, *values: object) -> None:
    """Append a line to the log, where there is one."""
    path = os.environ.get(LOG_VARIABLE)
    if path:
        with Path(path).open("a", encoding="utf-8") as lines:
            lines.write(" ".join(map(str, (kind, *values))) + "\n")


def read_log(lines: Iterable[str]) -> Run:
    """Return what a log says.

    Raises:
        ValueError: A line is of no known kind.
    """
    run = Run()
    for line in lines:
        kind, _, rest = line.strip().partition(" ")
        if kind == "step":
            seconds, _, command = rest.partition(" ")
            run.steps.append((command, int(seconds)))
        elif kind == "engine":
            run.engines.append(rest)
        elif kind == "cases":
            run.cases += int(rest)
        else:
            raise ValueError(f"line {line!r} is neither a step, nor an engine, nor cases")
    return run


def code_lines(source: str) -> int:
    """Return the number of lines that hold code: no docstrings, comments or blanks."""
    documented = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    held = {
        line
        for token in tokens
        if token.type not in _NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(held - documented)


def weigh(run: Run) -> dict[str, int]:
    """Return what the project weighs now, by what is counted."""
    of_kv_plan = {*(PACKAGE / "cli").rglob("*.py"), PACKAGE / "dry_run.py"}
    modules = [path for path in PACKAGE.rglob("*.py") if path not in of_kv_plan]
    pages = (ROOT / "docs").rglob("*.md")
    return {
        "code lines of the package without kv-plan": sum(
            code_lines(path.read_text(encoding="utf-8")) for path in modules
        ),
        "modules of the package without kv-plan": len(modules),
        "lines of tests": sum(
            len(path.read_text(encoding="utf-8").splitlines())
            for path in (ROOT / "tests").rglob("*.py")
        ),
        "words of docs/": sum(len(path.read_text(encoding="utf-8").split()) for path in pages),
        "cases": run.cases,
        "engines": len(run.engines),
        "seconds": sum(seconds for _, seconds in run.steps),
    }


def table(now: dict[str, int], last: dict[str, int], steps: Iterable[tuple[str, int]]) -> list[str]:
    """Return a line for each step, and one for each weight beside that of the last release."""
    lines = [f"{seconds:7,} s  {command}" for command, seconds in steps]
    lines += ["", f"{'now':>9} {'last':>9}"]
    return lines + [
        f"{value:9,} {last[what]:9,}  {what}" if what in last else f"{value:9,} {'-':>9}  {what}"
        for what, value in now.items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 1 where too many engines were started."""
    parser = argparse.ArgumentParser(prog="python -m tools.weight", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="store it as the last release's")
    arguments = parser.parse_args(argv)
    path = os.environ.get(LOG_VARIABLE)
    run = read_log(Path(path).read_text(encoding="utf-8").splitlines() if path else ())
    now = weigh(run)
    last = json.loads(LAST.read_text(encoding="utf-8")) if LAST.is_file() else {}
    print("\n".join(table(now, last, run.steps)))
    if arguments.keep:
        LAST.write_text(json.dumps(now, indent=2) + "\n", encoding="utf-8")
    if len(run.engines) > MAX_ENGINES:
        print(
            f"error: {len(run.engines)} engines were started, and a change may start "
            f"{MAX_ENGINES}: let tests share them, or mark some nightly ({', '.join(run.engines)})"
        )
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
