# SPDX-License-Identifier: Apache-2.0
"""The scripts for one machine with real engines: an answer that went through both, and an end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from tests.examples.running import LOCAL, RAY, free_ports, started
from tests.tools.pdstack.helpers import read_until, wait_until
from tools.pdstack.metrics import fetch_nixl_counters
from tools.pdstack.tiny_models import write_tiny_llama

# What the scripts do is seen with servers that are none, and what they pass with vLLM's own parser.
pytestmark = pytest.mark.e2e

END_S = 60.0
REQUEST_S = 300.0
# What the processes of pipeline stages are called.
STAGES = {LOCAL: "VLLM::Worker_PP", RAY: "ray::RayWorkerProc"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Directory of a model of four layers, which loads at once."""
    return str(write_tiny_llama(tmp_path_factory.mktemp("model")).directory)


def _environment(**variables: str) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "STARTUP_TIMEOUT_S": "900",
        "OMP_NUM_THREADS": "1",
    }
    return {**os.environ, **settings, **free_ports(), **variables, "PATH": path}


def _printed_curl(shown: str) -> str:
    """Return the command that the script offers to try."""
    match = re.search(r"^  (curl .*\\\n.*)$", shown, re.MULTILINE)
    assert match is not None, shown
    return match[1]


def _title(process: psutil.Process) -> str:
    """Return what a process calls itself; nothing for one that has just ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@pytest.mark.parametrize("script", [pytest.param(LOCAL, id="local"), pytest.param(RAY, id="ray")])
def test_it_serves_and_ends(script: Path, model: str, tmp_path: Path) -> None:
    """The printed command gets one engine's answer by way of both, and Ctrl-C leaves nothing."""
    env = _environment()
    options = ("--dtype", "float32", "--enforce-eager", "--max-num-seqs", "4")
    args = (model, "tp1pp2", "tp1pp1", "--", *options, "--max-model-len", "512")
    with started(script, *args, env=env, directory=tmp_path) as process:
        shown = read_until(process, "Ready")
        children = psutil.Process(process.pid).children(recursive=True)
        names = list(map(_title, children))
        stages = [name for name in names if name.startswith(STAGES[script])]
        assert len(stages) == 2, names
        reply = subprocess.run(
            ["bash", "-c", _printed_curl(shown)], capture_output=True, text=True, timeout=REQUEST_S
        )
        assert reply.returncode == 0, reply.stderr
        decode = f"http://127.0.0.1:{env['DECODE_PORT']}"
        wait_until(
            lambda: fetch_nixl_counters(decode).bytes_moved > 0, "the report of a read", END_S
        )
        body = {
            "model": model,
            "prompt": "The capital of France is",
            "max_tokens": 16,
            "temperature": 0,
            # Blocks that came from the other engine are not used again.
            "cache_salt": "alone",
        }
        alone = httpx.post(
            f"{decode}/v1/completions", json=body, timeout=REQUEST_S, trust_env=False
        )
        assert json.loads(reply.stdout)["choices"][0]["text"] == alone.json()["choices"][0]["text"]
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=END_S)
        assert process.returncode == 130
        _, alive = psutil.wait_procs(children, timeout=END_S)
        assert [each for each in alive if each.status() != psutil.STATUS_ZOMBIE] == []
