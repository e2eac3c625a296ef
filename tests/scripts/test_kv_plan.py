# SPDX-License-Identifier: Apache-2.0
"""The installed command `kv-plan`, as a process of its own: what it loads, prints and refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

INSTALLED = Path(sys.executable).with_name("kv-plan")
SOURCE = Path(__file__).parents[2] / "scripts/kv-plan"

LAYOUTS = ("--prefill", "tp=3,pp=2", "--decode", "tp=2")
SIZES = ("--num-layers", "4", "--num-kv-heads", "6", "--head-size", "64")
HEAVY = {"nixl", "torch", "transformers", "vllm", "zmq"}

# Runs a script as its main module, and says on standard error what was loaded for it.
LIST_MODULES = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print(*sorted({name.partition(".")[0] for name in sys.modules}), file=sys.stderr)
"""


def run(*command: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


@pytest.mark.parametrize("output", [(), ("--json",), ("--svg", "plan.svg")])
def test_nothing_that_takes_seconds_is_loaded(output, tmp_path):
    """Neither vLLM nor torch nor what reads models is imported, whatever is asked for."""
    done = run(
        *(sys.executable, "-c", LIST_MODULES, INSTALLED),
        *(*LAYOUTS, *SIZES, *output),
        cwd=tmp_path,
        check=True,
    )
    loaded = set(done.stderr.split())
    assert "_vllm_kv_reshard" in loaded
    assert loaded.isdisjoint(HEAVY)
    assert ("rich" in loaded) == ("--json" not in output)


def test_command_prints_the_plan_and_nothing_else():
    """Standard output is the object, and standard error is empty."""
    done = run(INSTALLED, *LAYOUTS, *SIZES, "--json", check=True)
    assert json.loads(done.stdout)["prefill"]["mesh"]["pp_size"] == 2
    assert done.stderr == ""


def test_layout_that_cannot_be_is_one_line_and_status_2():
    """Another program can tell a refusal from a crash."""
    done = run(INSTALLED, "--prefill", "tp=4", "--decode", "tp=1", *SIZES)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("kv-plan: error: tensor_parallel_size 4 does")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("output", [(), ("--json",)])
def test_reader_that_has_gone_is_no_crash(output):
    """As after `| head`: no traceback, and a status that is not 0."""
    reads, writes = os.pipe()
    os.close(reads)
    command = [INSTALLED, *LAYOUTS, *SIZES, *output]
    try:
        done = subprocess.run(
            command, stdout=writes, stderr=subprocess.PIPE, timeout=60, check=False
        )
    finally:
        os.close(writes)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize("found", [True, False])
def test_another_vllm_is_one_line(found, tmp_path):
    """A vLLM without the package, or none, is told apart from a plan that cannot be made."""
    if found:
        (tmp_path / "vllm").mkdir()
        (tmp_path / "vllm/__init__.py").write_text("raise AssertionError('imported')\n")
    # Isolated and without site-packages, only what the path names is found.
    code = "import runpy, sys; sys.path.insert(0, sys.argv[2]); runpy.run_path(sys.argv[1], "
    code += "run_name='__main__')"
    done = run(sys.executable, "-I", "-S", "-c", code, SOURCE, tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    where = f"the vLLM in {tmp_path / 'vllm'} has no" if found else "there is no"
    assert done.stderr.startswith(f"kv-plan: error: {where} ")
    assert done.stderr.count("\n") == 1
