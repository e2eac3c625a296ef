# SPDX-License-Identifier: Apache-2.0
"""Fakes of the servers, in processes of their own or in threads of the test's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.tools.pdstack.helpers import wait_until, write_fakes
from tools.pdstack.ports import HOST, PortAllocator
from tools.soak.clients import Server

FAKE_SERVER = Path(__file__).with_name("fake_server.py")


@pytest.fixture
def fake_bin(tmp_path: Path) -> Path:
    """A directory with fakes of ``vllm`` and ``vllm-router``."""
    return write_fakes(tmp_path / "bin", FAKE_SERVER)


@pytest.fixture
def engine() -> Iterator[Server]:
    """A fake engine that answers."""
    port = PortAllocator().take()
    command = [sys.executable, str(FAKE_SERVER), "serve", "model", "--host", HOST]
    process = subprocess.Popen([*command, "--port", str(port)], stdout=subprocess.DEVNULL)
    server = Server("engine", f"http://{HOST}:{port}")

    def is_up() -> bool:
        try:
            return httpx.get(f"{server.url}/health", trust_env=False).is_success
        except httpx.TransportError:
            return False

    try:
        wait_until(is_up, "the start of the fake engine")
        yield server
    finally:
        process.kill()
        process.wait()
