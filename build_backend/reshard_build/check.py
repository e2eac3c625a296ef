# SPDX-License-Identifier: Apache-2.0
"""Proves that series and overlay fit every wheel of every base: what `make patches-check` runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from packaging.version import Version

from .archive import BaseWheel
from .base import load_base
from .bases import releases
from .duplicates import require_no_duplicates
from .errors import BuildError, UnknownBaseError
from .operators import require_operators
from .overlay import base_overlay, clashes, require_no_clash
from .patchfile import Patch, describe
from .pinned import open_pinned
from .plugin import checked_releases, read_plugin
from .project import Project
from .roundtrip import require_round_trip
from .series import apply_series, base_files, load_series, touched_paths
from .typecheck import differences, require_types


@dataclass(frozen=True)
class Proof:
    """The outcome of one check.

    Attributes:
        name: What was checked.
        ok: Whether it holds.
        text: What was found.
    """

    name: str
    ok: bool
    text: str

    def __str__(self) -> str:
        return f"{'ok  ' if self.ok else 'FAIL'} {self.name}: {self.text}"


def run_checks(
    project: Project, environ: Mapping[str, str], only: Collection[str] = ()
) -> Iterator[Proof]:
    """Run all checks against all base wheels, and yield each outcome as soon as it is known.

    Bases are checked side by side, as pyright, which takes nearly all of the time, keeps one core
    busy. A check that cannot start because an earlier one failed is not run.

    Args:
        project: Source tree.
        environ: Environment variables, for the cache and for pip.
        only: Releases of the bases to check; all by default.

    Raises:
        UnknownBaseError: There is no such base.
        BuildError: The base wheels cannot be had.
    """
    known = releases(project)
    if unknown := sorted(set(only) - set(known)):
        raise UnknownBaseError(f"{unknown[0]} is not a base", f"choose from {', '.join(known)}")
    wanted = [release for release in known if not only or release in only]
    # None where a base is done.
    proofs: SimpleQueue[Proof | None] = SimpleQueue()

    def check(release: str) -> None:
        try:
            for proof in _check_base(project, release, environ):
                proofs.put(proof)
        finally:
            proofs.put(None)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        checks = [pool.submit(check, release) for release in wanted]
        for _ in wanted:
            yield from iter(proofs.get, None)
        for each in checks:
            each.result()


def _check_base(project: Project, release: str, environ: Mapping[str, str]) -> Iterator[Proof]:
    config = load_base(project.base_file(release))
    overlay = base_overlay(project, release)
    series = _Series(project.patches_dir(release))
    described = _prove(f"series, {release}", series.load)
    yield described
    with ExitStack() as stack:
        bases = [
            (
                f"{release} {target.name} {pin.machine}",
                pin,
                stack.enter_context(open_pinned(pin, environ)),
            )
            for target in config.targets.values()
            for pin in target.wheels.values()
        ]
        proved: set[str] = set()
        types, plugin_types = _Types(), _Types()
        for label, pin, base in bases:
            if pin.compiled is not None:
                yield _prove(f"operators, {label}", partial(require_operators, pin, base))
            # Two targets may have the Python of one wheel.
            if pin.sha256 in proved:
                continue
            proved.add(pin.sha256)
            against = _Against(release, base, overlay, series.patches, types)
            if described.ok:
                applied = _prove(f"apply, {label}", against.apply)
                yield applied
            if described.ok and applied.ok:
                yield _prove(f"re-export, {label}", against.reexport)
                yield _prove(f"duplicates, {label}", against.duplicates)
                yield _prove(f"types, {label}", against.types)
            yield _prove(f"overlay, {label}", against.apart)
            yield from _check_plugin(project, release, label, base, plugin_types)


def _check_plugin(
    project: Project, release: str, label: str, base: BaseWheel, types: _Types
) -> Iterator[Proof]:
    """Prove that the plugin fits a wheel as released, if it is meant for that release."""

    def fit() -> str:
        files = _python(read_plugin(project).files)
        modules = {**_modules(base), **{path: each.read_bytes() for path, each in files.items()}}
        how = types.require(modules, files, {}, Version(release).release, base.path.name)
        return f"{len(files)} files fit vllm without patches{how}"

    if checked_releases(project).contains(release):
        yield _prove(f"plugin, {label}", fit)


def _python(files: Mapping[str, Path]) -> dict[str, Path]:
    """Those of some files that are Python."""
    return {path: source for path, source in files.items() if path.endswith(".py")}


def _modules(base: BaseWheel) -> dict[str, bytes]:
    """The Python files of a base wheel."""
    return {path: base.read(path) for path in base.names if path.endswith((".py", ".pyi"))}


def _prove(name: str, check: Callable[[], str]) -> Proof:
    try:
        return Proof(name, True, check())
    except BuildError as error:
        return Proof(name, False, str(error))


class _Types:
    """Types on the wheels of a base: pyright, which takes nearly all time, reads one that passes.

    Of a further one it is enough that what is checked, and what this imports, is the same.
    """

    def __init__(self) -> None:
        self._passed: tuple[str, Mapping[str, bytes]] | None = None

    def require(
        self,
        modules: Mapping[str, bytes],
        checked: Collection[str],
        before: Mapping[str, bytes],
        release: tuple[int, ...],
        where: str,
    ) -> str:
        """Check one wheel as `require_types`; tells how, if not by pyright.

        Raises:
            TypeCheckError: Something does not hold.
        """
        if self._passed is not None:
            other, others = self._passed
            count, needed = differences(modules, others, [*checked, *before])
            if not needed:
                return f", as on {other}: they import none of {count} files that differ"
        require_types(modules, checked, before, release, where)
        self._passed = where, modules
        return ""


class _Series:
    """The series by itself."""

    def __init__(self, patches_dir: Path) -> None:
        self._patches_dir = patches_dir
        self.patches: tuple[Patch, ...] = ()

    def load(self) -> str:
        self.patches = load_series(self._patches_dir)
        for patch in self.patches:
            describe(patch)
        return f"{len(self.patches)} patches, each listed once and described"


class _Against:
    """Series and overlay against one base wheel; `apply` comes first."""

    def __init__(
        self,
        release: str,
        base: BaseWheel,
        overlay: Mapping[str, Path],
        patches: tuple[Patch, ...],
        types: _Types,
    ) -> None:
        self._release = Version(release).release
        self._base = base
        self._overlay = overlay
        self._patches = patches
        self._types = types
        self._files = base_files(base, touched_paths(patches))
        self._patched: dict[str, bytes | None] = {}

    def apply(self) -> str:
        self._patched = apply_series(self._patches, self._files)
        return f"{len(self._patches)} patches fit {len(self._patched)} files exactly"

    def reexport(self) -> str:
        require_round_trip(self._patches, self._files)
        return f"{len(self._patches)} patches come back byte for byte"

    def apart(self) -> str:
        require_no_clash(self._overlay, self._base.names, self._base.path.name)
        for patch in self._patches:
            require_no_clash(clashes(self._overlay, patch.paths), patch.paths, patch.name)
        return f"none of {len(self._overlay)} files exists upstream"

    def duplicates(self) -> str:
        for path, content in self._patched.items():
            if path.endswith(".py") and content is not None:
                require_no_duplicates(path, self._files.get(path), content)
        return f"none of {len(self._patched)} files defines anything twice"

    def types(self) -> str:
        overlay = _python(self._overlay)
        modules = _modules(self._base)
        patched = {path: each for path, each in self._patched.items() if path.endswith(".py")}
        for path, content in patched.items():
            modules[path] = content or b""
        modules |= {path: source.read_bytes() for path, source in overlay.items()}
        before = {path: self._files.get(path) or b"" for path in patched}
        how = self._types.require(modules, overlay, before, self._release, self._base.path.name)
        return f"{len(overlay)} files of the overlay fit, and {len(patched)} that are patched{how}"
