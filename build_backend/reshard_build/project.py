# SPDX-License-Identifier: Apache-2.0
"""Where things stand in the source tree, and what `pyproject.toml` says about the project."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Project:
    """Paths of one source tree.

    Attributes:
        root: Directory of `pyproject.toml`.
    """

    root: Path

    @property
    def backend_dir(self) -> Path:
        """Directory of this backend."""
        return self.root / "build_backend"

    @property
    def bases_dir(self) -> Path:
        """Directory with one directory for each base, named after the release."""
        return self.root / "bases"

    @property
    def default_file(self) -> Path:
        """The file that names the default base of each target; the Makefile reads it, too."""
        return self.bases_dir / "default"

    @property
    def overlay_dir(self) -> Path:
        """Directory of the modules that this fork owns, laid out as in the product."""
        return self.root / "vllm"

    @property
    def scripts_dir(self) -> Path:
        """Directory of the commands that are installed as they are, beside those of the base."""
        return self.root / "scripts"

    @property
    def plugin_dir(self) -> Path:
        """Directory of what the plugin has beside the overlay's package."""
        return self.root / "plugin"

    @property
    def plugin_file(self) -> Path:
        """The file with the `[project]` table of the plugin."""
        return self.plugin_dir / "plugin.toml"

    @property
    def commit_file(self) -> Path:
        """The file of a source archive with the commit that it was made from."""
        return self.plugin_dir / "commit"

    def base_file(self, release: str) -> Path:
        """The file that pins the wheels of a base."""
        return self.patches_dir(release) / "base.toml"

    def patches_dir(self, release: str) -> Path:
        """Directory of the patch series of a base."""
        return self.bases_dir / release

    def base_overlay_dir(self, release: str) -> Path:
        """Directory of the modules that one base alone needs, laid out as in the product."""
        return self.bases_dir / release / "vllm"

    def scratch_dir(self, release: str) -> Path:
        """Default place of the scratch git repository of a base."""
        return self.root / "build" / f"tree-{release}"

    def editable_dir(self, release: str, target_name: str) -> Path:
        """Directory that an editable installation puts on `sys.path`."""
        return self.root / "build" / f"editable-{release}-{target_name}"

    def table(self) -> dict[str, Any]:
        """Return the `[project]` table of `pyproject.toml`, which is the fork's.

        Raises:
            ConfigError: The file is missing, is not TOML or lacks the table.
        """
        return _project_table(self.root / "pyproject.toml")

    def plugin_table(self) -> dict[str, Any]:
        """Return the `[project]` table of the plugin.

        Raises:
            ConfigError: The file is missing, is not TOML or lacks the table.
        """
        return _project_table(self.plugin_file)


def _project_table(path: Path) -> dict[str, Any]:
    table = read_toml(path).get("project")
    if not isinstance(table, dict):
        raise ConfigError(f"{path.name} has no [project] table", "restore it")
    return table


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        ConfigError: The file is missing or is not TOML.
    """
    try:
        document: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        return document
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing", "run from a complete source tree") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}", "correct it") from None
