# SPDX-License-Identifier: Apache-2.0
"""A scheduler is heard by its own workers, and they hear nobody else."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from tests.v1.kv_connector.unit.reshard.transport.channels import (
    DEADLINE_S,
    HOST,
    open_socket,
    wait_until,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport import announcements
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.announcements import (
    Announcer,
    AnnouncerAddress,
    Listener,
    open_announcer,
)

NO_CONNECTION = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
)


@pytest.fixture
def announcer() -> Iterator[Announcer]:
    """A scheduler's."""
    opened = Announcer(HOST)
    yield opened
    opened.close()


@contextlib.contextmanager
def listening_to(address: AnnouncerAddress) -> Iterator[list[bytes]]:
    """A worker that listens; yields what it has heard."""
    heard: list[bytes] = []
    listener = Listener(address, heard.append)
    try:
        yield heard
    finally:
        listener.close()


def speak_until_heard(announcer: Announcer, *workers: list[bytes]) -> None:
    """Connections take a moment, in which nothing is heard."""

    def is_heard() -> bool:
        announcer.tell(b"hello")
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
            announcer.tell(message)
        for heard in (first, second):
            wait_until(lambda heard=heard: heard[-1] == said[-1])
            assert heard[-len(said) :] == said


@pytest.mark.parametrize("key", [None, zmq.curve_keypair()[0]], ids=["no key", "another key"])
def test_strangers_hear_nothing(announcer, key):
    """Who was not told the key by the scheduler is not connected."""
    with listening_to(announcer.address) as heard, open_socket(zmq.SUB) as stranger:
        if key is not None:
            stranger.curve_serverkey = key
            stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
        stranger.subscribe(b"")
        monitor = stranger.get_monitor_socket(NO_CONNECTION)
        stranger.connect(f"tcp://{HOST}:{announcer.address.port}")
        assert monitor.poll(DEADLINE_S * 1000)
        recv_monitor_message(monitor)
        speak_until_heard(announcer, heard)
        assert not stranger.poll(0)
        stranger.disable_monitor()
        monitor.close()


def test_nobody_else_is_heard(announcer):
    """Who listens in the scheduler's place, without its secret key, is not connected to."""
    with open_socket(zmq.PUB) as impostor:
        impostor.curve_server = True
        impostor.curve_secretkey = zmq.curve_keypair()[1]
        monitor = impostor.get_monitor_socket(NO_CONNECTION)
        port = impostor.bind_to_random_port(f"tcp://{HOST}")
        with listening_to(replace(announcer.address, port=port)) as heard:
            assert monitor.poll(DEADLINE_S * 1000)
            recv_monitor_message(monitor)
            impostor.send(b"believe me")
            # It tries again, and fails again, with the message waiting.
            assert monitor.poll(DEADLINE_S * 1000)
            assert not heard
        impostor.disable_monitor()
        monitor.close()


def test_who_does_not_listen_holds_up_nobody(announcer):
    """A worker that hangs misses what is said, and others and the scheduler do not wait for it."""
    hangs, goes_on = threading.Event(), threading.Event()
    calls: list[bytes] = []

    def hang(message: bytes) -> None:
        calls.append(message)
        hangs.set()
        goes_on.wait(DEADLINE_S)

    hung = Listener(announcer.address, hang)
    try:
        speak_until_heard(announcer, calls)
        assert hangs.wait(DEADLINE_S)
        with listening_to(announcer.address) as heard:
            speak_until_heard(announcer, heard)
            for _ in range(300):
                announcer.tell(bytes(1 << 16))
            announcer.tell(b"end")
            wait_until(lambda: heard[-1] == b"end")
        assert len(calls) == 1
    finally:
        goes_on.set()
        hung.close()


def test_closed_ones_leave_nothing(announcer):
    """Neither threads nor sockets, whoever goes first, and however often it is said."""
    listener = Listener(announcer.address, lambda _: None)
    assert listeners()
    announcer.close()
    announcer.close()
    listener.close()
    listener.close()
    assert not listeners()
    # The port is free.
    with open_socket(zmq.REP) as other:
        other.bind(f"tcp://{HOST}:{announcer.address.port}")


def test_listener_prepares_its_own_thread(announcer):
    """It helps the engine's thread, and may have to stay off its cores."""
    prepared: list[str] = []
    listener = Listener(
        announcer.address,
        lambda _: None,
        lambda: prepared.append(threading.current_thread().name),
    )
    wait_until(lambda: prepared)
    listener.close()
    assert prepared == ["reshard-listener"]


def test_keys_are_not_told_to_logs(announcer):
    """What vLLM sends its workers is written there when it breaks down."""
    assert announcer.address.public_key.decode() not in repr(announcer.address)


@pytest.mark.parametrize("host", ["192.0.2.1", None], ids=["not this machine's", "no CURVE"])
def test_engine_does_without(host, monkeypatch):
    """Where it cannot be, a line says what that costs."""
    lines: list[str] = []
    monkeypatch.setattr(
        announcements.logger, "warning", lambda text, *values: lines.append(text % values)
    )
    if host is None:

        def refuse() -> None:
            raise zmq.ZMQError(zmq.ENOTSUP)

        monkeypatch.setattr(zmq, "curve_keypair", refuse)
    assert open_announcer(host or HOST) is None
    (line,) = lines
    assert f"nothing can be announced to them at {host or HOST} (" in line
