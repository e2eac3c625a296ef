# SPDX-License-Identifier: Apache-2.0
"""How a reader of the shared-memory broadcast waits between two looks."""

from __future__ import annotations

import time

from vllm.distributed.utils import sched_yield
from vllm.platforms import current_platform

REST_S = 1e-4
"""Short against a step of a model on CPU, and long against a look."""


def wait_between_looks() -> None:
    """Let others run: at once where the model runs on an accelerator, for a moment on CPU.

    On CPU, workers and the threads that move their data share cores. A thread that yields a core
    over and over gives it to none of them on Linux 6.18: their virtual times drift apart so far
    that the others wait for half a minute, such as for a pipeline's next stage or for NIXL.
    """
    if current_platform.is_cpu():
        time.sleep(REST_S)
    else:
        sched_yield()
