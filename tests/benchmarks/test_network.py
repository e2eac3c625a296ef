# SPDX-License-Identifier: Apache-2.0
"""Namespaces with a link between them, and bytes that arrive over it."""

from __future__ import annotations

import os
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from benchmarks.caches import UNWRITTEN, Arrival
from benchmarks.network import Link, Site, move_to, sites
from benchmarks.watching import ArrivalWatch
from tools.pdstack.errors import NetworkError

LIMIT_S = 60.0


def listen(site: Site) -> socket.socket:
    """Listen in a namespace. The calling thread stays there."""
    move_to(site)
    # Where UCX looks for its devices, and takes those that are up.
    assert site.device is not None
    assert Path("/sys/class/net", site.device, "operstate").read_text().strip() == "up"
    return socket.create_server((site.host, 0))


def call(site: Site, address: tuple[str, int]) -> tuple[str, int]:
    """Connect from a namespace; returns who was reached. The calling thread stays there."""
    move_to(site)
    with socket.create_connection(address, LIMIT_S) as connection:
        return connection.getpeername()


def test_loopback_is_always_there():
    """Without a link, both engines are on this machine and read over TCP."""
    with sites(None) as ends:
        assert ends == (Site("127.0.0.1", None, "tcp"),) * 2


def test_namespaces_reach_each_other_and_go(monkeypatch):
    """Threads at both ends meet over the link; afterwards there are no namespaces."""
    # What is set for a process that stays there.
    monkeypatch.setenv("UCX_TLS", "all")
    monkeypatch.setenv("UCX_NET_DEVICES", "all")
    with ExitStack() as stack:
        try:
            ends = stack.enter_context(sites(Link(1)))
        except NetworkError as error:
            pytest.skip(str(error))
        for site, peer in (ends, ends[::-1]):
            threads = stack.enter_context(ThreadPoolExecutor(2))
            server = threads.submit(listen, site).result(LIMIT_S)
            address = stack.enter_context(server).getsockname()
            assert threads.submit(call, peer, address).result(LIMIT_S) == address
        assert os.environ["UCX_TLS"] == "tcp"
        assert os.environ["UCX_NET_DEVICES"] == ends[0].device
    left = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    assert not any(site.namespace in left for site in ends)


def test_what_this_machine_cannot_do_is_said(monkeypatch, tmp_path):
    """Without the programs that make networks, the reason names the first that is missing."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NetworkError, match="needs ip"), sites(Link(10, 0.1)):
        pass
    with pytest.raises(NetworkError, match="no network namespace bench-none"):
        move_to(Site(namespace="bench-none"))


def test_links_say_what_they_are():
    """Rate and delay, the latter only where there is one."""
    assert [str(link) for link in (Link(10, 0.1), Link(1))] == [
        "TCP, 10 Gbit/s, 0.1 ms",
        "TCP, 1 Gbit/s",
    ]


def test_bytes_have_arrived_when_the_last_of_every_head_has():
    """One head of one block that is still as it was cleared is enough to wait."""
    planes = [torch.full((4, 2, 8), UNWRITTEN, dtype=torch.uint8) for _ in range(2)]
    arrival = Arrival([plane[..., -1] for plane in planes], torch.tensor([1, 3]))
    for plane in planes:
        plane[[1, 3]] = 5
    planes[0][3, 1, -1] = UNWRITTEN
    assert not arrival.complete()
    watch = ArrivalWatch(arrival)
    planes[0][3, 1, -1] = 5
    assert watch.end() is not None


def test_bytes_that_never_come_are_not_there():
    """A watch that ends before has seen nothing."""
    plane = torch.full((2, 1, 8), UNWRITTEN, dtype=torch.uint8)
    assert ArrivalWatch(Arrival([plane[..., -1]], torch.tensor([1]))).end() is None
