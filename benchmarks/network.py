# SPDX-License-Identifier: Apache-2.0
"""Two network namespaces of this machine with a link between them, as between two hosts."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from tools.pdstack.errors import NetworkError
from tools.pdstack.hosts import cannot_enter, enter, namespace, run

_CLONE_NEWNS = 0x20000
_MS_REC, _MS_SLAVE = 0x4000, 0x80000
_ADDRESSES = "198.18.51.1", "198.18.51.2"
"""Of the range for benchmarks of networks (RFC 2544)."""

_TRANSPORTS = "tcp"
_DEVICE = "link0"
_UP_LIMIT_S, _LOOK_S = 10.0, 0.01

_BUFFER_S = 0.02
"""How much a link without delay may hold back: a few round trips of a network within a building."""


@dataclass(frozen=True)
class Site:
    """Where an engine runs.

    Attributes:
        host: Its address.
        namespace: The network namespace of its processes; None for that of this one.
        transports: What UCX may use (`UCX_TLS`); None to leave it the choice.
        device: The network device that UCX may use (`UCX_NET_DEVICES`); None for any. The loopback
            device of another namespace looks to it like this one's.
    """

    host: str = "127.0.0.1"
    namespace: str | None = None
    transports: str | None = None
    device: str | None = None


HERE = Site()


@dataclass(frozen=True)
class Link:
    """What lies between two hosts.

    Attributes:
        gbit_s: Bits a second, in 10^9.
        delay_ms: How long a packet takes, one way; 0 for no longer than the kernel needs.
    """

    gbit_s: float
    delay_ms: float = 0.0

    def __str__(self) -> str:
        delay = f", {self.delay_ms:g} ms" if self.delay_ms else ""
        return f"TCP, {self.gbit_s:g} Gbit/s{delay}"


def move_to(site: Site) -> None:
    """Take the calling thread, and those that it will start, to where an engine is to run.

    Raises:
        NetworkError: It is not there, or not allowed.
    """
    if site.transports is not None:
        os.environ["UCX_TLS"] = site.transports
    if site.device is not None:
        os.environ["UCX_NET_DEVICES"] = site.device
    if site.namespace is not None:
        _enter(site.namespace)


def _enter(namespace: str) -> None:
    enter(namespace)
    libc = ctypes.CDLL(None, use_errno=True)
    # UCX finds devices in /sys, which shows those of the namespace that it was mounted in.
    entered = (
        libc.unshare(_CLONE_NEWNS) == 0
        and libc.mount(None, b"/", None, _MS_SLAVE | _MS_REC, None) == 0
        and libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None) == 0
    )
    if not entered:
        raise cannot_enter(namespace)


@contextmanager
def sites(link: Link | None) -> Iterator[tuple[Site, Site]]:
    """Two places for engines.

    Args:
        link: What lies between them; None for the loopback device of this machine.

    Raises:
        NetworkError: This machine cannot have such a link; it says why.
    """
    if link is None:
        yield Site(transports=_TRANSPORTS), Site(transports=_TRANSPORTS)
        return
    names = tuple(f"bench-{os.getpid()}-{end}" for end in "pd")
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(namespace(name))
        peer = f"peer name {_DEVICE} netns {names[1]}"
        run(*f"ip -n {names[0]} link add {_DEVICE} type veth {peer}".split())
        for name, address in zip(names, _ADDRESSES, strict=True):
            run(*f"ip -n {name} address add {address}/30 dev {_DEVICE}".split())
            for device in ("lo", _DEVICE):
                run("ip", "-n", name, "link", "set", device, "up")
            run(*f"tc -n {name} qdisc add dev {_DEVICE} root {_shape(link)}".split())
        for name in names:
            _wait_until_up(name)
        first, second = (
            Site(address, name, _TRANSPORTS, _DEVICE)
            for name, address in zip(names, _ADDRESSES, strict=True)
        )
        yield first, second


def _wait_until_up(name: str) -> None:
    """Wait for the kernel to say that a link can be used, without which UCX finds no device.

    Linux says so up to a second after both ends were set up (`net/core/link_watch.c`).
    """
    ends_s = time.monotonic() + _UP_LIMIT_S
    while " state UP " not in run("ip", "-n", name, "-o", "link", "show", _DEVICE):
        if time.monotonic() > ends_s:
            raise NetworkError(f"a link of {name} was not up within {_UP_LIMIT_S:g} s")
        time.sleep(_LOOK_S)


def _shape(link: Link) -> str:
    """What `tc` is told: `netem` can delay packets, and not every kernel has it."""
    if link.delay_ms:
        return f"netem rate {link.gbit_s}gbit delay {link.delay_ms}ms limit 100000"
    burst_bytes = max(int(link.gbit_s * 1e9 / 8 * 1e-3), 128 << 10)
    return f"tbf rate {link.gbit_s}gbit burst {burst_bytes} latency {_BUFFER_S * 1e3:g}ms"
