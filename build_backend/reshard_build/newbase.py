# SPDX-License-Identifier: Apache-2.0
"""Begins a base for another release of vLLM, and says how far one has come: `make base`.

What can be copied or computed is done; what somebody has to read, decide or run is said, with the
command for it.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from .archive import BaseWheel
from .base import Base, Target, WheelPin, load_base
from .bases import releases
from .errors import BuildError, ConfigError, FetchError
from .fetch import find
from .metadata import product_metadata
from .operators import declared_in_sources, require_operators, write_operators
from .pinned import open_pinned
from .project import Project
from .series import apply_series, base_files, load_series, touched_paths
from .staging import staging_folder

STEPS_FOR_A_PERSON = (
    "make patches-import BASE={release}: for every patch, also one that fits, read its Drop-when "
    "and upstream's code; then make patches-export BASE={release}",
    "make patches-check: names, signatures and attributes that the overlay relies on",
    "make tree BASE={release} and BASE={before}: read the difference of what docs/rebasing.md "
    "lists, which no check sees",
    'make setup test sweep demo BASE={release}: with status "run" in base.toml',
    "docs/rebasing.md, its last steps: which tests are for which base, and the pages that name it",
)

RELEASED = "vllm"
"""The distribution that every release has."""

_COMPILED = """

[targets.{target}.compiled]
project = "{nearest.project}"
version = "{nearest.version}"
# What the release's own sources declare, to compare with.
operators = "operators.txt"

[targets.{target}.compiled.wheels.{nearest.machine}]
file = "{nearest.file}"
sha256 = "{nearest.sha256}"

"""


@dataclass(frozen=True)
class Step:
    """One of the steps that are done for a person.

    Attributes:
        name: What it is about.
        done: Whether nothing is left of it.
        text: What was done, or what is wrong and what to do.
    """

    name: str
    done: bool
    text: str

    def __str__(self) -> str:
        return f"{'done' if self.done else 'TODO'} {self.name}: {self.text}"


def begin(
    project: Project, release: str, environ: Mapping[str, str], sources: Path | None = None
) -> Iterator[Step]:
    """Begin a base, or look at one that was begun, and yield each step once it is known.

    Args:
        project: Source tree.
        release: The release of vLLM.
        environ: Environment variables, for the cache and for pip.
        sources: Unpacked sources of the release, to read the declared operators from; only asked
            for where compiled files of another release are used.

    Raises:
        BuildError: The release cannot be had, or a file of the base is invalid.
    """
    if release in releases(project):
        yield Step("pin", True, f"bases/{release} is there")
    else:
        before = releases(project)[-1]
        _copy(project, load_base(project.base_file(before)), release, environ)
        yield Step("pin", True, f"bases/{release} is new, with patches and rewrites of {before}")
        yield from _complete_builds(load_base(project.base_file(before)), release, environ)
    config = load_base(project.base_file(release))
    if sources is not None:
        _write_operators(config, sources)
    for target in config.targets.values():
        for pin in target.wheels.values():
            with open_pinned(pin, environ) as base:
                yield from _look(project, target, pin, base)


def _complete_builds(before: Base, release: str, environ: Mapping[str, str]) -> Iterator[Step]:
    """Yield a step for each target that no longer needs the compiled files of another release."""
    for target in before.targets.values():
        for project in {pin.compiled.pin.project for pin in target.wheels.values() if pin.compiled}:
            try:
                file, sha256 = find(project, release, environ)
            except FetchError:
                continue
            yield Step(
                f"wheels, {target.name}",
                False,
                f"{project} {release} is to be had: let it be the target's one wheel, file "
                f"{file}, sha256 {sha256}, without `compiled`",
            )


def _look(project: Project, target: Target, pin: WheelPin, base: BaseWheel) -> Iterator[Step]:
    """Yield what of a target and its wheels is done."""
    about = f"{target.name} {pin.machine}"

    def requirements() -> str:
        product_metadata(project, target, base)
        return "base.toml's rewrites fit those of the wheel"

    def patches() -> str:
        series = load_series(project.patches_dir(pin.version))
        apply_series(series, base_files(base, touched_paths(series)))
        return f"{len(series)} fit exactly"

    yield _step(f"requirements, {about}", requirements)
    if pin.compiled is not None:
        yield _step(f"operators, {about}", lambda: require_operators(pin, base))
    yield _step(f"patches, {about}", patches)


def _step(name: str, do: Callable[[], str]) -> Step:
    try:
        return Step(name, True, do())
    except BuildError as error:
        return Step(name, False, str(error))


def _copy(project: Project, before: Base, release: str, environ: Mapping[str, str]) -> None:
    """Make the directory of a base from that of the one before, with wheels of its own."""
    text = project.base_file(before.version).read_text(encoding="utf-8")
    text = text.replace(f"vLLM {before.version} as a base", f"vLLM {release} as a base")
    text = re.sub(r"^version = .*", f'version = "{release}"', text, count=1, flags=re.MULTILINE)
    text = re.sub(r"^release = .*", "release = 1", text, count=1, flags=re.MULTILINE)
    status = '# Not run yet.\nstatus = "checked"'
    text = re.sub(r"(^#.*\n)*^status = .*", status, text, count=1, flags=re.MULTILINE)
    own = find(RELEASED, release, environ)
    for target in before.targets.values():
        for pin in target.wheels.values():
            file, sha256 = own
            if pin.project != RELEASED:
                try:
                    file, sha256 = find(pin.project, release, environ)
                except FetchError:
                    text = _with_compiled_files_of(text, target.name, pin)
            text = text.replace(pin.file, file, 1).replace(pin.sha256, sha256, 1)
    with staging_folder(".base-", project.bases_dir) as staging:
        new = staging / release
        shutil.copytree(project.patches_dir(before.version), new)
        (new / "base.toml").write_text(text, encoding="utf-8")
        # What another release declares says nothing of this one.
        for parts in _parts(before):
            (new / parts.name).unlink(missing_ok=True)
        new.rename(project.patches_dir(release))


def _with_compiled_files_of(text: str, target: str, nearest: WheelPin) -> str:
    """Return a `base.toml` one target of which has the compiled files of an earlier release."""
    section = re.compile(
        rf"^\[targets\.{target}\]\n.*?(?=^\[targets\.(?!{target}\.)|\Z)", re.MULTILINE | re.DOTALL
    )

    def with_parts(match: re.Match[str]) -> str:
        own = re.sub(r"^project = .*", f'project = "{RELEASED}"', match[0], flags=re.MULTILINE)
        return own.rstrip() + _COMPILED.format(target=target, nearest=nearest)

    return section.sub(with_parts, text)


def _parts(config: Base) -> set[Path]:
    """Return the files of declared operators of a base."""
    return {
        pin.compiled.operators
        for target in config.targets.values()
        for pin in target.wheels.values()
        if pin.compiled is not None
    }


def _write_operators(config: Base, sources: Path) -> None:
    if not (files := _parts(config)):
        raise ConfigError(
            f"base {config.version} takes compiled files of its own release only",
            "leave the sources out",
        )
    for path in files:
        write_operators(declared_in_sources(sources), path, config.version)
