# SPDX-License-Identifier: Apache-2.0
"""What pages show of `kv-plan`.

A page shows a command as a block of `console` that begins with `$ kv-plan`. What follows in the
block is what the command prints, and the files that it names with `--svg` are its drawings.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

_BLOCK = re.compile(r"^```console\n\$ (kv-plan [^\n]+)\n.*?^```$", re.MULTILINE | re.DOTALL)
_COLUMNS = 80


def rewrite(page: str, directory: Path) -> str:
    """The same page with the output of each command as it is now.

    Args:
        page: Its text.
        directory: Where commands run; their drawings are written below it.
    """
    return _BLOCK.sub(
        lambda block: f"```console\n$ {block[1]}\n{_run(block[1], directory)}```", page
    )


def _run(command: str, directory: Path) -> str:
    """What a command prints, without the spaces that fill its lines."""
    for drawing in re.findall(r"--svg (\S+)", command):
        (directory / drawing).parent.mkdir(parents=True, exist_ok=True)
    name, *arguments = shlex.split(command)
    done = subprocess.run(
        [Path(sys.executable).with_name(name), *arguments],
        cwd=directory,
        env={**os.environ, "COLUMNS": str(_COLUMNS)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())
