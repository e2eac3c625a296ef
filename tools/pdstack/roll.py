# SPDX-License-Identifier: Apache-2.0
"""A fleet whose engines are replaced one after the other while clients go on asking.

What is done to each engine is what Kubernetes does to a pod: it gets no new requests any more, time
passes in which others come to it that were on their way, SIGTERM asks it to end, and it ends when
it has answered all and others have read what it holds. Its place is taken at the same address
after that, or at another address before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

import httpx

from .engine import UPSTREAM, EngineSpec, KVTransfer
from .errors import PDStackError
from .layout import Layout
from .ports import PortAllocator
from .process import describe_exit
from .registry import FORGOTTEN_AFTER_S, Registry, Role
from .router import RouterSpec
from .stack import Engine, PDStack, Router

SHUTDOWN_TIMEOUT_S = 60
"""How long an engine goes on for requests that it has, and for blocks that others read."""

_KILLED_AFTER_S = SHUTDOWN_TIMEOUT_S + 15.0
_ENDED_BY_ITSELF = (0, 143)
"""What vLLM ends with after SIGTERM."""
_CACHE_TOKENS = 16384
_VERSION_LIMIT_S = 30.0
_POLL_S = 0.2
_ROLES = {Role.PREFILL: "prefill", Role.DECODE: "decode"}
_KV_ROLES = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer"}


class Address(str, Enum):
    """Where the engine that follows another one is."""

    SAME = "same"
    OTHER = "other"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Replacement:
    """An engine that has been replaced.

    Attributes:
        name: of its place.
        before: its version.
        after: that of the one that followed.
        ended_after_s: how long it took to end once it was asked to.
        took_s: how long all of it took.
    """

    name: str
    before: str
    after: str
    ended_after_s: float
    took_s: float


@dataclass
class _Place:
    """A place for an engine, which others follow."""

    role: Role
    layout: Layout
    name: str
    engine: Engine
    incarnation: int = 1


@dataclass(frozen=True)
class Fleet:
    """What is rolled.

    Attributes:
        prefill: the layout of each prefill engine.
        decode: the layout of each decode engine.
        extra_args: appended to every engine's command line.
        scripts: where the vLLM that they begin with has its console scripts; by default here.
        settle_s: how long requests may be on their way to an engine that the router sends none any
            more: a decode engine gets one when its prompt has been computed.
        from_stock: whether they begin with upstream's connector. Until all are replaced, decode
            engines compute what they cannot read.
    """

    prefill: Sequence[Layout] = (Layout(1, 2), Layout(1, 2))
    decode: Sequence[Layout] = (Layout(1, 1), Layout(1, 1))
    extra_args: Sequence[str] = ()
    scripts: Path | None = None
    settle_s: float = 10.0
    from_stock: bool = False


class Rolling:
    """Engines in their places, and a router that hears of them.

    Args:
        stack: what starts them.
        fleet: what they are.
        registry: what the router hears of them.
        say: told what is going on.
    """

    def __init__(
        self,
        stack: PDStack,
        fleet: Fleet,
        registry: Registry,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._stack = stack
        self._fleet = fleet
        self._registry = registry
        self._say = say
        self._ports = PortAllocator()
        self._places: list[_Place] = []

    def start(self) -> Router:
        """Start engines and a router, and return that one.

        Raises:
            PDStackError: one of them cannot be started.
        """
        wanted = [(Role.PREFILL, each) for each in self._fleet.prefill]
        wanted += [(Role.DECODE, each) for each in self._fleet.decode]
        names = [_name(wanted[: number + 1]) for number in range(len(wanted))]
        specs = [
            self._at_an_address(self._spec(role, layout, f"{name}.1", self._fleet.scripts))
            for (role, layout), name in zip(wanted, names, strict=True)
        ]
        if self._fleet.from_stock:
            specs = [replace(each, kv_transfer=_as_stock(each)) for each in specs]
        engines = self._stack.start_engines(*specs)
        for (role, layout), name, engine in zip(wanted, names, engines, strict=True):
            self._places.append(_Place(role, layout, name, engine))
            self._registry.admit(engine.url, role)
            self._say(f"{name} serves with {version(engine)} at {engine.url}")
        spec = RouterSpec(extra_args=self._registry.router_args)
        return self._stack.start_router([], [], spec)

    def roll(self, address: Address, scripts: Path | None) -> list[Replacement]:
        """Replace each engine, the prefill engines first.

        Args:
            address: where those that follow are.
            scripts: where the vLLM that they run has its console scripts; by default here.

        Raises:
            PDStackError: an engine cannot be started, or did not end by itself.
        """
        return [self._replace(place, address, scripts) for place in self._places]

    def _replace(self, place: _Place, address: Address, scripts: Path | None) -> Replacement:
        began, old = time.monotonic(), place.engine
        before = version(old)
        place.incarnation += 1
        name = f"{place.name}.{place.incarnation}"
        spec = self._spec(place.role, place.layout, name, scripts)
        if address is Address.SAME:
            ended_after_s = self._end(place.name, old)
            side_channel_port = old.spec.side_channel_port
            self._admit(place, replace(spec, port=old.port, side_channel_port=side_channel_port))
        else:
            self._admit(place, self._at_an_address(spec))
            ended_after_s = self._end(place.name, old)
        after = version(place.engine)
        took_s = time.monotonic() - began
        self._say(
            f"{place.name}: {after} at {place.engine.url} has followed {before}, which ended "
            f"{ended_after_s:.1f} s after SIGTERM"
        )
        return Replacement(place.name, before, after, ended_after_s, took_s)

    def _admit(self, place: _Place, spec: EngineSpec) -> None:
        (place.engine,) = self._stack.start_engines(spec)
        self._registry.admit(place.engine.url, place.role)

    def _end(self, name: str, engine: Engine) -> float:
        """Let an engine end, and return how long it took once it was asked to.

        Raises:
            PDStackError: it did not end by itself, or another server ended.
        """
        self._registry.take_out(engine.url)
        self._say(f"{name} at {engine.url} gets no new requests")
        self._wait(FORGOTTEN_AFTER_S + self._fleet.settle_s, lambda: False)
        asked = time.monotonic()
        engine.child.request_stop()
        self._wait(_KILLED_AFTER_S, lambda: engine.child.exit_status is not None)
        took_s = time.monotonic() - asked
        self._stack.stop(engine)
        status = engine.child.exit_status
        if took_s >= _KILLED_AFTER_S or status is None or status not in _ENDED_BY_ITSELF:
            how = "was killed" if status is None else describe_exit(status)
            raise PDStackError(f"{engine.name} {how} {took_s:.0f} s after SIGTERM")
        return took_s

    def _wait(self, limit_s: float, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + limit_s
        while not until() and time.monotonic() < deadline:
            self._stack.check()
            time.sleep(_POLL_S)

    def _spec(self, role: Role, layout: Layout, name: str, scripts: Path | None) -> EngineSpec:
        num_blocks = _CACHE_TOKENS // self._stack.model.block_tokens
        blocks = ("--num-gpu-blocks-override", str(num_blocks))
        patience = ("--shutdown-timeout", str(SHUTDOWN_TIMEOUT_S))
        return EngineSpec(
            name,
            layout,
            # Leases as by default.
            KVTransfer(
                role=_KV_ROLES[role],
                extra_config={},
                load_failure_policy="recompute" if self._fleet.from_stock else None,
            ),
            extra_args=(*blocks, *patience, *self._fleet.extra_args),
            max_model_len=1024,
            scripts=scripts,
            grace_s=_KILLED_AFTER_S,
        )

    def _at_an_address(self, spec: EngineSpec) -> EngineSpec:
        """The same at ports that are free now; who follows may be at these again."""
        side_channel_port = self._ports.take(spec.layout.world_size)
        return replace(spec, port=self._ports.take(), side_channel_port=side_channel_port)


def _as_stock(spec: EngineSpec) -> KVTransfer:
    """The same connector's configuration with upstream's connector."""
    assert spec.kv_transfer is not None
    return replace(spec.kv_transfer, module_path=UPSTREAM.module_path)


def version(engine: Engine) -> str:
    """Return the version of vLLM that an engine says it is.

    Raises:
        PDStackError: it does not say so.
    """
    try:
        reply = httpx.get(f"{engine.url}/version", timeout=_VERSION_LIMIT_S, trust_env=False)
        reply.raise_for_status()
        told: str = reply.json()["version"]
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise PDStackError(f"{engine.name} does not tell its version: {error!r}") from error
    return told


def _name(places: Sequence[tuple[Role, Layout]]) -> str:
    """The name of the last one of places, which counts those of its role."""
    role = places[-1][0]
    return f"{_ROLES[role]}-{sum(each is role for each, _ in places)}"
