# SPDX-License-Identifier: Apache-2.0
"""What pages show of `kv-plan`: `python -m tools.docs_kv_plan` writes it anew.

A page shows a command as a block of `console` that begins with `$ kv-plan`. What follows in
the block is what the command prints, and the files that it names with `--svg` are its drawings.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

_BLOCK = re.compile(r"^```console\n\$ (kv-plan [^\n]+)\n.*?^```$", re.MULTILINE | re.DOTALL)
_COLUMNS = 80


def rewrite(page: str) -> str:
    """The same page with the output of each command as it is now.

    Drawings are written to where the commands say, seen from the current directory.
    """
    return _BLOCK.sub(lambda block: f"```console\n$ {block[1]}\n{_run(block[1])}```", page)


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
    name, *arguments = shlex.split(command)
    done = subprocess.run(
        [Path(sys.executable).with_name(name), *arguments],
        env={**os.environ, "COLUMNS": str(_COLUMNS)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())


def main() -> None:
    """Write all pages and drawings anew."""
    os.chdir(ROOT)
    for path in pages():
        path.write_text(rewrite(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
