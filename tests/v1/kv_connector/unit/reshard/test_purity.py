# SPDX-License-Identifier: Apache-2.0
"""The core computes with values alone."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import vllm.distributed.kv_transfer.kv_connector.v1.reshard as reshard

SHELL = (
    "agent",
    "compatibility",
    "connector",
    "geometry",
    "holder",
    "lease_check",
    "measure",
    "messages",
    "metadata",
    "params",
    "peers",
    "remote",
    "scatter",
    "scheduler",
    "settings",
    "side_channel",
    "staging_area",
    "stats",
    "transfers",
    "worker",
)
CORE = (
    "arena",
    "cache",
    "errors",
    "leases",
    "lowering",
    "mesh",
    "plan",
    "protocol",
    "shards",
    "staging",
    "strategy",
    "summary",
    "verify",
)
LIBRARIES = sys.stdlib_module_names | {"numpy"}
PACKAGE = Path(reshard.__file__).parent


@pytest.mark.parametrize("module", CORE)
def test_core_imports_numpy_the_standard_library_and_itself_only(module):
    """No torch, no vLLM, no transport: planning needs nothing that could do I/O."""
    for node in ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level == 1:
                assert node.module in CORE
                continue
            names = [node.module or "."]
        else:
            continue
        for name in names:
            assert name.partition(".")[0] in LIBRARIES, f"{module} imports {name}"


def test_every_module_is_classified():
    """A new module is named above, as part of the core or of the shell around it."""
    assert {path.stem for path in PACKAGE.glob("*.py")} == {"__init__", *CORE, *SHELL}
