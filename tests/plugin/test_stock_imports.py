# SPDX-License-Identifier: Apache-2.0
"""The plugin beside the released wheels: what can be seen without a GPU and without an engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from reshard_build.archive import open_base
from reshard_build.base import load_base
from reshard_build.bases import releases
from reshard_build.fetch import fetch
from reshard_build.overlay import parents
from reshard_build.plugin import PACKAGE, checked_releases, read_plugin

from tests.plugin.conftest import PROJECT
from tests.plugin.stock import install, lay_stock

pytestmark = pytest.mark.slow

RELEASE = "0.33.0"
WHEELS = [
    pin
    for release in releases(PROJECT)
    for target in load_base(PROJECT.base_file(release)).targets.values()
    for pin in target.wheels.values()
]

PROBE = """
import importlib, json, pkgutil, sys

from vllm.plugins import load_general_plugins
load_general_plugins()
load_general_plugins()
import vllm
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm_kv_reshard import entry

early = sorted(name for name in sys.modules if name.startswith("vllm_kv_reshard."))
found = {
    name: KVConnectorFactory.get_connector_class_by_name(name)
    for name in ("NixlConnector", "ReshardConnector", "NixlPullConnector", "NixlPushConnector")
}
package = importlib.import_module("vllm_kv_reshard")
modules = [m.name for m in pkgutil.walk_packages(package.__path__, "vllm_kv_reshard.")]
for name in modules:
    importlib.import_module(name)
print(json.dumps({
    "vllm": [vllm.__file__, vllm.__version__],
    "found": str(entry.find_vllm()),
    "early": early,
    "classes": {name: f"{each.__module__}.{each.__qualname__}" for name, each in found.items()},
    "abstract": sorted(found["NixlConnector"].__abstractmethods__),
    "uncalled": entry._uncalled(found["NixlConnector"]),
    "forks": sorted(entry._FORKS_HOOKS - set(dir(found["NixlPullConnector"]))),
    "modules": modules,
}))
"""


@pytest.fixture(scope="module")
def stock_site(plugin_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site directory with vLLM as released, for CUDA, and the plugin."""
    site = tmp_path_factory.mktemp("stock")
    lay_stock(RELEASE, "cuda", site, compile_all=False)
    install(plugin_wheel, site, compile_all=False)
    return site


def run(site: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run Python where that vLLM is found before the fork."""
    env = {**os.environ, "PYTHONPATH": str(site), **environ}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_everything_but_a_gpu(stock_site: Path) -> None:
    """Entry points are loaded, the factory finds ours, all modules import, all hooks are called."""
    done = run(stock_site, "-c", PROBE)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["vllm"] == [str(stock_site / "vllm" / "__init__.py"), RELEASE]
    assert told["found"] == f"vLLM {RELEASE} of vllm"
    assert told["early"] == [f"{PACKAGE}.{name}" for name in ("entry", "installed", "logs")]
    upstream = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
    assert told["classes"] == {
        "NixlConnector": f"{PACKAGE}.stock.NixlConnector",
        "ReshardConnector": f"{PACKAGE}.stock.NixlConnector",
        "NixlPullConnector": f"{upstream}.connector.NixlPullConnector",
        "NixlPushConnector": f"{upstream}.connector.NixlPushConnector",
    }
    assert (told["abstract"], told["uncalled"]) == ([], [])
    assert told["forks"] == [
        "drop_held",
        "hold_back",
        "prefer_cross_layer_blocks",
        "register_cross_layers_kv_cache",
        "take_first_outputs",
    ]
    assert (
        len(told["modules"]) == len([f for f in read_plugin(PROJECT).files if f[-3:] == ".py"]) - 1
    )


@pytest.mark.nightly
def test_name_left_alone(stock_site: Path) -> None:
    """`VLLM_PLUGINS` without the second entry point gives the name back to vLLM."""
    done = run(stock_site, "-c", PROBE, VLLM_PLUGINS="kv_reshard")
    assert done.returncode == 0, done.stderr
    classes = json.loads(done.stdout.splitlines()[-1])["classes"]
    assert classes["ReshardConnector"] == f"{PACKAGE}.stock.NixlConnector"
    assert classes["NixlConnector"].startswith("vllm.distributed.")


@pytest.mark.parametrize("pin", WHEELS, ids=lambda pin: f"{pin.project}-{pin.version}")
def test_no_wheel_of_vllm_has_its_paths(pin) -> None:
    """Installing, upgrading and removing the plugin touches no file of vLLM."""
    with open_base(fetch(pin, os.environ)) as base:
        theirs = parents(base.names)
    assert PACKAGE not in theirs
    assert parents(read_plugin(PROJECT).files).isdisjoint(theirs)


def test_all_checked_releases_have_a_base() -> None:
    """The two newest are what the plugin is for, and this test would otherwise prove another."""
    assert RELEASE in {r for r in releases(PROJECT) if checked_releases(PROJECT).contains(r)}
