# SPDX-License-Identifier: Apache-2.0
"""What holds for all tests."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

# Examples are not timed: other tests, with real engines, may share the machine.
settings.register_profile("project", deadline=None)
settings.load_profile("project")

# A shell without job control has what it runs in the background ignore SIGINT, and whoever is
# started with that cannot be told Ctrl-C: nor could the processes that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def caplog_vllm(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What vLLM logs, also where its loggers do not propagate to the root."""
    logger = logging.getLogger("vllm")
    caplog.set_level(logging.INFO, "vllm")
    if logger.propagate:
        yield caplog
        return
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)
