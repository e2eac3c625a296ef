# SPDX-License-Identifier: Apache-2.0
"""Names are looked up beside whoever wants their addresses."""

from __future__ import annotations

import socket
import threading

import pytest

from tests.v1.kv_connector.unit.reshard.transport.channels import wait_until
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport import lookups
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.lookups import (
    MAX_ADDRESSES,
    Lookups,
    addresses_of,
)


@pytest.fixture
def gate(monkeypatch):
    """Resolving takes until this is set."""
    gate = threading.Event()

    def wait(name: str) -> tuple[str, ...]:
        gate.wait()
        return (f"address of {name}",)

    monkeypatch.setattr(lookups, "addresses_of", wait)
    yield gate
    gate.set()


def taken(looking: Lookups, count: int) -> dict[str, object]:
    """What is found, once it is so many."""
    found: dict[str, object] = {}
    wait_until(lambda: found.update(looking.take()) or len(found) == count)
    return found


def test_no_more_than_some_at_once(gate, monkeypatch):
    """The others follow when these have ended; who is not wanted any more does not."""
    monkeypatch.setattr(lookups, "MAX_LOOKUPS", 2)
    announced = threading.Event()
    looking = Lookups(announced.set)
    for name in ("a", "b", "c", "d", "e", "a"):
        looking.want(name)
    looking.forget("d")
    assert sum(thread.name == "reshard-lookup" for thread in threading.enumerate()) == 2
    assert looking.take() == []
    assert not announced.is_set()
    gate.set()
    assert taken(looking, 4) == {name: (f"address of {name}",) for name in "abce"}
    assert announced.is_set()


def test_machine_without_more_threads(gate, monkeypatch):
    """Names wait until one can be had."""
    gate.set()
    looking = Lookups(lambda: None)
    with monkeypatch.context() as patch:

        def refuse(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        patch.setattr(threading.Thread, "start", refuse)
        looking.want("a")
        assert looking.take() == []
    assert taken(looking, 1) == {"a": ("address of a",)}


@pytest.mark.parametrize("name", ["", "\udc80", "a\0b", "x" * 64 + ".example"])
def test_what_cannot_be_a_name(name):
    """It is found at once that there are no addresses, in words."""
    looking = Lookups(lambda: None)
    looking.want(name)
    (fault,) = taken(looking, 1).values()
    assert isinstance(fault, str) and fault


def test_addresses_of_this_machine():
    """Numeric, each once."""
    assert "127.0.0.1" in addresses_of("localhost")


def test_not_all_addresses_are_used(monkeypatch):
    """A name may have any number of them, of kinds that are none of ours."""
    infos = [(socket.AF_INET, 0, 0, "", (f"10.0.0.{n // 2}", 0)) for n in range(50)]
    infos.insert(0, (socket.AF_UNIX, 0, 0, "", ("/path", 0)))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: infos)
    assert addresses_of("many") == tuple(f"10.0.0.{n}" for n in range(MAX_ADDRESSES))
