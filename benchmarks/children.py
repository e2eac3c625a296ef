# SPDX-License-Identifier: Apache-2.0
"""Processes that do what they are told, one call after another, and end with this one.

They are forked from a server that has imported vLLM once: a rank is there in a second.
"""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any

from .errors import BenchmarkError

CALL_LIMIT_S = 600.0
_LOOK_S = 0.5
_PR_SET_PDEATHSIG = 1
_LOG_TAIL_LINES = 15

_ENVIRONMENT = {
    # The server is forked: no library may have threads of its own there.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # Nobody computes; and NCCL refuses ranks that share a GPU.
    "VLLM_DISABLE_PYNCCL": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
}


def prepare(preload: str, log_dir: Path) -> None:
    """Start the server, before the first child; this process stays as it is.

    Args:
        preload: Name of the module that it imports.
        log_dir: Where its output goes.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload([preload])
    own = os.dup(2)
    log = os.open(log_dir / "server.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    before = dict(os.environ)
    os.environ.update(_ENVIRONMENT)
    os.dup2(log, 2)
    try:
        # It keeps what it finds as its error output and as its environment.
        ensure_running()
    finally:
        os.dup2(own, 2)
        for name in _ENVIRONMENT.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
        os.close(own)
        os.close(log)


class Child:
    """A process with one object, whose methods are called from here.

    Args:
        name: What it is called in errors, and its log.
        log_dir: Where its output goes.
        factory: Class of the object, as `module:name`: what it needs is imported in the process.
        args: For the factory.
    """

    def __init__(self, name: str, log_dir: Path, factory: str, *args: object) -> None:
        self.name = name
        self._log_path = log_dir / f"{name}.log"
        context = multiprocessing.get_context("forkserver")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, self._log_path, factory, args), name=name, daemon=True
        )
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process.pid is not None
        return self._process.pid

    def post(self, method: str, *args: object) -> None:
        """Call a method; `result` is to follow."""
        try:
            self._pipe.send((method, args))
        except OSError as error:
            raise self._ended() from error

    def result(self, limit_s: float = CALL_LIMIT_S) -> Any:
        """What the method that was called last has returned; for the first time, None.

        Raises:
            BenchmarkError: It raised, the process has ended, or it takes too long.
        """
        waited_s = 0.0
        while not self._pipe.poll(_LOOK_S):
            waited_s += _LOOK_S
            if not self._process.is_alive():
                raise self._ended()
            if waited_s >= limit_s:
                raise BenchmarkError(f"{self.name} has not answered for {limit_s:.0f} s")
        try:
            fault, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._ended() from error
        if fault is not None:
            raise BenchmarkError(f"{self.name} failed: {fault}\n{value}")
        return value

    def freeze(self) -> None:
        """Stop all of its threads."""
        self._send(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let them go on."""
        self._send(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> None:
        """Send a signal. One that has ended says so where it is asked for something."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once; `join` is to follow."""
        self._process.kill()

    def join(self) -> None:
        """Wait until it is gone."""
        self._process.join()
        self._pipe.close()

    def _ended(self) -> BenchmarkError:
        self._process.join(_LOOK_S)
        lines: list[str] = []
        with suppress(OSError):
            lines = self._log_path.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        status = self._process.exitcode
        return BenchmarkError("\n".join([f"{self.name} has ended with status {status}", *lines]))


def call_all(children: Sequence[Child], method: str, *args: object) -> list[Any]:
    """Call a method in all children at the same time; returns their results in order."""
    for child in children:
        child.post(method, *args)
    return [child.result() for child in children]


def end_all(children: Sequence[Child]) -> None:
    """End children at once, stopped or not, and wait until they are gone."""
    for child in children:
        child.kill()
    for child in children:
        child.join()


def _serve(pipe: Connection, log_path: Path, factory: str, args: Sequence[object]) -> None:
    """The process: make the object, then do what is asked, until nobody is there to ask."""
    # Ctrl-C is for who started this; and who is stopped would not hear of its parent's end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # As its server has it, unless that was started by somebody else before.
    os.environ.update(_ENVIRONMENT)
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        module, _, name = factory.partition(":")
        host = getattr(importlib.import_module(module), name)(*args)
        pipe.send((None, None))
        while True:
            method, arguments = pipe.recv()
            answer: tuple[str | None, object]
            try:
                answer = (None, getattr(host, method)(*arguments))
            except Exception as error:
                answer = (f"{type(error).__name__}: {error}", traceback.format_exc())
            pipe.send(answer)
    except (EOFError, BrokenPipeError):
        pass
    except Exception as error:
        pipe.send((f"{type(error).__name__}: {error}", traceback.format_exc()))
    finally:
        # No destructors: they would wait for peers that may be gone.
        os._exit(0)
