# SPDX-License-Identifier: Apache-2.0
"""The bases side by side: which there are, which one is the default, and which one is asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping

from packaging.version import InvalidVersion, Version

from .base import Base, Status, load_base
from .errors import ConfigError, PythonTooOldError, UnknownBaseError
from .project import Project
from .target import nvidia_driver_answers, wanted_target

VARIABLE = "VLLM_RESHARD_BASE"


def releases(project: Project) -> tuple[str, ...]:
    """Return the releases that there are bases of, the newest last.

    Raises:
        ConfigError: There is none, or a directory is not named after a release.
    """
    found = [path.parent.name for path in project.bases_dir.glob("*/base.toml")]
    if not found:
        raise ConfigError(f"{project.bases_dir} holds no base", "run from a complete source tree")
    try:
        return tuple(sorted(found, key=Version))
    except InvalidVersion as error:
        raise ConfigError(f"bases/: {error}", "name each directory after a release") from None


def default_releases(project: Project) -> dict[str, str]:
    """Return the release that is built where nothing else is asked for, by target.

    Raises:
        ConfigError: `bases/default` is missing, is not of the required form or names no base.
    """
    try:
        lines = project.default_file.read_text(encoding="utf-8").splitlines()
    except OSError:
        raise ConfigError(
            f"{project.default_file} is missing", "run from a complete source tree"
        ) from None
    found: dict[str, str] = {}
    for line in lines:
        target, _, release = line.partition(" ")
        if release not in releases(project):
            raise ConfigError(
                f"bases/default has the line {line!r}, which names none of "
                f"{', '.join(releases(project))}",
                "give each target a line with one of them, as `cpu 0.32.0`",
            )
        found[target] = release
    if not found:
        raise ConfigError("bases/default is empty", "give each target a line, as `cpu 0.32.0`")
    return found


def default_release(project: Project, target: str) -> str:
    """Return the release that is built for a target where nothing else is asked for.

    Args:
        project: Source tree.
        target: Its name. One that no base has gets the release of the first target that has one;
            that the base lacks it is for others to say.

    Raises:
        ConfigError: `bases/default` is missing, is not of the required form or names no base.
    """
    defaults = default_releases(project)
    return defaults.get(target, next(iter(defaults.values())))


def load_bases(project: Project) -> tuple[Base, ...]:
    """Read all bases, the newest last.

    Raises:
        ConfigError: One of the files is invalid.
    """
    return tuple(load_base(project.base_file(release)) for release in releases(project))


def select_base(
    project: Project,
    environ: Mapping[str, str],
    driver_answers: Callable[[], bool] = nvidia_driver_answers,
) -> Base:
    """Choose the base: `VLLM_RESHARD_BASE`, else the default one of the target.

    Args:
        project: Source tree.
        environ: Environment variables.
        driver_answers: Whether there is a usable NVIDIA device.

    Raises:
        UnknownBaseError: The variable names no base.
        ConfigError: A file of the bases is invalid.
    """
    wanted = environ.get(VARIABLE, "").strip()
    if not wanted:
        wanted = default_release(project, wanted_target(environ, driver_answers))
    if wanted not in releases(project):
        raise UnknownBaseError(
            f"{VARIABLE}={wanted} is not a base of this fork, which has "
            + ", ".join(_described(base, project) for base in load_bases(project)),
            f"set {VARIABLE} to one of them, or unset it for the default",
        )
    return load_base(project.base_file(wanted))


def require_python_of(
    base: Base, bases: Iterable[Base], version: tuple[int, ...] = sys.version_info[:3]
) -> None:
    """Refuse a Python that the base does not run on.

    Args:
        base: The chosen one.
        bases: All that there are, for the message.
        version: Version of the running interpreter.

    Raises:
        PythonTooOldError: The version is older than the oldest one of the base.
    """
    if _oldest(base) <= tuple(version[:2]):
        return
    found = ".".join(str(part) for part in version)
    needs = ", ".join(f"{each.version} needs {each.python}" for each in bases)
    fitting = [each.version for each in bases if _oldest(each) <= tuple(version[:2])]
    other = f", or set {VARIABLE}={fitting[-1]}" if fitting else ""
    raise PythonTooOldError(
        f"Python {found} ({sys.executable}) is too old for base {base.version}: {needs}",
        f"install with a newer interpreter, e.g. python{base.python} -m pip install .{other}",
    )


def _oldest(base: Base) -> tuple[int, ...]:
    return tuple(int(part) for part in base.python.split("."))


def _described(base: Base, project: Project) -> str:
    notes = [", ".join(sorted(base.targets))]
    defaults = default_releases(project)
    chosen = [target for target, release in defaults.items() if release == base.version]
    notes += [f"the default for {' and '.join(chosen)}"] if chosen else []
    notes += ["only checked"] if base.status is Status.CHECKED else []
    return f"{base.version} ({'; '.join(notes)})"
