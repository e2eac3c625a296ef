# SPDX-License-Identifier: Apache-2.0
"""The hosts of engines: names, addresses, and where they may be."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import threading
from pathlib import Path

import pytest

from tests.v1.kv_connector.unit.reshard.transport.channels import (
    DEADLINE_S,
    FACTORS,
    HOST,
    REPLIES,
    SHORT_S,
    WORKERS,
    asking,
    engine_at,
    fetch,
    free_port,
    listening,
    no_more_threads,
    serving,
    wait_until,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import (
    RemoteUnreachableError,
    RemoteUntrustedError,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.bounds import TrustedPeers
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport import (
    resolver as resolver_module,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.resolver import (
    MAX_ADDRESSES,
    addresses_of,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.side_channel import (
    HandshakeServer,
)


def let_all_wait(loop: asyncio.AbstractEventLoop) -> None:
    """Return when all that was requested has come as far as it can without waiting."""

    async def turns() -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    asyncio.run_coroutine_threadsafe(turns(), loop).result(DEADLINE_S)


class TestNames:
    """Hosts that are no addresses."""

    def test_not_resolved_in_time(self, resolver):
        """The error says that it was the name, and nothing more is waited for."""
        with pytest.raises(
            RemoteUnreachableError,
            match=r"^side channel slow\.example:1: the host's name was not resolved within 0\.3 s",
        ):
            fetch(1, host="slow.example", timeout_s=SHORT_S)

    def test_looked_up_once_for_all_who_ask(self, resolver, loops):
        """Requests for one engine come in crowds; whoever gives up first takes it from nobody."""
        with asking() as client:
            asked = [client.request(engine_at(1, "slow.example", str(n)), None) for n in range(9)]
            wait_until(lambda: resolver.asked)
            let_all_wait(loops.made[-1][0])
            assert asked[0].cancel()
            resolver.answers.set()
            for future in asked[1:]:
                assert "slow.example is unknown" in str(future.exception(DEADLINE_S))
        assert resolver.asked == ["slow.example"]

    def test_no_more_than_some_at_once(self, resolver, monkeypatch):
        """Each has a thread, and those beyond are refused at once; later ones are looked up."""
        monkeypatch.setattr(resolver_module, "MAX_LOOKUPS", 2)
        with asking() as client:
            slow = [client.request(engine_at(1, f"{n}.example"), None) for n in range(2)]
            wait_until(lambda: len(resolver.asked) == 2)
            third = client.request(engine_at(1, "third.example"), None)
            assert "2 other names are being looked up" in str(third.exception(DEADLINE_S))
            resolver.answers.set()
            for future in slow:
                assert "is unknown" in str(future.exception(DEADLINE_S))
            fourth = client.request(engine_at(1, "fourth.example"), None)
            assert "fourth.example is unknown" in str(fourth.exception(DEADLINE_S))

    def test_machine_without_more_threads(self, resolver, monkeypatch):
        """The handshake fails and says so, and the next one is served."""
        with serving() as server, asking() as client:
            assert client.request(engine_at(server.port), FACTORS).result(DEADLINE_S) == WORKERS
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", no_more_threads)
                failed = client.request(engine_at(server.port, "engine.example"), FACTORS)
                with pytest.raises(RemoteUnreachableError, match="to \\(can't start new thread\\)"):
                    failed.result(DEADLINE_S)
            named = client.request(engine_at(server.port, "engine.example"), FACTORS)
            assert named.result(DEADLINE_S) == WORKERS

    def test_all_addresses_are_tried(self, resolver):
        """An engine that listens at one of them is found, whichever comes first."""
        resolver.known["engine.example"] = ("127.0.0.2", HOST)
        with serving() as server:
            assert fetch(server.port, host="engine.example") == WORKERS

    def test_all_addresses_refuse(self, resolver):
        """That is known as soon as the last one has."""
        resolver.known["engine.example"] = ("127.0.0.2", HOST)
        with pytest.raises(RemoteUnreachableError, match=r"nothing listens there"):
            fetch(free_port(), host="engine.example", timeout_s=10 * DEADLINE_S)

    def test_address_that_says_nothing_does_not_hide_the_next(self, resolver):
        """Something else may listen at the first one, and keep the line open."""
        resolver.known["engine.example"] = ("127.0.0.2", HOST)
        with serving() as server, socket.socket() as other:
            other.bind(("127.0.0.2", server.port))
            other.listen()
            assert fetch(server.port, host="engine.example") == WORKERS

    @pytest.mark.parametrize("host", ["2130706433", "0x7f.1", "127.1"])
    def test_old_spellings_of_addresses_are_names(self, host):
        """The resolver reads them; what it says is held to the trusted networks."""
        trusted = TrustedPeers.parse(["10.0.0.0/8"])
        with pytest.raises(RemoteUntrustedError, match=r"host 127\.0\.0\.1 is not among trusted_p"):
            fetch(1, host=host, trusted=trusted)

    @pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
    def test_address_in_brackets(self, resolver):
        """It is written so in URLs, and is no name."""
        server = HandshakeServer("::1", 0, REPLIES)
        server.start()
        try:
            assert fetch(server.port, host="[::1]") == WORKERS
        finally:
            server.close()
        assert resolver.asked == []

    @pytest.mark.parametrize("name", ["", "\udc80", "a\0b", "x" * 64 + ".example", "::1%a]:1;[b"])
    def test_what_cannot_be_a_name(self, name):
        """It is found that there are no addresses, in words."""
        with pytest.raises(RemoteUnreachableError, match=r"no address to connect to \(.+\)"):
            fetch(1, host=name)

    def test_addresses_of_this_machine(self):
        """Numeric, each once."""
        assert "127.0.0.1" in addresses_of("localhost")

    def test_not_all_addresses_are_used(self, monkeypatch):
        """A name may have any number of them, of kinds that are none of ours."""
        infos = [(socket.AF_INET, 0, 0, "", (f"10.0.0.{n // 2}", 0)) for n in range(50)]
        infos.insert(0, (socket.AF_UNIX, 0, 0, "", ("/path", 0)))
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: infos)
        assert addresses_of("many") == tuple(f"10.0.0.{n}" for n in range(MAX_ADDRESSES))


def link_local_address() -> str:
    """An address of this machine that has a zone."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            if digits.startswith("fe80"):
                return f"{ipaddress.IPv6Address(int(digits, 16))}%{name}"
    pytest.skip("this machine has no link-local address of IPv6")


def test_address_with_a_zone(resolver):
    """It is connected to without a resolver."""
    host = link_local_address()
    with socket.socket(socket.AF_INET6) as listener, asking() as client:
        listener.settimeout(DEADLINE_S)
        place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4]
        listener.bind(place)
        listener.listen()
        asked = client.request(engine_at(listener.getsockname()[1], host), None)
        listener.accept()[0].close()
        assert asked.cancel()
    assert resolver.asked == []


def test_address_with_a_zone_that_is_none():
    """It is told at once."""
    with pytest.raises(RemoteUnreachableError, match=r"fe80::1%none:1: the exchange broke off"):
        fetch(1, host="fe80::1%none")


class TestTrustedPeers:
    """Hosts that may be asked, and those that may not."""

    def test_address_in_a_trusted_network(self):
        """It is asked."""
        with serving() as server:
            trusted = TrustedPeers.parse(["127.0.0.0/8"])
            assert fetch(server.port, trusted=trusted) == WORKERS

    @pytest.mark.parametrize("host", [HOST, "engine.example", "::ffff:127.0.0.1"])
    def test_others_are_not_connected_to(self, resolver, host):
        """Whether named by an address or by a name; nothing is sent to them."""
        with listening() as (listener, port):
            trusted = TrustedPeers.parse(["10.0.0.0/8"])
            with pytest.raises(RemoteUntrustedError, match=r"trusted_peers \(10\.0\.0\.0/8\)"):
                fetch(port, host=host, trusted=trusted)
            listener.setblocking(False)
            with pytest.raises(BlockingIOError):
                listener.accept()

    def test_only_trusted_addresses_of_a_name_are_used(self, resolver):
        """A name that also leads elsewhere does not."""
        resolver.known["engine.example"] = ("127.0.0.2", HOST)
        with serving() as server, socket.socket() as other:
            other.bind(("127.0.0.2", server.port))
            other.listen()
            trusted = TrustedPeers.parse(["127.0.0.1/32"])
            assert fetch(server.port, host="engine.example", trusted=trusted) == WORKERS
            other.setblocking(False)
            with pytest.raises(BlockingIOError):
                other.accept()
