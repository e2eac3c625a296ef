# SPDX-License-Identifier: Apache-2.0
"""The command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import reshard_build
from reshard_build.__main__ import main


def test_help_names_all_commands() -> None:
    """The module runs by its name and tells what it can do."""
    done = subprocess.run(
        [sys.executable, "-m", "reshard_build", "--help"],
        cwd=Path(reshard_build.__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    for command in ("wheel", "tree", "import", "export", "check", "rebuild"):
        assert f"\n    {command} " in done.stdout


def test_wheel_goes_to_dist_and_is_printed(
    frontend: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last line on stdout is the path of the wheel, for scripts."""
    assert main(["--root", str(frontend.root), "wheel"]) == 0
    path = Path(capsys.readouterr().out.splitlines()[-1])
    assert path.is_file()
    assert path.parent == frontend.root / "dist"


def test_progress_goes_to_stderr(frontend: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """What is being done is told beside the result, once."""
    main(["--root", str(frontend.root), "wheel"])
    assert capsys.readouterr().err.count("wrote vllm-0.22.1+reshard.1.cpu") == 1
