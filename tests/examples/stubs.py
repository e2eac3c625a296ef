# SPDX-License-Identifier: Apache-2.0
"""Programs that stand in for what the examples start: they write down how they were called."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_PROGRAM = """#!{python} -I
import http.server, json, os, signal, sys, time
name = os.path.basename(sys.argv[0])
call = {{"program": name, "args": sys.argv[1:], "env": dict(os.environ)}}
with open({calls!r}, "a") as calls:
    calls.write(json.dumps(call) + "\\n")
behaviour = os.environ.get("STUB_" + name.upper().replace("-", "_"), "end")
if behaviour == "die":
    print(name, "has no luck today")
    sys.exit(7)
if behaviour == "fail":
    print("ERROR EngineCore failed to start.\\nValueError: no luck either", flush=True)
    time.sleep(3600)
if behaviour == "hang" and "health-check" not in sys.argv:
    time.sleep(3600)
if behaviour == "serve" and "--port" in sys.argv:
    if os.fork() == 0:
        # A worker that nobody has told to end.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(3600)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *args):
            pass

    port = int(sys.argv[sys.argv.index("--port") + 1])
    http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@dataclass(frozen=True)
class Call:
    """One start of a stub.

    Attributes:
        args: its command line, without the program.
    """

    program: str
    args: list[str]
    env: dict[str, str]


class Stubs:
    """A directory of stubs for `vllm`, `vllm-router`, `ray` and `nvidia-smi`.

    What one does is said by the variable `STUB_` and its name: `serve` answers at its `--port`,
    `hang` and `die` do that, `fail` does what an engine does that cannot start and does not end,
    and otherwise it ends at once, as `ray health-check` does anyway.

    Args:
        directory: Where to put them; made if it is not there.
        num_gpus: How many GPUs `nvidia-smi` tells of; with 0 it fails, as without a driver.
    """

    def __init__(self, directory: Path, num_gpus: int = 0) -> None:
        directory.mkdir(parents=True)
        self._directory = directory
        self._calls = directory / "calls.jsonl"
        program = _PROGRAM.format(python=sys.executable, calls=str(self._calls))
        for name in ("vllm", "vllm-router", "ray"):
            self._write(name, program)
        listed = f"seq 0 {num_gpus - 1}" if num_gpus else "exit 9"
        self._write("nvidia-smi", f"#!/bin/sh\n{listed}\n")

    def env(self, **variables: str) -> dict[str, str]:
        """Return an environment in which the stubs are found first, and nothing chooses devices."""
        inherited: Mapping[str, str] = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("VLLM_", "CUDA_", "UCX_", "RAY_"))
        }
        path = f"{self._directory}:{os.environ['PATH']}"
        return {**inherited, "PATH": path, **variables}

    def calls(self, program: str) -> list[Call]:
        """Return how a program was called so far, in that order."""
        if not self._calls.exists():
            return []
        calls = [Call(**json.loads(line)) for line in self._calls.read_text().splitlines()]
        return [call for call in calls if call.program == program]

    def _write(self, name: str, text: str) -> None:
        path = self._directory / name
        path.write_text(text)
        path.chmod(0o755)
