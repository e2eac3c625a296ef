# SPDX-License-Identifier: Apache-2.0
"""The plugin's wheel: the overlay's package under another name, with metadata of its own."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest
import reshard_build
from packaging.version import Version
from reshard_build import (
    build_editable,
    build_sdist,
    build_wheel,
    check,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)
from reshard_build.archive import verify_wheel
from reshard_build.check import run_checks
from reshard_build.errors import ConfigError, OverlayError, PluginError
from reshard_build.git import git_text, run_git
from reshard_build.plugin import FORK_PACKAGE, PACKAGE, read_plugin
from reshard_build.project import Project

PACKAGE_DIR = Path(reshard_build.__file__).parent
SETTING = {"distribution": "plugin"}
PLUGIN_TOML = """\
[project]
name = "vllm-kv-reshard"
description = "The plugin"
readme = "plugin/README.md"
license = "Apache-2.0"
license-files = ["LICENSE"]
requires-python = ">=3.10"
dependencies = ["numpy"]

[project.optional-dependencies]
vllm = ["vllm>=0.22,<0.23"]

[project.scripts]
kv-plan = "vllm_kv_reshard.cli:main"

[project.entry-points."vllm.general_plugins"]
own = "vllm_kv_reshard.entry:register"
"""


@pytest.fixture
def plugin_tree(frontend: Any) -> Any:
    """Return a source tree with a shared package of two modules, and one that the plugin owns."""
    frontend.write("plugin/plugin.toml", PLUGIN_TOML)
    frontend.write("plugin/README.md", "# The plugin\n")
    frontend.write("plugin/vllm_kv_reshard/entry.py", "from .core import CORE\n")
    frontend.write(f"{FORK_PACKAGE}/__init__.py", "")
    frontend.write(f"{FORK_PACKAGE}/core.py", "from vllm.engine.core import LINE_1 as CORE\n")
    frontend.write("vllm/engine/elsewhere.py", "OURS = 1\n")
    return frontend


def test_wheel_has_paths_of_its_own_only(plugin_tree: Any, tmp_path: Path) -> None:
    """Shared modules bear the plugin's package, and nothing else of the overlay is there."""
    name = build_wheel(str(tmp_path), SETTING)
    assert re.fullmatch(r"vllm_kv_reshard-1\.0\+d[0-9a-f]{8}-py3-none-any\.whl", name)
    verify_wheel(tmp_path / name)
    with zipfile.ZipFile(tmp_path / name) as archive:
        package = [n for n in archive.namelist() if ".dist-info/" not in n]
        assert archive.read(f"{PACKAGE}/core.py").startswith(b"from vllm.engine.core")
    assert package == [f"{PACKAGE}/{n}.py" for n in ("__init__", "core", "entry")]


def test_metadata_asks_for_no_vllm_but_in_the_extra(plugin_tree: Any, tmp_path: Path) -> None:
    """Name, requirements and entry points are those of `plugin.toml`."""
    name = prepare_metadata_for_build_wheel(str(tmp_path), SETTING)
    version = read_plugin(plugin_tree.project).version
    assert name == f"vllm_kv_reshard-{version}.dist-info"
    metadata = Parser().parsestr((tmp_path / name / "METADATA").read_text())
    assert (metadata["Name"], metadata["Version"]) == ("vllm-kv-reshard", version)
    assert metadata.get_all("Requires-Dist") == ["numpy", 'vllm>=0.22,<0.23; extra == "vllm"']
    assert metadata.get_payload() == "# The plugin\n"
    assert "Root-Is-Purelib: true" in (tmp_path / name / "WHEEL").read_text()
    assert (tmp_path / name / "entry_points.txt").read_text() == (
        "[console_scripts]\nkv-plan = vllm_kv_reshard.cli:main\n\n"
        "[vllm.general_plugins]\nown = vllm_kv_reshard.entry:register\n"
    )


def test_commands_of_the_fork_are_refused(plugin_tree: Any, tmp_path: Path) -> None:
    """A file that two distributions own goes with either."""
    plugin_tree.write("scripts/kv-plan", "#!python\n")
    with pytest.raises(SystemExit, match="the command kv-plan, which is the fork's"):
        build_wheel(str(tmp_path), SETTING)


def test_same_sources_give_the_same_bytes(plugin_tree: Any, tmp_path: Path) -> None:
    """A wheel can be built again and compared."""
    one, other = tmp_path / "one", tmp_path / "other"
    name = build_wheel(str(one), SETTING)
    assert build_wheel(str(other), SETTING) == name
    assert (one / name).read_bytes() == (other / name).read_bytes()


def test_version_tells_the_build(plugin_tree: Any, tmp_path: Path) -> None:
    """A later commit is newer, and other files are another version, also in a source archive."""
    root = plugin_tree.root

    def version() -> str:
        return read_plugin(plugin_tree.project).version

    def commit(when: str) -> str:
        env = {f"GIT_{who}_DATE": f"{when}T10:20:00+0000" for who in ("AUTHOR", "COMMITTER")}
        run_git(root, "add", "--all")
        who = ("-c", "user.name=a", "-c", "user.email=a@b.example")
        run_git(root, *who, "commit", "--quiet", "--allow-empty", "--message", when, env=env)
        return git_text(root, "log", "-1", "--format=%h")

    without_git = version()
    plugin_tree.write(f"{FORK_PACKAGE}/more.py", "")
    assert version() != without_git
    run_git(root, "init", "--quiet")
    first = commit("2026-11-27")
    assert version() == f"1.0.post202611271020+g{first}"
    plugin_tree.write("README.md", "Not of the plugin.\n")
    assert version() == f"1.0.post202611271020+g{first}"
    plugin_tree.write(f"{FORK_PACKAGE}/more.py", "MORE = 1\n")
    changed = version()
    assert changed.startswith(f"1.0.post202611271020+g{first}.d")
    plugin_tree.write(f"{FORK_PACKAGE}/more.py", "MORE = 2\n")
    assert version() != changed
    for is_changed in (True, False):
        with tarfile.open(tmp_path / build_sdist(str(tmp_path), SETTING)) as archive:
            archive.extractall(tmp_path / f"{is_changed}", filter="data")
        (source,) = (tmp_path / f"{is_changed}").iterdir()
        assert read_plugin(Project(source)).version == version()
        second = commit("2026-11-28")
    assert version() == f"1.0.post202611281020+g{second}"
    assert Version(version()) > Version(changed) > Version("1.0")


def test_version_is_not_given(plugin_tree: Any) -> None:
    """It would be forgotten, and pip would keep the files of an older wheel."""
    plugin_tree.write("plugin/plugin.toml", PLUGIN_TOML.replace("\nname", '\nversion = "2"\nname'))
    with pytest.raises(ConfigError, match="has a version; leave it out"):
        read_plugin(plugin_tree.project)


def test_no_base_wheel_is_needed(plugin_tree: Any, tmp_path: Path) -> None:
    """What holds no file of vLLM is built without fetching it."""
    for wheel in plugin_tree.cache.iterdir():
        wheel.unlink()
    assert (tmp_path / build_wheel(str(tmp_path), SETTING)).is_file()


def test_source_archive_builds_the_plugin_with_pip(plugin_tree: Any, tmp_path: Path) -> None:
    """One archive is enough for both, and pip's option reaches the backend."""
    for path in PACKAGE_DIR.glob("*.py"):
        plugin_tree.write(f"build_backend/reshard_build/{path.name}", path.read_text())
    name = build_sdist(str(tmp_path), SETTING)
    with tarfile.open(tmp_path / name) as archive:
        archive.extractall(tmp_path, filter="data")
    source = tmp_path / name.removesuffix(".tar.gz")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    command += ["--no-index", "--config-settings", "distribution=plugin"]
    command += ["--wheel-dir", str(tmp_path / "out"), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    wheel = build_wheel(str(tmp_path / "direct"), SETTING)
    assert (tmp_path / "out" / wheel).read_bytes() == (tmp_path / "direct" / wheel).read_bytes()


def test_unknown_distribution(plugin_tree: Any, tmp_path: Path) -> None:
    """A slip of the pen does not build the fork."""
    with pytest.raises(SystemExit, match="distribution=plugins is unknown; give fork or plugin"):
        build_wheel(str(tmp_path), {"distribution": "plugins"})
    for hook in (build_wheel, build_editable, build_sdist, prepare_metadata_for_build_wheel):
        with pytest.raises(SystemExit, match="distributon is unknown; give distribution=fork or"):
            hook(str(tmp_path), {"distributon": "plugin"})


@pytest.mark.parametrize("hook", [build_editable, prepare_metadata_for_build_editable])
def test_no_editable_plugin(plugin_tree: Any, tmp_path: Path, hook: Any) -> None:
    """It would need a package whose files lie in two places; the message says what to do."""
    with pytest.raises(SystemExit, match=r"no editable installation.*make plugin"):
        hook(str(tmp_path), SETTING)


@pytest.mark.parametrize(
    "line",
    [
        "import vllm.distributed.kv_transfer.kv_connector.v1.reshard.core",
        "from vllm.distributed.kv_transfer.kv_connector.v1.reshard.core import CORE",
        "from vllm.distributed.kv_transfer.kv_connector.v1 import reshard",
        "from ..base import KVConnectorBase_V1",
    ],
)
def test_module_that_runs_in_the_fork_only(plugin_tree: Any, line: str) -> None:
    """An import through the fork's path is found when the plugin is built, not when it runs."""
    plugin_tree.write(f"{FORK_PACKAGE}/broken.py", f"\n{line}\n")
    with pytest.raises(PluginError, match=r"broken\.py:2 imports through"):
        read_plugin(plugin_tree.project)


def test_relative_import_between_subpackages(plugin_tree: Any) -> None:
    """Floors import each other."""
    plugin_tree.write(f"{FORK_PACKAGE}/plan/__init__.py", "")
    plugin_tree.write(f"{FORK_PACKAGE}/plan/mesh.py", "from ..core import CORE\n")
    assert f"{PACKAGE}/plan/mesh.py" in read_plugin(plugin_tree.project).files


def test_module_of_both(plugin_tree: Any) -> None:
    """A module of the plugin does not hide one that it shares."""
    plugin_tree.write("plugin/vllm_kv_reshard/core.py", "")
    with pytest.raises(OverlayError, match=f"{PACKAGE}/core.py"):
        read_plugin(plugin_tree.project)


def test_module_of_one_base_alone(plugin_tree: Any) -> None:
    """The plugin is one for all releases in its range; other bases may have what they need."""
    plugin_tree.write("bases/0.30.0/base.toml", "")
    plugin_tree.write(f"bases/0.30.0/{FORK_PACKAGE}/old.py", "")
    assert f"{PACKAGE}/old.py" not in read_plugin(plugin_tree.project).files
    plugin_tree.write(f"bases/0.22.1/{FORK_PACKAGE}/old.py", "")
    with pytest.raises(PluginError, match=r"old\.py is of base 0\.22\.1 alone"):
        read_plugin(plugin_tree.project)


def test_overlay_without_the_package(plugin_tree: Any) -> None:
    """A package that has moved does not give an empty plugin."""
    for path in (plugin_tree.root / FORK_PACKAGE).iterdir():
        path.unlink()
    with pytest.raises(PluginError, match="has nothing in"):
        read_plugin(plugin_tree.project)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("vllm>=0.22,<0.23", "vllm>=", "Expected"),
        ("vllm>=0.22,<0.23", "numpy", "does not require vllm"),
    ],
)
def test_incomplete_plugin_toml(plugin_tree: Any, old: str, new: str, message: str) -> None:
    """What the file lacks is told by name."""
    plugin_tree.write("plugin/plugin.toml", PLUGIN_TOML.replace(old, new))
    with pytest.raises(ConfigError, match=message):
        read_plugin(plugin_tree.project)


def test_check_against_wheels_as_released(plugin_tree: Any) -> None:
    """`make patches-check` sees a name that only a patch of the fork would bring."""
    name = "vllm/engine/core.py"
    core = (b"LINE_1 = 1\n", b"LINE_1 = 1\nPATCHED = 1\n")
    plugin_tree.pin({"vllm/__init__.py": b"", "vllm/engine/__init__.py": b"", name: core[0]})
    plugin_tree.add_patch("core: add a name", {name: core[0]}, {name: core[1]})
    plugin_tree.write(f"{FORK_PACKAGE}/core.py", "from vllm.engine.core import PATCHED as CORE\n")
    proofs = {p.name: p for p in run_checks(plugin_tree.project, plugin_tree.environ)}
    assert proofs["types, 0.22.1 cpu x86_64"].ok
    assert not proofs["plugin, 0.22.1 cpu x86_64"].ok
    assert '"PATCHED" is unknown import symbol' in proofs["plugin, 0.22.1 cpu x86_64"].text


def test_no_check_for_releases_out_of_its_range(
    plugin_tree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A base that keeps its patches for the fork is not held against the plugin."""
    monkeypatch.setattr(check, "require_types", lambda *_: None)
    proofs = run_checks(plugin_tree.project, plugin_tree.environ)
    assert [p.ok for p in proofs if p.name.startswith("plugin")] == [True, True]
    plugin_tree.write("plugin/plugin.toml", PLUGIN_TOML.replace(">=0.22,<0.23", ">=0.32"))
    proofs = run_checks(plugin_tree.project, plugin_tree.environ)
    assert not [proof.name for proof in proofs if proof.name.startswith("plugin")]
