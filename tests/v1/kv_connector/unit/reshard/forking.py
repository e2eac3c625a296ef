# SPDX-License-Identifier: Apache-2.0
"""Processes that are forked from one which has imported all: to import takes seconds for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess

ANSWER_S = 120.0
"""How long what is started may take until it answers."""

# One process is forked from for all modules of tests: it has what each of their programs imports.
_UNIT = __name__.rpartition(".")[0]
_PROGRAMS = (f"{_UNIT}.producer_process", f"{_UNIT}.transport.source_process")


def forking() -> ForkServerContext:
    """What starts such processes; from the first on, they are forked from the same one."""
    context = get_context("forkserver")
    context.set_forkserver_preload([*_PROGRAMS])
    return context


@contextmanager
def started(
    target: Callable[..., None], *arguments: object
) -> Iterator[tuple[BaseProcess, Connection]]:
    """Start a process that is given a pipe; gives it once it has said something over that."""
    context = forking()
    ours, theirs = context.Pipe()
    # It may have a process of its own, too.
    process = context.Process(target=target, args=(theirs, *arguments))
    process.start()
    theirs.close()
    try:
        assert ours.poll(ANSWER_S), "the process does not answer"
        yield process, ours
    finally:
        process.kill()
        process.join()
        ours.close()
