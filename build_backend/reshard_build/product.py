# SPDX-License-Identifier: Apache-2.0
"""Composes the product: base wheel, patched files and overlay, each file from one of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from .archive import BaseWheel
from .base import Base, Target, WheelPin
from .bases import load_bases, require_python_of, select_base
from .overlay import base_overlay, overlay_files, require_no_clash
from .pinned import open_pinned
from .project import Project
from .series import apply_series, base_files, load_series, touched_paths
from .target import select_target, select_wheel

VERSION_FILE = "vllm/_version.py"


@dataclass(frozen=True)
class Product:
    """What is built, before it takes the shape of a wheel or a tree.

    Attributes:
        target: What for.
        pin: The base wheel.
        base: The same, open, with what else files come from.
        changed: New content of files by path; `None` for one that a patch deletes.
        overlay: Source of the overlay's files by path.
        scripts: Source of commands by path, which begins with `scripts/`.
    """

    target: Target
    pin: WheelPin
    base: BaseWheel
    changed: Mapping[str, bytes | None]
    overlay: Mapping[str, Path]
    scripts: Mapping[str, Path]

    @property
    def upstream_paths(self) -> frozenset[str]:
        """Files of the patched base, without the overlay."""
        kept = (name for name in self.base.names if self.changed.get(name, b"") is not None)
        added = (name for name, content in self.changed.items() if content is not None)
        return frozenset((*kept, *added))


@dataclass(frozen=True)
class Choice:
    """The base, target and wheel that the environment asks for.

    Attributes:
        config: All that the `base.toml` of the chosen base says.
        target: The chosen one of its targets.
        pin: Its wheel for this machine.
    """

    config: Base
    target: Target
    pin: WheelPin


def choose(project: Project, environ: Mapping[str, str]) -> Choice:
    """Choose what to build.

    Args:
        project: Source tree.
        environ: Environment variables.

    Raises:
        ConfigError: A file of the bases is invalid.
        UnknownBaseError: `VLLM_RESHARD_BASE` names no base.
        PythonTooOldError: The base does not run on this Python.
        TargetError: The base has no such target.
        PlatformError: The target does not run on this machine.
    """
    config = select_base(project, environ)
    require_python_of(config, load_bases(project))
    target = select_target(config, environ)
    return Choice(config=config, target=target, pin=select_wheel(target))


@contextmanager
def open_product(
    project: Project, target: Target, pin: WheelPin, environ: Mapping[str, str]
) -> Iterator[Product]:
    """Fetch the base wheel and compose the product from it.

    Args:
        project: Source tree.
        target: What to build for.
        pin: Its base wheel.
        environ: Environment variables, for the cache and for pip.

    Raises:
        BuildError: The wheel cannot be had, the series does not apply, or the overlay clashes.
    """
    with open_pinned(pin, environ) as base:
        yield compose(project, target, pin, base)


def compose(project: Project, target: Target, pin: WheelPin, base: BaseWheel) -> Product:
    """Apply the series to an open base wheel and lay the overlay beside it.

    Args:
        project: Source tree.
        target: What to build for.
        pin: Names the base, its wheel and the wheel's tags.
        base: The base wheel.

    Raises:
        PatchDriftError: A patch does not apply exactly.
        OverlayError: An overlay file stands where upstream has one.
    """
    patches = load_series(project.patches_dir(pin.version))
    patched = apply_series(patches, base_files(base, touched_paths(patches)))
    overlay = base_overlay(project, pin.version)
    product = Product(
        target=target,
        pin=pin,
        base=base,
        changed={**patched, VERSION_FILE: version_module(target.version)},
        overlay=overlay,
        # The overlay's rule of what is a source holds for scripts too.
        scripts=overlay_files(project.scripts_dir),
    )
    require_no_clash(overlay, product.upstream_paths | set(base.names), f"vllm {pin.version}")
    return product


def version_module(version: str) -> bytes:
    """Return the source of `vllm/_version.py`, under the names that upstream's importers use.

    Args:
        version: Version of the product.
    """
    parsed = Version(version)
    parts: tuple[int | str, ...] = parsed.release
    if parsed.local:
        parts = (*parts, parsed.local)
    return (
        "# SPDX-License-Identifier: Apache-2.0\n"
        f'"""Version of this build of vLLM; written by {__package__}."""\n\n'
        f"__version__ = version = {version!r}\n"
        f"__version_tuple__ = version_tuple = {parts!r}\n"
        "__commit_id__ = commit_id = None\n"
    ).encode()
