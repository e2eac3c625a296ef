# SPDX-License-Identifier: Apache-2.0
"""What a probe takes for NIXL: does with itself whatever the metadata says."""

from __future__ import annotations

import os
import signal
import time


def nixl_agent_config(**_: object) -> None:
    """NIXL's settings."""


class nixl_agent:
    """NIXL's agent."""

    def __init__(self, name: str, config: None) -> None:
        if os.environ.get("FAKE_NIXL") == "makes no agent":
            raise OSError("no network")
        self._known: set[bytes] = set()
        self._refuses = os.environ.get("FAKE_NIXL") == "refuses known names"

    def add_remote_agent(self, metadata: bytes) -> bytes:
        """Do as the metadata says, which begins with a name, unless that is known."""
        name, _, what = metadata.rpartition(b":")
        if name in self._known:
            if self._refuses:
                raise ValueError("another is known by that name")
            return name
        if what == b"alone" and self._known:
            os.abort()
        self._known.add(name)
        if what == b"abort":
            os.abort()
        if what == b"crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if what == b"exit":
            os._exit(0)
        if what == b"hang":
            time.sleep(600)
        if what == b"refuse":
            raise ValueError("not known here")
        return name
