# SPDX-License-Identifier: Apache-2.0
"""A scheduler is heard by its own workers, and they hear nobody else."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from tests.v1.kv_connector.unit.reshard.transport.channels import (
    DEADLINE_S,
    HOST,
    open_socket,
    wait_until,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.announcements import (
    Announcer,
    AnnouncerAddress,
    listen_to,
    open_announcer,
)


@pytest.fixture
def announcer() -> Iterator[Announcer]:
    """A scheduler's."""
    opened = open_announcer(HOST)
    yield opened
    opened.close()


@contextlib.contextmanager
def listening_to(address: AnnouncerAddress) -> Iterator[list[bytes]]:
    """A worker that listens; yields what it has heard."""
    heard: list[bytes] = []
    listener = listen_to(address, heard.append)
    try:
        yield heard
    finally:
        listener.close()


def speak_until_heard(announcer: Announcer, *workers: list[bytes]) -> None:
    """Connections take a moment, in which nothing is heard."""

    def is_heard() -> bool:
        announcer.send(b"hello")
        return all(workers)

    wait_until(is_heard)


def listeners() -> list[threading.Thread]:
    """The threads of all who listen."""
    return [each for each in threading.enumerate() if each.name == "reshard-listener"]


def test_all_workers_hear_everything_in_order(announcer):
    """From when they are connected; each is told alike."""
    said = [bytes([number]) for number in range(200)]
    with listening_to(announcer.address) as first, listening_to(announcer.address) as second:
        speak_until_heard(announcer, first, second)
        for message in said:
            announcer.send(message)
        for heard in (first, second):
            wait_until(lambda heard=heard: heard[-1] == said[-1])
            assert heard[-len(said) :] == said


def has_ipv6() -> bool:
    """Whether this machine has an address of IPv6."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
def test_addresses_may_be_of_ipv6():
    """As those of engines are."""
    announcer = open_announcer("::1")
    with listening_to(announcer.address) as heard:
        speak_until_heard(announcer, heard)
    announcer.close()


def test_large_message_is_not_taken_in(announcer):
    """It ends who sent it, and the next one is told what it wants to hear."""
    with open_socket(zmq.SUB) as large:
        large.curve_serverkey = announcer.address.public_key
        large.curve_publickey, large.curve_secretkey = zmq.curve_keypair()
        monitor = large.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        large.subscribe(b"x" * 2000)
        large.connect(f"tcp://{HOST}:{announcer.address.port}")
        assert monitor.poll(DEADLINE_S * 1000)
        with listening_to(announcer.address) as heard:
            speak_until_heard(announcer, heard)
        large.disable_monitor()
        monitor.close()


@pytest.mark.parametrize("key", [None, zmq.curve_keypair()[0]], ids=["no key", "another key"])
def test_strangers_hear_nothing(announcer, key):
    """Who was not told the key by the scheduler is not connected."""
    with listening_to(announcer.address) as heard, open_socket(zmq.SUB) as stranger:
        if key is not None:
            stranger.curve_serverkey = key
            stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
        stranger.subscribe(b"")
        monitor = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        stranger.connect(f"tcp://{HOST}:{announcer.address.port}")
        assert monitor.poll(DEADLINE_S * 1000)
        speak_until_heard(announcer, heard)
        assert not stranger.poll(0)
        stranger.disable_monitor()
        monitor.close()


def test_nobody_else_is_heard(announcer):
    """Who listens in the scheduler's place, without its secret key, is not connected to."""
    with open_socket(zmq.PUB) as impostor:
        impostor.curve_server = True
        impostor.curve_secretkey = zmq.curve_keypair()[1]
        monitor = impostor.get_monitor_socket(zmq.EVENT_ACCEPTED)
        port = impostor.bind_to_random_port(f"tcp://{HOST}")
        with listening_to(replace(announcer.address, port=port)) as heard:
            # Who is connected stays so, and who is not tries again.
            for _ in range(3):
                assert monitor.poll(DEADLINE_S * 1000)
                recv_monitor_message(monitor)
                impostor.send(b"believe me")
            assert not heard
        impostor.disable_monitor()
        monitor.close()


def test_who_does_not_listen_holds_up_nobody(announcer):
    """A worker that hangs misses what is said, and others and the scheduler do not wait for it."""
    goes_on = threading.Event()
    late: list[bytes] = []

    def hang(message: bytes) -> None:
        late.append(message)
        goes_on.wait()

    num_messages = 3000
    hung = listen_to(announcer.address, hang)
    try:
        speak_until_heard(announcer, late)
        with listening_to(announcer.address) as heard:
            speak_until_heard(announcer, heard)
            for number in range(num_messages):
                # More than the system keeps of a connection.
                announcer.send(number.to_bytes(1 << 15, "little"))
                if number % 100 == 0:
                    # Who reads is not so far behind that it would miss something.
                    wait_until(lambda number=number: len(heard) > number)
            assert len(late) == 1
            goes_on.set()

            def end_is_heard() -> bool:
                announcer.send(b"end")
                return late[-1] == heard[-1] == b"end"

            wait_until(end_is_heard)
            assert len(late) < num_messages < len(heard)
    finally:
        goes_on.set()
        hung.close()


def test_closed_ones_leave_nothing(announcer):
    """Neither threads nor sockets, whoever goes first, and however often it is said."""
    listener = listen_to(announcer.address, lambda _: None)
    assert listeners()
    announcer.close()
    announcer.close()
    listener.close()
    listener.close()
    assert not listeners()
    # The port is free.
    with open_socket(zmq.REP) as other:
        other.bind(f"tcp://{HOST}:{announcer.address.port}")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux's affinity")
def test_all_of_its_threads_stay_off_the_models_cores(announcer):
    """ZeroMQ's own among them, which begin with the first socket."""
    own = os.sched_getaffinity(0)
    process = psutil.Process()
    before = {each.id for each in process.threads()}
    listener = listen_to(announcer.address, lambda _: None, {max(own)})
    try:
        new = {each.id for each in process.threads()} - before
        assert len(new) >= 3
        assert all(os.sched_getaffinity(each) == {max(own)} for each in new)
        assert os.sched_getaffinity(0) == own
    finally:
        listener.close()


def test_keys_are_not_told_to_logs(announcer):
    """What vLLM sends its workers is written there when it breaks down."""
    assert announcer.address.public_key.decode() not in repr(announcer.address)


def refuse() -> None:
    """As ZeroMQ does that was built without CURVE."""
    raise zmq.ZMQError(zmq.ENOTSUP)


def test_engine_does_without_an_address(caplog_vllm):
    """A line says what that costs."""
    assert open_announcer("192.0.2.1") is None
    (line,) = caplog_vllm.messages
    assert "nothing can be announced to them at 192.0.2.1 (" in line


def test_worker_does_without_cores_that_are_gone(announcer, caplog_vllm):
    """Also where it is the system that refuses."""
    before = psutil.Process().num_fds()
    assert listen_to(announcer.address, lambda _: None, {1 << 14}) is None
    assert psutil.Process().num_fds() == before
    (line,) = caplog_vllm.messages
    assert "decode engines may wait for that step" in line


def test_engine_and_worker_do_without_curve(announcer, caplog_vllm, monkeypatch):
    """The same line at each, and nothing is left open."""
    monkeypatch.setattr(zmq, "curve_keypair", refuse)
    before = psutil.Process().num_fds()
    assert open_announcer(HOST) is None
    assert listen_to(announcer.address, lambda _: None, None) is None
    assert psutil.Process().num_fds() == before
    lines = caplog_vllm.messages
    assert len(lines) == 2
    assert all(f"nothing can be announced to them at {HOST} (" in line for line in lines)
    assert all(line.endswith("raise the limit of open files (ulimit -n).") for line in lines)


def test_message_that_cannot_be_taken_up_is_not_the_last(announcer, caplog_vllm):
    """The thread says so, and hears the next one."""
    heard: list[bytes] = []

    def hear(message: bytes) -> None:
        if message == b"odd":
            raise ValueError("nobody thought of this")
        heard.append(message)

    listener = listen_to(announcer.address, hear)
    try:
        speak_until_heard(announcer, heard)
        announcer.send(b"odd")
        # What was said before it may still arrive.
        wait_until(lambda: "nobody thought of this" in caplog_vllm.text)
        assert "An announcement is lost" in caplog_vllm.text
        heard.clear()
        speak_until_heard(announcer, heard)
    finally:
        listener.close()
