# SPDX-License-Identifier: Apache-2.0
"""The plugin of this source tree, importable as if it were installed."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from reshard_build.plugin import read_plugin
from reshard_build.project import Project

PROJECT = Project(Path(__file__).parents[2])


@pytest.fixture(scope="session")
def plugin_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plugin's wheel."""
    directory = tmp_path_factory.mktemp("plugin-wheel")
    return directory / read_plugin(PROJECT).write_wheel(directory)


@pytest.fixture(scope="session")
def plugin_site(plugin_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site directory with the plugin in it."""
    site = tmp_path_factory.mktemp("plugin-site")
    with zipfile.ZipFile(plugin_wheel) as archive:
        archive.extractall(site)
    return site


@pytest.fixture(autouse=True)
def on_path(plugin_site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the plugin be found for one test: the fork would refuse to start beside it."""
    monkeypatch.syspath_prepend(str(plugin_site))
    yield
