# SPDX-License-Identifier: Apache-2.0
"""Finding imports that would fail, without importing."""

from __future__ import annotations

import ast

import pytest
from reshard_build.errors import SymbolError
from reshard_build.symbols import Import, imports_of, missing, require_symbols
from reshard_build.universe import Universe

FILES = {
    "vllm/__init__.py": (
        "import typing\n"
        "TABLE = {'LLM': '.entry:LLM'}\n"
        "if typing.TYPE_CHECKING:\n    from vllm.entry import LLM\n"
        "else:\n    def __getattr__(name):\n        return TABLE[name]\n"
    ),
    "vllm/entry.py": "class LLM:\n    inner = 1\n    def method(self): local = 1\n",
    "vllm/shapes.py": (
        "PLAIN = 1\n"
        "ANNOTATED: int = 1\n"
        "DECLARED: int\n"
        "LEFT, (RIGHT, *REST) = 1, (2, 3)\n"
        "import os.path\n"
        "import os.path as ospath\n"
        "from json import loads as parse\n"
        "if PLAIN:\n    IN_IF = 1\n"
        "elif LEFT:\n    IN_ELIF = 1\n"
        "else:\n    IN_ELSE = 1\n"
        "try:\n    IN_TRY = 1\n"
        "except OSError as error:\n    IN_EXCEPT = 1\n"
        "finally:\n    IN_FINALLY = 1\n"
        "for LOOP in (): IN_LOOP = 1\n"
        "with open('x') as HANDLE: pass\n"
        "match PLAIN:\n    case 1: IN_MATCH = 1\n"
        "print(WALRUS := 1)\n"
        "async def coroutine(): pass\n"
    ),
    "vllm/star.py": "from vllm.shapes import *\n_PRIVATE = 1\n",
    "vllm/cycle.py": "from .star import *\nfrom .cycle import *\n",
    "vllm/outside.py": "from torch import *\n",
    "vllm/sub/__init__.py": "",
    "vllm/sub/leaf.py": "",
    "vllm/space/leaf.py": "VALUE = 1\n",
    "vllm/_C.abi3.so": "",
}


@pytest.fixture
def universe() -> Universe:
    """Return a small vLLM."""
    return Universe(frozenset(FILES), lambda path: FILES[path].encode())


@pytest.mark.parametrize(
    "name",
    [
        *("PLAIN", "ANNOTATED", "LEFT", "RIGHT", "REST", "os", "ospath", "parse", "IN_IF"),
        *("IN_ELIF", "IN_ELSE", "IN_TRY", "IN_EXCEPT", "IN_FINALLY", "LOOP", "IN_LOOP"),
        *("HANDLE", "IN_MATCH", "WALRUS", "coroutine"),
    ],
)
def test_every_binding_at_the_top_counts(universe: Universe, name: str) -> None:
    """All statements that bind a name at import are seen, directly and through a star."""
    assert universe.has_name("vllm.shapes", name)
    assert universe.has_name("vllm.star", name)
    assert universe.has_name("vllm.cycle", name)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("vllm.shapes", "DECLARED"),
        ("vllm.shapes", "ABSENT"),
        ("vllm.shapes", "loads"),
        ("vllm.shapes", "path"),
        ("vllm.shapes", "x"),
        ("vllm.entry", "inner"),
        ("vllm.entry", "local"),
        ("vllm.cycle", "_PRIVATE"),
        ("vllm.cycle", "ABSENT"),
        ("vllm", "Absent"),
        ("vllm.sub", "absent"),
        ("vllm.absent", "x"),
    ],
)
def test_what_is_not_bound_is_missing(universe: Universe, module: str, name: str) -> None:
    """Declared, inner, renamed, merely spelt and plainly absent names do not count."""
    assert not universe.has_name(module, name)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("vllm", "LLM"),
        ("vllm", "sub"),
        ("vllm.sub", "leaf"),
        ("vllm.space", "leaf"),
        ("vllm.space.leaf", "VALUE"),
        ("vllm", "_C"),
        ("vllm._C", "anything"),
        ("vllm.outside", "randn"),
    ],
)
def test_lazy_names_submodules_and_binaries_exist(
    universe: Universe, module: str, name: str
) -> None:
    """Lazy tables, modules and packages count; what cannot be read is believed."""
    assert universe.has_name(module, name)


def test_lazy_table_must_spell_the_name(universe: Universe) -> None:
    """A `__getattr__` does not make every name exist."""
    assert not universe.has_name("vllm", "AsyncLLM")


def test_imports_are_found_everywhere() -> None:
    """Relative, nested, conditional and star imports are found; others' are not."""
    source = (
        "import os, vllm.entry\n"
        "from vllm.entry import LLM, Other as O\n"
        "from torch import nn\n"
        "from . import near\n"
        "from ..sub import leaf\n"
        "from .near import *\n"
        "def f():\n    from vllm.deep import x\n"
        "if TYPE_CHECKING:\n    from vllm.types import T\n"
    )
    found = [(i.line, i.module, i.name) for i in imports_of("vllm/own/mine.py", ast.parse(source))]
    assert sorted(found) == [
        (1, "vllm.entry", ""),
        (2, "vllm.entry", "LLM"),
        (2, "vllm.entry", "Other"),
        (4, "vllm.own", "near"),
        (5, "vllm.sub", "leaf"),
        (6, "vllm.own.near", ""),
        (8, "vllm.deep", "x"),
        (10, "vllm.types", "T"),
    ]


def test_relative_imports_of_a_package_start_in_it() -> None:
    """In `__init__.py` one dot is the package itself."""
    (found,) = imports_of("vllm/own/__init__.py", ast.parse("from .near import x\n"))
    assert found.module == "vllm.own.near"


def test_missing_module_and_name(universe: Universe) -> None:
    """A module that went away is missing, whatever is imported from it."""
    gone = Import("vllm/own.py", 1, "vllm.gone", "")
    lost = Import("vllm/own.py", 2, "vllm.entry", "Lost")
    fine = Import("vllm/own.py", 3, "vllm.entry", "LLM")
    assert missing(universe, [gone, lost, fine]) == [gone, lost]


def test_error_names_file_line_and_symbol(universe: Universe) -> None:
    """The message is enough to open the right file at the right line."""
    files = {**FILES, "vllm/own.py": "import os\nfrom vllm.entry import Lost\nimport vllm.gone\n"}
    everything = Universe(frozenset(files), lambda path: files[path].encode())
    with pytest.raises(SymbolError) as raised:
        require_symbols(everything, ["vllm/own.py"], "the base")
    text = str(raised.value)
    assert "vllm/own.py:2 imports Lost from vllm.entry" in text
    assert "vllm/own.py:3 imports vllm.gone" in text
    assert "\n" not in text


def test_invalid_overlay_file_is_named() -> None:
    """A file that is not Python is an error with its path."""
    with pytest.raises(SymbolError, match=r"vllm/own\.py is not valid Python"):
        Universe(frozenset({"vllm/own.py"}), lambda path: b"def\n").tree("vllm/own.py")
