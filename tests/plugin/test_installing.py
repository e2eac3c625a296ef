# SPDX-License-Identifier: Apache-2.0
"""How pip puts the plugin beside vLLM and takes it away, and vLLM does not notice."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from reshard_build.plugin import read_plugin
from wheel.wheelfile import WheelFile

from tests.plugin.conftest import PROJECT


@pytest.fixture(scope="module")
def vendors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with a build of vLLM under a vendor's name.

    It is of one module, and has the command that the fork has.
    """
    directory = tmp_path_factory.mktemp("vendors")
    venv.create(directory / "venv")
    files = {
        "vllm/__init__.py": "__version__ = '0.32.0'\n",
        "acme_vllm-0.32.0.data/scripts/kv-plan": "#!python\n",
    }
    wheel = write_wheel(directory, "acme-vllm", "0.32.0", files)
    pip(directory / "venv", "install", "--no-index", str(wheel))
    return directory / "venv"


@pytest.fixture
def environment(vendors: Path, tmp_path: Path) -> Path:
    """The same, for one test."""
    return shutil.copytree(vendors, tmp_path / "venv", symlinks=True)


def write_wheel(directory: Path, name: str, version: str, files: dict[str, str]) -> Path:
    """Write a wheel of a few files."""
    path = directory / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    with WheelFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
        info = archive.dist_info_path
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    return path


def pip(environment: Path, *arguments: str) -> str:
    """Run pip on the environment; return what it says."""
    command = [sys.executable, "-m", "pip", "--python", str(environment / "bin/python")]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def content(environment: Path) -> dict[str, str]:
    """Every file that is installed, with its hash."""
    files = [path for path in environment.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return {
        str(path.relative_to(environment)): sha256(path.read_bytes()).hexdigest() for path in files
    }


def test_vllm_is_as_it_was(environment: Path, plugin_wheel: Path) -> None:
    """Installing, installing again and removing change no file of vLLM and leave none."""
    before = content(environment)
    install = ("install", "--no-index", "--no-deps", str(plugin_wheel))
    pip(environment, *install)
    installed = content(environment)
    assert installed.items() > before.items()
    pip(environment, *install, "--force-reinstall")
    assert content(environment).keys() == installed.keys()
    pip(environment, "uninstall", "--yes", "vllm-kv-reshard")
    assert content(environment) == before


def test_another_build_replaces_it(environment: Path, plugin_wheel: Path, tmp_path: Path) -> None:
    """Pip keeps what is there under the same version: another commit has another one."""
    pip(environment, "install", "--no-index", "--no-deps", str(plugin_wheel))
    plugin = read_plugin(PROJECT)
    kept = dict(list(plugin.files.items())[:3])
    later = replace(plugin, files=kept, version="1.0.post209912312359+gffffffff")
    wheel = tmp_path / later.write_wheel(tmp_path)
    pip(environment, "install", "--no-index", "--no-deps", str(wheel))
    (site,) = environment.glob("lib/python*/site-packages")
    modules = [path for path in (site / "vllm_kv_reshard").rglob("*.py")]
    assert len(modules) == len(kept)
    assert (site / f"vllm_kv_reshard-{later.version}.dist-info").is_dir()


@pytest.mark.parametrize(("extra", "version"), [("", "0.32.0"), ("[vllm]", "0.33.0")])
def test_no_second_vllm(
    environment: Path, plugin_wheel: Path, tmp_path: Path, extra: str, version: str
) -> None:
    """An index that has vLLM is not asked for it, but where the extra says so."""
    index = tmp_path / "index"
    index.mkdir()
    for text in read_plugin(PROJECT).table["dependencies"]:
        write_wheel(index, canonicalize_name(Requirement(text).name), "99", {})
    write_wheel(index, "vllm", "0.33.0", {"vllm/__init__.py": "__version__ = '0.33.0'\n"})
    options = ("--no-index", "--find-links", str(index))
    pip(environment, "install", *options, f"vllm-kv-reshard{extra} @ {plugin_wheel.as_uri()}")
    (init,) = environment.glob("lib/python*/site-packages/vllm/__init__.py")
    assert init.read_text() == f"__version__ = '{version}'\n"


def test_command_runs_without_vllm_and_torch(environment: Path, plugin_wheel: Path) -> None:
    """`kv-reshard-plan` is there, and imports nothing of what serves."""
    pip(environment, "install", "--no-index", "--no-deps", str(plugin_wheel))
    script = environment / "bin/kv-reshard-plan"
    assert script.is_file()
    probe = (
        "import sys; from vllm_kv_reshard.cli import main; code = main(sys.argv[1:]); "
        "assert not {'torch', 'vllm', 'zmq'} & sys.modules.keys(), sorted(sys.modules); "
        "sys.exit(code)"
    )
    (site,) = environment.glob("lib/python*/site-packages")
    arguments = ["--prefill", "pp=2", "--decode", "tp=2", "--num-layers", "4"]
    arguments += ["--num-kv-heads", "2", "--head-size", "64"]
    done = subprocess.run(
        [sys.executable, "-c", probe, *arguments],
        env={"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "pp1tp0" in done.stdout
