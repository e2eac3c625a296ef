# SPDX-License-Identifier: Apache-2.0
"""One exception is one request's, wherever on the connector's threads it comes up.

Each call that the package makes there raises once, in the middle of good requests: see `sites`. The
others end right, all blocks come back, and the engines go on.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from random import Random

import pytest
from vllm.distributed.nixl_utils import NixlWrapper

from tests.v1.kv_connector.unit.reshard.engine.fleet import Fleet, Reads, all_reads
from tests.v1.kv_connector.unit.reshard.engine.sites import Calls, Site, all_calls

# Where a call raises, coroutines that were to be its arguments are left.
pytestmark = pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")

SEED = 24
NUM_SAMPLED = 80
"""So many of some 450 take about 10 s; `make test-full` goes through all of them."""

_MOST_IN_A_ROUND = 20
"""A site that is passed more often, as while a thread polls, raises in one of its first calls."""


@pytest.fixture
def reads() -> Iterator[Reads]:
    """All reads; what goes wrong on purpose is not logged."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with all_reads() as reads:
            yield reads
    finally:
        logging.disable(disabled)


@pytest.fixture
def calls(reads) -> Iterator[Calls]:
    """All calls."""
    with all_calls() as calls:
        yield calls


@pytest.fixture
def fleet(reads, calls) -> Iterator[Fleet]:
    """Engines that know each other."""
    fleet = Fleet(reads)
    try:
        fleet.warm_up()
        yield fleet
    finally:
        fleet.close()


def sites_of(fleet: Fleet, calls: Calls, *, breaks: bool) -> Counter[Site]:
    """All sites of rounds in which nothing raises, and how often each is passed in one."""
    sites: Counter[Site] = Counter()
    for _ in range(3):
        with calls.on():
            fleet.check(fleet.round(breaks=breaks), breaks=breaks)
        sites |= calls.counted
    return sites


def sweep(
    fleet: Fleet,
    calls: Calls,
    sites: Counter[Site],
    fault: Callable[[Site], Exception],
    breaks: bool,
) -> None:
    """Have each of some sites raise in a round of its own."""
    random, num_raised = Random(SEED), 0
    for site, passed in sorted(sites.items()):
        number = random.randint(1, min(passed, _MOST_IN_A_ROUND))
        if not breaks:
            fleet.reconnect()
        with calls.on():
            calls.plant(site, number, fault(site))
            try:
                fleet.check(
                    fleet.round(breaks=breaks), breaks=breaks, over_one_connection=is_nixls(site)
                )
            except AssertionError as error:
                raise AssertionError(f"{site} has raised in its call {number}: {error}") from error
        num_raised += calls.raised_in is not None
    # Not every poll comes by everywhere.
    assert num_raised >= 0.8 * len(sites)


def is_nixls(site: Site) -> bool:
    """Whether NIXL's agent is called there."""
    return site.callee.startswith(f"{NixlWrapper.__name__}.")


def unforeseen(site: Site) -> Exception:
    """What nobody thought of."""
    return RuntimeError(f"{site.callee}, called in {site.caller}, line {site.line}")


def sample(sites: Counter[Site], count: int) -> Counter[Site]:
    """Some of them, always the same ones as long as the code is."""
    chosen = Random(SEED).sample(sorted(sites), min(count, len(sites)))
    return Counter({site: sites[site] for site in chosen})


def of_broken_reads(fleet: Fleet, calls: Calls) -> Counter[Site]:
    """Those that only come by where a read fails."""
    broken, good = (sites_of(fleet, calls, breaks=breaks) for breaks in (True, False))
    return Counter({site: passed for site, passed in broken.items() if site not in good})


def test_exception_is_one_requests(fleet, calls):
    """Others are read, all blocks come back, and everybody goes on: at calls of a fixed sample."""
    sites = sites_of(fleet, calls, breaks=False)
    # What is wrapped is what is called, on each of the threads.
    assert {"engine", "transport", "protocol", "memory", "plan"} == {
        site.caller.partition("/")[0] for site in sites
    }
    assert len(sites) > 2 * NUM_SAMPLED
    sweep(fleet, calls, sample(sites, NUM_SAMPLED), unforeseen, breaks=False)


@pytest.mark.nightly
def test_every_exception_is_one_requests(fleet, calls):
    """At every call."""
    sweep(fleet, calls, sites_of(fleet, calls, breaks=False), unforeseen, breaks=False)


def test_exception_beside_a_broken_read(fleet, calls):
    """What it leaves in doubt is given back when its lane is closed, whatever raises until then."""
    sites = sample(of_broken_reads(fleet, calls), NUM_SAMPLED // 8)
    sweep(fleet, calls, sites, unforeseen, breaks=True)


@pytest.mark.nightly
def test_every_exception_beside_a_broken_read(fleet, calls):
    """At every call that is made only then."""
    sweep(fleet, calls, of_broken_reads(fleet, calls), unforeseen, breaks=True)


@pytest.mark.parametrize(
    "fault",
    [OSError(errno.EMFILE, "Too many open files"), MemoryError("Cannot allocate memory")],
    ids=["EMFILE", "ENOMEM"],
)
def test_nixl_lacks_something(fleet, calls, fault):
    """Descriptors or memory, in any call of its agents."""
    sites = sites_of(fleet, calls, breaks=False)
    nixls = {site: passed for site, passed in sites.items() if is_nixls(site)}
    assert nixls
    sweep(fleet, calls, Counter(nixls), lambda _: fault, breaks=False)


class Threads:
    """Starts threads, or says that there are no more.

    Attributes:
        refused: The name of the one that is not started, the first time.
        seen: The names of all.
    """

    def __init__(self, start: Callable[[threading.Thread], None], refused: str) -> None:
        self._start = start
        self.refused: str | None = refused
        self.seen: list[str] = []

    def start(self, thread: threading.Thread) -> None:
        """Start one."""
        self.seen.append(thread.name)
        if self.refused is not None and thread.name.startswith(self.refused):
            self.refused = None
            raise RuntimeError("can't start new thread")
        self._start(thread)


@pytest.mark.parametrize("name", ["reshard-handshakes", "reshard-listener"])
def test_thread_that_does_not_start_is_started_later_or_done_without(reads, monkeypatch, name):
    """What has asked for it fails, and whoever asks next is served."""
    threads = Threads(threading.Thread.start, name)
    monkeypatch.setattr(threading.Thread, "start", lambda thread: threads.start(thread))
    fleet = Fleet(reads)
    try:
        for _ in range(2):
            fleet.warm_up()
            assert threads.refused is None
        fleet.check(fleet.round())
    finally:
        fleet.close()


@pytest.mark.parametrize("name", ["reshard-connector", "reshard-dialer"])
def test_engine_without_a_thread_that_it_needs_does_not_begin(reads, monkeypatch, name):
    """It says so, and what there is already is closed."""
    threads = Threads(threading.Thread.start, name)
    monkeypatch.setattr(threading.Thread, "start", lambda thread: threads.start(thread))
    with pytest.raises(RuntimeError, match="can't start new thread"):
        Fleet(reads)
    assert threads.refused is None
