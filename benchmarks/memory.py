# SPDX-License-Identifier: Apache-2.0
"""How much memory a process takes at most, whoever allocates it."""

from __future__ import annotations

from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


class PeakMemory:
    """The highest resident size of this process from now on, above what it is now."""

    def __init__(self) -> None:
        _CLEAR.write_text(_RESET_PEAK, encoding="ascii")
        self._before_bytes = _status_bytes("VmRSS")

    def risen_bytes(self) -> int:
        """How far it rose so far."""
        return max(_status_bytes("VmHWM") - self._before_bytes, 0)


def _status_bytes(name: str) -> int:
    for line in _STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise OSError(f"{_STATUS} has no {name}")
