# SPDX-License-Identifier: Apache-2.0
"""All bases and targets of this source tree, from the real base wheels."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED

import pytest
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename
from reshard_build import archive
from reshard_build.archive import BaseWheel, open_product, verify_wheel
from reshard_build.assemble import write_wheel
from reshard_build.bases import default_release, load_bases
from reshard_build.check import run_checks
from reshard_build.metadata import dist_info
from reshard_build.pinned import open_pinned
from reshard_build.product import VERSION_FILE, Choice, Product, choose, compose
from reshard_build.project import Project

pytestmark = pytest.mark.slow

PROJECT = Project(Path(__file__).parents[2])


BASES = load_bases(PROJECT)
WHEELS = [(base.version, target) for base in BASES for target in base.targets]
TORCH = {"0.22.1": "torch==2.11.0", "0.32.0": "torch==2.13.0", "0.33.0": "torch==2.14.0"}
# That of the compiled files, where these are not the release's own.
TORCH_ON_CPU = {**TORCH, "0.33.0": "torch==2.13.0"}


def _deciding(release: str, target: str) -> Any:
    """Every change builds the wheel that is run by default; the others can wait for test-full."""
    marks = (
        () if (release, target) == (default_release(PROJECT, "cpu"), "cpu") else pytest.mark.nightly
    )
    return pytest.param((release, target), marks=marks, id=f"{release}-{target}")


@pytest.fixture(scope="module", params=[_deciding(*wheel) for wheel in WHEELS])
def choice(request: pytest.FixtureRequest) -> Choice:
    """Return what the variables ask for."""
    release, target = request.param
    base = next(base for base in BASES if base.version == release)
    if sys.version_info < tuple(int(part) for part in base.python.split(".")):
        pytest.skip(f"base {release} needs Python {base.python}")
    asked = {"VLLM_RESHARD_BASE": release, "VLLM_TARGET_DEVICE": target}
    return choose(PROJECT, {**os.environ, **asked})


@pytest.fixture(scope="module")
def product(choice: Choice) -> Iterator[Product]:
    """Return the product of this source tree."""
    with open_pinned(choice.pin, os.environ) as base:
        yield compose(PROJECT, choice.target, choice.pin, base)


@pytest.fixture(scope="module")
def built(product: Product, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BaseWheel]:
    """Return the finished wheel, open; it is large, so it goes away with the module."""
    directory = tmp_path_factory.mktemp("wheels")
    metadata = dist_info(PROJECT, product.target, product.pin, product.base)
    with pytest.MonkeyPatch.context() as patch:
        # Nobody fetches it, and compressing it takes longer than all that is looked at here.
        patch.setattr(archive, "COMPRESSION", ZIP_STORED)
        path = directory / write_wheel(product, metadata, directory)
    with open_product(path) as wheel:
        yield wheel
    path.unlink()


def test_every_file_has_its_owner(product: Product, built: BaseWheel) -> None:
    """Base, patches and overlay make up the wheel; the base's files are byte for byte the same."""
    for name in product.base.names:
        if name not in product.changed:
            assert built.read(name) == product.base.read(name), name
            assert built.mode(name) == product.base.mode(name), name
    for name, content in product.changed.items():
        assert (built.read(name) if name in built else None) == content, name
    for name, source in product.overlay.items():
        assert built.read(name) == source.read_bytes(), name
    assert set(built.names) == product.upstream_paths | product.overlay.keys()


def test_record_is_valid(built: BaseWheel) -> None:
    """RECORD covers every file of the wheel."""
    verify_wheel(built.path)


def test_identity(product: Product, built: BaseWheel) -> None:
    """Version of file name, metadata and `_version.py` agree; the name is vLLM's own."""
    metadata = Metadata.from_email(built.read_dist_info("METADATA"))
    names: dict[str, object] = {}
    exec(built.read(VERSION_FILE), names)
    name, version, _, tags = parse_wheel_filename(built.path.name)
    assert name == metadata.name == "vllm"
    assert str(version) == str(metadata.version) == names["__version__"] == product.target.version
    assert tags == product.pin.tags
    assert b"vllm = vllm.entrypoints.cli.main:main" in built.read_dist_info("entry_points.txt")


def test_requirements_can_be_satisfied(choice: Choice, built: BaseWheel) -> None:
    """One pin of torch without a local version, what we import, and no needs of a build."""
    metadata = Metadata.from_email(built.read_dist_info("METADATA"))
    requirements = [r for r in metadata.requires_dist or [] if "extra" not in str(r.marker)]
    assert Requirement("nixl>=1.5") in requirements
    assert Requirement("rich>=13") in requirements
    assert not [r for r in requirements if r.name == "setuptools" and "==" in str(r.specifier)]
    release, target = choice.config.version, choice.target.name
    assert {str(r) for r in requirements if r.name == "torch"} == {
        (TORCH_ON_CPU if target == "cpu" else TORCH)[release]
    }
    vision = {r.name for r in requirements} & {"torchvision", "torchaudio", "torchcodec"}
    assert bool(vision) != (target == "cpu" and release != "0.22.1")
    assert not [r for r in requirements if "+" in str(r.specifier)]


def test_python_is_the_wheels_own(product: Product, choice: Choice) -> None:
    """`python` in `base.toml` is the oldest version that the wheel accepts."""
    needed = Metadata.from_email(product.base.read_dist_info("METADATA")).requires_python
    major, minor = (int(part) for part in choice.config.python.split("."))
    assert needed is not None
    assert f"{major}.{minor}" in needed
    assert f"{major}.{minor - 1}" not in needed


@pytest.mark.nightly
def test_patches_and_overlay_fit_the_oldest_base() -> None:
    """All proofs hold for both wheels of the base that needs the most patches."""
    failed = [p for p in run_checks(PROJECT, os.environ, ["0.22.1"]) if not p.ok]
    assert failed == []
