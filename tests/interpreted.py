# SPDX-License-Identifier: Apache-2.0
"""Tests of kernels in Triton, which its interpreter runs on the CPU's tensors.

The interpreter has to be chosen before vLLM is imported, and other tests want vLLM without it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tools.pdstack.interpreter import MODULE_DIR

_ROOT = Path(__file__).resolve().parents[1]


def assert_passes(*modules: Path) -> None:
    """See that the tests of modules pass in a process that has vLLM with the interpreter."""
    paths = [str(MODULE_DIR), *filter(None, [os.environ.get("PYTHONPATH")])]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, modules)],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)},
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout
    assert " passed" in ended.stdout, ended.stdout
