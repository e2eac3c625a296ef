# SPDX-License-Identifier: Apache-2.0
"""Command lines and environments of engines."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.pdstack import engine
from tools.pdstack.engine import (
    UPSTREAM_AT_REST,
    CoreAllocator,
    Device,
    EngineSpec,
    KVTransfer,
    ServedModel,
    Speculation,
    engine_command,
    engine_env,
    why_no_mla,
    why_no_model,
    why_no_push,
)
from tools.pdstack.errors import UsageError
from tools.pdstack.layout import Layout

MODEL = ServedModel(Path("/models/m"), "name")


def _command(spec: EngineSpec, device: Device = Device.CPU) -> list[str]:
    return engine_command(spec, MODEL, device, 8100, "/bin/vllm")


def _value(command: list[str], option: str) -> str:
    return command[command.index(option) + 1]


def _env(spec: EngineSpec, device: Device = Device.CPU, **inherited: str) -> Mapping[str, str]:
    return engine_env(spec, device, inherited, side_channel_port=5600, cores=[0, 1, 0])


def test_a_command_says_model_address_and_layout() -> None:
    """The command serves the model under its name, on the loopback, with the layout's sizes."""
    command = _command(EngineSpec("e", Layout(3, 2)))
    assert "--prefill-context-parallel-size" not in command
    replicas = _command(EngineSpec("e", Layout(pcp_size=2)))
    assert _value(replicas, "--prefill-context-parallel-size") == "2"
    assert command[:3] == ["/bin/vllm", "serve", "/models/m"]
    assert _value(command, "--served-model-name") == "name"
    assert _value(command, "--host") == "127.0.0.1"
    assert _value(command, "--port") == "8100"
    assert _value(command, "--tensor-parallel-size") == "3"
    assert _value(command, "--pipeline-parallel-size") == "2"
    assert _value(command, "--dtype") == "float32"


@pytest.mark.parametrize("device", list(Device))
def test_the_connector_is_configured_for_the_device(device: Device) -> None:
    """The transfer config names connector, role, buffer device and the extra config."""
    spec = EngineSpec("e", kv_transfer=KVTransfer("C", "kv_consumer", {"n": 4}))
    assert json.loads(_value(_command(spec, device), "--kv-transfer-config")) == {
        "kv_connector": "C",
        "kv_role": "kv_consumer",
        "kv_buffer_device": device.value,
        "kv_connector_extra_config": {"n": 4},
    }


def test_a_connector_can_be_taken_from_a_module() -> None:
    """A module path reaches the transfer config under vLLM's name for it, and is not made up."""
    named = json.loads(KVTransfer(module_path="a.b").to_json(Device.CPU))
    assert named["kv_connector_module_path"] == "a.b"
    assert "kv_connector_module_path" not in json.loads(KVTransfer().to_json(Device.CPU))


def test_a_failure_policy_can_be_chosen() -> None:
    """It reaches the transfer config under vLLM's name for it, and is not made up."""
    named = json.loads(KVTransfer(load_failure_policy="recompute").to_json(Device.CPU))
    assert named["kv_load_failure_policy"] == "recompute"
    assert "kv_load_failure_policy" not in json.loads(KVTransfer().to_json(Device.CPU))


def test_an_engine_alone_has_no_connector() -> None:
    """Without a connector nothing is said about transfers."""
    assert "--kv-transfer-config" not in _command(EngineSpec("e", kv_transfer=None))


def test_extra_arguments_come_last() -> None:
    """Extra arguments win over what the launcher says itself."""
    command = _command(EngineSpec("e", extra_args=("--dtype", "bfloat16")))
    assert command[-2:] == ["--dtype", "bfloat16"]


def test_memory_is_limited_where_the_device_needs_it() -> None:
    """On CUDA the cache size is an argument, on CPU a variable."""
    spec = EngineSpec("e", kv_cache_gib=2)
    assert _value(_command(spec, Device.CUDA), "--kv-cache-memory-bytes") == str(2 << 30)
    assert "--kv-cache-memory-bytes" not in _command(spec, Device.CPU)
    assert _env(spec)["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert "VLLM_CPU_KVCACHE_SPACE" not in _env(spec, Device.CUDA)


def test_the_environment_binds_everything_to_loopback_and_cores() -> None:
    """Handshake address, one core for each worker, and no traffic to the outside."""
    env = _env(EngineSpec("e", Layout(3)), PATH="/bin", no_proxy="example.org")
    assert env["PATH"] == "/bin"
    assert env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == env["VLLM_HOST_IP"] == "127.0.0.1"
    assert env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5600"
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "0|1|0"
    assert env["no_proxy"] == "example.org,127.0.0.1,localhost"
    assert env["HF_HUB_OFFLINE"] == env["VLLM_NO_USAGE_STATS"] == env["DO_NOT_TRACK"] == "1"


def test_an_engine_may_be_at_the_other_end_of_a_link() -> None:
    """It serves, and shakes hands, at its own address in its own namespace, past all proxies."""
    spec = EngineSpec("e", host="198.18.51.1", namespace="far")
    command, env = _command(spec), _env(spec)
    assert command[:6] == ["ip", "netns", "exec", "far", "/bin/vllm", "serve"]
    assert _value(command, "--host") == "198.18.51.1"
    assert env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == env["VLLM_HOST_IP"] == "198.18.51.1"
    assert env["no_proxy"] == "127.0.0.1,localhost,198.18.51.1"


def test_the_environment_of_a_spec_wins() -> None:
    """What a spec sets is laid over everything else."""
    assert _env(EngineSpec("e", env={"OMP_NUM_THREADS": "4"}))["OMP_NUM_THREADS"] == "4"


@given(
    st.lists(st.integers(0, 500), min_size=1, max_size=16, unique=True),
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
)
def test_cores_are_spread_evenly(cores: list[int], world_sizes: list[int]) -> None:
    """Every worker gets a usable core, and no core serves two workers more than another."""
    allocator = CoreAllocator(cores)
    taken = [allocator.take(size) for size in world_sizes]
    assert [len(each) for each in taken] == world_sizes
    counts = [sum(each.count(core) for each in taken) for core in cores]
    assert sum(counts) == sum(world_sizes)
    assert max(counts) - min(counts) <= 1


def test_a_missing_script_is_a_usage_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Scripts are looked for beside the interpreter, and the remedy is named."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(UsageError, match="make setup"):
        engine.find_script("vllm")
    (tmp_path / "vllm").touch()
    assert engine.find_script("vllm") == str(tmp_path / "vllm")


def test_script_of_another_environment(tmp_path: Path) -> None:
    """An engine may run another vLLM than its launcher's, and it is said where that is missing."""
    with pytest.raises(UsageError, match=f"vllm is not installed in {tmp_path}"):
        engine.find_script("vllm", tmp_path)
    (tmp_path / "vllm").touch()
    assert engine.find_script("vllm", tmp_path) == str(tmp_path / "vllm")


def test_an_engine_drafts_as_it_is_told() -> None:
    """What drafts is found from the served model's directory, if it is a model of its own."""
    options = (("prompt_lookup_max", 4),)
    for speculation, config in (
        (None, None),
        (
            Speculation("ngram", 3, options=options),
            {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4},
        ),
        (
            Speculation("eagle", 2, "head"),
            {"method": "eagle", "num_speculative_tokens": 2, "model": "/models/m/head"},
        ),
    ):
        command = _command(EngineSpec("e", speculation=speculation))
        if config is None:
            assert "--speculative-config" not in command
        else:
            assert json.loads(_value(command, "--speculative-config")) == config


def test_a_connector_of_our_own_is_found_by_the_engine() -> None:
    """By its module's directory, in front of what is looked in anyway; others are not."""
    spec = EngineSpec("e", kv_transfer=UPSTREAM_AT_REST)
    module_dir = UPSTREAM_AT_REST.module_dir
    assert module_dir is not None
    assert (module_dir / f"{UPSTREAM_AT_REST.module_path}.py").is_file()
    assert _env(spec)["PYTHONPATH"] == str(module_dir)
    assert _env(spec, PYTHONPATH="/a")["PYTHONPATH"] == f"{module_dir}:/a"
    assert "PYTHONPATH" not in _env(EngineSpec("e"))
    modules = EngineSpec("e", kv_transfer=UPSTREAM_AT_REST, module_dirs=(Path("/b"), Path("/c")))
    assert _env(modules, PYTHONPATH="/a")["PYTHONPATH"] == f"/b:/c:{module_dir}:/a"
    assert _env(replace(modules, kv_transfer=None))["PYTHONPATH"] == "/b:/c"
    # What the overlay lies in would hide vLLM.
    assert not list(module_dir.glob("vllm*"))


@pytest.mark.parametrize(
    ("version", "device"), [("0.22.1+reshard.1.cpu", Device.CPU), ("0.22.1+reshard.1", Device.CUDA)]
)
def test_the_device_follows_from_the_version(
    monkeypatch: pytest.MonkeyPatch, version: str, device: Device
) -> None:
    """The installed distribution says what it was built for."""
    monkeypatch.setattr("importlib.metadata.version", lambda _: version)
    assert engine.installed_device() is device


@pytest.mark.parametrize(
    ("version", "has_backend", "why"),
    [
        ("9.0+reshard.1.cpu", True, ""),
        ("9.0+reshard.1.cpu", False, "vLLM 9.0+reshard.1.cpu has no MLA on CPU"),
        ("9.0+reshard.1", True, "MLA at float32 runs on CPU only"),
    ],
)
def test_mla_needs_a_kernel_for_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, has_backend: bool, why: str
) -> None:
    """Whether the installed vLLM has it is seen from its files."""
    files = ["v1/attention/backends/mla/cpu_mla.py"] if has_backend else []
    _install(tmp_path, monkeypatch, version, files)
    assert why_no_mla() == why


def test_a_model_needs_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a backend, the files say what the installed vLLM knows."""
    _install(tmp_path, monkeypatch, "9.0", ["model_executor/models/known.py"])
    assert why_no_model("known") == ""
    assert why_no_model("new") == "vLLM 9.0 has no model new"


def test_connector_that_writes_needs_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Upstream has it since 0.32."""
    place = "distributed/kv_transfer/kv_connector/v1/nixl"
    _install(tmp_path, monkeypatch, "9.0", [f"{place}/stats.py"])
    assert why_no_push() == "vLLM 9.0 has no NixlPushConnector"
    (tmp_path / place / "push_scheduler.py").touch()
    assert why_no_push() == ""


def _install(place: Path, monkeypatch: pytest.MonkeyPatch, version: str, files: list[str]) -> None:
    """Let a vLLM of these files be the installed one."""
    for name in files:
        (place / name).parent.mkdir(parents=True)
        (place / name).touch()
    found = ModuleSpec("vllm", None, is_package=True)
    found.submodule_search_locations = [str(place)]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found)
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
