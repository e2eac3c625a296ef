# SPDX-License-Identifier: Apache-2.0
"""NIXL metadata ends a process that was made for that, and nobody else."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.v1.kv_connector.unit.reshard.engine.workers import (
    DEADLINE_S,
    Progress,
    assert_received,
    fill,
    receive,
    wait_until,
)
from tests.v1.kv_connector.unit.reshard.programs import python_path
from tests.v1.kv_connector.unit.reshard.transport import fake_nixl
from tests.v1.kv_connector.unit.reshard.transport.channels import (
    BOUNDS,
    FACTORS,
    asking,
    describe,
    engine_at,
    reply_of,
    serving,
)
from tests.v1.kv_connector.unit.reshard.transport.loading import (
    forking_process,
    start_of_address,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import (
    RemoteHandshakeError,
    RemoteUnreachableError,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.description import (
    decode_worker,
    encode_worker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    RemoteEngineAddress,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.metadata import (
    WorkerHandshake,
    encode_reply,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport import probe as probe_module
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport import probe_process
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.agent import (
    NixlAgent,
    nixl_module,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.agent_metadata import (
    with_room,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.handshake_client import (
    HandshakeClient,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.probe import (
    MetadataProbe,
)

FAKE = "fake_nixl"


@pytest.fixture
def fake_nixl_is_found(monkeypatch) -> None:
    """Processes that are started find the module."""
    monkeypatch.setenv("PYTHONPATH", str(Path(fake_nixl.__file__).parent))


@pytest.fixture
def fake(fake_nixl_is_found) -> Iterator[MetadataProbe]:
    """A probe whose NIXL does as it is told."""
    probe = MetadataProbe(FAKE)
    yield probe
    probe.close()


@pytest.fixture
def forked(monkeypatch) -> list[object]:
    """A thing for each child that is asked for."""
    send_fds, forked = socket.send_fds, []

    def fork(*arguments: object) -> int:
        forked.append(arguments)
        return send_fds(*arguments)

    monkeypatch.setattr(socket, "send_fds", fork)
    return forked


@pytest.fixture
def tried(fake, monkeypatch) -> list[list[bytes]]:
    """What that probe is through with, whatever came of it."""
    try_all, tried = fake.try_all, []

    async def try_and_note(metadata: list[bytes]) -> list[bytes]:
        try:
            return await try_all(metadata)
        finally:
            tried.append(metadata)

    monkeypatch.setattr(fake, "try_all", try_and_note)
    return tried


@pytest.fixture
def real() -> Iterator[MetadataProbe]:
    """A probe with NIXL itself."""
    probe = MetadataProbe(nixl_module())
    yield probe
    probe.close()


def survives(probe: MetadataProbe, *metadata: bytes) -> bool:
    """Whether a process has survived an engine's metadata."""
    try:
        asyncio.run(asyncio.wait_for(probe.try_all(metadata), DEADLINE_S))
    except RemoteHandshakeError as error:
        assert "NIXL ends the process that loads its metadata" in str(error)
        return False
    return True


def children() -> list[psutil.Process]:
    """The processes that a probe has forked."""
    forks = forking_process()
    assert forks is not None
    return forks.children()


def has_ended(child: psutil.Process) -> bool:
    """Whether a process does nothing any more."""
    try:
        return child.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_child_is_ready_before_the_first_handshake(fake, tried, forked):
    """A client that is told to prepare has one, once, that has loaded what it was given."""
    with closing(HandshakeClient(BOUNDS, probe=fake)) as client:
        for _ in range(2):
            client.prepare(b"our own")
        wait_until(lambda: tried)
        (child,) = children()
    # The client has closed it, and all with it.
    wait_until(lambda: has_ended(child))
    assert tried == [[b"our own"]] and len(forked) == 1
    client.prepare(b"our own")
    assert forking_process() is None


@pytest.mark.parametrize("last_words", [b"abort", b"hang"])
def test_client_that_could_not_prepare_asks_all_the_same(fake, tried, monkeypatch, last_words):
    """What is wrong with our own metadata says nothing of others'."""
    monkeypatch.setattr(probe_module, "_LIMIT_S", 0.5)
    with closing(HandshakeClient(BOUNDS, probe=fake)) as client:
        client.prepare(last_words)
        wait_until(lambda: tried == [[last_words]])
    assert survives(fake, b"good")


def test_machine_without_processes_prepares_nothing(fake, monkeypatch):
    """It is tried again, and told, when an answer is to be tried."""
    refused = threading.Event()

    def refuse(*_, **__):
        refused.set()
        raise OSError(errno.EAGAIN, "no more processes")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with closing(HandshakeClient(BOUNDS, probe=fake)) as client:
        client.prepare(b"our own")
        assert refused.wait(DEADLINE_S)
    with pytest.raises(RemoteHandshakeError, match="raise this machine's limits of processes"):
        asyncio.run(fake.try_all([b"good"]))


def test_what_ends_its_process_is_refused(fake):
    """However it does; what forks goes on, and what comes next is tried by another child."""
    assert survives(fake, b"good", b"refuse")
    forks = forking_process()
    for last_words in (b"abort", b"crash", b"exit"):
        assert not survives(fake, b"A:good", b"B:" + last_words)
        assert not survives(fake, last_words, b"good")
        assert survives(fake, b"good")
    assert forks is not None and forking_process() == forks


@pytest.mark.parametrize("first", [b"A:good", b"A:refuse"])
@pytest.mark.parametrize("how", ["takes known names", "refuses known names"])
def test_name_that_is_known_hides_nothing(fake, monkeypatch, first, how):
    """NIXL does not look into what bears a name that it knows, and a worker may load that alone."""
    monkeypatch.setenv("FAKE_NIXL", how)
    assert survives(fake, first, b"A:good", b"B:good")
    assert not survives(fake, first, b"A:abort")
    assert not survives(fake, first, b"B:good", b"A:abort")


def test_engine_of_which_little_can_be_reached_is_no_engine(fake):
    """Each that NIXL refuses takes an agent."""
    assert survives(fake, *[b"A:refuse"] * probe_process.MAX_AGENTS)
    assert not survives(fake, *[b"A:refuse"] * (probe_process.MAX_AGENTS + 1))


def test_what_hangs_is_refused_and_ends(fake, monkeypatch):
    """A child has its time, and nobody has to end it."""
    monkeypatch.setattr(probe_module, "_LIMIT_S", 0.2)
    assert not survives(fake, b"hang")
    assert survives(fake, b"good")


def test_handshake_that_runs_out_of_time_leaves_a_child_to_its_limit(fake, monkeypatch):
    """It ends by itself, and the next answer is tried beside it."""
    monkeypatch.setattr(probe_module, "_LIMIT_S", 3.0)
    assert survives(fake, b"good")

    async def give_up() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(fake.try_all([b"hang"]), 0.1)
        await fake.try_all([b"good"])

    asyncio.run(give_up())
    wait_until(lambda: len(children()) == 1)


def test_child_that_has_survived_tries_the_next_answers(fake, forked, monkeypatch):
    """To make an agent takes longest; and one ends after some answers, with its descriptors."""
    monkeypatch.setattr(probe_module, "MAX_TRIED", 3)
    for number in range(7):
        assert survives(fake, b"%d:good" % number)
    # The first, and one ahead of time after the third and the sixth.
    assert len(forked) == 3
    wait_until(lambda: len(children()) == 1)


def test_engine_is_not_refused_for_what_others_have_broken(fake):
    """A child that has loaded other engines' is no witness: a fresh one tells."""
    assert survives(fake, b"A:good")
    assert survives(fake, b"B:alone")
    assert not survives(fake, b"C:good", b"D:alone")


def test_large_metadata_comes_whole(fake):
    """An engine's workers may say 16 MiB in all."""
    large = [b"%d:" % number + bytes(1 << 20) for number in range(15)]
    assert survives(fake, *large, b"good")
    assert not survives(fake, *large, b"abort")


@pytest.mark.parametrize("whose", ["what forks", "the next child", "both"])
def test_process_that_has_ended_is_replaced(fake, whose):
    """Whatever ended it while nothing was tried."""
    assert survives(fake, b"good")
    wait_until(lambda: len(children()) == 1)
    (child,) = children()
    if whose != "the next child":
        forking_process().kill()
    if whose != "what forks":
        child.kill()
        wait_until(lambda: has_ended(child))
    assert survives(fake, b"good")
    assert not survives(fake, b"abort")
    assert survives(fake, b"good")


@pytest.mark.parametrize("why", ["no such file", "makes no agent", "no such module"])
def test_nothing_is_taken_untried(fake_nixl_is_found, monkeypatch, why):
    """Where no process can be had for it, an engine is refused, and the message says what helps."""
    if why == "no such file":
        monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    monkeypatch.setenv("FAKE_NIXL", why)
    module = "no_such_nixl" if why == "no such module" else "fake_nixl"
    probe = MetadataProbe(module)
    with pytest.raises(RemoteHandshakeError, match=r"not tried.*side_channel_key_file"):
        asyncio.run(asyncio.wait_for(probe.try_all([b"good"]), DEADLINE_S))
    probe.close()


def test_nothing_is_left_when_it_is_closed(fake):
    """No process, no descriptor."""
    fds = psutil.Process().num_fds()
    assert survives(fake, b"good")
    pids = [each.pid for each in (forking_process(), *children())]
    fake.close()
    fake.close()
    wait_until(lambda: not any(map(psutil.pid_exists, pids)))
    assert psutil.Process().num_fds() == fds


def test_nothing_outlives_a_worker_that_is_killed(fake_nixl_is_found):
    """Even while something is tried that hangs for long."""
    program = """
import asyncio, sys
from psutil import Process
from reshard.transport.probe import MetadataProbe
probe = MetadataProbe("fake_nixl")
asyncio.run(probe.try_all([b"good"]))
print(*(each.pid for each in Process().children(recursive=True)), flush=True)
sys.stdin.read()
"""
    worker = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": python_path()},
    )
    assert worker.stdout is not None and worker.stdin is not None
    with worker.stdout, worker.stdin:
        pids = list(map(int, worker.stdout.readline().split()))
        # What forks, and a child of it.
        assert len(pids) == 2 and all(map(psutil.pid_exists, pids))
        worker.kill()
        worker.wait(DEADLINE_S)
        wait_until(lambda: not any(map(psutil.pid_exists, pids)))


@pytest.fixture
def source() -> Iterator[NixlAgent]:
    """An agent whose metadata is known."""
    agent = NixlAgent("source", num_threads=1)
    yield agent
    agent.close()


def test_one_wrong_byte_of_a_real_address(real, source):
    """UCX aborts whoever loads it, which has been a worker. Which byte it is differs."""
    metadata = source.metadata()
    address = start_of_address(metadata)
    assert survives(real, metadata)
    mutants = (
        metadata[:place] + value + metadata[place + 1 :]
        for place in range(address, address + 64)
        for value in (b"\x23", b"\xff")
    )
    wrong = next(each for each in mutants if not survives(real, each))
    assert not survives(real, metadata, wrong)
    assert not survives(real, wrong)
    assert survives(real, metadata)


def engine_that_says(metadata: bytes) -> list[bytes]:
    """The answer of an engine of one worker."""
    return reply_of(replace(describe(0, "engine"), agent_metadata=metadata))


def test_what_was_tried_is_what_is_loaded(real, source):
    """With its room: behind the address, a worker would have something else than the trial had."""
    with serving(engine_that_says(source.metadata())) as server, asking(probe=real) as client:
        (worker,) = client.request(engine_at(server.port), FACTORS).result(DEADLINE_S)
    assert worker.agent_metadata == with_room(source.metadata()) != source.metadata()


def test_others_shake_hands_while_something_is_tried(fake):
    """They have children of their own; once too many hang, the rest wait, and say for what."""
    with (
        serving(engine_that_says(b"hang")) as liar,
        serving(engine_that_says(b"good")) as good,
        asking(probe=fake) as client,
    ):
        hanging = [
            client.request(engine_at(liar.port), FACTORS) for _ in range(probe_module.MAX_AT_ONCE)
        ]
        hanging.pop().cancel()
        assert client.request(engine_at(good.port), FACTORS).result(DEADLINE_S)
        assert not any(each.done() for each in hanging)
    with serving(engine_that_says(b"hang")) as liar, asking(probe=fake, timeout_s=1.0) as client:
        hanging = [
            client.request(engine_at(liar.port), FACTORS)
            for _ in range(probe_module.MAX_AT_ONCE + 1)
        ]
        for each in hanging:
            with pytest.raises(RemoteUnreachableError, match="was not tried within 1 s"):
                each.result(DEADLINE_S)


def test_handshake_says_who_has_ended_a_process(fake):
    """And the client asks others all the same."""
    with (
        serving(engine_that_says(b"abort")) as liar,
        serving(engine_that_says(b"good")) as good,
        asking(probe=fake) as client,
    ):
        lied = client.request(engine_at(liar.port), FACTORS)
        told = client.request(engine_at(good.port), FACTORS)
        with pytest.raises(RemoteHandshakeError, match=f"127.0.0.1:{liar.port}: NIXL ends"):
            lied.result(DEADLINE_S)
        assert told.result(DEADLINE_S)[0].agent_metadata == b"good"
    assert forking_process() is None


def test_worker_survives_one_wrong_byte(engines):
    """The request that names such a host fails; others are read, from then on and meanwhile."""
    evil, good = engines("evil"), engines("good")
    decode = engines("decode", probes=True)
    ((rank, worker),) = evil.workers.items()
    assert worker.handshake is not None
    said = decode_worker(worker.handshake.body)
    metadata = said.agent_metadata
    address = metadata.index(b"UCX") + len(b"UCX") + 10
    body = encode_worker(
        replace(said, agent_metadata=metadata[:address] + b"\x23" + metadata[address + 1 :])
    )
    reply = {(rank.pp_rank, rank.tp_rank): WorkerHandshake(worker.handshake.factors, body)}
    whole = fill(good, [5, 2, 9])
    good.offer("p-a")
    with serving(encode_reply(reply)) as liar:
        lied = receive(RemoteEngineAddress("evil", "127.0.0.1", liar.port), [6], [7], tokens=16)
        decode.start(receive={"lied": lied, "good": receive(good.serve(), [3, 4, 1], [5, 2, 9])})
        progress = Progress(decode, good)
        progress.until(decode, received="good")
        progress.until(decode, received="lied")
    assert_received(decode, [3, 4, 1], whole)
    (worker,) = decode.workers.values()
    assert worker.report.take_failed() == {"lied": {6}}
