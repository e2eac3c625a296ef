# SPDX-License-Identifier: Apache-2.0
"""Child processes end, with everything that they started, whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tools.pdstack.errors import ProcessDiedError
from tools.pdstack.process import (
    ChildProcess,
    TerminatedError,
    describe_exit,
    sigterm_raises,
    stop_all,
    uninterrupted,
)

Wait = Callable[[Callable[[], object], str], None]
Survivors = Callable[[], list[psutil.Process]]

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
# A grandchild in its own session that ignores SIGTERM; its parent says so, then waits or ends.
FAMILY = f"""
import subprocess, sys, time
code = {STUBBORN!r} + "print('up', flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
time.sleep(600 if sys.argv[1] == "stay" else float(sys.argv[2]))
sys.exit(5)
"""
WAIT_FOREVER = "import time; print('up', flush=True); time.sleep(600)"


def _child(run_dir: Path, code: str, *args: str, grace_s: float = 5.0) -> ChildProcess:
    command = [sys.executable, "-c", code, *args]
    return ChildProcess("child", command, os.environ, run_dir, grace_s)


def _is_up(child: ChildProcess) -> Callable[[], bool]:
    return lambda: "up" in child.log_tail()


def test_a_child_ends_on_request(run_dir: Path, wait: Wait, survivors: Survivors) -> None:
    """After a stop nothing is left, and that end is no error."""
    child = _child(run_dir, WAIT_FOREVER)
    wait(_is_up(child), "the start")
    child.check()
    child.stop()
    child.check()
    assert child.exit_status == 128 + signal.SIGTERM
    assert survivors() == []


def test_a_child_has_a_group_of_its_own_in_the_launchers_session(run_dir: Path, wait: Wait) -> None:
    """Ctrl-C in a terminal passes it by, and the kernel's shares of a core are not per child."""
    child = _child(run_dir, WAIT_FOREVER)
    wait(_is_up(child), "the start")
    for process in [child.pid, *(each.pid for each in child.processes())]:
        assert os.getpgid(process) == child.pid != os.getpgid(0)
        assert os.getsid(process) == os.getsid(0)
    child.stop()


def test_a_child_that_ignores_requests_can_be_killed(
    run_dir: Path, wait: Wait, survivors: Survivors
) -> None:
    """It is not given its time to end, nothing is left, and that end is no error."""
    child = _child(run_dir, STUBBORN + WAIT_FOREVER, grace_s=600.0)
    wait(_is_up(child), "the start")
    child.kill()
    child.check()
    assert child.exit_status == 128 + signal.SIGKILL
    assert survivors() == []


def test_a_grandchild_that_hides_and_ignores_is_ended(
    run_dir: Path, wait: Wait, survivors: Survivors
) -> None:
    """Neither another session nor a deaf ear for SIGTERM saves a descendant."""
    child = _child(run_dir, FAMILY, "stay")
    wait(_is_up(child), "the grandchild's start")
    assert len(child.processes()) == 2
    child.stop()
    assert survivors() == []


def test_an_orphan_is_ended_when_its_parent_ends(
    run_dir: Path, wait: Wait, survivors: Survivors
) -> None:
    """A crash leaves no descendant either, and the command's own exit status is told."""
    child = _child(run_dir, FAMILY, "leave", "1.5")
    wait(lambda: child.exit_status is not None, "the end")
    assert survivors() == []
    with pytest.raises(ProcessDiedError, match="child ended with exit status 5"):
        child.check()


POLITE = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("goodbye", flush=True)))
print("up", flush=True)
time.sleep(600)
"""
ORPHANER = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1]])
time.sleep(1.5)
"""


def test_an_orphan_may_clean_up(run_dir: Path, wait: Wait, survivors: Survivors) -> None:
    """What a command left behind hears SIGTERM before it is killed."""
    child = _child(run_dir, ORPHANER, POLITE)
    wait(lambda: child.exit_status is not None, "the end")
    assert child.log_tail() == ["up", "goodbye"]
    assert survivors() == []


def test_a_deaf_command_is_killed_after_its_grace(
    run_dir: Path, wait: Wait, survivors: Survivors
) -> None:
    """A command that ignores SIGTERM gets its grace and no more."""
    child = _child(run_dir, STUBBORN + WAIT_FOREVER, grace_s=0.5)
    wait(_is_up(child), "the start")
    started = time.monotonic()
    child.stop()
    assert time.monotonic() - started < 10
    assert child.exit_status == 128 + signal.SIGKILL
    assert survivors() == []


def test_a_killed_keeper_does_not_save_the_child(
    run_dir: Path, wait: Wait, survivors: Survivors
) -> None:
    """Even when the keeper is killed, a stop ends what it kept."""
    child = _child(run_dir, STUBBORN + WAIT_FOREVER)
    wait(_is_up(child), "the start")
    os.kill(child.pid, signal.SIGKILL)
    wait(lambda: child.exit_status is not None, "the keeper's end")
    child.stop()
    wait(lambda: survivors() == [], "the child's end")


LAUNCHER = """
import os, sys
from pathlib import Path
from tools.pdstack.process import ChildProcess
child = ChildProcess("child", [sys.executable, "-c", *sys.argv[2:]], os.environ, Path(sys.argv[1]))
os.read(0, 1)
"""


def test_a_killed_launcher_leaves_nothing(run_dir: Path, wait: Wait, survivors: Survivors) -> None:
    """SIGKILL of the launcher, which it cannot answer, ends the whole tree."""
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(run_dir), FAMILY, "stay"], stdin=subprocess.PIPE
    )
    log = run_dir / "child.log"
    wait(lambda: log.exists() and "up" in log.read_text(), "the grandchild's start")
    assert survivors() != []
    launcher.kill()
    launcher.wait()
    wait(lambda: survivors() == [], "the end of all processes")
    assert launcher.stdin is not None
    launcher.stdin.close()


def test_a_child_that_dies_at_its_start_shows_its_log(run_dir: Path, wait: Wait) -> None:
    """The error holds the exit status, the telling line, and the end of the log."""
    code = "print('first'); print('ValueError: no such layout'); raise SystemExit(4)"
    child = _child(run_dir, code)
    wait(lambda: child.exit_status is not None, "the end")
    with pytest.raises(ProcessDiedError) as caught:
        child.check()
    assert str(caught.value) == "child ended with exit status 4: ValueError: no such layout"
    assert caught.value.log_tail == ["first", "ValueError: no such layout"]


def test_a_command_that_does_not_exist_is_named(run_dir: Path, wait: Wait) -> None:
    """A missing program is an ordinary death with the reason in the log."""
    child = ChildProcess("child", ["/nonexistent/program"], os.environ, run_dir)
    wait(lambda: child.exit_status is not None, "the end")
    with pytest.raises(ProcessDiedError, match="exit status 127"):
        child.check()
    assert "cannot run /nonexistent/program" in child.log_tail()[0]


def test_several_children_stop_at_the_same_time(run_dir: Path, wait: Wait) -> None:
    """Their graces run side by side, not one after the other."""
    children = []
    for i in range(3):
        command = [sys.executable, "-c", STUBBORN + WAIT_FOREVER]
        children.append(ChildProcess(f"child-{i}", command, os.environ, run_dir, grace_s=6.0))
    for child in children:
        wait(_is_up(child), "the start")
    started = time.monotonic()
    stop_all(children)
    assert time.monotonic() - started < 15
    assert all(child.exit_status is not None for child in children)


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (1, "ended with exit status 1"),
        (137, "was ended by SIGKILL"),
        (-9, "was ended by SIGKILL"),
        (143, "was ended by SIGTERM"),
        (255, "ended with exit status 255"),
    ],
)
def test_exit_statuses_are_told_in_words(status: int, words: str) -> None:
    """Signals are named, also when a shell or Python encodes them."""
    assert describe_exit(status) == words


def test_sigterm_becomes_an_exception() -> None:
    """Within the block SIGTERM unwinds the stack, afterwards the old handler is back."""
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(TerminatedError), sigterm_raises():
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_clean_up_cannot_be_interrupted() -> None:
    """Within the block Ctrl-C does nothing, afterwards it does again."""
    with uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        signal.pause()
