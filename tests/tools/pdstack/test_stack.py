# SPDX-License-Identifier: Apache-2.0
"""Starting, watching and stopping several servers, with fakes in their place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import psutil
import pytest

from tools.pdstack.engine import Device, EngineSpec, ServedModel
from tools.pdstack.errors import (
    PDStackError,
    ProcessDiedError,
    StartFailedError,
    StartupTimeoutError,
)
from tools.pdstack.metrics import NixlCounters
from tools.pdstack.router import RouterSpec
from tools.pdstack.stack import PDStack, Server, run_directory

Wait = Callable[[Callable[[], object], str], None]
Survivors = Callable[[], list[psutil.Process]]
MakeStack = Callable[..., PDStack]

pytestmark = pytest.mark.usefixtures("fake_scripts")


@pytest.fixture
def make_stack(model: ServedModel, run_dir: Path) -> MakeStack:
    """Return a function that makes a stack of fakes."""

    def make(
        startup_timeout_s: float = 60.0,
        on_wait: Callable[[Sequence[Server]], None] = lambda _: None,
    ) -> PDStack:
        return PDStack(
            model,
            run_dir,
            device=Device.CPU,
            startup_timeout_s=startup_timeout_s,
            on_wait=on_wait,
        )

    return make


def _get(url: str) -> str:
    return httpx.get(url, trust_env=False).text


def test_engines_serve_until_the_block_ends(make_stack: MakeStack, survivors: Survivors) -> None:
    """Engines and router answer inside the block; after it no process is left."""
    with make_stack() as stack:
        prefill, decode = stack.start_engines(EngineSpec("prefill"), EngineSpec("decode"))
        router = stack.start_router([prefill], [decode])
        assert [_get(f"{each.url}/health") for each in (prefill, decode, router)] == ["ok"] * 3
        assert decode.nixl_counters() == NixlCounters(transfers=1)
        stack.check()
    assert survivors() == []


def test_engines_are_reused_by_several_routers(make_stack: MakeStack) -> None:
    """One router can be stopped and another put in front of the same engines."""
    with make_stack() as stack:
        engines = stack.start_engines(EngineSpec("a"), EngineSpec("b"))
        first = stack.start_router(engines[:1], engines[1:], RouterSpec("first"))
        stack.stop(first)
        second = stack.start_router(engines[1:], engines[:1], RouterSpec("second"))
        stack.check()
        assert _get(f"{second.url}/health") == "ok"


def test_a_crash_at_the_start_stops_the_others(make_stack: MakeStack, survivors: Survivors) -> None:
    """When one engine fails to start, its cause is told and the healthy one is taken down."""
    broken = EngineSpec("decode", env={"FAKE_ENGINE": "crash"})
    stack = make_stack()
    with (
        pytest.raises(ProcessDiedError, match=r"decode ended .*the fake server was told") as caught,
        stack,
    ):
        stack.start_engines(EngineSpec("prefill"), broken)
    assert caught.value.name == "decode"
    assert survivors() == []


@pytest.mark.parametrize(
    ("behaviour", "kind", "how"),
    [
        ("fail", ProcessDiedError, "ended with exit status 1"),
        ("fail stuck", StartFailedError, "could not start and did not end by itself"),
    ],
)
def test_an_engine_that_cannot_start_is_not_waited_for(
    make_stack: MakeStack,
    survivors: Survivors,
    behaviour: str,
    kind: type[ProcessDiedError],
    how: str,
) -> None:
    """Its log is believed, also where the process hangs at its end; the cause is the root one."""
    stack = make_stack(startup_timeout_s=600.0)
    with pytest.raises(ProcessDiedError) as caught, stack:
        stack.start_engines(EngineSpec("decode", env={"FAKE_ENGINE": behaviour}))
    assert type(caught.value) is kind
    cause = "NotImplementedError: the CPU cannot do what the fake engine was asked for"
    assert str(caught.value) == f"decode {how}: {cause}"
    assert any("EngineCore failed to start" in line for line in caught.value.log_tail)
    assert survivors() == []


def test_a_server_that_never_gets_ready_is_reported(
    make_stack: MakeStack, survivors: Survivors
) -> None:
    """The deadline ends the wait, with the server's name and the end of its log."""
    stack = make_stack(startup_timeout_s=8.0)
    with pytest.raises(StartupTimeoutError, match="slow was not ready after 8 s") as caught, stack:
        stack.start_engines(EngineSpec("slow", env={"FAKE_ENGINE": "slow"}))
    assert caught.value.log_tail == ["fake ENGINE with ['slow']"]
    assert survivors() == []


@pytest.mark.parametrize("behaviour", ["clash", "clash stuck"])
def test_a_lost_port_is_replaced(make_stack: MakeStack, behaviour: str) -> None:
    """An engine whose port was taken is started again with another one, also if it hangs."""
    with make_stack() as stack:
        (engine,) = stack.start_engines(EngineSpec("e", env={"FAKE_ENGINE": behaviour}))
        assert engine.attempts == 2
        assert _get(f"{engine.url}/health") == "ok"


def test_a_taken_router_port_is_refused(make_stack: MakeStack) -> None:
    """A port that the user chose is not replaced, but refused by name."""
    with make_stack() as stack:
        (engine,) = stack.start_engines(EngineSpec("e"))
        with pytest.raises(PDStackError, match=f"port {engine.port} on 127.0.0.1 is taken"):
            stack.start_router([engine], [engine], RouterSpec(port=engine.port))


def test_a_taken_engine_port_is_refused(make_stack: MakeStack) -> None:
    """So is the port of an engine, where the user chose it."""
    with make_stack() as stack:
        (engine,) = stack.start_engines(EngineSpec("e"))
        with pytest.raises(PDStackError, match=f"port {engine.port} on 127.0.0.1 is taken"):
            stack.start_engines(EngineSpec("other", port=engine.port))


def test_an_engine_returns_to_its_ports(make_stack: MakeStack) -> None:
    """One that is stopped can be started again where others look for it."""
    with make_stack() as stack:
        (engine,) = stack.start_engines(EngineSpec("e"))
        stack.stop(engine)
        (again,) = stack.start_engines(EngineSpec("again", port=engine.port))
        assert again.url == engine.url
        assert _get(f"{again.url}/health") == "ok"


def test_a_chosen_side_channel_is_not_replaced(make_stack: MakeStack) -> None:
    """An engine that finds its own port taken is not started again elsewhere."""
    stack = make_stack()
    with pytest.raises(ProcessDiedError, match="Address already in use"), stack:
        stack.start_engines(EngineSpec("e", env={"FAKE_ENGINE": "clash"}, side_channel_port=15001))


def test_a_later_death_is_noticed(make_stack: MakeStack, wait: Wait) -> None:
    """A killed engine turns a check into an error, and explains a failed request."""
    with make_stack() as stack:
        (engine,) = stack.start_engines(EngineSpec("decode"))
        for process in engine.child.processes():
            process.kill()
        wait(lambda: engine.child.exit_status is not None, "the keeper's end")
        with pytest.raises(ProcessDiedError, match="decode was ended by SIGKILL"):
            stack.check()
        assert isinstance(stack.explain(OSError("reset")), ProcessDiedError)


def test_waiting_is_reported(make_stack: MakeStack) -> None:
    """While servers start, their phases are handed out; the last report says ready."""
    phases: list[str] = []
    with make_stack(on_wait=lambda servers: phases.append(servers[0].phase)) as stack:
        stack.start_engines(EngineSpec("e"))
    assert phases[0] == "importing vLLM"
    assert phases[-1] == "ready"


def test_logs_stay_only_after_a_failure(tmp_path: Path) -> None:
    """The run directory goes after success, and stays after an error or when asked to."""
    with run_directory(parent=tmp_path) as good:
        (good / "log").touch()
    with run_directory(keep=True, parent=tmp_path) as kept:
        pass
    with pytest.raises(KeyboardInterrupt), run_directory(parent=tmp_path) as bad:
        raise KeyboardInterrupt
    assert [each.exists() for each in (good, kept, bad)] == [False, True, True]
