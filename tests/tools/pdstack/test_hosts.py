# SPDX-License-Identifier: Apache-2.0
"""Hosts that reach each other, and links between them that lose, hold up and cut."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

from tools.pdstack.errors import NetworkError
from tools.pdstack.hosts import CUT, DEVICE, Link, Network, drop_program, hosts, visiting

LIMIT_S = 60.0
MANY = 400
SO_RCVBUFFORCE = 33
"""As <asm-generic/socket.h> has it: more than others may ask for."""
T = TypeVar("T")


@pytest.fixture
def network() -> Iterator[Network]:
    """Two hosts."""
    try:
        with hosts("a", "b") as network:
            yield network
    except NetworkError as error:
        pytest.skip(str(error))


def at(network: Network, name: str, function: Callable[[], T]) -> T:
    """Call something in a host."""
    with visiting(network.hosts[name].namespace):
        return function()


def udp(network: Network, name: str) -> socket.socket:
    """Return a socket that hears what is sent to a host, at a port of the kernel's choice."""

    def listen() -> socket.socket:
        heard = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        heard.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 4 << 20)
        heard.bind((network.hosts[name].address, 0))
        return heard

    return at(network, name, listen)


def arrived(
    source: socket.socket, target: socket.socket, count: int, size_bytes: int = 8, least: int = 0
) -> int:
    """Return how many of so many packets have arrived.

    Args:
        size_bytes: of each; as a packet of IP it has 28 more.
        least: how many are waited for; more may come in a moment.
    """
    for _ in range(count):
        source.sendto(bytes(size_bytes), target.getsockname())
    for heard in itertools.count():
        target.settimeout(LIMIT_S if heard < least else 0.1)
        try:
            target.recv(1 << 16)
        except TimeoutError:
            return heard
    raise AssertionError("never")


def namespaces_of(pid: int) -> set[str]:
    """Return the namespaces that a process has made."""
    text = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in text.splitlines() if line.startswith(f"hosts-{pid}-")}


def test_hosts_reach_each_other_and_go():
    """A connection opens and carries bytes; after the block, also after an error, all is gone."""
    with pytest.raises(ZeroDivisionError):
        try:
            with hosts("a", "b") as network, ThreadPoolExecutor(1) as pool:
                assert len(namespaces_of(os.getpid())) == 3
                address = network.hosts["b"].address
                server = at(network, "b", lambda: socket.create_server((address, 0)))
                with server:
                    accepted = pool.submit(server.accept)
                    client = at(
                        network,
                        "a",
                        lambda: socket.create_connection(server.getsockname(), LIMIT_S),
                    )
                    with client, accepted.result(LIMIT_S)[0] as there:
                        there.sendall(b"x")
                        assert client.recv(1) == b"x"
                        assert there.getpeername()[0] == network.hosts["a"].address
                raise ZeroDivisionError
        except NetworkError as error:
            pytest.skip(str(error))
    assert namespaces_of(os.getpid()) == set()


def test_visitor_comes_back(network):
    """Within, devices are those of the host; afterwards, also after an error, they are not."""
    before = {name for _, name in socket.if_nameindex()}
    with pytest.raises(ZeroDivisionError), visiting(network.hosts["a"].namespace):
        assert {name for _, name in socket.if_nameindex()} == {"lo", DEVICE}
        raise ZeroDivisionError
    assert {name for _, name in socket.if_nameindex()} == before
    with visiting(None):
        assert {name for _, name in socket.if_nameindex()} == before
    with pytest.raises(NetworkError, match="no network namespace none-such"), visiting("none-such"):
        pass


@pytest.mark.parametrize("way", ["outward", "inward"])
def test_cut_goes_one_way_until_it_is_healed(network, way):
    """What goes the other way arrives."""
    a, b = udp(network, "a"), udp(network, "b")
    with a, b:
        # So that each knows where the other is.
        assert arrived(a, b, 1, least=1) == arrived(b, a, 1, least=1) == 1
        with network.link("a", **{way: CUT}):
            expected = (0, MANY) if way == "outward" else (MANY, 0)
            out, back = expected
            assert (arrived(a, b, MANY, least=out), arrived(b, a, MANY, least=back)) == expected
        assert arrived(a, b, MANY, least=MANY) == arrived(b, a, MANY, least=MANY) == MANY


def test_large_packets_are_dropped_whatever_else_is(network):
    """The largest one that passes has the size that was said, also where others are lost."""
    a, b = udp(network, "a"), udp(network, "b")
    with a, b:
        arrived(a, b, 1, least=1)
        for link, least in ((Link(largest_bytes=600), MANY), (Link(0.5, largest_bytes=600), 1)):
            with network.link("a", outward=link):
                assert arrived(a, b, MANY, 600 - 28, least) >= least
                assert arrived(a, b, MANY, 601 - 28) == 0


def test_segments_are_lost_one_by_one(network):
    """The kernel does not hand over a connection's bytes in larger packets than a network has."""
    with ThreadPoolExecutor(1) as pool:
        address = network.hosts["b"].address
        server = at(network, "b", lambda: socket.create_server((address, 0)))
        with server, network.link("a", outward=Link(largest_bytes=1500)):
            accepted = pool.submit(server.accept)
            client = at(
                network, "a", lambda: socket.create_connection(server.getsockname(), LIMIT_S)
            )
            with client, accepted.result(LIMIT_S)[0] as there:
                there.settimeout(LIMIT_S)
                sending = pool.submit(client.sendall, bytes(1 << 20))
                heard = 0
                while heard < 1 << 20:
                    heard += len(there.recv(1 << 20))
                sending.result(LIMIT_S)


def test_share_is_lost_at_random(network):
    """Of 400 packets, a quarter, within six standard deviations."""
    a, b = udp(network, "a"), udp(network, "b")
    with a, b:
        arrived(a, b, 1, least=1)
        with network.link("b", inward=Link(lost=0.25)):
            assert (
                abs(arrived(a, b, MANY, least=MANY // 2) - 0.75 * MANY)
                < 6 * (MANY * 0.25 * 0.75) ** 0.5
            )


@pytest.mark.parametrize("way", ["outward", "inward"])
def test_slow_link_takes_its_time(network, way):
    """Each way has a rate of its own."""
    source, target = ("a", "b") if way == "outward" else ("b", "a")
    rate_bytes_s, size_bytes, count = 100_000, 1000, 50
    one, other = udp(network, source), udp(network, target)
    with one, other:
        arrived(one, other, 1, least=1)
        with network.link("a", **{way: Link(bytes_s=rate_bytes_s)}):
            sent_before, began = network.bytes_sent(source), time.monotonic()
            other.settimeout(LIMIT_S)
            for _ in range(count):
                one.sendto(bytes(size_bytes), other.getsockname())
            for _ in range(count):
                other.recv(1 << 16)
            # Less what it may send at once.
            assert time.monotonic() - began > 0.8 * (count * size_bytes - (8 << 10)) / rate_bytes_s
            assert network.bytes_sent(source) - sent_before >= count * size_bytes


def test_link_that_drops_nothing_needs_no_program():
    """The rest is a program that tests size first, then chance."""
    assert drop_program(Link(bytes_s=1)) == ""
    assert drop_program(CUT) == "4,32 0 0 4294963256,37 0 1 4294967295,6 0 0 0,6 0 0 2"
    assert drop_program(Link(0.5, 86)) == (
        "6,128 0 0 0,37 3 0 100,32 0 0 4294963256,37 0 1 2147483647,6 0 0 0,6 0 0 2"
    )


def test_what_this_machine_cannot_do_is_said(monkeypatch, tmp_path):
    """Without the programs that make networks, the reason names the first that is missing."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NetworkError, match="needs ip"), hosts("a"):
        pass


def test_ctrl_c_leaves_nothing(network):
    """A terminal sends it to all processes of a program, while it goes on with its clean-up."""
    program = """
import time
from tools.pdstack.hosts import hosts
with hosts("a", "b") as network:
    print(network.switch, flush=True)
    time.sleep(600)
"""
    root = Path(__file__).parents[3]
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        process_group=0,
    )
    try:
        assert process.stdout is not None
        switch = process.stdout.readline().strip()
        assert switch in namespaces_of(process.pid)
        for _ in range(2):
            os.killpg(process.pid, signal.SIGINT)
        process.wait(LIMIT_S)
        assert namespaces_of(process.pid) == set()
    finally:
        process.kill()
        process.wait()
