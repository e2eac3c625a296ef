# SPDX-License-Identifier: Apache-2.0
"""Hosts of one's own: network namespaces of this machine, joined by a switch that can go wrong.

    with hosts("prefill", "decode") as network:
        with network.link("prefill", outward=Link(bytes_s=100_000), inward=CUT):
            ...

Each host has one device and an address of the range for benchmarks of networks (RFC 2544). Packets
that are lost are lost at the switch, so that neither end is told: no reset, no ICMP. Nothing of it
can be seen from this process's own network, and nothing stays after the block.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from .errors import NetworkError
from .process import uninterrupted

DEVICE = "eth0"
"""The network device of every host."""

_SUBNET = "198.18.52"
_NETWORKS = itertools.count()
_NAMESPACES = Path("/run/netns")
_MINE = Path("/proc/thread-self/ns/net")
_CLONE_NEWNET = 0x40000000

_MAC_BYTES = 14
_BURST_BYTES = 8 << 10
"""What a slow link may send at once: more than a packet."""
_QUEUE_BYTES = 64 << 10
"""What a slow link holds back before it drops."""

# Instructions of BPF (<linux/bpf_common.h>), and what is made of their result (<linux/pkt_cls.h>).
_LOAD_LENGTH, _LOAD, _JUMP_IF_GREATER, _RETURN = 0x80, 0x20, 0x25, 0x06
_RANDOM = 0xFFFFF038
"""Where a load finds a random number of 32 bits (`SKF_AD_OFF + SKF_AD_RANDOM`)."""
_PASS, _DROP = 0, 2


@dataclass(frozen=True)
class Link:
    """What becomes of packets that go one way between a host and the switch.

    Attributes:
        lost: the share of packets that is dropped at random, 0 to 1.
        largest_bytes: larger packets of IP are dropped; ``None`` for none of them.
        bytes_s: how fast they go; ``None`` for as fast as the kernel can.
    """

    lost: float = 0.0
    largest_bytes: int | None = None
    bytes_s: int | None = None


WHOLE = Link()
CUT = Link(lost=1.0)


@dataclass(frozen=True)
class Host:
    """One of the hosts.

    Attributes:
        address: where the others reach it.
        namespace: the network namespace of its processes.
    """

    name: str
    address: str
    namespace: str


@dataclass(frozen=True)
class Network:
    """Hosts, and the switch that joins them.

    Attributes:
        hosts: by name.
        switch: the switch's namespace. Its device for a host has the host's name.
    """

    hosts: Mapping[str, Host]
    switch: str

    @contextmanager
    def link(self, name: str, *, outward: Link = WHOLE, inward: Link = WHOLE) -> Iterator[None]:
        """Within this block a host is joined by such a link.

        In such a block there may be others for the same host, if one of them at most drops packets
        of a way, and one at most has a rate for it.

        Args:
            name: of the host.
            outward: for what it sends.
            inward: for what it receives.

        Raises:
            NetworkError: the kernel cannot do that.
        """
        # Packets that are lost have left their host; those that wait do so before that.
        here, there = (self.hosts[name].namespace, DEVICE), (self.switch, name)
        with (
            _dropping(outward, *there, "ingress"),
            _dropping(inward, *there, "egress"),
            _waiting(outward, *here),
            _waiting(inward, *there),
        ):
            yield

    def bytes_sent(self, name: str) -> int:
        """Return how many bytes a host has sent so far, lost ones included."""
        with visiting(self.switch):
            text = Path("/proc/thread-self/net/dev").read_text()
        fields = {
            device.strip(): counts.split()
            for device, _, counts in (line.partition(":") for line in text.splitlines())
        }
        # What the switch receives there.
        return int(fields[name][0])


@contextmanager
def hosts(*names: str) -> Iterator[Network]:
    """Have hosts that reach each other, and nobody else.

    Args:
        names: of the hosts; short, as devices are called so, too.

    Raises:
        NetworkError: this machine cannot have them, or such links; it says why.
    """
    prefix = f"hosts-{os.getpid()}-{next(_NETWORKS)}"
    with ExitStack() as stack:
        switch = stack.enter_context(namespace(f"{prefix}-switch"))
        run("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "switch", "up")
        known = {}
        for number, name in enumerate(names, 1):
            host = Host(name, f"{_SUBNET}.{number}", f"{prefix}-{name}")
            stack.enter_context(namespace(host.namespace))
            _join(host, switch)
            known[name] = host
        network = Network(known, switch)
        # Said now, and not in the middle of what these are wanted for.
        with network.link(names[0], outward=Link(lost=0.5, bytes_s=1 << 20)):
            pass
        yield network


def _join(host: Host, switch: str) -> None:
    """Put a device into a host, and its other end into the switch."""
    here, there = ("ip", "-n", host.namespace), ("ip", "-n", switch)
    veth = f"{host.name} type veth peer name {DEVICE} netns {host.namespace}"
    run(*there, "link", "add", "name", *veth.split())
    run(*there, "link", "set", "dev", host.name, "master", "switch", "up")
    run(*here, "address", "add", f"{host.address}/24", "dev", DEVICE)
    run(*here, "link", "set", "lo", "up")
    # Else the kernel hands over dozens of packets as one, which would be lost as one, too.
    run(*here, "link", "set", DEVICE, "gso_max_segs", "1", "up")
    run("tc", "-n", switch, "qdisc", "add", "dev", host.name, "clsact")


@contextmanager
def _dropping(link: Link, name: str, device: str, side: str) -> Iterator[None]:
    """Drop packets at a device of a namespace, on the side where they come in or go out."""
    program, at = drop_program(link), ("dev", device, side)
    with ExitStack() as stack:
        if program:
            stack.callback(_try, "tc", "-n", name, "filter", "del", *at)
            what = ("bpf", "direct-action", "bytecode", program)
            run("tc", "-n", name, "filter", "add", *at, *what)
        yield


@contextmanager
def _waiting(link: Link, name: str, device: str) -> Iterator[None]:
    """Have packets wait for their turn to leave by a device of a namespace."""
    at = ("dev", device, "root")
    with ExitStack() as stack:
        if link.bytes_s is not None:
            stack.callback(_try, "tc", "-n", name, "qdisc", "del", *at)
            shape = f"tbf rate {8 * link.bytes_s}bit burst {_BURST_BYTES} limit {_QUEUE_BYTES}"
            run("tc", "-n", name, "qdisc", "add", *at, *shape.split())
        yield


def drop_program(link: Link) -> str:
    """Return what decides, packet by packet, which ones a link drops; empty where it drops none.

    Returns:
        A program of BPF, as `tc` reads it: its length, then of each instruction the code, how many
        to skip if so and if not, and its operand.
    """
    tests = []
    if link.largest_bytes is not None:
        # The packet has its MAC header here.
        tests.append((_LOAD_LENGTH, 0, link.largest_bytes + _MAC_BYTES, True))
    if link.lost > 0:
        # A random number passes that is greater than this share of all numbers.
        tests.append((_LOAD, _RANDOM, max(round(link.lost * 2**32) - 1, 0), False))
    if not tests:
        return ""
    instructions = []
    for number, (load, operand, bound, greater_drops) in enumerate(tests):
        to_drop = 2 * (len(tests) - number - 1) + 1
        skips = (to_drop, 0) if greater_drops else (0, to_drop)
        instructions += [(load, 0, 0, operand), (_JUMP_IF_GREATER, *skips, bound)]
    instructions += [(_RETURN, 0, 0, _PASS), (_RETURN, 0, 0, _DROP)]
    words = (" ".join(map(str, instruction)) for instruction in instructions)
    return ",".join([str(len(instructions)), *words])


@contextmanager
def namespace(name: str) -> Iterator[str]:
    """Have a network namespace; its devices go with it.

    Raises:
        NetworkError: this machine cannot have it; it says why.
    """
    with ExitStack() as stack:
        # What is left of it ends with its last process.
        stack.callback(_try, "ip", "netns", "delete", name)
        run("ip", "netns", "add", name)
        yield name


@contextmanager
def visiting(name: str | None) -> Iterator[None]:
    """Have the calling thread, and threads and processes that it starts, be in a namespace.

    Args:
        name: of the namespace; ``None`` to stay.

    Raises:
        NetworkError: it is not there, or not allowed.
    """
    if name is None:
        yield
        return
    with _opened(_MINE) as before:
        enter(name)
        try:
            yield
        finally:
            _set_network(before, "of before")


def enter(name: str) -> None:
    """Take the calling thread, and those that it will start, to a namespace.

    Raises:
        NetworkError: it is not there, or not allowed.
    """
    with _opened(_NAMESPACES / name) as there:
        _set_network(there, name)


def cannot_enter(name: str) -> NetworkError:
    """Return what to raise where the last call of the C library has failed."""
    reason = os.strerror(ctypes.get_errno())
    return NetworkError(f"cannot enter the network namespace {name}: {reason}")


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise NetworkError(f"no network namespace {path.name}: {error.strerror}") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _set_network(descriptor: int, name: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET) != 0:
        raise cannot_enter(name)


def run(*command: str) -> str:
    """Run `ip` or `tc`; returns what it has printed.

    Raises:
        NetworkError: it is not installed, or has failed.
    """
    if shutil.which(command[0]) is None:
        raise NetworkError(f"needs {command[0]}, which is not installed")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        message = " ".join(done.stderr.split())
        raise NetworkError(f"not allowed here, or not known to this kernel: {message}")
    return done.stdout


def _try(*command: str) -> None:
    """Remove something, which may not be there, and let no signal cut it short."""
    with uninterrupted(), suppress(NetworkError):
        run(*command)
