# SPDX-License-Identifier: Apache-2.0
"""Limits of the machine: counted, raised, shared out, watched, and asked before they are met."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import socket
import subprocess
import sys
import threading
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import (
    ConnectorThreadError,
    LocalLayoutError,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport import limits
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.agent import NixlAgent
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.limits import (
    FULL,
    LOOK_INTERVAL_S,
    FileWatch,
    count_files,
    listeners,
    listeners_told,
    require_room,
    within_limit,
)

MANY = 1 << 20


@pytest.fixture
def counted(monkeypatch) -> list[int]:
    """How many of 100 files are open: the last one counts."""
    counts = [0]
    monkeypatch.setattr(limits, "count_files", lambda: counts[-1])
    monkeypatch.setattr(limits, "file_limit", lambda: 100)
    return counts


@pytest.fixture
def warnings(monkeypatch) -> list[str]:
    """What the module warns of, line by line."""
    lines: list[str] = []
    monkeypatch.setattr(limits.logger, "warning", lambda text, *of: lines.append(text % of))
    return lines


def test_files_are_counted():
    """As many more as are opened."""
    with contextlib.ExitStack() as kept:
        before = count_files()
        for _ in range(50):
            kept.callback(os.close, os.dup(0))
        # Other threads may close some of theirs meanwhile.
        assert count_files() >= before + 30


def test_all_files_are_open_where_none_is_left_to_look_with(monkeypatch):
    """A worker that looks must not end over that."""

    def fail(_: str) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "scandir", fail)
    assert count_files() == limits.file_limit()


def test_soft_limit_is_raised_to_the_hard_one():
    """Once, and again to no effect; the hard one stays."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    raised = min(hard, limits._MOST_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, hard), hard))
    try:
        for _ in range(2):
            limits.raise_file_limit()
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (raised, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@given(st.integers(1, MANY), st.floats(0.01, 1.0), st.integers(1, 20), st.integers(1, MANY))
def test_bound_stays_within_its_share(most, share, files_each, limit):
    """Of whatever limit; but one is always allowed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "file_limit", lambda: limit)
        bound = within_limit(most, share, files_each)
    assert 1 <= bound <= most
    assert bound == 1 or bound * files_each <= share * limit
    assert bound == most or (bound + 1) * files_each > share * limit * (1 - 1e-9)


def test_no_agent_is_made_without_files(counted):
    """NIXL may wait for ever where it finds none in the middle."""
    counted.append(60)
    with pytest.raises(LocalLayoutError, match=r"60 of 100 files .* 50 more: .*ulimit -n"):
        require_room(4)
    require_room(3)


def test_no_agent_is_made_without_threads(monkeypatch):
    """UCX ends the process there; those that were tried are gone again, however it ends."""
    before, start = threading.active_count(), threading.Thread.start
    left = [7]

    def start_one(thread: threading.Thread) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_one)
    with pytest.raises(LocalLayoutError, match=r"7 more threads .* needs 8: .*ulimit -u"):
        require_room(4)
    left[0] = 8
    require_room(4)
    assert threading.active_count() == before


def test_no_agent_is_made_without_ports(monkeypatch):
    """NIXL waits for ever where it finds none for one of its threads."""
    with contextlib.ExitStack() as kept:
        first = kept.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
        monkeypatch.setenv("UCX_TLS", "tcp,self")
        monkeypatch.setenv("UCX_TCP_PORT_RANGE", f"{first}-{first}")
        says = rf"UCX_TCP_PORT_RANGE {first}-{first} has 0 free ports, .* needs 5: widen"
        with pytest.raises(LocalLayoutError, match=says):
            NixlAgent("one")
        # No port of UCX's is needed.
        monkeypatch.setenv("UCX_TLS", "rc")
        require_room(4)
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    require_room(0)
    for span in ("0", "1024-65535", "auto"):
        monkeypatch.setenv("UCX_TCP_PORT_RANGE", span)
        require_room(4)


def test_shortage_is_told_when_it_begins_and_ends(counted, warnings):
    """Once each, with what is open; the metric has each count."""
    recorded: list[float] = []
    watch = FileWatch(recorded.append)
    seen = []
    for step, count in enumerate((50, 81, 90, 78, 60, 60)):
        counted.append(count)
        seen.append((watch.look(step * LOOK_INTERVAL_S), watch.shortage[:2]))
    assert seen == [
        (False, ""),
        (True, "81"),
        (False, "90"),
        (False, "78"),
        (True, ""),
        (False, ""),
    ]
    assert recorded == [0.5, 0.81, 0.9, 0.78, 0.6, 0.6]
    (warning,) = warnings
    assert warning.startswith("81 of 100 files are open, ") and "ulimit -n" in warning


def test_listeners_of_an_agent_are_told_apart(monkeypatch):
    """One that another thread opens meanwhile is not the agent's, and may be closed."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    others = listeners()
    agent = NixlAgent(f"agent-{uuid.uuid4()}", num_threads=0)
    own = listeners() - others
    # A port that the agent's metadata has no two bytes of by chance.
    with contextlib.ExitStack() as stack:
        for _ in range(10):
            server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            if server.getsockname()[1].to_bytes(2, "big") not in agent.metadata():
                break
        assert listeners_told(agent.metadata(), others) == own and own
    agent.close()


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_only_listeners_at_ports_are_found(family, tmp_path):
    """As long as they are open; other sockets and files are none, and none is changed."""
    before = listeners()
    with (
        socket.socket(family) as opened,
        socket.socket(family, socket.SOCK_DGRAM) as datagrams,
        socket.socket(socket.AF_UNIX) as named,
    ):
        try:
            opened.bind(("", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
        datagrams.bind(("", 0))
        named.bind(str(tmp_path / "named"))
        named.listen()
        assert listeners() == before
        opened.listen()
        assert listeners() - before == {(opened.fileno(), opened.getsockname()[1])}
        assert opened.getblocking()
    assert listeners() == before


def test_socket_that_is_needed_is_missed_once_it_is_closed():
    """Also where its descriptor has become another file's."""
    before = listeners()
    with socket.create_server(("127.0.0.1", 0)) as opened, socket.socket() as other:
        ((_, port),) = needed = listeners() - before
        assert port == opened.getsockname()[1]
        watch = FileWatch(lambda _: None)
        watch.need(needed)
        assert not watch.look(0.0)
        os.dup2(other.fileno(), opened.fileno())
        with pytest.raises(ConnectorThreadError, match=rf"port {port}, .*ulimit -n"):
            watch.look(LOOK_INTERVAL_S)


_DEAF = """
import os, resource, socket, time, uuid
from {agent} import NixlAgent
from {limits} import FileWatch, listeners

others = listeners()
agent = NixlAgent(str(uuid.uuid4()), num_threads=0)
watch = FileWatch(lambda _: None)
((descriptor, port),) = opened = listeners() - others
watch.need(opened)
watch.look(0.0)
peer = socket.socket()
highest = max(map(int, os.listdir("/proc/self/fd")))
while (last := os.dup(0)) < highest:
    pass
resource.setrlimit(resource.RLIMIT_NOFILE, (last + 1, 4096))
peer.connect(("127.0.0.1", port))
ends_s = time.monotonic() + 60
try:
    while time.monotonic() < ends_s:
        watch.look(time.monotonic())
        time.sleep(0.01)
except Exception as error:
    print(error, flush=True)
os._exit(0)
"""


def test_agent_that_has_become_deaf_is_noticed():
    """UCX closes its port for good where it finds no descriptor to accept with."""
    program = _DEAF.format(agent=NixlAgent.__module__, limits=limits.__name__)
    environment = {**os.environ, "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"}
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert re.search(r"^UCX has closed its port \d+, .*ulimit -n", ended.stdout, re.M), ended


def test_files_are_not_counted_again_at_once(counted):
    """Polls are more frequent than that."""
    watch = FileWatch(lambda _: None)
    assert not watch.look(0.0)
    counted.append(int(100 * FULL) + 1)
    assert not watch.look(0.9 * LOOK_INTERVAL_S)
    assert watch.look(LOOK_INTERVAL_S)
