# SPDX-License-Identifier: Apache-2.0
"""NIXL metadata: where the address in it begins, and processes that load it and may end of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

import psutil

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport import probe_process
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.agent import nixl_module

_LOADER = """
import importlib, json, sys
nixl = importlib.import_module(sys.argv[1])
config = nixl.nixl_agent_config(enable_prog_thread=False, num_threads=0, backends=["UCX"])
for number, each in enumerate(json.load(sys.stdin)):
    agent = nixl.nixl_agent(str(number), config)
    try:
        agent.add_remote_agent(bytes.fromhex(each))
    except Exception:
        pass
    agent.get_new_notifs()
print("alive")
"""


def start_of_address(metadata: bytes) -> int:
    """Where UCX's address begins in NIXL metadata: behind its tag, and 8 bytes of length."""
    return metadata.index(b"UCX|c") + len(b"UCX|c") + 8


def assert_loaded(metadata: Sequence[bytes]) -> None:
    """Load each in an agent of its own; NIXL may refuse it, and must not end the process."""
    loader = subprocess.run(
        [sys.executable, "-c", _LOADER, nixl_module()],
        input=json.dumps([each.hex() for each in metadata]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert loader.stdout.splitlines()[-1:] == ["alive"], loader.returncode


def forking_process() -> psutil.Process | None:
    """What forks for this process's probe; None while there is none, or it has ended."""
    for each in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if probe_process.__file__ in each.cmdline():
                return each
    return None
