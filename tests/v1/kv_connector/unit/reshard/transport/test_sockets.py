# SPDX-License-Identifier: Apache-2.0
"""Sockets that this engine listens on."""

from __future__ import annotations

import socket as sockets
from collections.abc import Iterator

import pytest
import zmq

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.sockets import listen

ARRIVES_MS = 30_000


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    """A context whose sockets end with the test."""
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def has_ipv6() -> bool:
    """Whether this machine has an address of IPv6."""
    try:
        with sockets.socket(sockets.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        pytest.param("::1", marks=pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")),
    ],
)
def test_any_free_port_is_said_and_answers(context, host):
    """Whatever kind of address it has."""
    puller, pusher = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    port = listen(puller, host, 0, 100)
    assert 0 < port < 1 << 16
    pusher.ipv6 = ":" in host
    pusher.connect(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
    pusher.send(b"x" * 100)
    assert puller.poll(ARRIVES_MS) and puller.recv() == b"x" * 100


def test_larger_frame_ends_its_sender_alone(context):
    """It is not taken in, and the next peer is heard."""
    puller = context.socket(zmq.PULL)
    port = listen(puller, "127.0.0.1", 0, 100)
    watch = puller.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    large, small = context.socket(zmq.PUSH), context.socket(zmq.PUSH)
    large.reconnect_ivl = -1
    large.connect(f"tcp://127.0.0.1:{port}")
    large.send(b"x" * 101)
    assert watch.poll(ARRIVES_MS)
    small.connect(f"tcp://127.0.0.1:{port}")
    small.send(b"x" * 100)
    assert puller.poll(ARRIVES_MS) and puller.recv() == b"x" * 100
    assert not puller.poll(0)
    puller.disable_monitor()


def test_port_that_is_taken_is_refused(context):
    """The one that was first goes on."""
    first, second = context.socket(zmq.PULL), context.socket(zmq.PULL)
    port = listen(first, "127.0.0.1", 0, 100)
    with pytest.raises(zmq.ZMQError, match="in use"):
        listen(second, "127.0.0.1", port, 100)
    assert listen(second, "127.0.0.2", port, 100) == port


def test_socket_waits_for_nobody_at_its_end(context):
    """Peers that vanish cost no memory for ever, and no time when it is closed."""
    one = context.socket(zmq.PULL)
    listen(one, "127.0.0.1", 0, 1 << 20)
    assert (one.linger, one.tcp_keepalive, one.maxmsgsize) == (0, 1, 1 << 20)
