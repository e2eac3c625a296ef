# SPDX-License-Identifier: Apache-2.0
"""Checks that the overlay keeps to vLLM's classes and functions, with pyright and without running.

What the overlay imports exists, arguments fit, overrides take what callers of the overridden method
may give, and attributes exist that are read of values whose class is known; and so it is for what
patches add to upstream's files. Pyright reads the product's Python as it would be installed;
other packages are those of the environment that this runs in.

Of code that is switched by release, what runs on the base is checked: see `switches`. What pyright
does not see is in decision record 25.
"""

from __future__ import annotations

import ast
import json
import operator
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import TypeCheckError

RULES = (
    "reportAbstractUsage",
    "reportAttributeAccessIssue",
    "reportCallIssue",
    "reportGeneralTypeIssues",
    "reportIncompatibleMethodOverride",
    "reportMissingImports",
)
"""Pyright's rules for what differs from release to release. Types of arguments and results are for
`make lint`, which knows one release and all types."""

RULES_FOR_PATCHES = ("reportAttributeAccessIssue", "reportCallIssue", "reportMissingImports")
"""Those by which what a patch adds to a file of upstream's is judged."""

_LIMIT_S = 600.0

_BEFORE = "before_patches"
"""Where upstream's files lie beside the product as they were."""

_ORDERS: dict[type[ast.cmpop], Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


@dataclass(frozen=True)
class Finding:
    """Something that does not hold.

    Attributes:
        path: File of the product.
        line: Line number, from 1.
        text: What does not hold.
        rule: Which of `RULES`.
    """

    path: str
    line: int
    text: str
    rule: str = ""

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.text}"


def require_types(
    modules: Mapping[str, bytes],
    overlay: Collection[str],
    patched: Mapping[str, bytes],
    release: tuple[int, ...],
    where: str,
) -> None:
    """Check the overlay, and what patches add.

    Args:
        modules: Content of all of the product's Python files.
        overlay: The overlay's.
        patched: Content before the patches of the files that they touch.
        release: The base's, as `(0, 32, 0)`.
        where: Which base it is, for the message.

    Raises:
        TypeCheckError: Something does not hold, or pyright cannot be run.
    """
    if found := check(modules, overlay, patched, release):
        raise TypeCheckError(
            f"on {where} the overlay does not fit: {'; '.join(map(str, found))}",
            "follow upstream, in compat.py where bases differ",
        )


def check(
    modules: Mapping[str, bytes],
    overlay: Collection[str],
    patched: Mapping[str, bytes],
    release: tuple[int, ...],
) -> list[Finding]:
    """What does not hold, by file and line; see `require_types`."""
    constants: dict[str, bool] = {}
    for path in overlay:
        constants |= switches(modules[path], release)
    before = {f"{_BEFORE}/{path}": content for path, content in patched.items()}
    with tempfile.TemporaryDirectory(prefix="reshard-types-") as name:
        root = Path(name)
        for path, content in {**modules, **before}.items():
            target = root / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        found = _run_pyright(root, [*overlay, *patched, *before], constants)
    # What upstream's file had before is upstream's, wherever it stands now, and so are its classes.
    upstreams = {
        (each.path.removeprefix(f"{_BEFORE}/"), each.text) for each in found if each.path in before
    }
    ours = [
        each
        for each in found
        if each.path in overlay
        or (
            each.path in patched
            and each.rule in RULES_FOR_PATCHES
            and (each.path, each.text) not in upstreams
        )
    ]
    return sorted(ours, key=lambda each: (each.path, each.line))


def differences(
    modules: Mapping[str, bytes], others: Mapping[str, bytes], checked: Collection[str]
) -> tuple[int, list[str]]:
    """How many files two wheels have differently, and which of those what is checked depends on.

    They are the checked files themselves, and what one of these imports; not a file of which only
    the body of an annotated function differs.

    Args:
        modules: Content of all Python files of one.
        others: Of the other.
        checked: Which of them are checked.
    """
    differing = {
        path for path in modules.keys() | others.keys() if modules.get(path) != others.get(path)
    }
    imported: set[str] = set()
    for path in checked:
        imported |= _imported(path, modules[path])
    return len(differing), sorted(
        path
        for path in differing
        if path in checked
        or (
            _module_name(path) in imported
            and _outline(modules.get(path)) != _outline(others.get(path))
        )
    )


def _module_name(path: str) -> str:
    return path.partition(".")[0].removesuffix("/__init__").replace("/", ".")


def _imported(path: str, source: bytes) -> set[str]:
    """Modules that a file may import, their packages, and names in them that may be modules."""
    # A package's own file is named as a module in it.
    parents = path.partition(".")[0].split("/")
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found |= {each.name for each in names}
            case ast.ImportFrom(module=module, names=names, level=level):
                base = ".".join((*(parents[:-level] if level else ()), *filter(None, [module])))
                found |= {base, *(f"{base}.{each.name}" for each in names)}
    return {name[:end] for name in found for end in _ends(name)}


def _ends(name: str) -> list[int]:
    """Where a dotted name's packages end, and itself."""
    return [index for index, letter in enumerate(f"{name}.") if letter == "."]


def _outline(source: bytes | None) -> str | None:
    """What other modules see of one."""
    if source is None:
        return None
    module = ast.parse(source)
    for node in module.body:
        if isinstance(node, ast.FunctionDef) and node.returns is not None:
            node.body = []
    return ast.dump(module)


def switches(source: bytes, release: tuple[int, ...]) -> dict[str, bool]:
    """Names at the top of a module that a comparison with the release decides, and what they are.

    Args:
        source: The module.
        release: The base's.
    """
    known: dict[str, bool] = {}

    def truth(node: ast.expr) -> bool | None:
        match node:
            case ast.Name(id=name):
                return known.get(name)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                value = truth(operand)
                return None if value is None else not value
            case ast.Compare(
                left=ast.Attribute(attr="release"), ops=[order], comparators=[ast.Tuple() as other]
            ) if type(order) in _ORDERS:
                return _ORDERS[type(order)](release, ast.literal_eval(other))
        return None

    try:
        statements = ast.parse(source).body
    except SyntaxError:
        # Pyright says so, too, and where.
        return {}
    for statement in statements:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                if (decided := truth(value)) is not None:
                    known[name] = decided
    return known


def _run_pyright(root: Path, paths: list[str], constants: Mapping[str, bool]) -> list[Finding]:
    """Run pyright on some of the files below a directory.

    Raises:
        TypeCheckError: It cannot be run.
    """
    config = {
        "include": paths,
        "typeCheckingMode": "off",
        "defineConstant": dict(constants),
        **dict.fromkeys(RULES, "error"),
    }
    project = root / "pyrightconfig.json"
    project.write_text(json.dumps(config), encoding="utf-8")
    command = ["-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable]
    try:
        done = subprocess.run(
            [sys.executable, *command, "--project", str(project)],
            capture_output=True,
            check=False,
            text=True,
            timeout=_LIMIT_S,
        )
        report = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired, json.JSONDecodeError) as error:
        raise TypeCheckError(
            f"pyright cannot be run: {error}", "install requirements/lint.txt"
        ) from None
    return [
        Finding(
            Path(each["file"]).relative_to(root.resolve()).as_posix(),
            each["range"]["start"]["line"] + 1,
            " ".join(each["message"].split()),
            each.get("rule", ""),
        )
        for each in report["generalDiagnostics"]
        if each["severity"] == "error"
    ]
