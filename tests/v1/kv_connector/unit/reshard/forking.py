# SPDX-License-Identifier: Apache-2.0
"""Processes that are forked from one which has imported all: to import takes seconds for each."""

from __future__ import annotations

from multiprocessing import get_context
from multiprocessing.context import ForkServerContext

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
