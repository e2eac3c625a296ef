# SPDX-License-Identifier: Apache-2.0
"""The scripts that start a whole stack: what they start, and that nothing is left of it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.examples.checks import EXAMPLES, check_kv_transfer
from tests.examples.parsers import parse_ray_start, parse_vllm_router, parse_vllm_serve
from tests.examples.running import LIMIT_S, LOCAL, RAY, free_ports, started
from tests.examples.stubs import Call, Stubs
from tests.tools.pdstack.helpers import living_in, read_until, wait_until, words_of


def run(script: Path, *args: str, env: dict[str, str], directory: Path) -> tuple[int, str]:
    """Return the exit status of a script that ends by itself, and what it says to stderr."""
    with started(script, *args, env=env, directory=directory) as process:
        _, err = process.communicate(timeout=LIMIT_S)
        wait_until(lambda: living_in(directory) == [], "the end of all processes", LIMIT_S)
        return process.returncode, err


@pytest.fixture
def serving(tmp_path: Path) -> Callable[..., tuple[Stubs, dict[str, str]]]:
    """Return a function that makes stubs that serve, and an environment for a script."""

    def make(num_gpus: int = 0, **variables: str) -> tuple[Stubs, dict[str, str]]:
        stubs = Stubs(tmp_path / "bin", num_gpus)
        serve = {"STUB_VLLM": "serve", "STUB_VLLM_ROUTER": "serve", "STUB_RAY": "hang"}
        return stubs, stubs.env(**{**serve, **free_ports(), "GRACE_S": "5", **variables})

    return make


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interruption_leaves_nothing(
    serving: Callable[..., tuple[Stubs, dict[str, str]]], tmp_path: Path, number: signal.Signals
) -> None:
    """Servers are ended, and so are workers of theirs that do not end by themselves."""
    _, env = serving()
    with started(LOCAL, "m", env=env, directory=tmp_path) as process:
        read_until(process, "Ready")
        # The script; a server and a worker for each of the two engines and the router.
        assert len(living_in(tmp_path)) >= 7
        process.send_signal(number)
        process.communicate(timeout=LIMIT_S)
        assert process.returncode == 128 + number
        wait_until(lambda: living_in(tmp_path) == [], "the end of all processes", LIMIT_S)


def test_signals_are_heeded_whenever_they_come(tmp_path: Path) -> None:
    """None of two thousand signals makes a script that watches its servers hang or end."""
    script = tmp_path / "script.sh"
    script.write_text(
        f"""#!/usr/bin/env bash
        set -euo pipefail
        source {EXAMPLES / "lib/children.sh"}
        trap : USR1
        # The time between two looks: a signal then does no harm.
        sleep() {{ :; }}
        start server env sleep 1000
        echo Ready
        watch_children
        """
    )
    script.chmod(0o755)
    with started(script, env={"PATH": os.environ["PATH"]}, directory=tmp_path) as process:
        read_until(process, "Ready")
        for _ in range(2000):
            process.send_signal(signal.SIGUSR1)
            # Signals of a kind that nobody has taken up yet are one.
            time.sleep(0.0005)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=LIMIT_S)
        assert (process.returncode, err) == (143, "")


def test_an_interruption_during_start_up_leaves_nothing(
    serving: Callable[..., tuple[Stubs, dict[str, str]]], tmp_path: Path
) -> None:
    """Ctrl-C works as well while engines load."""
    stubs, env = serving(STUB_VLLM="hang")
    with started(LOCAL, "m", env=env, directory=tmp_path) as process:
        wait_until(lambda: len(stubs.calls("vllm")) == 2, "the start of both engines", LIMIT_S)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LIMIT_S)
        assert process.returncode == 130
        wait_until(lambda: living_in(tmp_path) == [], "the end of all processes", LIMIT_S)


def _stop_when_ready(script: Path, *args: str, env: dict[str, str], directory: Path) -> None:
    with started(script, *args, env=env, directory=directory) as process:
        read_until(process, "Ready")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=LIMIT_S)


def _engines(stubs: Stubs, env: dict[str, str]) -> list[Call]:
    """Return how the prefill and the decode engine were started, which happens at the same time."""
    by_port = {call.args[call.args.index("--port") + 1]: call for call in stubs.calls("vllm")}
    assert set(by_port) == {env["PREFILL_PORT"], env["DECODE_PORT"]}
    return [by_port[env["PREFILL_PORT"]], by_port[env["DECODE_PORT"]]]


def test_what_is_started_locally(
    serving: Callable[..., tuple[Stubs, dict[str, str]]], tmp_path: Path
) -> None:
    """Two engines of the layouts asked for, on the loopback only, and a router that knows both."""
    stubs, env = serving(DECODE_ARGS="--max-num-seqs 3 --enforce-eager")
    _stop_when_ready(
        LOCAL, "m", "tp3pp2", "tp2pp1", "--", "--max-model-len", "64", env=env, directory=tmp_path
    )
    calls = _engines(stubs, env)
    engines = [parse_vllm_serve(call.args[1:]) for call in calls]
    prefill, decode = engines
    assert (prefill.tensor_parallel_size, prefill.pipeline_parallel_size) == (3, 2)
    assert (decode.tensor_parallel_size, decode.pipeline_parallel_size) == (2, 1)
    assert (decode.max_num_seqs, decode.enforce_eager) == (3, True)
    assert (prefill.max_num_seqs, prefill.enforce_eager) == (None, False)
    for side, args, call in zip(("prefill", "decode"), engines, calls, strict=True):
        assert (args.model_tag, args.host, args.max_model_len) == ("m", "127.0.0.1", 64)
        assert call.env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "127.0.0.1"
        assert call.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == str(args.port + 500)
        assert args.kv_transfer_config.kv_buffer_device == "cpu"
        check_kv_transfer(args.kv_transfer_config, side)
    (call,) = stubs.calls("vllm-router")
    router = parse_vllm_router(call.args)
    assert router.host == router.prometheus_host == "127.0.0.1"
    assert [url for url, _ in router.prefill_urls] == [f"http://127.0.0.1:{prefill.port}"]
    assert router.decode_urls == [f"http://127.0.0.1:{decode.port}"]


def test_workers_on_cpu_have_cores_of_their_own(
    serving: Callable[..., tuple[Stubs, dict[str, str]]], tmp_path: Path
) -> None:
    """Every worker gets a list of cores that it may use, and none gets more than another."""
    stubs, env = serving()
    _stop_when_ready(LOCAL, "m", "tp1pp2", "tp1pp1", env=env, directory=tmp_path)
    bound = [call.env["VLLM_CPU_OMP_THREADS_BIND"].split("|") for call in _engines(stubs, env)]
    assert [len(each) for each in bound] == [2, 1]
    lists = [[int(core) for core in each.split(",")] for engine in bound for each in engine]
    usable = sorted(os.sched_getaffinity(0))
    assert {len(each) for each in lists} == {max(1, len(usable) // 3)}
    given = [core for each in lists for core in each]
    assert set(given) <= set(usable)
    # Distinct where there are enough.
    assert len(set(given)) == min(len(usable), len(given))


@pytest.mark.parametrize("visible", [None, "4,5,6"])
def test_engines_share_out_the_gpus(
    serving: Callable[..., tuple[Stubs, dict[str, str]]], tmp_path: Path, visible: str | None
) -> None:
    """Each engine sees as many GPUs as it has ranks, of those that there are to be had."""
    chosen = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    stubs, env = serving(num_gpus=8, **chosen)
    _stop_when_ready(LOCAL, "m", "tp1pp2", "tp1pp1", env=env, directory=tmp_path)
    seen = [call.env["CUDA_VISIBLE_DEVICES"] for call in _engines(stubs, env)]
    assert seen == (["0,1", "2"] if visible is None else ["4,5", "6"])
    for side, call in zip(("prefill", "decode"), _engines(stubs, env), strict=True):
        args = parse_vllm_serve(call.args[1:])
        assert args.kv_transfer_config.kv_buffer_device == "cuda"
        check_kv_transfer(args.kv_transfer_config, side)


def test_engines_may_share_a_gpu_that_is_named(
    serving: Callable[..., tuple[Stubs, dict[str, str]]], tmp_path: Path
) -> None:
    """Who says which GPUs engines use is believed."""
    stubs, env = serving(num_gpus=1, PREFILL_DEVICES="0", DECODE_DEVICES="0")
    _stop_when_ready(LOCAL, "m", "tp1pp1", "tp1pp1", env=env, directory=tmp_path)
    assert [call.env["CUDA_VISIBLE_DEVICES"] for call in _engines(stubs, env)] == ["0", "0"]


def test_ray_is_given_the_gpus_of_the_prefill_engine(
    serving: Callable[..., tuple[Stubs, dict[str, str]]], tmp_path: Path
) -> None:
    """Ray hands out those and no others, so that it leaves the decode engine's alone."""
    stubs, env = serving(num_gpus=4, PREFILL_DEVICES="1,3", DECODE_DEVICES="2")
    _stop_when_ready(RAY, "m", env=env, directory=tmp_path)
    (node,) = (call for call in stubs.calls("ray") if call.args[0] == "start")
    assert parse_ray_start(node.args[1:])["num_gpus"] == 2
    assert node.env["CUDA_VISIBLE_DEVICES"] == "1,3"
    seen = [call.env["CUDA_VISIBLE_DEVICES"] for call in _engines(stubs, env)]
    assert seen == ["1,3", "2"]


def test_ray_asks_for_gpus_to_be_named(
    serving: Callable[..., tuple[Stubs, dict[str, str]]], tmp_path: Path
) -> None:
    """Where there are GPUs, nothing is started before it is said whose they are."""
    stubs, env = serving(num_gpus=4)
    status, err = run(RAY, "m", env=env, directory=tmp_path)
    assert status == 1
    assert "PREFILL_DEVICES: set it to" in err
    assert stubs.calls("ray") == []


def test_too_few_gpus_are_noticed(
    serving: Callable[..., tuple[Stubs, dict[str, str]]], tmp_path: Path
) -> None:
    """Nothing is started where layouts need more GPUs than there are."""
    stubs, env = serving(num_gpus=2)
    status, err = run(LOCAL, "m", "tp1pp2", "tp1pp1", env=env, directory=tmp_path)
    assert status == 1
    assert "need 3 GPUs, and there are 2" in err
    assert stubs.calls("vllm") == []


@pytest.mark.parametrize("script", [LOCAL, RAY], ids=["local", "ray"])
def test_arguments_are_checked_first(
    serving: Callable[..., tuple[Stubs, dict[str, str]]], tmp_path: Path, script: Path
) -> None:
    """What is not understood starts no engine."""
    stubs, env = serving()
    for number, (args, words) in enumerate(
        [
            ((), "usage: "),
            (("--help",), "usage: "),
            (("m", "tp1pp1", "tp1pp1", "tp1pp1"), "usage: "),
            (("m", "tp0pp1"), "layout tp0pp1 is not understood"),
            (("m", "tp1pp1", "2"), "layout 2 is not understood"),
        ]
    ):
        directory = tmp_path / str(number)
        directory.mkdir()
        status, err = run(script, *args, env=env, directory=directory)
        assert status == 2, args
        assert words in err
    assert stubs.calls("vllm") == []


def test_the_death_of_a_server_ends_the_rest(
    serving: Callable[..., tuple[Stubs, dict[str, str]]], tmp_path: Path
) -> None:
    """The log of what has died is shown, and where it lies."""
    _, env = serving(STUB_VLLM_ROUTER="die")
    status, err = run(LOCAL, "m", env=env, directory=tmp_path)
    assert status == 1
    assert "vllm-router has no luck today" in err
    assert f"router has ended with status 7; its log is {tmp_path}/logs/router.log" in err


def test_a_server_that_dies_later_ends_the_rest(
    serving: Callable[..., tuple[Stubs, dict[str, str]]], tmp_path: Path
) -> None:
    """An engine that is gone after all was ready is noticed, too."""
    _, env = serving()
    with started(LOCAL, "m", env=env, directory=tmp_path) as process:
        read_until(process, "Ready")
        (decode,) = (
            each
            for each in living_in(tmp_path)
            # The server, not its worker.
            if env["DECODE_PORT"] in words_of(each) and os.getpgid(each.pid) == each.pid
        )
        assert os.getsid(decode.pid) == os.getsid(process.pid)
        decode.kill()
        _, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 1
        assert "decode has ended with status 137" in err
        wait_until(lambda: living_in(tmp_path) == [], "the end of all processes", LIMIT_S)


def test_an_engine_that_cannot_start_is_not_waited_for(
    serving: Callable[..., tuple[Stubs, dict[str, str]]], tmp_path: Path
) -> None:
    """What its log says ends the script, although the process lives, and is shown."""
    _, env = serving(STUB_VLLM="fail")
    status, err = run(LOCAL, "m", env=env, directory=tmp_path)
    assert status == 1
    assert "ValueError: no luck either" in err
    assert "prefill could not start and did not end by itself; its log is " in err


def test_a_failed_test_shows_what_the_script_said(
    serving: Callable[..., tuple[Stubs, dict[str, str]]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A script that never got ready is known by its errors and by the logs of its servers."""
    _, env = serving(STUB_VLLM="die")
    with (
        pytest.raises(AssertionError, match="'Ready' was never printed"),
        started(LOCAL, "m", env=env, directory=tmp_path) as process,
    ):
        read_until(process, "Ready")
    shown = capsys.readouterr().out
    assert "prefill has ended with status 7" in shown
    assert "--- prefill.log ---\nvllm has no luck today" in shown


def test_a_child_lives_until_it_has_ended(tmp_path: Path) -> None:
    """Nobody has to wait for one that has: its status is kept."""
    script = f"""
        set -euo pipefail
        LOG_DIR={tmp_path}
        source {EXAMPLES / "lib/children.sh"}
        start one sleep 100
        start other sh -c "exit 7"
        while lives "${{children[1]}}"; do sleep 0.1; done
        lives "${{children[0]}}"
        wait "${{children[1]}}" || echo "status $?"
    """
    ran = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, capture_output=True, timeout=LIMIT_S, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert "status 7" in ran.stdout


def test_a_server_that_is_never_ready_is_given_up(
    serving: Callable[..., tuple[Stubs, dict[str, str]]], tmp_path: Path
) -> None:
    """After the time that it was given, the script says so and ends."""
    _, env = serving(STUB_VLLM="hang", STARTUP_TIMEOUT_S="1")
    status, err = run(LOCAL, "m", env=env, directory=tmp_path)
    assert status == 1
    assert "prefill was not ready after 1 s" in err


def test_what_is_started_with_ray(
    serving: Callable[..., tuple[Stubs, dict[str, str]]], tmp_path: Path
) -> None:
    """A node of its own, on which the stages of the prefill engine run, and of no other engine."""
    stubs, env = serving()
    _stop_when_ready(RAY, "m", env=env, directory=tmp_path)
    (node,) = (
        parse_ray_start(call.args[1:]) for call in stubs.calls("ray") if call.args[0] == "start"
    )
    assert node["head"] and node["block"]
    # On CPU, too, vLLM asks for one for each worker.
    assert node["num_gpus"] >= 2
    assert not Path(node["temp_dir"]).exists()
    prefill, decode = _engines(stubs, env)
    assert prefill.env["RAY_ADDRESS"] == f"{node['node_ip_address']}:{node['port']}"
    assert parse_vllm_serve(prefill.args[1:]).distributed_executor_backend == "ray"
    assert parse_vllm_serve(prefill.args[1:]).pipeline_parallel_size == 2
    assert parse_vllm_serve(decode.args[1:]).distributed_executor_backend is None
    # One that nobody can guess, for this cluster alone.
    assert prefill.env["RAY_AUTH_MODE"] == "token"
    tokens = {call.env["RAY_AUTH_TOKEN"] for call in (*stubs.calls("ray"), prefill)}
    assert [len(token) for token in tokens] == [36]
    wait_until(lambda: living_in(tmp_path) == [], "the end of all processes", LIMIT_S)
