# SPDX-License-Identifier: Apache-2.0
"""What an engine is asked to be, and the command line and environment that say so to vLLM."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from .cpu import why_no_bfloat16_operators
from .errors import UsageError
from .hosts import DEVICE, Host
from .layout import Layout
from .ports import HOST
from .process import GRACE_S

_PUSH = "distributed/kv_transfer/kv_connector/v1/nixl/push_scheduler.py"
_CPU_MLA = "v1/attention/backends/mla/cpu_mla.py"
_CPU_DEEPSEEK4 = "models/deepseek_v4/cpu/model.py"
_CPU_RUNNER = "v1/worker/cpu/model_runner.py"
_GIB = 1 << 30
_LOOPBACK = "127.0.0.1,localhost"
# Apart from all else: vLLM must not be found in here.
_MODULES = Path(__file__).with_name("modules")
_FORKED = _MODULES / "forked"


class Device(str, Enum):
    """Where the engines run."""

    CPU = "cpu"
    CUDA = "cuda"


def installed_device() -> Device:
    """Return the device that the installed vLLM was built for, as vLLM itself tells it.

    Raises:
        UsageError: vLLM is not installed in this interpreter's environment.
    """
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        raise UsageError(f"vLLM is not installed for {sys.executable}; run `make setup`") from None
    return Device.CPU if "cpu" in version else Device.CUDA


def why_no_mla() -> str:
    """Return why the installed vLLM cannot serve MLA at float32; an empty string where it can.

    Raises:
        UsageError: vLLM is not installed in this interpreter's environment.
    """
    return _why_not_on_cpu("MLA at float32", "MLA", _CPU_MLA)


def why_no_deepseek4() -> str:
    """Return why the installed vLLM cannot serve the tiny DeepSeek V4; empty where it can.

    Raises:
        UsageError: vLLM is not installed in this interpreter's environment.
    """
    why = _why_not_on_cpu("the tiny DeepSeek V4", "DeepSeek V4", _CPU_DEEPSEEK4)
    return why or why_no_bfloat16_operators()


def why_no_second_runner() -> str:
    """Return why vLLM's second model runner cannot be had here; an empty string where it can.

    Raises:
        UsageError: vLLM is not installed in this interpreter's environment.
    """
    return _why_not_on_cpu(
        "the second model runner by Triton's interpreter", "second model runner", _CPU_RUNNER
    )


def why_no_first_tokens() -> str:
    """Return why the installed vLLM lets no connector answer; an empty string where it does."""
    base = _file("distributed/kv_transfer/kv_connector/v1/base.py")
    known = base is not None and "def take_first_outputs(" in base.read_text()
    return "" if known else f"vLLM {_release()} asks connectors for no first tokens"


def why_no_push() -> str:
    """Return why upstream has no connector that writes; an empty string where it has one."""
    return "" if _file(_PUSH) else f"vLLM {_release()} has no NixlPushConnector"


def why_no_model(module: str) -> str:
    """Return why the installed vLLM cannot serve a model; an empty string where it can.

    Args:
        module: of the model, by its name among vLLM's models.
    """
    known = _file(f"model_executor/models/{module}.py")
    return "" if known else f"vLLM {_release()} has no model {module}"


def _why_not_on_cpu(served: str, what: str, path: str) -> str:
    """Return why something that runs on CPU only cannot be served; an empty string where it can.

    Args:
        served: what is asked for.
        what: what vLLM would need to have.
        path: of the file that has it.
    """
    if installed_device() is not Device.CPU:
        return f"{served} runs on CPU only"
    return "" if _file(path) else f"vLLM {_release()} has no {what} on CPU"


def _release() -> str:
    return importlib.metadata.version("vllm")


def _file(path: str) -> Path | None:
    """Return a file of the installed vLLM, found without importing it, which takes seconds."""
    found = importlib.util.find_spec("vllm")
    places = found.submodule_search_locations if found is not None else None
    files = (Path(place) / path for place in places or ())
    return next((file for file in files if file.is_file()), None)


def why_no_state() -> str:
    """Return why the installed vLLM cannot move recurrent state; an empty string where it can.

    Raises:
        UsageError: vLLM is not installed in this interpreter's environment.
    """
    installed_device()
    version = importlib.metadata.version("vllm")
    release = tuple(map(int, version.partition("+")[0].split(".")[:2]))
    reason = f"on vLLM {version}, models with recurrent state are left to upstream's connector"
    return reason if release < (0, 32) else ""


def find_script(name: str, directory: Path | None = None) -> str:
    """Return a console script.

    Args:
        name: its name.
        directory: where it is installed; by default beside this interpreter.

    Raises:
        UsageError: it is not there.
    """
    path = (directory or Path(sys.executable).parent) / name
    if not path.exists():
        raise UsageError(f"{name} is not installed in {path.parent}; run `make setup`")
    return str(path)


@dataclass(frozen=True)
class ServedModel:
    """A model directory, and the name under which clients ask for it.

    Attributes:
        engine_args: what the model needs on every engine's command line.
        block_tokens: size of a block of its KV cache on CPU, where nobody chooses another one; the
            smallest where layers have several.
        env: what the model needs in every engine's environment, as pairs.
    """

    directory: Path
    name: str
    engine_args: tuple[str, ...] = ()
    block_tokens: int = 128
    env: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class KVTransfer:
    """The connector of an engine.

    Attributes:
        connector: its class name.
        role: `kv_producer` of an engine that only prefills, `kv_consumer` of one that only decodes;
            by default either, for engines that pairs share.
        extra_config: passed through to it.
        module_path: where the class is imported from; by default where vLLM has it registered.
        module_dir: where that module lies, if it is not installed.
        load_failure_policy: what becomes of a request whose blocks cannot be read; by default
            vLLM's choice.
    """

    connector: str = "NixlConnector"
    role: str = "kv_both"
    # A lease outlives the moments in which many workers on few cores keep each other from running.
    extra_config: Mapping[str, Any] = field(default_factory=lambda: {"kv_lease_duration": 120})
    module_path: str | None = None
    module_dir: Path | None = None
    load_failure_policy: str | None = None

    def to_json(self, device: Device) -> str:
        """Return the value of ``--kv-transfer-config``."""
        config: dict[str, Any] = {
            "kv_connector": self.connector,
            "kv_role": self.role,
            "kv_buffer_device": device.value,
        }
        if self.module_path is not None:
            config["kv_connector_module_path"] = self.module_path
        if self.load_failure_policy is not None:
            config["kv_load_failure_policy"] = self.load_failure_policy
        if self.extra_config:
            config["kv_connector_extra_config"] = dict(self.extra_config)
        return json.dumps(config)


UPSTREAM = KVTransfer(module_path="vllm.distributed.kv_transfer.kv_connector.v1.nixl")
"""Upstream's connector of the same wheel."""

UPSTREAM_AT_REST = KVTransfer(module_path="upstream_at_rest", module_dir=_MODULES)
"""The same where it leaves the cores to others."""

UPSTREAM_PUSH_AT_REST = replace(UPSTREAM_AT_REST, connector="NixlPushConnector")
"""Upstream's connector whose prefill engines write, where it leaves the cores to others."""


def beside_offloading(ours: KVTransfer, *, is_first: bool = True) -> KVTransfer:
    """Return a `MultiConnector` of a connector and of one that offloads to host memory, on CPU.

    The latter is vLLM's `OffloadingConnector`, but for its copies, which vLLM makes on GPUs only.

    Args:
        ours: the connector.
        is_first: whether it is asked before the one that offloads.
    """
    offloading = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "OffloadsToHost",
            "spec_module_path": "offloads_to_host",
            "cpu_bytes_to_use": 64 << 20,
        },
    }
    children = [json.loads(ours.to_json(Device.CPU)), offloading]
    return replace(
        ours,
        connector="MultiConnector",
        extra_config={"connectors": children if is_first else children[::-1]},
        module_dir=_MODULES,
    )


@dataclass(frozen=True)
class Speculation:
    """How an engine drafts.

    Attributes:
        method: as vLLM calls it.
        num_tokens: how many are drafted at a time.
        model: what drafts, by its path from the served model's directory; ``None`` where it is no
            model of its own.
        options: more of vLLM's, as pairs.
    """

    method: str
    num_tokens: int
    model: str | None = None
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return self.method

    def to_json(self, directory: Path) -> str:
        """Return the value of ``--speculative-config``.

        Args:
            directory: the served model's.
        """
        config: dict[str, Any] = {
            "method": self.method,
            "num_speculative_tokens": self.num_tokens,
            **dict(self.options),
        }
        if self.model is not None:
            config["model"] = str(directory / self.model)
        return json.dumps(config)


@dataclass(frozen=True)
class EngineSpec:
    """One ``vllm serve``.

    Attributes:
        name: how it is called in messages and for its log.
        layout: its parallel sizes.
        kv_transfer: its connector; ``None`` for an engine that serves alone.
        extra_args: appended to the command line, so they win over what stands there already.
        env: laid over everything else in the environment.
        kv_cache_gib: size of the KV cache of each worker.
        port: where it serves HTTP; ``None`` for a free port.
        side_channel_port: where it serves handshakes; ``None`` for a free port.
        speculation: how it drafts; ``None`` where it does not.
        host: where it can be reached.
        scripts: where the vLLM that it runs has its console scripts; by default where this one has.
        namespace: the network namespace that it runs in, for which one has to be root; by default
            the launcher's.
        module_dirs: where modules lie that it imports, and that are not installed.
        spawns: whether it starts its processes as vLLM does. On CPU they are forked otherwise,
            which takes ten seconds of a core less for each.
        grace_s: how long it may take to end after SIGTERM.
    """

    name: str
    layout: Layout = field(default_factory=Layout)
    kv_transfer: KVTransfer | None = field(default_factory=KVTransfer)
    extra_args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    kv_cache_gib: int = 1
    max_model_len: int = 2048
    port: int | None = None
    side_channel_port: int | None = None
    speculation: Speculation | None = None
    host: str = HOST
    scripts: Path | None = None
    namespace: str | None = None
    module_dirs: Sequence[Path] = ()
    spawns: bool = False
    grace_s: float = GRACE_S


def on_host(spec: EngineSpec, host: Host) -> EngineSpec:
    """Return how an engine is started on a host of one's own."""
    env = {
        **spec.env,
        # Else UCX goes around the network, by the memory that all hosts share.
        "UCX_TLS": "tcp,self",
        "UCX_NET_DEVICES": DEVICE,
        "GLOO_SOCKET_IFNAME": DEVICE,
    }
    return replace(spec, host=host.address, namespace=host.namespace, env=env)


def engine_command(
    spec: EngineSpec, model: ServedModel, device: Device, port: int, vllm: str
) -> list[str]:
    """Return the command that starts the engine.

    Args:
        port: where it serves HTTP.
        vllm: path of the ``vllm`` script.
    """
    # It becomes the engine, and /sys shows the devices of that namespace then.
    command = ["ip", "netns", "exec", spec.namespace] if spec.namespace is not None else []
    command += [vllm, "serve", str(model.directory)]
    command += ["--served-model-name", model.name, "--host", spec.host, "--port", str(port)]
    command += ["--tensor-parallel-size", str(spec.layout.tp_size)]
    command += ["--pipeline-parallel-size", str(spec.layout.pp_size)]
    if spec.layout.pcp_size > 1:
        command += ["--prefill-context-parallel-size", str(spec.layout.pcp_size)]
    # float32: answers are compared token by token, and bfloat16 differs between layouts.
    command += ["--dtype", "float32", "--enforce-eager"]
    # Small batches: an engine warms up with the largest one, and a demo never fills it.
    command += ["--max-model-len", str(spec.max_model_len)]
    command += ["--max-num-batched-tokens", "512", "--max-num-seqs", "16"]
    if device is Device.CUDA:
        # Engines may share a GPU; each is told its size instead of taking what is left.
        command += ["--gpu-memory-utilization", "0.2"]
        command += ["--kv-cache-memory-bytes", str(spec.kv_cache_gib * _GIB)]
    if spec.kv_transfer is not None:
        command += ["--kv-transfer-config", spec.kv_transfer.to_json(device)]
    if spec.speculation is not None:
        command += ["--speculative-config", spec.speculation.to_json(model.directory)]
    return [*command, *model.engine_args, *spec.extra_args]


def engine_env(
    spec: EngineSpec,
    device: Device,
    inherited: Mapping[str, str],
    *,
    side_channel_port: int,
    cores: Sequence[int],
    model_env: Sequence[tuple[str, str]] = (),
) -> dict[str, str]:
    """Return the whole environment of the engine.

    Args:
        model_env: what the model needs.
        inherited: the launcher's own environment.
        side_channel_port: first port of the connector's handshake.
        cores: one CPU core for each worker; ignored on CUDA.
    """
    env = server_env(inherited, spec.host)
    env |= {
        "VLLM_HOST_IP": spec.host,
        "VLLM_NIXL_SIDE_CHANNEL_HOST": spec.host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel_port),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        **dict(model_env),
    }
    if device is Device.CPU:
        env |= {
            "VLLM_CPU_KVCACHE_SPACE": str(spec.kv_cache_gib),
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, cores)),
            "OMP_NUM_THREADS": "1",
            # Else each worker compiles a few helpers when the first request comes, for up to 30 s,
            # and asks Triton for a device, which its stand-in on CPU does not have.
            "TORCHDYNAMO_DISABLE": "1",
        }
    connectors = spec.kv_transfer.module_dir if spec.kv_transfer is not None else None
    forked = None if spec.spawns or device is not Device.CPU else _FORKED
    modules = [*spec.module_dirs, *filter(None, [connectors, forked])]
    if modules:
        paths = (*map(str, modules), env.get("PYTHONPATH"))
        env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return env | dict(spec.env)


def server_env(inherited: Mapping[str, str], *hosts: str) -> dict[str, str]:
    """Return the part of the environment that engines, router and clients have in common.

    Args:
        inherited: the launcher's own environment.
        hosts: where engines are.
    """
    env = dict(inherited)
    # Everything here is on this machine; a proxy cannot reach it.
    near = [_LOOPBACK, *(host for host in hosts if host != HOST)]
    for name in ("no_proxy", "NO_PROXY"):
        env[name] = ",".join(filter(None, (env.get(name), *near)))
    env["PYTHONUNBUFFERED"] = "1"
    env["NO_COLOR"] = "1"
    return env


class CoreAllocator:
    """Spreads workers over the CPU cores of this machine, one after the other, round and round.

    Without it every engine would bind its workers to the same first cores.
    """

    def __init__(self, cores: Sequence[int]) -> None:
        self._order = itertools.cycle(cores)

    def take(self, count: int) -> list[int]:
        """Return one core for each of ``count`` workers; cores repeat when there are too few."""
        return list(itertools.islice(self._order, count))
