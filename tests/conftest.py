# SPDX-License-Identifier: Apache-2.0
"""What holds for all tests."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from tests import lanes
from tools import weight

if TYPE_CHECKING:
    from tests.faults.stage import Stage

# Examples are not timed: other tests, with real engines, may share the machine.
settings.register_profile("project", deadline=None)
settings.load_profile("project")

# A shell without job control has what it runs in the background ignore SIGINT, and whoever is
# started with that cannot be told Ctrl-C: nor could the processes that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--part=NAME` chooses a part of the nightly lane."""
    # Before this file is found, pytest takes the word behind an option that it does not know for a
    # path: with `--part tools` it would look for this file below tools/.
    choices = [name for name, part in lanes.PARTS.items() if part.is_selection]
    parser.addoption("--part", choices=choices, help="a part of the nightly lane")


# Before marks are compared with what `-m` asks for.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort tests into their lanes."""
    lanes.sort(items)
    wanted = config.getoption("part")
    if wanted is None:
        return
    others = [each for each in items if ("part", wanted) not in each.user_properties]
    config.hook.pytest_deselected(items=others)
    items[:] = [each for each in items if ("part", wanted) in each.user_properties]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> lanes.ByEngines | None:
    """Share tests with engines out as `lanes` says; others are shared out by xdist."""
    return lanes.ByEngines(config, log) if config.getoption("dist") == "loadgroup" else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Have the number of tests that ran counted, once where several processes share them."""
    if hasattr(terminalreporter.config, "workerinput"):
        return
    ran = ("passed", "failed", "error")
    weight.log("cases", sum(len(terminalreporter.stats.get(how, ())) for how in ran))


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """The engines that all tests of layouts and of faults share."""
    from tests.faults.stage import running

    with running(tmp_path_factory.mktemp("tiny"), tmp_path_factory.mktemp("run")) as stage:
        yield stage


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
