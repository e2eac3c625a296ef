# SPDX-License-Identifier: Apache-2.0
"""What is known to mean something else from release to release is so in their sources."""

from __future__ import annotations

import os
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.version import Version
from reshard_build.bases import load_bases
from reshard_build.fetch import cache_dir
from reshard_build.project import Project

from tests.bases import RELEASE
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.caches.releases import CHANGES

ROOT = Path(__file__).resolve().parents[7]
WHEELS = [
    (base.version, cache_dir(os.environ) / pin.file)
    for base in load_bases(Project(ROOT))
    for target in base.targets.values()
    for pin in target.wheels.values()
]


@pytest.mark.parametrize(
    ("release", "path"), WHEELS, ids=lambda value: getattr(value, "name", value)
)
def test_change_stands_in_every_release_since(release, path):
    """And in none before, so that two engines of which one has it are told apart."""
    if not path.is_file():
        pytest.skip("not on this machine: make patches-check fetches it")
    with ZipFile(path) as wheel:
        names = set(wheel.namelist())
        for change in CHANGES:
            source = wheel.read(change.module).decode() if change.module in names else ""
            is_there = Version(release) >= Version(change.since)
            assert (change.sign in source) is is_there, change


def test_engines_say_which_meaning_is_theirs():
    """In words that do not name their own release."""
    for change in CHANGES:
        when = "since" if Version(RELEASE) >= Version(change.since) else "before"
        assert change.meaning == f"{when} vLLM {change.since}"
        assert change.is_here is (when == "since")
