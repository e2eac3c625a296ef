# SPDX-License-Identifier: Apache-2.0
"""Launcher of a disaggregated stack: prefill engines, decode engines and a router, for real.

``python -m tools.pdstack demo`` is what ``make demo`` runs. From Python, :class:`PDStack` starts
and stops any number of engines and routers.
"""

from .engine import Device, EngineSpec, KVTransfer, ServedModel
from .errors import PDStackError, ProcessDiedError, StartupTimeoutError, UsageError
from .layout import Layout, parse_layout
from .router import RouterSpec
from .stack import Engine, PDStack, Router, run_directory

__all__ = [
    "Device",
    "Engine",
    "EngineSpec",
    "KVTransfer",
    "Layout",
    "PDStack",
    "PDStackError",
    "ProcessDiedError",
    "Router",
    "RouterSpec",
    "ServedModel",
    "StartupTimeoutError",
    "UsageError",
    "parse_layout",
    "run_directory",
]
