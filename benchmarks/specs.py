# SPDX-License-Identifier: Apache-2.0
"""What ranks are told of themselves and of requests: values that travel between processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from tools.pdstack.layout import Layout

from .cases import Shape
from .network import HERE, Site


@dataclass(frozen=True)
class Variant:
    """Something that is measured beside others.

    Attributes:
        name: What it is called in tables.
        connector: `ours`, `upstream`, `raw` or `memcpy`.
        strategy: What our connector is told by `transfer_strategy`; None to leave it the choice.
        num_threads: What our connector is told by `num_threads`; None for its default.
        at_rest: Upstream's with what ours does for CPUs: NIXL's threads rest for as long, and
            nothing is bound to one core.
    """

    name: str
    connector: str
    strategy: str | None = None
    num_threads: int | None = None
    at_rest: bool = False


OURS = Variant("ours", "ours")
NO_UCX_THREADS = Variant("ours, no UCX threads", "ours", num_threads=0)
UPSTREAM = Variant("upstream", "upstream")
UPSTREAM_AT_REST = Variant("upstream at rest", "upstream", at_rest=True)
RAW = Variant("raw NIXL", "raw")
MEMCPY = Variant("memcpy", "memcpy")
EARLY = Variant("ours, early", "ours")
"""With requests that go to both engines at once; end to end only, as the next one."""
EARLY_SEEDED = Variant("ours, early, seeded", "ours")
"""And with answers that begin with the prefill engine's token."""


@dataclass(frozen=True)
class EngineSpec:
    """An engine, of which every rank is a process.

    Attributes:
        variant: What runs there.
        engine_id: Unique.
        layout: Its parallel sizes.
        shape: The model's, and block size.
        num_blocks: Blocks of each rank's cache.
        block_tokens: Tokens in a block.
        nhd: Whether a token's heads are adjacent; else a head's tokens are.
        port: Of its side channel.
        model: Path of the model's configuration.
        meeting: Path of a file by which its ranks meet.
        site: Where it runs.
    """

    variant: Variant
    engine_id: str
    layout: Layout
    shape: Shape
    num_blocks: int
    block_tokens: int
    nhd: bool
    port: int
    model: str
    meeting: str
    site: Site = HERE


@dataclass(frozen=True)
class Watch:
    """What a rank looks at while it reads.

    Attributes:
        step_s: How long each step takes besides the connector's part, which is acted out: the
            engine's thread sleeps, as while a device computes. By default as long as engines rest
            after a step in which nothing was computed.
        computes: Whether the connector hears that steps compute something.
        in_python: It computes in Python instead, and sees when it has to wait for the interpreter.
        memory: How far resident memory rises.
        arrival_in: Blocks that are cleared first, to see when the last of their bytes is there.
    """

    step_s: float = 1e-3
    computes: bool = False
    in_python: bool = False
    memory: bool = False
    arrival_in: tuple[int, ...] = ()


@dataclass(frozen=True)
class RequestSpec:
    """A request, at one end.

    Attributes:
        request_id: What it is called there.
        block_ids: Its blocks there.
        num_tokens: Of its prompt.
        params: What the prefill engine says of it to the decode engine; None at the former.
    """

    request_id: str
    block_ids: list[int]
    num_tokens: int
    params: dict[str, Any] | None = None


@dataclass(frozen=True)
class PauseSummary:
    """How long the engine's thread was kept from its own work.

    By a call of the connector's, or by another thread that had the interpreter.

    Attributes:
        longest_s: The longest time of all.
        p99_s: What the longest times of 99 steps in 100 are below.
    """

    longest_s: float
    p99_s: float


@dataclass(frozen=True)
class Reading:
    """What one rank has measured of the requests that it has read.

    Times are those of the machine's monotonic clock, the same in all processes.

    Attributes:
        began_s: When the first method was called.
        ended_s: When the last request was reported.
        posted_s: When the first read was posted.
        start_cpu_s: CPU time in `bind_connector_metadata` and `start_load_kv`, of the calling
            thread, in all steps.
        finished_cpu_s: The same in `get_finished`.
        nixl_cpu_s: The part of both that this thread spent in NIXL's `transfer`.
        worker_cpu_s: CPU time of all threads of the process.
        steps: How often both were called.
        steps_after_arrival: How many of these began after the last byte was there; None where that
            was not watched for.
        pauses: Of the engine's thread; None where nobody has looked.
        peak_bytes: How far resident memory rose above what it was before.
    """

    began_s: float
    ended_s: float
    posted_s: float
    start_cpu_s: float = 0.0
    finished_cpu_s: float = 0.0
    nixl_cpu_s: float = 0.0
    worker_cpu_s: float = 0.0
    steps: int = 1
    steps_after_arrival: int | None = None
    pauses: PauseSummary | None = None
    peak_bytes: int = 0


@dataclass(frozen=True)
class PeersUsage:
    """What a worker takes that knows many engines.

    Attributes:
        resident_bytes: Resident memory of the process.
        num_descriptors: Its open file descriptors, at rest.
        peak_descriptors: The same right after the last read.
        num_threads: Its threads.
        handshakes_s: From each of the last requests to its first read, without a side channel.
        nixl_s: How long NIXL took of each.
    """

    resident_bytes: int
    num_descriptors: int
    peak_descriptors: int
    num_threads: int
    handshakes_s: list[float]
    nixl_s: list[float]


Sealed: TypeAlias = bytes
"""A value of a connector's own type, pickled: it passes through this process without vLLM."""


@dataclass(frozen=True)
class Offer:
    """What a prefill engine's scheduler has to say of its requests.

    Attributes:
        metadata: For its workers.
        others: For them in the steps that follow.
        params: For the decode engine, by request.
    """

    metadata: Sealed
    others: Sealed
    params: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class RawRank:
    """What a rank without a connector says of itself.

    Attributes:
        metadata: NIXL's.
        heads: Which of the model's heads it holds.
        planes: Address of each plane.
        strides: Bytes from a block, a head and a token to the next.
        block_tokens: Tokens in a block.
    """

    metadata: bytes
    heads: range
    planes: list[int]
    strides: tuple[int, int, int]
    block_tokens: int
