# SPDX-License-Identifier: Apache-2.0
"""The package stands wherever it is put: as part of vLLM, or under a name of its own."""

from __future__ import annotations

import ast
from pathlib import Path

from vllm.distributed.kv_transfer.kv_connector.v1 import reshard


def test_own_modules_are_imported_by_relative_names():
    """An absolute name would load a second copy, or none, where the package has another name."""
    sources = sorted(Path(reshard.__file__).parent.rglob("*.py"))
    assert sources
    imported = {
        (path.name, name)
        for path in sources
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom) and node.level == 0
            else [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else []
        )
    }
    assert {found for found in imported if "reshard" in found[1]} == set()
