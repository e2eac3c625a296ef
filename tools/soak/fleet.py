# SPDX-License-Identifier: Apache-2.0
"""The engines and the router of a soak: started, stopped, killed, replaced, and looked at.

Every seat has a stack of its own, so that the end of one engine does not keep another from being
started.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from tools.pdstack.engine import EngineSpec, KVTransfer, ServedModel, beside_offloading
from tools.pdstack.errors import PDStackError
from tools.pdstack.logs import find_cause
from tools.pdstack.ports import HOST, PortAllocator
from tools.pdstack.process import ChildProcess, describe_exit, stop_all, uninterrupted
from tools.pdstack.registry import Registry
from tools.pdstack.registry import Role as RouterRole
from tools.pdstack.router import RouterSpec
from tools.pdstack.stack import Engine, PDStack, Router
from tools.pdstack.stack import Server as StackServer

from .clients import Server
from .faults import ROUTER, Placement, Role
from .history import End, Footprint, PoolReading, Recorder
from .schedule import Seat

MAX_MODEL_TOKENS = 1024
POOL_BLOCKS = {Role.PREFILL: 24, Role.DECODE: 24}
"""Three requests of the longest kind: with as many clients, blocks run out again and again. A
decode engine prefetches for two of them: it keeps room for one more."""

MOST_AT_ONCE = 4
"""So many requests a prefill engine computes at once; others are known there, and wait."""

_CHUNK_TOKENS = 128
# A block of the cache. Several requests have a chunk in each step, and none has room for all of its
# prompt when it begins: so they run out of blocks in the middle, and one is preempted.
_IN_CHUNKS = (
    *("--long-prefill-token-threshold", str(_CHUNK_TOKENS)),
    *("--max-num-seqs", str(MOST_AT_ONCE)),
    "--no-scheduler-reserve-full-isl",
)

_SHUTDOWN_TIMEOUT_S = 60
"""How long an engine that is asked to end goes on for what it has, and for what others read."""

KILLED_AFTER_S = _SHUTDOWN_TIMEOUT_S + 15.0

_CACHED_KERNELS = 32
"""oneDNN compiles a kernel for each shape that it multiplies, the number of tokens in a step among
its sizes, and keeps 1,024 of a quarter of a MiB. An engine that meets new lengths all the time
would grow by hundreds of MiB before that is full, which could hide what leaks."""

_ANY_PAIR = ("--decode-policy", "random")
"""With both in turn, a prefill engine's requests would all go to the same decode engine."""

_ROUTER_ROLES = {Role.PREFILL: RouterRole.PREFILL, Role.DECODE: RouterRole.DECODE}
_ENDED_BY_ITSELF = (0, 143)
_READ_LIMIT_S = 3.0
_NUM_WORKERS = 4
_USAGE = "vllm:kv_cache_usage_perc"
_HELD = "vllm:nixl_held_blocks"
_IN_DOUBT = "vllm:nixl_kv_blocks_in_doubt"
_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_PREEMPTIONS = "vllm:num_preemptions_total"
_EARLY = "vllm:nixl_prefill_wait_seconds_count"
_PREFETCHED = "vllm:nixl_prefetched_bytes_total"
_READ = (_USAGE, _HELD, _IN_DOUBT, _RUNNING, _WAITING, _PREEMPTIONS, _EARLY, _PREFETCHED)


@dataclass(frozen=True)
class FleetSettings:
    """How engines are configured.

    Attributes:
        ucx_tls: the transports of UCX. Shared memory needs no help of a worker that is read from,
            and so hides what happens when it is stopped.
        lease_s: how long blocks are held for a reader that is not heard of.
        read_timeout_s: how long a read may take.
        engine_ttl_s: after how long another engine that nobody asks for is forgotten.
    """

    ucx_tls: str = "tcp,self"
    lease_s: float = 15.0
    read_timeout_s: float = 20.0
    engine_ttl_s: float = 60.0


def engine_spec(
    seat: Seat,
    incarnation: int,
    placement: Placement,
    settings: FleetSettings,
    *,
    port: int,
    side_channel_port: int,
    recompute: bool,
) -> EngineSpec:
    """Return how the engine of a seat is started.

    Args:
        incarnation: how many engines have had the seat, with this one.
        recompute: whether it computes what it cannot read, or fails the request.
    """
    env = {
        "UCX_TLS": settings.ucx_tls,
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(_CACHED_KERNELS),
    }
    if placement.stage_layers:
        env["VLLM_PP_LAYER_PARTITION"] = ",".join(map(str, placement.stage_layers))
    extra_config: dict[str, Any] = {
        "kv_lease_duration": settings.lease_s,
        "kv_read_timeout_s": settings.read_timeout_s,
        "engine_ttl": settings.engine_ttl_s,
        "early_dispatch": seat.early,
        "transfer_strategy": seat.strategy,
        "seed_first_token": seat.seeded,
    }
    transfer = KVTransfer(
        role="kv_producer" if seat.role is Role.PREFILL else "kv_consumer",
        extra_config=extra_config,
        load_failure_policy="recompute" if recompute else "fail",
    )
    return EngineSpec(
        f"{seat.name}.{incarnation}",
        placement.layout,
        kv_transfer=beside_offloading(transfer) if seat.offloads else transfer,
        env=env,
        extra_args=(
            *("--num-gpu-blocks-override", str(POOL_BLOCKS[seat.role])),
            *("--shutdown-timeout", str(_SHUTDOWN_TIMEOUT_S)),
            *(_IN_CHUNKS if seat.role is Role.PREFILL else ()),
        ),
        max_model_len=MAX_MODEL_TOKENS,
        port=port,
        side_channel_port=side_channel_port,
        grace_s=KILLED_AFTER_S,
    )


def read_pool(text: str, engine: str, incarnation: int, at_s: float) -> PoolReading:
    """Return what a page of metrics says of blocks; what it lacks is 0."""
    totals = dict.fromkeys(_READ, 0.0)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in totals:
                totals[sample.name] += sample.value
    return PoolReading(
        at_s=at_s,
        engine=engine,
        incarnation=incarnation,
        usage=totals[_USAGE],
        held_blocks=totals[_HELD],
        blocks_in_doubt=totals[_IN_DOUBT],
        running=totals[_RUNNING],
        waiting=totals[_WAITING],
        preemptions=totals[_PREEMPTIONS],
        early=totals[_EARLY],
        prefetched_bytes=totals[_PREFETCHED],
    )


def choose_worker(processes: Sequence[psutil.Process], number: int) -> psutil.Process:
    """Return a process that computes, out of all that an engine has.

    An engine with one worker may have it in its core's process.

    Args:
        number: which one, in the order of ranks, counted round and round.

    Raises:
        PDStackError: none does.
    """
    titled = sorted(((_title(each), each) for each in processes), key=lambda pair: pair[0])
    for word in ("Worker", "EngineCore"):
        found = [process for title, process in titled if word in title]
        if found:
            return found[number % len(found)]
    raise PDStackError(f"no worker among {', '.join(title for title, _ in titled) or 'nothing'}")


class _Place:
    """A seat, and who has it."""

    def __init__(
        self, seat: Seat, stack: PDStack, ports: PortAllocator, *, recompute: bool
    ) -> None:
        self.seat = seat
        self.stack = stack
        self.port = ports.take()
        # Where a placement with more workers follows, there is room for them.
        self.side_channel_port = ports.take(_NUM_WORKERS)
        self.recompute = recompute
        self.placement = seat.placement
        self.incarnation = 0
        self.engine: Engine | None = None
        self.is_ending = False


class Fleet:
    """Engines in their seats, and a router in front of them.

    Args:
        model: what all of them serve.
        run_dir: where their logs go, one for each engine that ever had a seat.
        recorder: where it is noted down when one ends.
        on_wait: as `PDStack`'s.
    """

    def __init__(
        self,
        model: ServedModel,
        run_dir: Path,
        seats: Sequence[Seat],
        settings: FleetSettings,
        recorder: Recorder,
        *,
        startup_timeout_s: float,
        on_wait: Callable[[Sequence[StackServer]], None] = lambda _: None,
    ) -> None:
        self._settings = settings
        self._recorder = recorder
        ports = PortAllocator()

        def new_stack() -> PDStack:
            return PDStack(model, run_dir, startup_timeout_s=startup_timeout_s, on_wait=on_wait)

        # Of two decode engines, one fails what it cannot read, and the other one computes it.
        decode = [seat.name for seat in seats if seat.role is Role.DECODE]
        self._places = {
            seat.name: _Place(
                seat,
                new_stack(),
                ports,
                recompute=seat.name in decode[1::2],
            )
            for seat in seats
        }
        self._router_stack = new_stack()
        self._router_port = ports.take()
        self._registry = Registry(ports.take())
        self._router: Router | None = None
        self._router_incarnation = 0

    def start(self) -> None:
        """Start all engines one after the other, and then the router."""
        self._registry.start()
        for name in self._places:
            self._start(name)
        self._start_router()

    def names(self, role: Role | None = None) -> list[str]:
        """Return the names of all seats, or of those of a role."""
        return [name for name, place in self._places.items() if role in (None, place.seat.role)]

    def computes(self, name: str) -> bool:
        """Whether an engine computes what it cannot read, or fails the request."""
        return self._places[name].recompute

    def is_early(self, name: str) -> bool:
        """Whether requests may be sent to an engine and another one at once."""
        return self._places[name].seat.early

    def server(self, name: str) -> Server:
        """Return how to ask an engine, or the router."""
        # Ports stay: whoever asks while nobody listens hears so.
        port = self._router_port if name == ROUTER else self._places[name].port
        return Server(name, f"http://{HOST}:{port}")

    def log_paths(self) -> dict[str, Path]:
        """Return the logs of those who have the seats now, and of the router."""
        paths = {
            name: place.engine.child.log_path
            for name, place in self._places.items()
            if place.engine is not None
        }
        if self._router is not None:
            paths[ROUTER] = self._router.child.log_path
        return paths

    @contextmanager
    def stopped(self, name: str, worker: int | None = None) -> Iterator[str]:
        """Within this block processes of an engine live, but do nothing; yields what they are.

        Args:
            worker: which worker, counted round and round; `None` for all processes.
        """
        processes = self._running(name).child.processes()
        if worker is not None:
            processes = [choose_worker(processes, worker)]
        titles = ", ".join(sorted(_title(each) for each in processes))
        try:
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.suspend()
            yield titles
        finally:
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.resume()

    def kill(self, name: str) -> None:
        """End all processes of an engine, or of the router, at once."""
        place = self._places.get(name)
        server: StackServer = self._running_router if place is None else self._running(name)
        if place is not None:
            self._registry.take_out(server.url)
        for process in server.child.processes():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        if place is None:
            self._router_stack.stop(server)
            self._router = None
            return
        place.stack.stop(server)
        self._note_end(place, wanted=True, how="killed")

    def take_out(self, name: str) -> None:
        """Let an engine have no new requests of the router's."""
        self._registry.take_out(self._running(name).url)

    def ask_to_end(self, name: str) -> None:
        """Ask an engine to end by itself; returns at once."""
        self._places[name].is_ending = True
        self._running(name).child.request_stop()

    def has_ended(self, name: str) -> bool:
        """Whether no process of an engine is left that was asked to end."""
        return self._running(name).child.exit_status is not None

    def bury(self, name: str) -> None:
        """Note down how an engine has ended that was asked to; one that has not is killed."""
        place, engine = self._places[name], self._running(name)
        had_ended = self.has_ended(name)
        place.stack.stop(engine)
        place.is_ending = False
        status = engine.child.exit_status
        by_itself = had_ended and status in _ENDED_BY_ITSELF
        how = "it did not end by itself" if status is None else describe_exit(status)
        self._note_end(place, wanted=by_itself, how=how)

    def restart(self, name: str, placement: Placement | None = None) -> None:
        """Start an engine, or the router, after it has ended.

        Args:
            placement: how the engine is laid out from now on; `None` for as before.
        """
        if name == ROUTER:
            self._start_router()
            return
        if placement is not None:
            self._places[name].placement = placement
        self._start(name)

    def look(self) -> list[str]:
        """Note down engines that have ended of their own accord; return their names."""
        ended = []
        for name, place in self._places.items():
            engine = place.engine
            status = None if engine is None else engine.child.exit_status
            if engine is None or status is None or place.is_ending:
                continue
            self._registry.take_out(engine.url)
            cause = find_cause(engine.child.log_path)
            place.stack.stop(engine)
            self._note_end(place, wanted=False, how=f"{describe_exit(status)}: {cause}")
            ended.append(name)
        return ended

    def missing(self) -> list[str]:
        """Return the seats that nobody has."""
        return [name for name, place in self._places.items() if place.engine is None]

    def read_pools(self) -> dict[str, PoolReading]:
        """Read the metrics of all engines that answer, and note them down."""
        readings = ((name, self.read_pool(name)) for name in self._places)
        return {name: reading for name, reading in readings if reading is not None}

    def read_pool(self, name: str) -> PoolReading | None:
        """Read the metrics of an engine, and note them down; `None` where it does not answer."""
        place = self._places[name]
        engine, incarnation = place.engine, place.incarnation
        if engine is None:
            return None
        try:
            page = httpx.get(f"{engine.url}/metrics", timeout=_READ_LIMIT_S, trust_env=False)
            page.raise_for_status()
        except httpx.HTTPError:
            return None
        reading = read_pool(page.text, name, incarnation, self._recorder.now_s())
        self._recorder.history.pools.append(reading)
        return reading

    def measure_footprints(self) -> None:
        """Note down what every engine takes of the machine."""
        for name, place in self._places.items():
            if place.engine is None:
                continue
            rss_bytes = descriptors = threads = 0
            for process in place.engine.child.processes():
                with suppress(psutil.NoSuchProcess), process.oneshot():
                    rss_bytes += process.memory_info().rss
                    descriptors += process.num_fds()
                    threads += process.num_threads()
            self._recorder.history.footprints.append(
                Footprint(
                    round=self._recorder.round,
                    at_s=self._recorder.now_s(),
                    engine=name,
                    incarnation=place.incarnation,
                    rss_bytes=rss_bytes,
                    descriptors=descriptors,
                    threads=threads,
                )
            )

    def close(self) -> None:
        """End everything, also what never became ready. Signals do not cut it short."""
        with uninterrupted():
            children: list[ChildProcess] = [
                place.engine.child for place in self._places.values() if place.engine is not None
            ]
            if self._router is not None:
                children.append(self._router.child)
            stop_all(children)
            for stack in (*(place.stack for place in self._places.values()), self._router_stack):
                stack.stop_all()
            self._registry.close()

    def _start(self, name: str) -> None:
        place = self._places[name]
        place.incarnation += 1
        spec = engine_spec(
            place.seat,
            place.incarnation,
            place.placement,
            self._settings,
            port=place.port,
            side_channel_port=place.side_channel_port,
            recompute=place.recompute,
        )
        try:
            (place.engine,) = place.stack.start_engines(spec)
        except PDStackError as error:
            place.stack.stop_all()
            self._note_end(place, wanted=False, how=f"it could not start: {error}")
            raise
        self._registry.admit(place.engine.url, _ROUTER_ROLES[place.seat.role])

    def _start_router(self) -> None:
        self._router_incarnation += 1
        spec = RouterSpec(
            f"{ROUTER}.{self._router_incarnation}",
            port=self._router_port,
            extra_args=(*self._registry.router_args, *_ANY_PAIR),
        )
        self._router = self._router_stack.start_router([], [], spec)

    def _note_end(self, place: _Place, *, wanted: bool, how: str) -> None:
        place.engine = None
        self._recorder.history.ends.append(
            End(
                round=self._recorder.round,
                at_s=self._recorder.now_s(),
                engine=place.seat.name,
                incarnation=place.incarnation,
                wanted=wanted,
                how=how,
            )
        )

    def _running(self, name: str) -> Engine:
        engine = self._places[name].engine
        if engine is None:
            raise PDStackError(f"{name} does not run")
        return engine

    @property
    def _running_router(self) -> Router:
        if self._router is None:
            raise PDStackError("the router does not run")
        return self._router


def _title(process: psutil.Process) -> str:
    try:
        words = process.cmdline()
    except psutil.Error:
        return ""
    return " ".join(words[:2])[:60]
