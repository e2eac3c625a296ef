# SPDX-License-Identifier: Apache-2.0
"""Scripts that start a whole stack, run until a test is over."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.examples.checks import EXAMPLES
from tests.tools.pdstack.helpers import living_in
from tools.pdstack.logs import tail
from tools.pdstack.ports import PortAllocator, can_bind

LOCAL = EXAMPLES / "local/serve_pd.sh"
RAY = EXAMPLES / "ray/single_machine.sh"
LIMIT_S = 60.0
LOG_LINES = 40
SIDE_CHANNEL_OFFSET = 500


def free_ports() -> dict[str, str]:
    """Return free ports for all that the scripts start."""
    ports = PortAllocator()
    taken = {name: str(ports.take()) for name in ("PORT", "METRICS_PORT")}
    # Ray takes the next one, too.
    taken["RAY_PORT"] = str(ports.take(2))
    for name in ("PREFILL_PORT", "DECODE_PORT"):
        port = ports.take()
        while not can_bind(port + SIDE_CHANNEL_OFFSET):
            port = ports.take()
        taken[name] = str(port)
    return taken


@contextmanager
def started(
    script: Path, *args: str, env: dict[str, str], directory: Path
) -> Iterator[subprocess.Popen[str]]:
    """Run a script in a directory; whatever lives there is killed in the end.

    A test that fails meanwhile shows all that the script and its servers have said.
    """
    logs = directory / "logs"
    logs.mkdir()
    process = subprocess.Popen(
        # A shell cannot catch what it was started with ignored, as nohup and background jobs are.
        ["env", "--default-signal=HUP,INT,TERM", script, *args],
        cwd=directory,
        env={**env, "LOG_DIR": str(logs)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    except BaseException:
        out, err = _end(process, directory)
        _tell({"its output, what was not read": out, "its errors": err}, logs)
        raise
    _end(process, directory)


def _end(process: subprocess.Popen[str], directory: Path) -> tuple[str, str]:
    process.kill()
    for survivor in living_in(directory):
        with suppress(psutil.NoSuchProcess):
            survivor.kill()
    return process.communicate()


def _tell(said: dict[str, str], logs: Path) -> None:
    """Print what the script has said and how its servers' logs end: pytest shows it."""
    ends = {path.name: "\n".join(tail(path, LOG_LINES)) for path in sorted(logs.glob("*.log"))}
    for title, text in {**said, **ends}.items():
        print(f"--- {title} ---\n{text}")
