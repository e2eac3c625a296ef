# SPDX-License-Identifier: Apache-2.0
"""The hooks of PEP 517 and PEP 660. A frontend calls them in the root of the source tree."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .archive import open_base
from .assemble import dist_info_name, write_editable_wheel, write_wheel
from .bases import select_base
from .editable import refresh
from .errors import readable_exit
from .fetch import fetch
from .messages import show_progress
from .metadata import dist_info
from .product import Product, choose, open_product
from .project import Project
from .sdist import write_sdist

Settings = Mapping[str, Any] | None


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
        choice = choose(project, os.environ)
        name = dist_info_name(choice.target)
        with open_base(fetch(choice.pin, os.environ)) as base:
            for relative, content in dist_info(project, choice.target, choice.pin, base).items():
                path = Path(metadata_directory, name, relative)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
        return name


def prepare_metadata_for_build_editable(
    metadata_directory: str, config_settings: Settings = None
) -> str:
    """Write the metadata directory of an editable installation; return its name."""
    return prepare_metadata_for_build_wheel(metadata_directory, config_settings)


def build_wheel(
    wheel_directory: str,
    config_settings: Settings = None,
    metadata_directory: str | None = None,
) -> str:
    """Build the product's wheel; return its file name."""
    with _frontend(), _product() as (project, product):
        metadata = dist_info(project, product.target, product.pin, product.base)
        return write_wheel(product, metadata, Path(wheel_directory))


def build_editable(
    wheel_directory: str,
    config_settings: Settings = None,
    metadata_directory: str | None = None,
) -> str:
    """Write the tree of an editable installation, and the wheel that points to it."""
    with _frontend(), _product() as (project, product):
        tree = project.editable_dir(product.pin.version, product.target.name)
        metadata = dist_info(project, product.target, product.pin, product.base)
        refresh(product, tree)
        return write_editable_wheel(product, metadata, Path(wheel_directory), tree)


def build_sdist(sdist_directory: str, config_settings: Settings = None) -> str:
    """Write the source distribution, for which no base wheel is needed; return its file name."""
    with _frontend():
        project = Project(Path.cwd())
        version = select_base(project, os.environ).product_version
        return write_sdist(project, version, Path(sdist_directory))


@contextmanager
def _frontend() -> Iterator[None]:
    with show_progress(), readable_exit():
        yield


@contextmanager
def _product() -> Iterator[tuple[Project, Product]]:
    project = Project(Path.cwd())
    choice = choose(project, os.environ)
    with open_product(project, choice.target, choice.pin, os.environ) as product:
        yield project, product
