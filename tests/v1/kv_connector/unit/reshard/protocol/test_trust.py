# SPDX-License-Identifier: Apache-2.0
"""Which hosts may be asked."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.trust import (
    TrustedPeers,
    numeric,
)

TRUSTED = TrustedPeers.parse(["10.0.0.0/8", "192.0.2.7", "fd00::/8"])


@pytest.mark.parametrize(
    ("host", "trusted"),
    [
        ("10.255.0.1", True),
        ("11.0.0.1", False),
        ("192.0.2.7", True),
        ("192.0.2.8", False),
        ("fd00::1", True),
        ("fe80::1", False),
        ("fe80::1%eth0", False),
        ("::ffff:10.0.0.1", True),
        ("::ffff:11.0.0.1", False),
    ],
)
def test_addresses_are_looked_up_in_the_networks(host, trusted):
    """Of both kinds, and of the one written as the other."""
    fault = TRUSTED.fault(host)
    assert (fault is None) is trusted
    if fault is not None:
        assert "is not among trusted_peers (10.0.0.0/8, 192.0.2.7/32, fd00::/8)" in fault


@pytest.mark.parametrize("host", ["engine.example", "localhost", "127.1", "0x7f000001", "", "a\nb"])
def test_names_are_left_to_who_looks_them_up(host):
    """That includes the spellings of addresses that only a resolver reads."""
    assert numeric(host) is None
    assert TRUSTED.fault(host) is None


@pytest.mark.parametrize("zone", ["", "lo]:7777;[fd00::2", "a b", "eth0\n", "a%b", "\u00e9"])
def test_zones_are_names_of_interfaces(zone):
    """What else is written behind a trusted address makes it no address."""
    assert numeric("fd00::1%eth0.1_a-b") is not None
    assert numeric(f"fd00::1%{zone}") is None


def test_no_network_trusts_nobody():
    """An empty list is none at all, rather than all."""
    assert "none at all" in (TrustedPeers.parse([]).fault("127.0.0.1") or "")


@pytest.mark.parametrize("network", ["10.0.0.1/8", "example.com", "10.0.0.0/33", ""])
def test_what_is_no_network_is_refused(network):
    """A slip of the pen does not become a wider network."""
    with pytest.raises(ValueError):
        TrustedPeers.parse([network])


@given(st.ip_addresses(v=4), st.integers(0, 32))
def test_addresses_are_in_the_networks_made_of_them(address, prefix):
    """Whatever the length of the prefix, also when written as an address of IPv6."""
    trusted = TrustedPeers((ipaddress.ip_network((address, prefix), strict=False),))
    assert trusted.allows(address)
    assert trusted.fault(f"::ffff:{address}") is None
