# SPDX-License-Identifier: Apache-2.0
"""How vLLM kills its processes where some of them end by themselves."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest
from vllm.utils.system_utils import kill_process_tree

DEADLINE_S = 60.0
FAMILY = """
import subprocess, sys, time
for _ in range(2):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("started", flush=True)
time.sleep(600)
"""


def test_one_that_has_ended_does_not_save_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's workers have children, which end with them while the engine is being killed."""
    with subprocess.Popen([sys.executable, "-c", FAMILY], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"started\n"
        first, second = psutil.Process(parent.pid).children()
        name_of = psutil.Process.name

        def name(process: psutil.Process) -> str:
            if process == first:
                raise psutil.NoSuchProcess(process.pid)
            return name_of(process)

        try:
            with monkeypatch.context() as patch:
                patch.setattr(psutil.Process, "name", name)
                kill_process_tree(parent.pid)
            assert parent.wait(DEADLINE_S) < 0
            assert psutil.wait_procs([second], DEADLINE_S)[0] == [second]
        finally:
            for process in (first, second):
                if process.is_running():
                    process.kill()
            parent.kill()
