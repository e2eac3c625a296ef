# SPDX-License-Identifier: Apache-2.0
"""The hooks of PEP 517 and PEP 660. A frontend calls them in the root of the source tree.

The config setting `distribution` chooses what is built: `fork`, which is the default, or `plugin`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .assemble import dist_info_name, write_editable_wheel, write_wheel
from .bases import select_base
from .editable import refresh
from .errors import EditableError, SettingError, readable_exit
from .messages import show_progress
from .metadata import dist_info
from .operators import report_operators
from .pinned import open_pinned
from .plugin import read_plugin
from .product import Product, choose, open_product
from .project import Project
from .sdist import write_sdist

Settings = Mapping[str, Any] | None

SETTING = "distribution"
FORK, PLUGIN = "fork", "plugin"


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """Return what a build needs beyond `build-system.requires`: nothing."""
    return []


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    """Return what an editable build needs beyond `build-system.requires`: nothing."""
    return []


def get_requires_for_build_sdist(config_settings: Settings = None) -> list[str]:
    """Return what a source distribution needs beyond `build-system.requires`: nothing."""
    return []


def prepare_metadata_for_build_wheel(
    metadata_directory: str, config_settings: Settings = None
) -> str:
    """Write the product's metadata directory without building it; return its name."""
    with _frontend():
        project = Project(Path.cwd())
        if _wants_plugin(config_settings):
            plugin = read_plugin(project)
            name, files = plugin.dist_info_name, plugin.dist_info()
        else:
            choice = choose(project, os.environ)
            name = dist_info_name(choice.target)
            with open_pinned(choice.pin, os.environ) as base:
                files = dist_info(project, choice.target, choice.pin, base)
        for relative, content in files.items():
            path = Path(metadata_directory, name, relative)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return name


def prepare_metadata_for_build_editable(
    metadata_directory: str, config_settings: Settings = None
) -> str:
    """Write the metadata directory of an editable installation; return its name."""
    with _frontend():
        _refuse_editable_plugin(config_settings)
    return prepare_metadata_for_build_wheel(metadata_directory, config_settings)


def build_wheel(
    wheel_directory: str,
    config_settings: Settings = None,
    metadata_directory: str | None = None,
) -> str:
    """Build the product's wheel; return its file name."""
    with _frontend():
        if _wants_plugin(config_settings):
            return read_plugin(Project(Path.cwd())).write_wheel(Path(wheel_directory))
    with _frontend(), _product() as (project, product):
        metadata = dist_info(project, product.target, product.pin, product.base)
        return write_wheel(product, metadata, Path(wheel_directory))


def build_editable(
    wheel_directory: str,
    config_settings: Settings = None,
    metadata_directory: str | None = None,
) -> str:
    """Write the tree of an editable installation, and the wheel that points to it."""
    with _frontend():
        _refuse_editable_plugin(config_settings)
    with _frontend(), _product() as (project, product):
        tree = project.editable_dir(product.pin.version, product.target.name)
        metadata = dist_info(project, product.target, product.pin, product.base)
        refresh(product, tree)
        return write_editable_wheel(product, metadata, Path(wheel_directory), tree)


def build_sdist(sdist_directory: str, config_settings: Settings = None) -> str:
    """Write the source distribution, for which no base wheel is needed; return its file name.

    There is one for both: a wheel of either can be built from it.
    """
    with _frontend():
        _wants_plugin(config_settings)
        project = Project(Path.cwd())
        version = select_base(project, os.environ).product_version
        return write_sdist(project, version, Path(sdist_directory))


def _wants_plugin(config_settings: Settings) -> bool:
    """Read the setting `distribution`, the only one.

    Raises:
        SettingError: It names neither, or there are others.
    """
    if unknown := sorted((config_settings or {}).keys() - {SETTING}):
        raise SettingError(
            f"config setting {unknown[0]} is unknown", f"give {SETTING}={FORK} or {PLUGIN}, or none"
        )
    wanted = (config_settings or {}).get(SETTING, FORK)
    if wanted not in (FORK, PLUGIN):
        raise SettingError(
            f"config setting {SETTING}={wanted} is unknown", f"give {FORK} or {PLUGIN}, or leave it"
        )
    return bool(wanted == PLUGIN)


def _refuse_editable_plugin(config_settings: Settings) -> None:
    if _wants_plugin(config_settings):
        raise EditableError(
            "the plugin has no editable installation: its modules are those of the fork, in a "
            "package of another name",
            "build its wheel with `make plugin`, and install that",
        )


@contextmanager
def _frontend() -> Iterator[None]:
    with show_progress(), readable_exit():
        yield


@contextmanager
def _product() -> Iterator[tuple[Project, Product]]:
    project = Project(Path.cwd())
    choice = choose(project, os.environ)
    with open_product(project, choice.target, choice.pin, os.environ) as product:
        report_operators(product.pin, product.base)
        yield project, product
