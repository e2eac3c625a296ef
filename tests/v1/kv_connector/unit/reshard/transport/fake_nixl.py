# SPDX-License-Identifier: Apache-2.0
"""What a probe takes for NIXL: does with itself whatever the metadata says."""

from __future__ import annotations

import os
import signal
import time


def nixl_agent_config(**_: object) -> None:
    """NIXL's settings."""


class nixl_agent:  # noqa: N801
    """NIXL's agent."""

    def __init__(self, name: str, config: None) -> None:
        if os.environ.get("FAKE_NIXL") == "makes no agent":
            raise OSError("no network")

    def add_remote_agent(self, metadata: bytes) -> str:
        """Do as the metadata says."""
        if metadata == b"abort":
            os.abort()
        if metadata == b"crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if metadata == b"exit":
            os._exit(0)
        if metadata == b"hang":
            time.sleep(600)
        if metadata == b"refuse":
            raise ValueError("not known here")
        return "a peer"

    def remove_remote_agent(self, name: str) -> None:
        """Forget it."""
