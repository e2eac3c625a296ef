# SPDX-License-Identifier: Apache-2.0
"""Errors are one readable line, also on a Python that is too old."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import reshard_build
from reshard_build.errors import BuildError, PythonTooOldError, readable_exit, require_python

PACKAGE_DIR = Path(reshard_build.__file__).parent


def test_python_3_10_is_new_enough() -> None:
    """The oldest Python of vLLM's is accepted."""
    require_python((3, 10, 0))


def test_old_python_is_refused_with_both_versions() -> None:
    """The message names the running version and the needed one."""
    with pytest.raises(PythonTooOldError, match=r"Python 3\.8\.18 .* needs Python 3\.10 or newer"):
        require_python((3, 8, 18))


def test_import_on_old_python_ends_in_one_line() -> None:
    """A frontend that imports the backend with an old Python sees one line and no traceback."""
    code = "import sys; sys.version_info = (3, 8, 18, 'final', 0); import reshard_build"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=PACKAGE_DIR.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: Python 3.8.18")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["__init__.py", "errors.py"])
def test_first_modules_parse_with_python_3_8(name: str) -> None:
    """What runs before the version check uses no syntax that Python 3.8 lacks."""
    ast.parse((PACKAGE_DIR / name).read_text(encoding="utf-8"), feature_version=(3, 8))


def test_only_errors_is_imported_before_the_check() -> None:
    """Nothing stands between the start of the package and the version check."""
    body = ast.parse((PACKAGE_DIR / "__init__.py").read_text(encoding="utf-8")).body
    imports = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    check = next(node for node in body if isinstance(node, ast.With))
    before = [node for node in imports if node.lineno < check.lineno]
    modules = [n.module if isinstance(n, ast.ImportFrom) else n.names[0].name for n in before]
    assert modules == ["sys", "errors"]


def test_error_of_the_system_becomes_the_exit_message(tmp_path: Path) -> None:
    """A file that cannot be read, wherever the build reads it, is one line with its name."""
    with pytest.raises(SystemExit) as raised, readable_exit():
        tmp_path.read_bytes()
    text = str(raised.value.code)
    assert text.startswith("error: ") and str(tmp_path) in text and "\n" not in text


def test_build_error_becomes_the_exit_message() -> None:
    """The message and the remedy are what the process says last; status 1 comes with it."""
    with pytest.raises(SystemExit, match=r"^error: it broke; mend it$"), readable_exit():
        raise BuildError("it broke", "mend it")


def test_other_errors_pass_through() -> None:
    """A programming error keeps its traceback."""
    with pytest.raises(ZeroDivisionError), readable_exit():
        raise ZeroDivisionError
