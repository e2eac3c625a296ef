# SPDX-License-Identifier: Apache-2.0
"""The plugin: the overlay's package under a name of its own, as a wheel for a vLLM as released.

The package imports itself relatively and everything else of vLLM absolutely, so that the same files
run from both names. What only a plugin needs lies in `plugin/vllm_kv_reshard/`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.tags import Tag
from packaging.utils import canonicalize_name
from packaging.version import Version

from .archive import DateTime, WheelWriter
from .assemble import assemble
from .base import load_base
from .bases import default_releases, releases
from .commit import commit_suffix
from .errors import ConfigError, PluginError
from .metadata import own_fields, own_licenses, render, wheel_file
from .overlay import overlay_files, require_no_clash
from .project import Project

PACKAGE = "vllm_kv_reshard"
#: Where the package stands in the fork.
FORK_PACKAGE = "vllm/distributed/kv_transfer/kv_connector/v1/reshard"
#: The extra that requires vLLM in the range that was checked.
VLLM_EXTRA = "vllm"

_TAG = Tag("py3", "none", "any")
# The earliest time that a zip archive can hold: any fixed time will do.
_DATE_TIME: DateTime = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class Plugin:
    """The plugin of a source tree.

    Attributes:
        project: Source tree.
        table: Its `[project]` table.
        version: The project's release and commit; no release of vLLM is in it.
        files: Source by path in the wheel.
    """

    project: Project
    table: Mapping[str, Any]
    version: str
    files: Mapping[str, Path]

    @property
    def dist_info_name(self) -> str:
        """Name of the metadata directory."""
        return f"{PACKAGE}-{self.version}.dist-info"

    @property
    def wheel_name(self) -> str:
        """File name of the wheel."""
        return f"{PACKAGE}-{self.version}-{_TAG}.whl"

    def write_wheel(self, directory: Path) -> str:
        """Write the wheel; the same sources give the same bytes.

        Args:
            directory: Where to put it.

        Returns:
            The wheel's file name.

        Raises:
            ConfigError: `plugin.toml` names a file that does not exist.
            MetadataError: `plugin.toml` does not make valid metadata.
        """

        def fill(writer: WheelWriter) -> None:
            for name, source in self.files.items():
                writer.add(name, source.read_bytes())

        return assemble(self.wheel_name, _DATE_TIME, self.dist_info(), directory, fill)

    def dist_info(self) -> dict[str, bytes]:
        """Return the files of the metadata directory, but for RECORD.

        Raises:
            ConfigError: `plugin.toml` names a file that does not exist.
            MetadataError: `plugin.toml` does not make valid metadata.
        """
        fields = [*own_fields(self.project, self.table, self.version), *self._requirements()]
        files = {
            "METADATA": render(self.project, self.table, fields),
            "WHEEL": wheel_file([_TAG], pure=True),
            "entry_points.txt": self._entry_points().encode(),
            "top_level.txt": f"{PACKAGE}\n".encode(),
        }
        for name, content in own_licenses(self.project, self.table):
            files[f"licenses/{name}"] = content
        return files

    def _requirements(self) -> Iterator[tuple[str, str]]:
        yield "Requires-Python", self.table["requires-python"]
        for requirement in self.table.get("dependencies", ()):
            yield "Requires-Dist", requirement
        for extra, requirements in self.table.get("optional-dependencies", {}).items():
            yield "Provides-Extra", extra
            for requirement in requirements:
                yield "Requires-Dist", f'{requirement}; extra == "{extra}"'

    def _entry_points(self) -> str:
        groups = {"console_scripts": self.table.get("scripts", {})}
        groups |= self.table.get("entry-points", {})
        return "\n".join(
            f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
            for group, entries in groups.items()
        )


def read_plugin(project: Project) -> Plugin:
    """Read what the plugin is made of.

    Args:
        project: Source tree.

    Raises:
        ConfigError: `plugin.toml` lacks something.
        OverlayError: A module of the plugin has the path of one that it shares with the fork.
        PluginError: The package could not run from the plugin, or a command is the fork's.
    """
    table = project.plugin_table()
    if "version" in table:
        raise ConfigError(
            "plugin.toml has a version", "leave it out: it comes from base.toml and git"
        )
    release = load_base(project.base_file(next(iter(default_releases(project).values())))).release
    checked = checked_releases(project)
    of_fork = {Path(path).name for path in overlay_files(project.scripts_dir)}
    if common := sorted(of_fork & table.get("scripts", {}).keys()):
        raise PluginError(
            f"plugin.toml has the command {common[0]}, which is the fork's: where both are "
            "installed, pip would remove it with either",
            "give it another name",
        )
    files = _files(project, checked)
    # As PEP 440 writes it, so that metadata and file names agree with what pip makes of it.
    version = str(Version(f"{release}.0{commit_suffix(project, files)}"))
    return Plugin(project=project, table=table, version=version, files=files)


def checked_releases(project: Project) -> SpecifierSet:
    """Return the range of vLLM's releases that the plugin is for: the one that its extra requires.

    Args:
        project: Source tree.

    Raises:
        ConfigError: `plugin.toml` does not tell it.
    """
    extras = project.plugin_table().get("optional-dependencies", {})
    try:
        found = [Requirement(text) for text in extras.get(VLLM_EXTRA, ())]
    except InvalidRequirement as error:
        raise ConfigError(f"plugin.toml: {error}", "give a list of requirements") from None
    for requirement in found:
        if canonicalize_name(requirement.name) == "vllm":
            return requirement.specifier
    raise ConfigError(
        f"plugin.toml: the extra {VLLM_EXTRA} does not require vllm",
        "say which releases of it are checked",
    )


def _files(project: Project, checked: SpecifierSet) -> dict[str, Path]:
    prefix = f"{FORK_PACKAGE}/"
    shared = {
        f"{PACKAGE}/{path.removeprefix(prefix)}": source
        for path, source in overlay_files(project.overlay_dir).items()
        if path.startswith(prefix)
    }
    if not shared:
        raise PluginError(f"the overlay has nothing in {FORK_PACKAGE}", "say where it went")
    for release in releases(project):
        for path in overlay_files(project.base_overlay_dir(release)):
            if path.startswith(prefix) and checked.contains(release):
                raise PluginError(
                    f"{path} is of base {release} alone, and the plugin is one for all",
                    "let compat.py of the shared package decide",
                )
    for path, source in shared.items():
        if path.endswith(".py"):
            _require_own_imports(path, source)
    own = {
        path: source
        for path, source in overlay_files(project.plugin_dir / PACKAGE).items()
        if path.startswith(f"{PACKAGE}/")
    }
    require_no_clash(own, shared, "the package that it shares with the fork")
    return dict(sorted({**shared, **own}.items()))


def _require_own_imports(path: str, source: Path) -> None:
    """Refuse a module that finds the rest of its package in the fork only."""
    in_fork = FORK_PACKAGE.replace("/", ".")
    depth = path.count("/")
    for node in ast.walk(ast.parse(source.read_bytes(), filename=str(source))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif not isinstance(node, ast.ImportFrom):
            continue
        elif node.level:
            names = [in_fork] if node.level > depth else []
        else:
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        if any(name == in_fork or name.startswith(f"{in_fork}.") for name in names):
            raise PluginError(
                f"{source.name}:{node.lineno} imports through the package's place in the fork",
                "import relatively, and not from above the package",
            )
