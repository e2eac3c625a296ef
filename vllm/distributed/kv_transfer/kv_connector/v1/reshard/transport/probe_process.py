# SPDX-License-Identifier: Apache-2.0
"""The process in which other engines' NIXL metadata is tried: see `probe`. Run as a script.

It imports NIXL, and neither vLLM nor torch: 17 MiB of its own. For each socket that it is handed,
it forks. The child makes an agent as the worker's are, says so, and then takes metadata, loads
each, and says that it is still there, again and again. What loading has broken ends with the child.
All end with the worker, however that ends: their sockets are closed then.
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
"""What a child says when it has an agent, and whenever it has loaded all of an answer."""

MAX_AGENTS = 8
"""So many a child makes; it needs one for all engines whose names differ."""

LENGTH_BYTES = 4
"""How long what follows is, before all of it and before each of the metadata within."""


def main() -> None:
    """Fork for each socket that comes over the one of the worker's, until that is closed."""
    options = json.loads(sys.argv[1])
    # This folder, whose modules have names of others. Python 3.10 has no option for it.
    own = str(Path(__file__).resolve().parent)
    sys.path[:] = [path for path in sys.path if os.path.realpath(path) != own]
    # Each time that NIXL ends a child is expected, and no crash of anybody's.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Ctrl-C is the worker's to hear.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The kernel takes ended children away.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    nixl = importlib.import_module(options["nixl"])
    with socket.socket(fileno=options["socket"]) as worker:
        while True:
            said, descriptors, *_ = socket.recv_fds(worker, 1, 1)
            if not said:
                return
            with socket.socket(fileno=descriptors[0]) as client:
                # Where there are no more processes, the socket is closed, and nothing was said.
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
    """Load what comes over a socket."""
    # UCX tells at length of how it ends.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    # One that hangs is not waited for.
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
            # An agent that knows a name, or has failed halfway, may not look into what comes next;
            # and that may be all that a worker loads. Only one that has loaded nothing is sure to.
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
    """A name for an agent, which no other has."""
    return f"probe/{int.from_bytes(os.urandom(16), 'little'):032x}"


def _load(agent: Any, metadata: bytes) -> object:
    """Load metadata; returns the name in it, or None where NIXL refuses it."""
    try:
        return agent.add_remote_agent(metadata)
    except Exception:
        # The worker's agent will refuse it, too.
        return None


def _receive(client: socket.socket, num_bytes: int) -> bytes:
    """So many bytes; none where the other side has closed."""
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
