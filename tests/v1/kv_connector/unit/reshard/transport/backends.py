# SPDX-License-Identifier: Apache-2.0
"""The backends of NIXL that tests run with, where they load."""

from __future__ import annotations

import subprocess
import sys
from functools import cache

import pytest

BACKENDS = ["UCX", "LIBFABRIC"]

# Without vLLM, which would take seconds to import.
_TRIES = """
from nixl._api import nixl_agent, nixl_agent_config
nixl_agent("try", nixl_agent_config(backends=["{backend}"]))
"""


@cache
def _fault_of(backend: str) -> str:
    """Why a backend does not load; empty where it does. It may abort the process that tries."""
    tried = subprocess.run(
        [sys.executable, "-c", _TRIES.format(backend=backend)],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return "" if not tried.returncode else tried.stderr.strip().rpartition("\n")[2]


def available(backend: str) -> str:
    """A backend; the test is skipped where it does not load."""
    if backend != "UCX" and (fault := _fault_of(backend)):
        pytest.skip(f"NIXL's {backend} does not load here ({fault}): see CONTRIBUTING.md")
    return backend
