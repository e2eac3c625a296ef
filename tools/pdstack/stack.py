# SPDX-License-Identifier: Apache-2.0
"""Start engines and routers, watch them, and take all of them down again.

    with run_directory() as run_dir, PDStack(model, run_dir) as stack:
        prefill, decode = stack.start_engines(EngineSpec("prefill"), EngineSpec("decode"))
        router = stack.start_router([prefill], [decode])
        ...

Engines outlive the routers in front of them: a sweep over pairs of layouts starts one engine of
each layout and then one router after the other.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import httpx

from tools import weight

from . import logs
from .engine import (
    CoreAllocator,
    Device,
    EngineSpec,
    ServedModel,
    engine_command,
    engine_env,
    find_script,
    installed_device,
    server_env,
)
from .errors import PDStackError, ProcessDiedError, StartFailedError, StartupTimeoutError
from .metrics import NixlCounters, fetch_nixl_counters
from .ports import HOST, PortAllocator, can_bind
from .process import ChildProcess, stop_all, uninterrupted
from .router import RouterSpec, router_command

_POLL_S = 0.3
_START_ATTEMPTS = 3
_PORT_CLASH = ("address already in use", "Address already in use", "EADDRINUSE")
_DEATH_FOLLOWS_S = 15.0
"""An API server notices within 5 s that its engine died, and then needs a moment to end."""
_END_FOLLOWS_S = 5.0
"""How long a server may take to end by itself once its engine could not be started. Some never do:
at its end a process that has imported Ray was seen to wait for ever in zmq's ``Context.term``."""


@contextmanager
def run_directory(keep: bool = False, parent: Path | None = None) -> Iterator[Path]:
    """Make a directory for logs; it stays when the block fails, or when ``keep`` says so."""
    directory = Path(tempfile.mkdtemp(prefix="pdstack-", dir=parent))
    # Only after success: after an error or an interruption the logs are what one wants to see.
    yield directory
    if not keep:
        shutil.rmtree(directory, ignore_errors=True)


@dataclass
class Server:
    """A server of the stack: an engine or a router.

    Attributes:
        start: starts its process, with new ports, and returns it and its port.
        host: where it can be reached.
        movable: whether it may be started again with other ports, where its own were lost.
        ready_after_s: how long its start-up took; ``None`` while it is not ready.
        failed_at: when its log was seen to say that it cannot start; ``None`` while it does not.
    """

    name: str
    start: Callable[[], tuple[ChildProcess, int]]
    child: ChildProcess
    port: int
    host: str = HOST
    movable: bool = True
    ready_after_s: float | None = None
    failed_at: float | None = None
    attempts: int = 1

    @property
    def url(self) -> str:
        """Base URL, without a path."""
        return f"http://{self.host}:{self.port}"

    @property
    def phase(self) -> str:
        """How far its start-up has come, in a few words."""
        if self.ready_after_s is not None:
            return "ready"
        return logs.find_phase(self.child.log_path)

    @property
    def waited_s(self) -> float:
        """Seconds since its start, until it was ready."""
        if self.ready_after_s is not None:
            return self.ready_after_s
        return time.monotonic() - self.child.started_at


@dataclass
class Engine(Server):
    """A running ``vllm serve``."""

    spec: EngineSpec = field(kw_only=True)

    def nixl_counters(self) -> NixlCounters:
        """Read what this engine has moved over NIXL so far."""
        return fetch_nixl_counters(self.url)


@dataclass
class Router(Server):
    """A running ``vllm-router``."""

    spec: RouterSpec = field(kw_only=True)

    @property
    def phase(self) -> str:
        """A router has no phases worth telling."""
        return "ready" if self.ready_after_s is not None else "waiting for the engines"


_AnyServer = TypeVar("_AnyServer", bound=Server)


class PDStack:
    """Engines and routers that live and die together.

    Args:
        model: what all engines serve.
        run_dir: where their logs go.
        device: where they run; by default what the installed vLLM was built for.
        startup_timeout_s: how long a server may take to become ready.
        on_wait: called several times a second with the servers that are being started.
    """

    def __init__(
        self,
        model: ServedModel,
        run_dir: Path,
        *,
        device: Device | None = None,
        startup_timeout_s: float = 600.0,
        on_wait: Callable[[Sequence[Server]], None] = lambda _: None,
    ) -> None:
        self.model = model
        self.run_dir = run_dir
        self._device = device or installed_device()
        self._startup_timeout_s = startup_timeout_s
        self._on_wait = on_wait
        self._ports = PortAllocator()
        self._cores = CoreAllocator(_usable_cores())
        self._servers: list[Server] = []

    def __enter__(self) -> PDStack:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop_all()

    def start_engines(self, *specs: EngineSpec) -> list[Engine]:
        """Start engines at the same time, and return when all of them are ready.

        Raises:
            PDStackError: the port that one of them should serve at is taken.
            ProcessDiedError: one of them ended (or another server of the stack did).
            StartFailedError: one of them could not start, and lived on; it is ended.
            StartupTimeoutError: one of them was not ready in time.
        """
        return self._start([self._new_engine(spec) for spec in specs])

    def start_router(
        self,
        prefill: Sequence[Engine],
        decode: Sequence[Engine],
        spec: RouterSpec | None = None,
    ) -> Router:
        """Start a router in front of running engines, and return when it is ready.

        Raises:
            PDStackError: its port is taken.
            ProcessDiedError: it ended (or another server of the stack did).
            StartupTimeoutError: it was not ready in time.
        """
        return self._start([self._new_router(prefill, decode, spec or RouterSpec())])[0]

    def stop(self, *servers: Server) -> None:
        """Stop servers, and wait until nothing of them is left. Signals do not cut it short."""
        with uninterrupted():
            stop_all([server.child for server in servers])
            stopped = {id(server) for server in servers}
            self._servers = [each for each in self._servers if id(each) not in stopped]

    def stop_all(self) -> None:
        """Stop every server, also one that has died or never became ready."""
        self.stop(*self._servers)

    def check(self) -> None:
        """Do nothing while all servers live.

        Raises:
            ProcessDiedError: one ended.
        """
        for server in self._servers:
            server.child.check()

    def explain(self, error: Exception) -> PDStackError:
        """Turn a failed request into the reason: a server that died, if one did or soon does."""
        deadline = time.monotonic() + _DEATH_FOLLOWS_S
        while time.monotonic() < deadline:
            try:
                self.check()
            except ProcessDiedError as died:
                return died
            time.sleep(_POLL_S)
        return PDStackError(
            f"a request failed although every server lives: {type(error).__name__}: {error}"
        )

    def _new_engine(self, spec: EngineSpec) -> Engine:
        vllm = find_script("vllm", spec.scripts)
        _check_free(spec.port)
        cores = self._cores.take(spec.layout.world_size)

        def start() -> tuple[ChildProcess, int]:
            port = spec.port or self._ports.take()
            # Connectors add rank numbers to the first port.
            side_channel_port = spec.side_channel_port or self._ports.take(spec.layout.world_size)
            env = engine_env(
                spec,
                self._device,
                os.environ,
                side_channel_port=side_channel_port,
                cores=cores,
                model_env=self.model.env,
            )
            command = engine_command(spec, self.model, self._device, port, vllm)
            return ChildProcess(spec.name, command, env, self.run_dir, spec.grace_s), port

        child, port = start()
        weight.log("engine", spec.name)
        movable = spec.port is None and spec.side_channel_port is None
        engine = Engine(spec.name, start, child, port, spec.host, movable, spec=spec)
        return self._remember(engine)

    def _new_router(
        self, prefill: Sequence[Engine], decode: Sequence[Engine], spec: RouterSpec
    ) -> Router:
        script = find_script("vllm-router")
        _check_free(spec.port)

        def start() -> tuple[ChildProcess, int]:
            port = spec.port or self._ports.take()
            command = router_command(
                spec,
                script,
                port=port,
                metrics_port=self._ports.take(),
                prefill_urls=[engine.url for engine in prefill],
                decode_urls=[engine.url for engine in decode],
            )
            env = server_env(os.environ, *(engine.host for engine in (*prefill, *decode)))
            return ChildProcess(spec.name, command, env, self.run_dir), port

        child, port = start()
        movable = spec.port is None
        return self._remember(Router(spec.name, start, child, port, movable=movable, spec=spec))

    def _remember(self, server: _AnyServer) -> _AnyServer:
        self._servers.append(server)
        return server

    def _start(self, starting: list[_AnyServer]) -> list[_AnyServer]:
        """Wait until all of them answer; one that lost its port to somebody else is restarted."""
        with httpx.Client(timeout=2.0, trust_env=False) as client:
            while not all(server.ready_after_s is not None for server in starting):
                self._on_wait(starting)
                for server in starting:
                    if server.ready_after_s is None:
                        self._look_at(server, client)
                self.check()
                time.sleep(_POLL_S)
        self._on_wait(starting)
        return starting

    def _look_at(self, server: Server, client: httpx.Client) -> None:
        has_hung = server.child.exit_status is None and _has_hung(server)
        if has_hung:
            server.child.kill()
        if self._restarted(server):
            return
        if has_hung:
            raise _died(StartFailedError, server, "could not start and did not end by itself")
        if _answers(server, client):
            server.ready_after_s = server.waited_s
        elif server.waited_s > self._startup_timeout_s:
            waited = f"was not ready after {self._startup_timeout_s:.0f} s ({server.phase})"
            raise _died(StartupTimeoutError, server, waited)

    @staticmethod
    def _restarted(server: Server) -> bool:
        if server.child.exit_status is None or server.attempts >= _START_ATTEMPTS:
            return False
        if not server.movable:
            return False
        if not any(text in line for line in server.child.log_tail(200) for text in _PORT_CLASH):
            return False
        server.attempts += 1
        server.failed_at = None
        server.child, server.port = server.start()
        return True


def _has_hung(server: Server) -> bool:
    """Whether a server that lives has said long ago that it cannot start."""
    if server.failed_at is None and logs.start_failed(server.child.log_path):
        server.failed_at = time.monotonic()
    return server.failed_at is not None and time.monotonic() - server.failed_at > _END_FOLLOWS_S


def _died(kind: type[ProcessDiedError], server: Server, how: str) -> ProcessDiedError:
    log = server.child.log_path
    return kind(server.name, how, logs.find_cause(log), server.child.log_tail())


def _answers(server: Server, client: httpx.Client) -> bool:
    try:
        return client.get(f"{server.url}/health").status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def _check_free(port: int | None) -> None:
    """See that a port that was chosen can be had."""
    if port is not None and not can_bind(port):
        raise PDStackError(f"port {port} on {HOST} is taken; choose another one")


def _usable_cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
