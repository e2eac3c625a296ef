# SPDX-License-Identifier: Apache-2.0
"""The lower floors of the connector without vLLM: planning, memory, protocol and transport.

They ask two things of vLLM, a logger and the names of NIXL's classes; there is a stand-in for each.
This module itself needs nothing that is not Python's.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from pathlib import Path
from types import ModuleType

NEEDED = ("torch", "nixl", "numpy", "msgspec", "psutil")
"""What has to be installed, by the names by which it is installed and imported."""

_OVERLAY = Path(__file__).parents[2] / "vllm"
_TRANSPORT = "vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport"


def why_not() -> str:
    """Return what is missing for it, in words; an empty string where nothing is."""
    missing = []
    for name in NEEDED:
        try:
            importlib.import_module(name)
        except ImportError as error:
            missing.append(f"{name} ({error})")
    return f"cannot import {', '.join(missing)}" if missing else ""


def why_no_gpu() -> str:
    """Return why torch cannot compute on a GPU, in words; an empty string where it can."""
    import torch

    if torch.cuda.is_available():
        return ""
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    return f"torch {torch.__version__} ({built}) finds no GPU: see what nvidia-smi says"


def install() -> None:
    """Have the connector's lower floors be imported from this checkout, whatever is installed.

    To be called before anything of vLLM is imported.
    """
    assert not any(name == "vllm" or name.startswith("vllm.") for name in sys.modules)
    # As vLLM sets it before NIXL is imported: else UCX may keep regions that were given back.
    os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    nixl = importlib.import_module("nixl._api")
    _add("vllm", __path__=[str(_OVERLAY)])
    _add("vllm.distributed", __path__=[str(_OVERLAY / "distributed")])
    _add("vllm.logger", init_logger=logging.getLogger)
    _add(
        "vllm.distributed.nixl_utils",
        NixlWrapper=nixl.nixl_agent,
        nixl_agent_config=nixl.nixl_agent_config,
    )


def _add(name: str, **attributes: object) -> None:
    module = ModuleType(name)
    for attribute, value in attributes.items():
        setattr(module, attribute, value)
    sys.modules[name] = module
