# SPDX-License-Identifier: Apache-2.0
"""One base: which upstream release, which wheel for which target, which requirements."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.tags import Tag
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from .errors import ConfigError
from .project import read_toml


@dataclass(frozen=True)
class CompiledParts:
    """Where the compiled files come from, for a release that has no wheel for a target.

    Attributes:
        pin: The nearest wheel for the target. Its compiled files stand for the release's.
        operators: File of the operators that the release itself would register.
        differing: Why it is no matter that the wheel lacks an operator or has another schema for
            it, by the operator's name.
    """

    pin: WheelPin
    operators: Path
    differing: Mapping[str, str]


@dataclass(frozen=True)
class WheelPin:
    """One base wheel.

    Attributes:
        project: Name of the distribution on the package index.
        version: Version of the distribution; of a base wheel, it names the base.
        python: Oldest Python that the release runs on.
        machine: What `platform.machine()` returns where the wheel runs.
        file: File name of the wheel.
        sha256: Checksum of the file, 64 hexadecimal digits.
        compiled: What takes the place of the wheel's own compiled files, if anything does.
    """

    project: str
    version: str
    python: str
    machine: str
    file: str
    sha256: str
    compiled: CompiledParts | None = None

    @property
    def tags(self) -> frozenset[Tag]:
        """Compatibility tags, from the file name: the `WHEEL` file inside may disagree."""
        return parse_wheel_filename(self.file)[3]

    @property
    def contents_sha256(self) -> str:
        """Checksums of all wheels that files come from."""
        return "+".join([self.sha256, *([self.compiled.pin.sha256] if self.compiled else [])])

    @property
    def compressed_tag(self) -> str:
        """Compatibility tags as they stand in the file name."""
        return "-".join(self.file.removesuffix(".whl").split("-")[-3:])


@dataclass(frozen=True)
class Rewrites:
    """How the requirements of a base wheel are changed.

    Attributes:
        replace: Each takes the place of all the base's requirements on the same project.
        drop: Requirements of the base that the product does not have; a bare name stands for all
            of the base's requirements on that project.
        add: Requirements that the base does not have.
    """

    replace: tuple[Requirement, ...] = ()
    drop: tuple[Requirement, ...] = ()
    add: tuple[Requirement, ...] = ()


@dataclass(frozen=True)
class Target:
    """A device that the product is built for.

    Attributes:
        name: Value of `VLLM_TARGET_DEVICE`.
        version: Version of the product for this target.
        rewrites: Changes to the requirements.
        wheels: Base wheel by machine.
    """

    name: str
    version: str
    rewrites: Rewrites
    wheels: Mapping[str, WheelPin]


class Status(Enum):
    """How far a base is proved."""

    #: Engines of it are run.
    RUN = "run"
    #: Patches and overlay fit its wheels, and no more is known.
    CHECKED = "checked"


@dataclass(frozen=True)
class Base:
    """Everything that a `base.toml` says.

    Attributes:
        version: Upstream release.
        status: How far it is proved.
        python: Oldest Python that the release runs on.
        release: Number of the fork's release on this base.
        product_version: Version of the fork without a target's suffix.
        targets: By name.
    """

    version: str
    status: Status
    python: str
    release: int
    product_version: str
    targets: Mapping[str, Target]


def load_base(path: Path) -> Base:
    """Read and validate a `base.toml`.

    Args:
        path: The file; its directory bears the name of the release.

    Raises:
        ConfigError: A key is missing or a value is not of the required form.
    """
    document = read_toml(path)
    name = f"{path.parent.name}/{path.name}"
    version = _text(document, "version", name)
    if version != path.parent.name:
        raise ConfigError(
            f"{name}: version is {version!r}", "give it the name of the directory that it stands in"
        )
    release = document.get("release")
    if not isinstance(release, int) or isinstance(release, bool) or release < 1:
        raise ConfigError(f"{name}: release is {release!r}", "give a whole number from 1")
    status = _status(document, name)
    python = _text(document, "python", name)
    if not re.fullmatch(r"3\.\d+", python):
        raise ConfigError(f"{name}: python is {python!r}", 'give the oldest version, e.g. "3.11"')
    product_version = f"{version}+reshard.{release}"
    if status is not Status.RUN:
        product_version += f".{status.value}"
    try:
        Version(product_version)
    except InvalidVersion:
        raise ConfigError(f"{name}: version {version!r} is invalid", "give a PEP 440 one") from None
    targets = {
        target: _target(
            target,
            entry,
            (version, python, product_version),
            path.parent,
            f"{name}: targets.{target}",
        )
        for target, entry in _table(document, "targets", name).items()
    }
    return Base(
        version=version,
        status=status,
        python=python,
        release=release,
        product_version=product_version,
        targets=targets,
    )


def _status(document: Mapping[str, Any], where: str) -> Status:
    try:
        return Status(document.get("status"))
    except ValueError:
        raise ConfigError(
            f"{where}: status is {document.get('status')!r}",
            f"give it one of {', '.join(status.value for status in Status)}",
        ) from None


def _target(
    name: str, entry: Any, versions: tuple[str, str, str], directory: Path, where: str
) -> Target:
    version, python, product_version = versions
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} is not a table", "see base.toml's other targets")
    project = _text(entry, "project", where)
    suffix = _text(entry, "suffix", where, may_be_empty=True)
    wheels = _wheels(entry, project, version, python, where)
    if "compiled" in entry:
        parts = _compiled(entry["compiled"], python, directory, f"{where}.compiled")
        if parts.keys() != wheels.keys():
            raise ConfigError(
                f"{where}.compiled has wheels for {', '.join(sorted(parts))}",
                f"give it one for each of {', '.join(sorted(wheels))}",
            )
        wheels = {machine: replace(pin, compiled=parts[machine]) for machine, pin in wheels.items()}
    return Target(
        name=name,
        version=f"{product_version}.{suffix}" if suffix else product_version,
        rewrites=Rewrites(
            replace=_requirements(entry, "replace", where),
            drop=_requirements(entry, "drop", where),
            add=_requirements(entry, "add", where),
        ),
        wheels=wheels,
    )


def _wheels(
    entry: Mapping[str, Any], project: str, version: str, python: str, where: str
) -> dict[str, WheelPin]:
    """Return the pinned wheels of a table, by machine."""
    return {
        machine: _pin(wheel, project, (version, python, machine), f"{where}.wheels.{machine}")
        for machine, wheel in _table(entry, "wheels", where).items()
    }


def _compiled(entry: Any, python: str, directory: Path, where: str) -> dict[str, CompiledParts]:
    """Return the compiled parts of a target, by machine."""
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} is not a table", "give it `project`, `version` and `wheels`")
    project, version = _text(entry, "project", where), _text(entry, "version", where)
    operators = directory / _text(entry, "operators", where)
    differing = entry.get("differing", {})
    if not isinstance(differing, dict) or not all(
        isinstance(reason, str) and reason for reason in differing.values()
    ):
        raise ConfigError(
            f"{where}.differing is {differing!r}", "give it a reason for each operator"
        )
    return {
        machine: CompiledParts(pin=pin, operators=operators, differing=differing)
        for machine, pin in _wheels(entry, project, version, python, where).items()
    }


def _pin(entry: Any, project: str, about: tuple[str, str, str], where: str) -> WheelPin:
    version, python, machine = about
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} is not a table", "give it `file` and `sha256`")
    file = _text(entry, "file", where)
    sha256 = _text(entry, "sha256", where)
    if not re.fullmatch(r"[0-9a-f]{64}", sha256):
        raise ConfigError(f"{where}.sha256 is {sha256!r}", "give 64 lower-case hexadecimal digits")
    try:
        file_project, file_version, _, _ = parse_wheel_filename(file)
    except InvalidWheelFilename as error:
        raise ConfigError(f"{where}.file: {error}", "give the name of a wheel") from None
    if file_project != canonicalize_name(project) or file_version != Version(version):
        raise ConfigError(
            f"{where}.file {file} is not {project} {version}",
            "let file, project and version agree",
        )
    return WheelPin(
        project=project, version=version, python=python, machine=machine, file=file, sha256=sha256
    )


def _text(table: Mapping[str, Any], key: str, where: str, *, may_be_empty: bool = False) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not (value or may_be_empty):
        raise ConfigError(f"{where}: {key} is {value!r}", "give it a string")
    return value


def _table(table: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    value = table.get(key)
    if not isinstance(value, dict) or not value:
        raise ConfigError(f"{where}: {key} is {value!r}", "give it a table with an entry")
    return value


def _requirements(table: Mapping[str, Any], key: str, where: str) -> tuple[Requirement, ...]:
    value = table.get(key, [])
    try:
        return tuple(Requirement(text) for text in value)
    except (TypeError, InvalidRequirement) as error:
        raise ConfigError(f"{where}.{key}: {error}", "give a list of requirements") from None
