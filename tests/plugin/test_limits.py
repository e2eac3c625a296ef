# SPDX-License-Identifier: Apache-2.0
"""What is said of a vLLM without the fork's patches, by configuration."""

from __future__ import annotations

from dataclasses import replace

import pytest


def limits_of(**changes):
    """The limits of an engine on one GPU, but for what is given."""
    from vllm_kv_reshard import limits

    plain = limits.Needs(
        device_type="cuda",
        pp_size=1,
        num_workers=1,
        compiles=True,
        pools=False,
        v2_runner=True,
    )
    return limits.limits_of(replace(plain, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_workers": 8, "compiles": False},
        {"pools": True, "v2_runner": False},
        {"device_type": "cpu", "v2_runner": False, "compiles": False},
    ],
)
def test_nothing_to_say(changes):
    """One stage on GPUs, and one rank on CPU, need no patch."""
    assert limits_of(**changes) == []


@pytest.mark.parametrize(
    ("changes", "name", "remedy"),
    [
        (
            {"device_type": "cpu", "pp_size": 2, "compiles": False, "v2_runner": False},
            "pipeline stages on CPU in eager mode",
            "leave out --enforce-eager",
        ),
        (
            {"pp_size": 2, "pools": True, "v2_runner": False},
            "pipeline stages of pooling models",
            "--pipeline-parallel-size 1",
        ),
    ],
)
def test_refused(changes, name, remedy):
    """What would end an engine, or lose its blocks, is refused with its name and the remedy."""
    limit = next(each for each in limits_of(**changes) if each.fatal)
    assert str(limit).startswith(f"{name}: ")
    assert remedy in limit.remedy
    assert "the fork" in limit.remedy


def test_told():
    """What costs time only is told."""
    (limit,) = limits_of(device_type="cpu", num_workers=2, v2_runner=False)
    assert (limit.name, limit.fatal) == ("rest on CPU", False)


@pytest.mark.parametrize(
    "changes",
    [
        {"pp_size": 4, "num_workers": 8},
        {"pp_size": 4, "num_workers": 4, "compiles": False},
        {"pp_size": 2, "num_workers": 2, "pools": True},
    ],
)
def test_stages_are_told_what_cannot_be_beside_them(changes):
    """What vLLM says names the child of `MultiConnector`, and not what to do."""
    (limit,) = limits_of(**changes)
    assert not limit.fatal
    assert "MultiConnector" in limit.consequence
    assert "--pipeline-parallel-size 1" in limit.remedy


def test_documented():
    """The page lists every limit by the name that the log gives."""
    from vllm_kv_reshard.limits import LIMITS

    from tests.plugin.conftest import PROJECT

    page = (PROJECT.root / "docs" / "plugin.md").read_text(encoding="utf-8")
    assert [limit.name for limit in LIMITS if f"| {limit.name} |" not in page] == []
