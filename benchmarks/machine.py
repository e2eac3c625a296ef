# SPDX-License-Identifier: Apache-2.0
"""Where figures come from: machine and versions."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
from pathlib import Path

import psutil

_PACKAGES = ("vllm", "nixl", "torch", "numpy")


def machine_facts() -> dict[str, str]:
    """What a reader of figures wants to know of the machine, by name."""
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    facts = {
        "processor": _processor(),
        "cores": f"{usable} of {os.cpu_count()}",
        "memory": f"{psutil.virtual_memory().total / 2**30:.1f} GiB",
        "available": f"{psutil.virtual_memory().available / 2**30:.1f} GiB",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load average": load,
    }
    for package in _PACKAGES:
        facts[package] = _version(package)
    facts["ucx"] = _ucx_version()
    return facts


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _ucx_version() -> str:
    """The version of UCX that NIXL brings along, as its library says."""
    for package in ("nixl-cu13", "nixl-cu12", "nixl"):
        try:
            files = importlib.metadata.files(package) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name.startswith("libucp"):
                try:
                    version = ctypes.CDLL(str(file.locate())).ucp_get_version_string
                except OSError:
                    continue
                version.restype = ctypes.c_char_p
                return str(version().decode())
    return "unknown"
