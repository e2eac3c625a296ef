# SPDX-License-Identifier: Apache-2.0
"""Engines on hosts of their own, and networks between them that cut, drop and hold up packets.

A network that goes wrong sends no reset: all that either end sees is that nothing comes.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.pairs import ask_unaided
from tests.faults.logs import Log
from tests.faults.stage import (
    LEASE_S,
    SLACK_S,
    Stage,
    answer_of,
    assert_failed,
    hung,
    spec,
)
from tests.faults.table import read_rows
from tests.tools.pdstack.helpers import wait_until
from tools.pdstack.engine import (
    EngineSpec,
    ServedModel,
    engine_command,
    engine_env,
    find_script,
    installed_device,
    on_host,
)
from tools.pdstack.errors import NetworkError
from tools.pdstack.hosts import CUT, Link, Network, hosts, visiting
from tools.pdstack.layout import Layout
from tools.pdstack.process import ChildProcess
from tools.pdstack.stack import Engine, PDStack
from tools.pdstack.tiny_models import write_tiny_llama

pytestmark = pytest.mark.e2e

ROWS = read_rows()
# Longer than a handshake may take, so that it is known which of them was.
READ_LIMIT_S = 14.0
# A stage of the tiny model has 192 KiB of a prompt's three blocks.
STAGE_BYTES = 192 << 10
SLOW = Link(bytes_s=32 << 10)
SMALL = Link(largest_bytes=600)
HEAD, SECOND, DECODE = "head", "second", "decode"


def stage_of(number: int, network: Network) -> EngineSpec:
    """Return how a stage of the prefill engine is started, each on a host of its own."""
    head, host = network.hosts[HEAD], network.hosts[(HEAD, SECOND)[number]]
    nodes = f"--nnodes 2 --node-rank {number} --master-addr {head.address} --master-port 29501"
    args = (*nodes.split(), "--distributed-executor-backend", "mp")
    engine = spec(f"far-{host.name}", *args, *(["--headless"] if number else []))
    return dataclasses.replace(on_host(engine, host), layout=Layout(pp_size=2))


def decode_spec(network: Network, name: str, policy: str | None = None) -> EngineSpec:
    """Return how a decode engine is started."""
    options = {"kv_read_timeout_s": READ_LIMIT_S}
    return on_host(spec(name, policy=policy, options=options), network.hosts[DECODE])


def start_headless(engine: EngineSpec, model: ServedModel, directory: Path) -> ChildProcess:
    """Start a stage that serves no HTTP: it is ready when its head is."""
    device, cores = installed_device(), sorted(os.sched_getaffinity(0))[-1:] * 2
    command = engine_command(engine, model, device, 0, find_script("vllm"))
    env = engine_env(engine, device, os.environ, side_channel_port=5600, cores=cores)
    return ChildProcess(engine.name, command, env, directory)


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    """A host for each stage of the prefill engine, and one for decode engines and clients."""
    try:
        with hosts(HEAD, SECOND, DECODE) as network, visiting(network.hosts[DECODE].namespace):
            yield network
    except NetworkError as error:
        pytest.skip(f"hosts of one's own: {error}")


@pytest.fixture(scope="module")
def far(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A prefill engine of two stages on two hosts, and a decode engine, which have never met."""
    model = write_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama", num_layers=2)
    directory = tmp_path_factory.mktemp("hosts")
    second = start_headless(stage_of(1, network), model, directory)
    try:
        with PDStack(model, directory) as stack:
            prefill, decode = stack.start_engines(
                stage_of(0, network), decode_spec(network, "far-decode")
            )
            router = stack.start_router([prefill], [decode])
            stage = Stage(stack, prefill, decode, decode, router)
            yield stage
            # One wait for the leases of all.
            wait_until(
                lambda: not stage.holds_blocks(), "the return of all blocks", LEASE_S + SLACK_S
            )
            second.check()
            stage.close()
    finally:
        second.stop()


@pytest.fixture(scope="module")
def recomputing(far: Stage, network: Network) -> Engine:
    """Another decode engine, which computes what it cannot read, and has met nobody."""
    (engine,) = far.stack.start_engines(decode_spec(network, "far-recomputing", "recompute"))
    return engine


@pytest.fixture(autouse=True)
def the_others_are_served(far: Stage) -> Iterator[None]:
    """Whatever becomes of the network, once it is whole both engines serve, and hold no block."""
    yield
    far.stack.check()
    far.assert_serving()
    far.assert_blocks_are_free(far.decode)


def test_host_that_is_cut_off_before_the_first_handshake(far: Stage, network: Network) -> None:
    """A request fails when the handshake has had its time, and others are served meanwhile."""
    text, other = far.text(), far.text()
    params = far.prefilled(text)
    log = Log(far.decode)
    with network.link(DECODE, outward=CUT, inward=CUT):
        reply = far.being_decoded(text, params)
        assert ask_unaided(far.decode, far.model, other)
        assert_failed(reply.result(SLACK_S))
    (line,) = log.complaints()
    row = ROWS["the prefill engine's host is cut off before the first handshake"]
    assert row.tells("500", line, "lease"), line


def test_host_that_is_cut_off_during_a_read(far: Stage, network: Network) -> None:
    """A stage's host is lost when some of its bytes have come: that costs one request its time."""
    far.assert_serving()
    text, other = far.text(), far.text()
    params = far.prefilled(text)
    log = Log(far.decode)
    with network.link(SECOND, outward=SLOW):
        sent_before = network.bytes_sent(SECOND)
        reply = far.being_decoded(text, params)
        wait_until(
            lambda: network.bytes_sent(SECOND) - sent_before > STAGE_BYTES // 4, "a part of a read"
        )
        assert not reply.done()
        with network.link(SECOND, outward=CUT, inward=CUT):
            assert ask_unaided(far.decode, far.model, other)
            assert_failed(reply.result(READ_LIMIT_S + SLACK_S))
    (line,) = log.complaints()
    row = ROWS["a host of the prefill engine is cut off during a read"]
    assert row.tells("500", line, "lease"), line


def test_workers_that_hang_cost_a_request_its_time(far: Stage) -> None:
    """The client hears of it, and others are served meanwhile and after it."""
    far.assert_serving()
    text, other, after = far.text(), far.text(), far.text()
    right, params = far.right_answer(after), far.prefilled(text)
    log = Log(far.decode)
    with hung(far.prefill):
        reply = far.being_decoded(text, params)
        assert ask_unaided(far.decode, far.model, other)
        assert_failed(reply.result(READ_LIMIT_S + SLACK_S))
        (line,) = log.complaints()
        assert ROWS["the prefill engine's workers hang"].tells("500", line, "lease"), line
        assert ask_unaided(far.decode, far.model, other)
    assert answer_of(far.decoded(after, far.prefilled(after))) == right


@pytest.mark.nightly
def test_slow_link_costs_time_only(far: Stage, network: Network) -> None:
    """Bytes that take seconds on their way are waited for, and nothing is complained of."""
    far.assert_serving()
    text = far.text()
    right, params = far.right_answer(text), far.prefilled(text)
    log = Log(far.decode)
    with network.link(SECOND, outward=SLOW):
        reply = far.decoded(text, params)
    assert answer_of(reply) == right
    assert SLOW.bytes_s is not None
    assert reply.elapsed.total_seconds() > 0.8 * STAGE_BYTES / SLOW.bytes_s
    assert log.complaints() == []


@pytest.mark.nightly
def test_lossy_link_costs_time_only(far: Stage, network: Network) -> None:
    """One packet of twenty is lost, both ways: TCP sends it again."""
    far.assert_serving()
    lossy = Link(lost=0.05)
    log = Log(far.decode)
    for _ in range(4):
        text = far.text()
        right, params = far.right_answer(text), far.prefilled(text)
        with network.link(SECOND, outward=lossy, inward=lossy):
            assert answer_of(far.decoded(text, params)) == right
    assert log.complaints() == []


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("links", "what"),
    [
        # Whether requests for bytes are lost or the bytes: the same, and as when both are.
        pytest.param({"outward": CUT}, "packets of a host are lost one way", id="outward"),
        pytest.param({"inward": CUT}, "packets of a host are lost one way", id="inward"),
        # As where a tunnel holds less than its ends believe: messages pass, and blocks do not.
        pytest.param({"outward": SMALL}, "large packets are lost", id="large packets"),
    ],
)
def test_packets_that_are_lost(
    far: Stage, network: Network, links: dict[str, Link], what: str
) -> None:
    """A read that waits for what is lost costs its request its time, and no other one."""
    far.assert_serving()
    text, other = far.text(), far.text()
    params = far.prefilled(text)
    log = Log(far.decode)
    with network.link(SECOND, **links):
        reply = far.being_decoded(text, params)
        assert ask_unaided(far.decode, far.model, other)
        assert_failed(reply.result(READ_LIMIT_S + SLACK_S))
    (line,) = log.complaints()
    assert ROWS[what].tells("500", line, "lease"), line


@pytest.mark.nightly
def test_large_packets_that_are_lost_before_the_first_handshake(
    far: Stage, recomputing: Engine, network: Network
) -> None:
    """The connection opens, and the answer does not come; the request is computed."""
    text = far.text()
    right, params = far.right_answer(text), far.prefilled(text)
    log = Log(recomputing)
    with network.link(HEAD, outward=SMALL):
        assert answer_of(far.decoded(text, params, recomputing)) == right
    (line,) = log.complaints()
    row = ROWS["large packets are lost before the first handshake"]
    assert row.tells("500", line, "lease"), line


@pytest.mark.nightly
def test_host_that_is_cut_off_during_a_read_that_is_computed(
    far: Stage, recomputing: Engine, network: Network
) -> None:
    """The client waits, and has the right answer; blocks in doubt come back once it is healed."""
    far.connect(recomputing)
    text = far.text()
    right, params = far.right_answer(text), far.prefilled(text)
    log = Log(recomputing)
    with network.link(SECOND, outward=SLOW):
        sent_before = network.bytes_sent(SECOND)
        reply = far.being_decoded(text, params, recomputing)
        wait_until(
            lambda: network.bytes_sent(SECOND) - sent_before > STAGE_BYTES // 4, "a part of a read"
        )
        with network.link(SECOND, outward=CUT, inward=CUT):
            assert answer_of(reply.result(READ_LIMIT_S + SLACK_S)) == right
    (line,) = log.complaints()
    row = ROWS["a host of the prefill engine is cut off during a read"]
    assert row.tells("500", line, "lease"), line
    far.assert_blocks_are_free(recomputing)
    far.connect(recomputing)
