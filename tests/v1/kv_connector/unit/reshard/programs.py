# SPDX-License-Identifier: Apache-2.0
"""Programs that import the package by its own name: importing it by its whole one imports vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from vllm.distributed.kv_transfer.kv_connector.v1 import reshard

_LIMIT_S = 120.0


def run_program(program: str) -> subprocess.CompletedProcess[str]:
    """Run a program in which the package is `reshard`, until it ends."""
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
    )


def python_path() -> str:
    """Where the package is found by its own name, and then what was there."""
    folders = [str(Path(reshard.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(filter(None, folders))
