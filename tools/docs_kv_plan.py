# SPDX-License-Identifier: Apache-2.0
"""What pages show of `vllm kv-plan`: `python -m tools.docs_kv_plan` writes it anew.

A page shows a command as a block of `console` that begins with `$ vllm kv-plan`. What follows in
the block is what the command prints, and the files that it names with `--svg` are its drawings.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

_BLOCK = re.compile(r"^```console\n\$ vllm (kv-plan [^\n]+)\n.*?^```$", re.MULTILINE | re.DOTALL)
_COLUMNS = 80


def rewrite(page: str) -> str:
    """The same page with the output of each command as it is now.

    Drawings are written to where the commands say, seen from the current directory.
    """
    return _BLOCK.sub(lambda block: f"```console\n$ vllm {block[1]}\n{_run(block[1])}```", page)


def drawings(page: str) -> list[Path]:
    """The drawings that a page's commands write."""
    return [Path(name) for command in _BLOCK.findall(page) for name in _named_svg(command)]


def pages() -> Iterator[Path]:
    """The pages that show a command."""
    for path in sorted((ROOT / "docs").glob("*.md")):
        if _BLOCK.search(path.read_text(encoding="utf-8")):
            yield path


def _named_svg(command: str) -> list[str]:
    return re.findall(r"--svg (\S+)", command)


def _run(command: str) -> str:
    """What a command prints, without the spaces that fill its lines."""
    from vllm.entrypoints.cli.kv_plan import cmd_init

    (subcommand,) = cmd_init()
    parser = ArgumentParser()
    subcommand.subparser_init(parser.add_subparsers()).set_defaults(run=subcommand.cmd)
    options = parser.parse_args(shlex.split(command))
    printed = io.StringIO()
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(_COLUMNS)
    try:
        with contextlib.redirect_stdout(printed):
            options.run(options)
    finally:
        del os.environ["COLUMNS"]
        if before is not None:
            os.environ["COLUMNS"] = before
    return "".join(f"{line.rstrip()}\n" for line in printed.getvalue().splitlines())


def main() -> None:
    """Write all pages and drawings anew."""
    os.chdir(ROOT)
    for path in pages():
        path.write_text(rewrite(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
