# SPDX-License-Identifier: Apache-2.0
"""The process in which `probe` tries other engines' NIXL metadata. Run as a script.

It imports NIXL, but neither vLLM nor torch, and uses 17 MiB of its own. It forks for each socket
that it receives. The child makes an agent like the worker's, reports that, and then repeatedly
receives metadata, loads them, and reports that it is still alive. Any damage from loading ends with
the child. All of these processes end when the worker does, for whatever reason, because their
sockets are closed then.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import Any

ALIVE = b"+"
"""Sent by a child when it has made its agent, and each time it has loaded a whole answer."""

MAX_AGENTS = 8
"""Maximum agents per child. One suffices for engines with different names."""

LENGTH_BYTES = 4
"""Size of the length that precedes a message, and each of the metadata in it."""


def main() -> None:
    """Fork for each socket received over the worker's socket, until that is closed."""
    options = json.loads(sys.argv[1])
    # Drop this folder: its modules would shadow others. Python 3.10 has no option for that.
    own = str(Path(__file__).resolve().parent)
    sys.path[:] = [path for path in sys.path if os.path.realpath(path) != own]
    # Crashes of children are expected: write no core dumps.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The worker handles Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Have the kernel reap ended children.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    nixl = importlib.import_module(options["nixl"])
    with socket.socket(fileno=options["socket"]) as worker:
        while True:
            said, descriptors, *_ = socket.recv_fds(worker, 1, 1)
            if not said:
                return
            with socket.socket(fileno=descriptors[0]) as client:
                # If no process is left, the socket is closed without a report.
                try:
                    is_child = not os.fork()
                except OSError:
                    continue
                if is_child:
                    try:
                        worker.close()
                        _try(client, nixl, options)
                    finally:
                        os._exit(0)


def _try(client: socket.socket, nixl: Any, options: dict[str, Any]) -> None:
    """Load the metadata that arrive over a socket."""
    # UCX prints long reports when it aborts.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    # End this child if it hangs.
    signal.setitimer(signal.ITIMER_REAL, options["limit_s"])
    config = nixl.nixl_agent_config(enable_prog_thread=False, num_threads=0, backends=["UCX"])
    agents = [nixl.nixl_agent(_name(), config)]
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    client.sendall(ALIVE)
    seen: set[object] = set()
    while length := _receive(client, LENGTH_BYTES):
        data = _receive(client, int.from_bytes(length, "little"))
        signal.setitimer(signal.ITIMER_REAL, options["limit_s"])
        while data:
            stop = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")
            metadata, data = data[LENGTH_BYTES:stop], data[stop:]
            name = None if None in seen else _load(agents[-1], metadata)
            # An agent that knows this name, or has failed halfway, may not parse these metadata,
            # which may be the only ones that a worker loads. A new agent certainly parses them.
            if (name is None or name in seen) and seen:
                if len(agents) == MAX_AGENTS:
                    return
                agents.append(nixl.nixl_agent(_name(), config))
                seen.clear()
                name = _load(agents[-1], metadata)
            seen.add(name)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        client.sendall(ALIVE)


def _name() -> str:
    """Return a unique name for an agent."""
    return f"probe/{int.from_bytes(os.urandom(16), 'little'):032x}"


def _load(agent: Any, metadata: bytes) -> object:
    """Load metadata; return the name in them, or None if NIXL refuses them."""
    try:
        return agent.add_remote_agent(metadata)
    except Exception:
        # The worker's agent will refuse them, too.
        return None


def _receive(client: socket.socket, num_bytes: int) -> bytes:
    """Receive exactly this many bytes; return none if the other side has closed."""
    parts: list[bytes] = []
    while num_bytes:
        part = client.recv(num_bytes)
        if not part:
            return b""
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)


if __name__ == "__main__":
    main()
