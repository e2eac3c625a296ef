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
    def base_file(self) -> Path:
        """The file that pins the base wheels."""
        return self.root / "build_backend" / "base.toml"

    @property
    def patches_dir(self) -> Path:
        """Directory of the patch series."""
        return self.root / "patches"

    @property
    def overlay_dir(self) -> Path:
        """Directory of the modules that this fork owns, laid out as in the product."""
        return self.root / "vllm"

    @property
    def scripts_dir(self) -> Path:
        """Directory of the commands that are installed as they are, beside those of the base."""
        return self.root / "scripts"

    @property
    def scratch_dir(self) -> Path:
        """Default place of the scratch git repository."""
        return self.root / "build" / "tree"

    def editable_dir(self, target_name: str) -> Path:
        """Directory that an editable installation of a target puts on `sys.path`."""
        return self.root / "build" / f"editable-{target_name}"

    def table(self) -> dict[str, Any]:
        """Return the `[project]` table of `pyproject.toml`.

        Raises:
            ConfigError: The file is missing, is not TOML or lacks the table.
        """
        document = read_toml(self.root / "pyproject.toml")
        table = document.get("project")
        if not isinstance(table, dict):
            raise ConfigError("pyproject.toml has no [project] table", "restore it")
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
