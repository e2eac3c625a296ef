# SPDX-License-Identifier: Apache-2.0
"""A scheduler is woken by its own workers, and by nothing else."""

from __future__ import annotations

import errno
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
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.doorbell import (
    Doorbell,
    Ringer,
    open_doorbell,
    open_ringer,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.sockets import (
    connect_internally,
)


class Sleeper:
    """What is woken."""

    def __init__(self) -> None:
        self.num_rings = 0
        self._rung = threading.Semaphore(0)

    def wake(self) -> None:
        """Called by the doorbell's thread."""
        self.num_rings += 1
        self._rung.release()

    def wait(self) -> None:
        """Wait for one ring."""
        assert self._rung.acquire(timeout=DEADLINE_S)


@pytest.fixture
def sleeper() -> Sleeper:
    """A scheduler's."""
    return Sleeper()


@pytest.fixture
def doorbell(sleeper) -> Iterator[Doorbell]:
    """Its doorbell."""
    opened = Doorbell(HOST, sleeper.wake)
    yield opened
    opened.close()


@pytest.fixture
def ringers(doorbell) -> Iterator[list[Ringer]]:
    """Two workers."""
    made = [Ringer(doorbell.address, name) for name in ("pp0tp0", "pp0tp1")]
    yield made
    for each in made:
        each.close()


def test_each_worker_is_known_once_it_is_connected(doorbell, ringers):
    """A scheduler rests only when all of its workers could wake it."""
    wait_until(lambda: doorbell.num_ringers == 2)
    for _ in range(3):
        ringers[0].ring()
    assert doorbell.num_ringers == 2


def test_every_ring_wakes(sleeper, doorbell, ringers):
    """One after the other, by either worker."""
    for _ in ringers:
        sleeper.wait()
    for number in range(10):
        ringers[number % 2].ring()
        sleeper.wait()
    assert sleeper.num_rings == 12


def test_worker_without_the_key_is_not_heard(sleeper, doorbell):
    """Nor does it count as a worker."""
    _, other_key = zmq.curve_keypair()
    with open_socket(zmq.PUSH) as socket:
        watch = socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_DISCONNECTED
        )
        connect_internally(socket, replace(doorbell.address, public_key=other_key))
        socket.send(b"pp9tp9")
        assert watch.poll(DEADLINE_S * 1e3)
        recv_monitor_message(watch)
        assert doorbell.num_ringers == sleeper.num_rings == 0


def test_ringing_where_nothing_is_heard_waits_for_nothing(doorbell):
    """More rings than fit are as good as one."""
    ringer = Ringer(doorbell.address, "pp0tp0")
    doorbell.close()
    for _ in range(5000):
        ringer.ring()
    ringer.close()


def test_closing_twice_is_closing_once(doorbell, ringers):
    """On both ends."""
    for each in (*ringers, *ringers, doorbell, doorbell):
        each.close()


def test_engine_can_do_without(monkeypatch, caplog_vllm, doorbell):
    """Where there is no socket, there is a line in the log."""

    def refuse(*_: object) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    monkeypatch.setattr(zmq.Context, "socket", refuse)
    assert open_doorbell(HOST, lambda: None) is None
    assert open_ringer(doorbell.address, "pp0tp0", None) is None
    assert caplog_vllm.text.count("Workers cannot wake their scheduler at") == 2
