# SPDX-License-Identifier: Apache-2.0
"""The product's metadata."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from reshard_build.archive import open_base
from reshard_build.base import Rewrites
from reshard_build.errors import ConfigError, MetadataError
from reshard_build.metadata import dist_info, rewrite_requirements, sdist_metadata


def _dist_info(source_tree: Any, name: str) -> dict[str, bytes]:
    target = source_tree.base.targets[name]
    pin = target.wheels["x86_64"]
    with open_base(source_tree.cache / pin.file) as base:
        return dist_info(source_tree.project, target, pin, base)


def test_own_identity_and_the_bases_needs(source_tree: Any) -> None:
    """Name, version, text and licence are this project's; Python and extras are the base's."""
    metadata = Metadata.from_email(_dist_info(source_tree, "cpu")["METADATA"])
    assert (metadata.name, str(metadata.version)) == ("vllm", "0.22.1+reshard.1.cpu")
    assert metadata.summary == "The product"
    assert metadata.description == "# The product\n"
    assert metadata.description_content_type == "text/markdown"
    assert metadata.license_expression == "Apache-2.0"
    assert metadata.license_files == ["LICENSE", "vllm/LICENSE"]
    assert str(metadata.requires_python) == ">=3.10"
    assert metadata.provides_extra == ["bench"]


def test_requirements_of_the_cpu_target(source_tree: Any) -> None:
    """Pins that an index can satisfy, no build requirement, NIXL; extras stay as they are."""
    metadata = Metadata.from_email(_dist_info(source_tree, "cpu")["METADATA"])
    assert [str(r) for r in metadata.requires_dist or []] == [
        "numpy",
        'setuptools<81.0.0,>=77.0.3; python_version > "3.11"',
        "torch==2.11.0",
        "torchvision==0.26.0",
        "torchaudio==2.11.0",
        'torch==1.0; extra == "bench"',
        "nixl>=1.5",
    ]


def test_requirements_of_the_cuda_target(source_tree: Any) -> None:
    """Upstream's own pins stay."""
    metadata = Metadata.from_email(_dist_info(source_tree, "cuda")["METADATA"])
    assert str(metadata.version) == "0.22.1+reshard.1"
    assert [str(r) for r in metadata.requires_dist or []] == [
        "numpy",
        "torch==2.11.0",
        "nixl>=1.5",
    ]


def test_other_files_of_the_directory(source_tree: Any) -> None:
    """Entry points and both licences are there; the tag is the file name's, not the one inside."""
    files = _dist_info(source_tree, "cpu")
    assert files["entry_points.txt"] == b"[console_scripts]\nvllm = vllm.cli:main\n"
    assert files["licenses/LICENSE"] == b"Our licence.\n"
    assert files["licenses/vllm/LICENSE"] == b"Upstream's licence.\n"
    wheel = files["WHEEL"].decode().splitlines()
    assert [line for line in wheel if line.startswith("Tag")] == [
        "Tag: cp38-abi3-manylinux_2_28_x86_64"
    ]


def test_source_distribution_marks_what_depends_on_the_target(source_tree: Any) -> None:
    """PKG-INFO is valid without a base wheel and leaves requirements open."""
    metadata = Metadata.from_email(sdist_metadata(source_tree.project, "0.22.1+reshard.1"))
    assert str(metadata.version) == "0.22.1+reshard.1"
    assert "requires-dist" in (metadata.dynamic or [])


def test_missing_readme_is_named(source_tree: Any) -> None:
    """A file that `pyproject.toml` names and the tree lacks is an error that names it."""
    (source_tree.root / "README.md").unlink()
    with pytest.raises(ConfigError, match=r"names README\.md, which cannot be read"):
        _dist_info(source_tree, "cpu")


def test_invalid_own_metadata_is_refused(source_tree: Any) -> None:
    """Metadata that an installer would reject is not written."""
    path = source_tree.root / "pyproject.toml"
    path.write_text(path.read_text().replace('license = "Apache-2.0"', 'license = "None at all"'))
    with pytest.raises(MetadataError, match="would be invalid"):
        _dist_info(source_tree, "cpu")


@pytest.mark.parametrize(
    "rewrites",
    [
        Rewrites(replace=(Requirement("absent==1"),)),
        Rewrites(drop=(Requirement("numpy==1"),)),
        Rewrites(add=(Requirement("NumPy>=2"),)),
    ],
)
def test_stale_rewrite_is_refused(rewrites: Rewrites) -> None:
    """A rewrite that the base no longer calls for is an error, not silently without effect."""
    with pytest.raises(MetadataError, match="does not fit those of the base"):
        rewrite_requirements([Requirement("numpy")], rewrites, "the base")


NAMES = st.sampled_from(["alpha", "beta", "gamma", "delta"])
EXTRA = st.sampled_from(["", '; extra == "x"', '; python_version > "3.11"'])


@given(st.lists(st.builds(lambda n, e: Requirement(f"{n}{e}"), NAMES, EXTRA), max_size=12))
@settings(derandomize=True)
def test_rewriting_leaves_the_rest_alone(requirements: list[Requirement]) -> None:
    """What is not replaced keeps its place; a replaced project stands once, extras apart."""
    requirements = [*requirements, Requirement("alpha<1")]
    new = Requirement("alpha==2")
    result = rewrite_requirements(requirements, Rewrites(replace=(new,)), "the base")

    def is_replaced(requirement: Requirement) -> bool:
        return requirement.name == "alpha" and "extra" not in str(requirement)

    assert result.count(new) == 1
    assert [r for r in result if r != new] == [r for r in requirements if not is_replaced(r)]


def test_bare_name_drops_all_requirements_on_a_project() -> None:
    """A name without a version drops every requirement on it, but for those of an extra."""
    texts = [
        "torchvision",
        'torchvision==1; os_name == "nt"',
        'torchvision; extra == "video"',
        "six",
    ]
    drop = Rewrites(drop=(Requirement("torchvision"),))
    left = rewrite_requirements(map(Requirement, texts), drop, "the base")
    assert [str(r) for r in left] == ['torchvision; extra == "video"', "six"]
    with pytest.raises(MetadataError, match="torchvision"):
        rewrite_requirements([Requirement("six")], drop, "the base")
