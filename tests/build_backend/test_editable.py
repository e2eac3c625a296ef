# SPDX-License-Identifier: Apache-2.0
"""Editable installations: overlay edits are live, one command brings patched files up to date."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest
from reshard_build import build_editable
from reshard_build.__main__ import main
from reshard_build.editable import STAMP, read_stamp

CORE = "vllm/engine/core.py"


@pytest.fixture
def installed(frontend: Any) -> Any:
    """Return the source tree, installed editable into an environment without anything else."""
    frontend.write("vllm/own/mine.py", "VALUE = 'first'\n")
    frontend.write("vllm/engine/beside.py", "VALUE = 'beside'\n")
    frontend.core = frontend.edit_core("edit", 5, "'patched'")
    frontend.tree = frontend.project.editable_dir("0.22.1", "cpu")
    wheels = frontend.directory / "wheels"
    wheel = build_editable(str(wheels))
    environment = frontend.directory / "venv"
    venv.create(environment, with_pip=False)
    (site,) = environment.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheels / wheel) as archive:
        archive.extractall(site)
    frontend.python = environment / "bin" / "python"
    return frontend


def _run(installed: Any, code: str) -> str:
    """Run code in the installed environment, in the root of the source tree."""
    done = subprocess.run(
        [installed.python, "-c", code],
        cwd=installed.root,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def _rebuild(installed: Any) -> None:
    assert main(["--root", str(installed.root), "rebuild"]) == 0


def test_patched_base_and_overlay_are_imported(installed: Any) -> None:
    """From the root of the sources, whose `vllm/` is no package, all three parts are imported."""
    code = (
        "import vllm, importlib.metadata as m; from vllm.engine import core, beside;"
        "from vllm.own import mine;"
        "print(vllm.__version__, m.version('vllm'), core.LINE_5, mine.VALUE, beside.VALUE)"
    )
    version = "0.22.1+reshard.1.cpu"
    assert _run(installed, code) == f"{version} {version} patched first beside"


def test_overlay_edits_are_live(installed: Any) -> None:
    """An edited module and a new one beside it are seen at once."""
    installed.write("vllm/own/mine.py", "VALUE = 'second'\n")
    installed.write("vllm/own/new.py", "VALUE = 'new'\n")
    code = "from vllm.own import mine, new; print(mine.VALUE, new.VALUE)"
    assert _run(installed, code) == "second new"


def test_rebuild_applies_the_series_of_now(installed: Any) -> None:
    """Dropped patches are undone, changed ones applied, and a new module is linked."""
    tree_before = (installed.tree / "vllm/_C.abi3.so").stat().st_mtime_ns
    (installed.patches_dir / "edit.patch").unlink()
    installed.write("bases/0.22.1/series", "")
    installed.add_patch(
        "lazy", {"vllm/py.typed": b""}, {"vllm/py.typed": b"", "vllm/x.py": b"X = 1\n"}
    )
    installed.write("vllm/engine/beside2.py", "VALUE = 'beside2'\n")
    (installed.root / "vllm/engine/beside.py").unlink()
    _rebuild(installed)
    code = (
        "from vllm.engine import core, beside2; import vllm.x, importlib.util as u;"
        "print(core.LINE_5, beside2.VALUE, vllm.x.X, u.find_spec('vllm.engine.beside'))"
    )
    assert _run(installed, code) == "5 beside2 1 None"
    assert (installed.tree / "vllm/_C.abi3.so").stat().st_mtime_ns == tree_before
    (installed.patches_dir / "lazy.patch").unlink()
    installed.write("bases/0.22.1/series", "")
    _rebuild(installed)
    assert not (installed.tree / "vllm/x.py").exists()


def test_patch_that_adds_beside_the_overlay_stays_out_of_the_sources(installed: Any) -> None:
    """When a directory ceases to be wholly the overlay's, its link gives way to single ones."""
    assert (installed.tree / "vllm/own").is_symlink()
    installed.add_patch("share", {}, {"vllm/own/theirs.py": b"VALUE = 'theirs'\n"})
    _rebuild(installed)
    assert not (installed.root / "vllm/own/theirs.py").exists()
    code = "from vllm.own import mine, theirs; print(mine.VALUE, theirs.VALUE)"
    assert _run(installed, code) == "first theirs"
    (installed.patches_dir / "share.patch").unlink()
    installed.write("bases/0.22.1/series", "edit.patch\n")
    _rebuild(installed)
    assert (installed.tree / "vllm/own").is_symlink()
    assert (installed.root / "vllm/own/mine.py").exists()


def test_killed_rebuild_is_caught_up(installed: Any) -> None:
    """Files that a killed run changed are known from the stamp, and set right by the next one."""
    (installed.patches_dir / "edit.patch").unlink()
    installed.write("bases/0.22.1/series", "")
    stamp = json.loads((installed.tree / STAMP).read_text())
    (installed.tree / STAMP).write_text(json.dumps({**stamp, "changed": [CORE, "vllm/half.py"]}))
    (installed.tree / "vllm/half.py").write_text("half")
    (installed.tree / CORE).write_text("half")
    _rebuild(installed)
    assert (installed.tree / CORE).read_text().startswith("LINE_1 = 1\n")
    assert not (installed.tree / "vllm/half.py").exists()


def test_stamp_names_what_will_change_before_it_does(
    installed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that dies while it writes has already said which files it may have changed."""
    installed.add_patch("add", {}, {"vllm/added.py": b"ADDED = 1\n"})

    def die(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("reshard_build.editable._write_changed", die)
    with pytest.raises(KeyboardInterrupt):
        _rebuild(installed)
    stamp = read_stamp(installed.tree)
    assert stamp is not None
    assert {CORE, "vllm/added.py"} <= set(stamp.changed)


@pytest.mark.parametrize("spoil", ["", "{}", "[1]"])
def test_unusable_stamp_means_a_new_tree(installed: Any, spoil: str) -> None:
    """A tree of unknown state is written anew."""
    (installed.tree / STAMP).write_text(spoil)
    (installed.tree / "vllm/left_over.py").write_text("")
    _rebuild(installed)
    assert not (installed.tree / "vllm/left_over.py").exists()
    assert _run(installed, "from vllm.engine.core import LINE_5; print(LINE_5)") == "patched"
    # Beside it there is only what builds take turns by.
    left = {path.name for path in installed.tree.parent.iterdir()}
    assert left == {installed.tree.name, f".{installed.tree.name}.lock"}


def test_other_base_means_a_new_tree(installed: Any) -> None:
    """When another base is pinned, nothing of the old one stays."""
    installed.pin({"vllm/__init__.py": b"NEW = 1\n", CORE: (installed.tree / CORE).read_bytes()})
    installed.write("bases/0.22.1/series", "")
    (installed.patches_dir / "edit.patch").unlink()
    _rebuild(installed)
    assert not (installed.tree / "vllm/lazy.py").exists()
    assert _run(installed, "import vllm; print(vllm.NEW)") == "1"


def test_failed_rebuild_leaves_the_tree(installed: Any) -> None:
    """A series that does not apply is refused before any file is touched."""
    installed.edit_core("drift", 5, "'x'", core="LINE_5 = 5\n")
    with pytest.raises(SystemExit, match=r"drift\.patch"):
        _rebuild(installed)
    assert _run(installed, "from vllm.engine.core import LINE_5; print(LINE_5)") == "patched"


def test_rebuild_without_installation_says_so(
    frontend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no tree, the way to get one is named."""
    monkeypatch.delenv("VLLM_TARGET_DEVICE")
    with pytest.raises(SystemExit, match=r"no editable installation .* `pip install -e \.`"):
        _rebuild(frontend)


def test_pip_installs_editable(installed: Any, tmp_path: Path) -> None:
    """The hooks work from within pip, and the files that it installs are metadata and a path."""
    target = tmp_path / "target"
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation"]
    subprocess.run(
        [
            *command,
            "--no-index",
            "--target",
            str(target),
            "--editable",
            str(_with_backend(installed)),
        ],
        check=True,
        capture_output=True,
    )
    (path_file,) = target.glob("*.pth")
    assert path_file.read_text().strip() == str(installed.tree)
    assert not (target / "vllm").exists()


def _with_backend(source_tree: Any) -> Path:
    import reshard_build

    (source_tree.root / "build_backend" / "reshard_build").symlink_to(
        Path(reshard_build.__file__).parent
    )
    root: Path = source_tree.root
    return root
