# SPDX-License-Identifier: Apache-2.0
"""One module tells releases apart, and no other one asks."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from zipfile import ZipFile

import pytest
from packaging.version import Version
from reshard_build.bases import load_bases
from reshard_build.fetch import cache_dir
from reshard_build.project import Project

from tests.bases import RELEASE
from vllm.distributed.kv_transfer.kv_connector.v1 import reshard
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine import compat
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.compat import CHANGES

PACKAGE = Path(reshard.__path__[0])
ROOT = Path(__file__).resolve().parents[6]
OVERLAY = ROOT / "vllm"


def modules() -> list[Path]:
    """All modules that the overlay adds to any base, without the one that may ask."""
    found = [path for path in sorted(OVERLAY.rglob("*.py")) if path.name != "compat.py"]
    assert OVERLAY / "distributed/kv_transfer/kv_connector/v1/reshard/connector.py" in found
    return found


def questions(tree: ast.AST) -> Iterator[str]:
    """What in a module could tell one release of vLLM from another."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id == "hasattr" and of_vllm(node.args[0]):
                yield f"line {node.lineno}: hasattr"
            # A default is what hasattr would ask.
            if node.func.id == "getattr" and len(node.args) > 2 and of_vllm(node.args[0]):
                yield f"line {node.lineno}: getattr with a default"
        elif isinstance(node, ast.Try):
            for statement in node.body:
                if isinstance(statement, (ast.Import, ast.ImportFrom)):
                    yield f"line {statement.lineno}: an import that may fail"
            for handler in node.handlers:
                names = {each.id for each in ast.walk(handler) if isinstance(each, ast.Name)}
                if names & {"ImportError", "ModuleNotFoundError"}:
                    yield f"line {handler.lineno}: an import that may fail"
        elif isinstance(node, ast.Compare):
            text = ast.unparse(node)
            if re.search(r"version|release", text, re.I) and re.search(r"Version\(|\d\.\d", text):
                yield f"line {node.lineno}: {text}"
        elif isinstance(node, ast.ImportFrom) and node.module == "packaging.version":
            yield f"line {node.lineno}: {node.module}"


def of_vllm(node: ast.AST) -> bool:
    """Whether an expression may be something of vLLM's.

    Not the operating system, nor its libraries, nor a model's own configuration, whose fields
    differ from model to model.
    """
    text = ast.unparse(node)
    return text not in ("os", "openmp", "text_config") and not text.endswith(".hf_config")


def test_no_other_module_tells_releases_apart():
    """What differs has a name in `compat`, and goes when its base goes."""
    asked = {path: list(questions(ast.parse(path.read_text()))) for path in modules()}
    assert {path: found for path, found in asked.items() if found} == {}


@pytest.mark.parametrize(
    "source",
    [
        "if hasattr(config, 'layout'): pass",
        "flag = getattr(config, 'layout', None)",
        "try:\n    from vllm import layout\nexcept ImportError:\n    layout = None",
        "if Version(vllm.__version__) < Version('0.32'): pass",
        "if vllm.__version__ >= '0.32': pass",
        "from packaging.version import Version",
    ],
)
def test_questions_are_recognised(source):
    """The walk finds what it is for."""
    assert list(questions(ast.parse(source)))


def switches() -> list[str]:
    """What other modules import from `compat`: what it defines, and what it chooses for them."""
    tree = ast.parse((PACKAGE / "engine/compat.py").read_text())
    defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assigned = [
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    ]
    public = [name for name in (*defined, *assigned) if not name.startswith("_")]
    # Those of peers stay when a base goes.
    of_bases = [name for name in public if getattr(compat, name) not in (*CHANGES, CHANGES)]
    return of_bases + compat.__all__


def test_every_switch_says_which_base_needs_it():
    """Who lets a base go finds what goes with it."""
    source = (PACKAGE / "engine/compat.py").read_text()
    for name in switches():
        if imported := re.search(rf"`{name}`: ((?:[^`]|\n#)*)", source):
            reason = imported[1]
        else:
            after = re.split(rf"\n(?:def )?{name}\b", source)[1]
            _, reason, _ = re.split(r'"""', after, maxsplit=2)
        assert "0.22.1" in reason, name


def test_slots_are_counted_in_tokens():
    """Either base's way to say it means the same."""
    spec = SimpleNamespace(block_size=16, storage_block_size=4, tokens_per_state=4)
    assert compat.tokens_per_slot(spec) == 4


def test_kernels_of_rocm_are_not_asked_for_elsewhere(monkeypatch):
    """Where they are looked for, operators are loaded that end a process without AVX-512."""
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.ops.flydsl_turboquant_decode", None)
    assert not compat.keeps_turboquants_scales_apart()


WHEELS = [
    (base.version, cache_dir(os.environ) / pin.file)
    for base in load_bases(Project(ROOT))
    for target in base.targets.values()
    for pin in target.wheels.values()
]


@pytest.mark.parametrize(
    ("release", "path"), WHEELS, ids=lambda value: getattr(value, "name", value)
)
def test_change_stands_in_every_release_since(release, path):
    """And in none before, so that two engines of which one has it are told apart."""
    if not path.is_file():
        pytest.skip("not on this machine: make patches-check fetches it")
    with ZipFile(path) as wheel:
        names = set(wheel.namelist())
        for change in CHANGES:
            source = wheel.read(change.module).decode() if change.module in names else ""
            is_there = Version(release) >= Version(change.since)
            assert (change.sign in source) is is_there, change


def test_engines_say_which_meaning_is_theirs():
    """In words that do not name their own release."""
    for change in CHANGES:
        when = "since" if Version(RELEASE) >= Version(change.since) else "before"
        assert change.meaning == f"{when} vLLM {change.since}"
        assert change.is_here is (when == "since")
