# SPDX-License-Identifier: Apache-2.0
"""Every script is sound, and starts programs with options that they have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.examples.checks import EXAMPLES, check_kv_transfer
from tests.examples.parsers import parse_ray_start, parse_vllm_router, parse_vllm_serve
from tests.examples.stubs import Stubs
from tools.pdstack.cli import build_parser

SCRIPTS = sorted(EXAMPLES.glob("**/*.sh"))
PROGRAMS = [script for script in SCRIPTS if script.parent.name != "lib"]
LIMIT_S = 60.0

# What has to be given, for scripts that are one command.
COMMANDS = {
    "two_nodes/prefill.sh": {"HOST_IP": "10.0.0.1"},
    "two_nodes/decode.sh": {"HOST_IP": "10.0.0.2"},
    "two_nodes/router.sh": {
        "PREFILL_URLS": "http://10.0.0.1:8100 http://10.0.0.3:8100",
        "DECODE_URLS": "http://10.0.0.2:8100",
    },
    "ray/head.sh": {"HOST_IP": "10.0.0.1"},
    "ray/worker.sh": {"HOST_IP": "10.0.0.3", "HEAD_IP": "10.0.0.1"},
    "ray/prefill.sh": {"HOST_IP": "10.0.0.1"},
}
ENGINES = {
    "two_nodes/prefill.sh": (1, 2),
    "two_nodes/decode.sh": (2, 1),
    "ray/prefill.sh": (1, 2),
}


def _name(path: Path) -> str:
    return str(path.relative_to(EXAMPLES))


def _run(name: str, env: dict[str, str], *args: str) -> subprocess.CompletedProcess[str]:
    command = [EXAMPLES / name, *args]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S)


def test_bash_can_read_them() -> None:
    """Their syntax is right."""
    for script in SCRIPTS:
        subprocess.run(["bash", "-n", script], check=True, timeout=LIMIT_S)


def test_shellcheck_finds_nothing() -> None:
    """Nor does what they source have any finding, not even one of style."""
    shellcheck = Path(sys.executable).with_name("shellcheck")
    command = [shellcheck, "--external-sources", "--severity=style", *SCRIPTS]
    found = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert found.returncode == 0, found.stdout + found.stderr


def test_they_can_be_run_and_stop_at_the_first_error() -> None:
    """Each is executable, and no failed command goes unnoticed."""
    for script in PROGRAMS:
        assert os.access(script, os.X_OK), script
        lines = script.read_text().splitlines()
        assert lines[0] == "#!/usr/bin/env bash", script
        first_command = next(line for line in lines if line and not line.startswith("#"))
        assert first_command == "set -euo pipefail", script


def test_engines_start_with_what_vllm_knows(tmp_path: Path) -> None:
    """All options are vLLM's, the layout is as documented, and the side channel is this node's."""
    stubs = Stubs(tmp_path / "bin")
    for number, (name, sizes) in enumerate(ENGINES.items()):
        ran = _run(name, stubs.env(**COMMANDS[name]), "--enforce-eager")
        assert ran.returncode == 0, ran.stderr
        call = stubs.calls("vllm")[number]
        assert call.args[0] == "serve"
        args = parse_vllm_serve(call.args[1:])
        assert (args.tensor_parallel_size, args.pipeline_parallel_size) == sizes, name
        assert args.enforce_eager
        assert call.env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == COMMANDS[name]["HOST_IP"] == args.host
        assert call.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5600"
        check_kv_transfer(args.kv_transfer_config, Path(name).stem)


def test_variables_choose_layout_model_and_ports(tmp_path: Path) -> None:
    """What an engine's script documents as taken from the environment, it takes from there."""
    stubs = Stubs(tmp_path / "bin")
    chosen = {"MODEL": "m", "TP": "4", "PP": "3", "PORT": "9", "SIDE_CHANNEL_PORT": "11"}
    for number, name in enumerate(ENGINES):
        assert _run(name, stubs.env(**COMMANDS[name], **chosen)).returncode == 0
        call = stubs.calls("vllm")[number]
        args = parse_vllm_serve(call.args[1:])
        assert (args.tensor_parallel_size, args.pipeline_parallel_size) == (4, 3)
        assert (args.model_tag, args.port) == ("m", 9)
        assert call.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "11"


def test_the_engine_on_ray_joins_the_cluster_of_the_head(tmp_path: Path) -> None:
    """The engine looks for Ray where the head listens, and its stages are Ray's."""
    stubs = Stubs(tmp_path / "bin")
    _run("ray/prefill.sh", stubs.env(**COMMANDS["ray/prefill.sh"], RAY_PORT="7000"))
    (call,) = stubs.calls("vllm")
    assert (call.env["RAY_ADDRESS"], call.env["RAY_AUTH_MODE"]) == ("10.0.0.1:7000", "token")
    assert parse_vllm_serve(call.args[1:]).distributed_executor_backend == "ray"


def test_ray_nodes_start_with_what_ray_knows(tmp_path: Path) -> None:
    """Head and worker agree on the address, and both know under which address they are found."""
    stubs = Stubs(tmp_path / "bin")
    for name in ("ray/head.sh", "ray/worker.sh"):
        assert _run(name, stubs.env(**COMMANDS[name], RAY_PORT="7000")).returncode == 0
    head_call, worker_call = stubs.calls("ray")
    assert (head_call.args[0], worker_call.args[0]) == ("start", "start")
    head, worker = (parse_ray_start(call.args[1:]) for call in (head_call, worker_call))
    assert head["head"] and head["block"] and worker["block"]
    assert f"{head['node_ip_address']}:{head['port']}" == worker["address"] == "10.0.0.1:7000"
    assert worker["node_ip_address"] == worker_call.env["VLLM_HOST_IP"] == "10.0.0.3"
    assert head_call.env["VLLM_HOST_IP"] == "10.0.0.1"
    assert {call.env["RAY_AUTH_MODE"] for call in (head_call, worker_call)} == {"token"}


def test_the_router_starts_with_what_it_knows(tmp_path: Path) -> None:
    """All options are the router's, and it is given every engine in its role."""
    stubs = Stubs(tmp_path / "bin")
    env = stubs.env(**COMMANDS["two_nodes/router.sh"])
    assert _run("two_nodes/router.sh", env, "--log-level", "debug").returncode == 0
    (call,) = stubs.calls("vllm-router")
    args = parse_vllm_router(call.args)
    assert args.vllm_pd_disaggregation and args.kv_connector == "nixl"
    assert [url for url, _ in args.prefill_urls] == ["http://10.0.0.1:8100", "http://10.0.0.3:8100"]
    assert args.decode_urls == ["http://10.0.0.2:8100"]
    assert args.log_level == "debug"


def test_what_has_to_be_given_is_asked_for(tmp_path: Path) -> None:
    """Without a variable that has no default nothing is started, and a line says which."""
    stubs = Stubs(tmp_path / "bin")
    for name, variables in COMMANDS.items():
        for missing in variables:
            given = {key: value for key, value in variables.items() if key != missing}
            ran = _run(name, stubs.env(**given))
            assert ran.returncode != 0, (name, missing)
            assert f"{missing}: set it to" in ran.stderr
    assert not any(stubs.calls(program) for program in ("vllm", "vllm-router", "ray"))


def test_a_roll_is_the_launchers(tmp_path: Path) -> None:
    """What follows is the installation that is named; options are passed on."""
    ran = subprocess.run(
        [EXAMPLES / "local/roll.sh", "next", "--address", "other"],
        env={"PATH": os.environ["PATH"], "PYTHON": "echo"},
        cwd=_make(tmp_path / "next").parent,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert ran.returncode == 0, ran.stderr
    module, *args = ran.stdout.split()[1:]
    assert module == "tools.pdstack"
    asked = build_parser().parse_args(args)
    assert (asked.command, asked.next, asked.address) == ("roll", tmp_path / "next/bin", "other")


def test_a_roll_wants_what_follows() -> None:
    """Without it, a line says how the script is called."""
    ran = _run(
        "local/roll.sh", {"PATH": os.environ["PATH"], "PYTHON": "echo"}, "--address", "other"
    )
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith("usage: roll.sh NEXT")


def _make(directory: Path) -> Path:
    directory.mkdir()
    return directory


def test_every_command_is_tried() -> None:
    """No script is without a test of what it starts."""
    started_elsewhere = {"local/serve_pd.sh", "local/roll.sh", "ray/single_machine.sh"}
    assert {_name(script) for script in PROGRAMS} == {*COMMANDS, *started_elsewhere}
