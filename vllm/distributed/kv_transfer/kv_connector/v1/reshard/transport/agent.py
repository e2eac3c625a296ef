# SPDX-License-Identifier: Apache-2.0
"""A worker's end of NIXL: register memory, prepare lists, post reads, poll, notify.

It adds no policy to NIXL. What it adds is types, errors that name the peer, and an end: nothing
that an agent has begun writes after `close`.

NIXL has four words that sound like the end of a read, and are none. Measured with 1.5.1 over TCP,
all of a read's bytes landed after its handle had been released, after its peer had been removed,
after its memory had been deregistered, and after it was taken for failed. Two things are an end:
the read is done, or the agent that posted it is gone. So no handle of a read is released before it
is done, and there is no way to forget a peer: its agent is closed.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from vllm.distributed.nixl_utils import NixlWrapper, nixl_agent_config
from vllm.logger import init_logger

from ..errors import InDoubtError, LocalLayoutError, TransferError
from ..memory.leg import Indices, Rows
from ..protocol.quoting import one_line, quote
from .cpu import running_on

logger = init_logger(__name__)

_LOCAL = "NIXL_INIT_AGENT"

_MAKING = threading.Lock()
"""Some of what is set while an agent is made is set for all of the process."""

Memory = Literal["DRAM", "VRAM"]
"""Memory of the host, or of the device."""


class TransferState(Enum):
    """How a posted read is doing."""

    IN_FLIGHT = "in flight"
    DONE = "done"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class Prepared:
    """A prepared descriptor list.

    Attributes:
        peer: The agent whose memory it describes; None for our own.
        handle: NIXL's handle; None once it is released.
    """

    peer: str | None
    handle: Any


@dataclass(slots=True, eq=False)
class Transfer:
    """A posted read.

    Attributes:
        peer: The agent that is read from.
        handle: NIXL's handle; None once it is released.
        ended_at_once: It was over when it had been posted, as between processes of one machine,
            where NIXL reads few descriptors while it posts them.
        ended_in: As what it was counted by its connection; None while it is in flight.
    """

    peer: str
    handle: Any
    ended_at_once: bool = False
    ended_in: TransferState | None = None


class NixlAgent:
    """A NIXL agent of a worker's.

    It belongs to one thread at a time: NIXL does not promise that two may use an agent at once.

    One that is read from has a progress thread of NIXL's, which answers while the worker computes.
    One that reads is *polled*: looking at its reads, or taking its notifications, makes it
    advance. Its other threads sleep but while they share in a read of many descriptors.

    Args:
        name: Unique among all agents that may meet.
        memory: Where the KV cache lies.
        backends: NIXL backends, in the order of preference.
        num_threads: Threads of the UCX backend, among which it divides reads of 1,024 descriptors
            and more; each takes resources of the network card. 0 for none.
        polled: Advance only when it is looked at.
        progress_delay_us: How long NIXL's progress thread rests when it found nothing to do. 0 for
            not at all: the least latency, for one core.
        cores: Where NIXL's threads may run, and this one while it waits for a peer; None for where
            the calling thread may.

    Raises:
        LocalLayoutError: NIXL is not installed.
    """

    def __init__(
        self,
        name: str,
        *,
        memory: Memory = "DRAM",
        backends: Sequence[str] = ("UCX",),
        num_threads: int = 4,
        polled: bool = False,
        progress_delay_us: int = 0,
        cores: Collection[int] | None = None,
    ) -> None:
        if NixlWrapper is None or nixl_agent_config is None:
            raise LocalLayoutError(
                "the Python package nixl cannot be imported: install nixl>=1.5 in this environment"
            )
        self.name = name
        self._memory = memory
        self._backends = list(backends)
        config = nixl_agent_config(
            enable_prog_thread=not polled or not can_be_polled(backends),
            num_threads=num_threads,
            backends=self._backends,
            capture_telemetry=True,
        )
        with _MAKING, progress_delay(progress_delay_us), running_on(cores):
            self._agent = NixlWrapper(name, config)
        self._cores = cores
        self._registered: list[Any] = []
        self._lists: set[Prepared] = set()
        self._reads: set[Transfer] = set()

    @property
    def is_open(self) -> bool:
        """Whether it has not been closed; to other threads, a hint."""
        return self._agent is not None

    def register(
        self, regions: Sequence[tuple[int, int, int]], memory: Memory | None = None
    ) -> None:
        """Make memory known to NIXL, so that it can be read and written.

        Args:
            regions: Address, size in bytes and device id of each region.
            memory: Where they lie; None for where the KV cache does.
        """
        descriptors = self._agent.get_reg_descs(
            [(*region, "") for region in regions], memory or self._memory
        )
        self._agent.register_memory(descriptors, backends=self._backends)
        self._registered.append(descriptors)

    def metadata(self) -> bytes:
        """What a peer needs to `connect`; complete once all memory is registered."""
        return bytes(self._agent.get_agent_metadata())

    def connect(self, metadata: bytes) -> str:
        """Make a peer known; returns its name.

        With LIBFABRIC over TCP this waits for as long as the peer's process is stopped or gone, as
        does `close` once such a peer was read from: see decision 23.

        Raises:
            TransferError: The metadata is not that of an agent that this one can reach.
        """
        try:
            # NIXL may yield in a loop until the peer has answered. Where two workers that share a
            # core do so, neither lets the other's threads run.
            with running_on(self._cores):
                peer = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise TransferError(
                f"NIXL does not accept a peer's metadata: {one_line(error)}"
            ) from error
        return peer.decode() if isinstance(peer, bytes) else str(peer)

    def disconnect(self, peer: str) -> None:
        """Forget a peer with which nothing is in flight, and whose lists were given back."""
        try:
            self._agent.remove_remote_agent(peer)
        except Exception as error:
            logger.warning("NIXL cannot forget %s: %s", quote(peer), one_line(error))

    def prepare(
        self, rows: Rows, peer: str | None = None, memory: Memory | None = None
    ) -> Prepared:
        """Prepare strided descriptors, of a peer's memory or of our own.

        Args:
            rows: Shape (rows, 5), as in `lowering`.
            peer: Whose memory; None for our own.
            memory: Where it lies; None for where the KV cache does.

        Raises:
            TransferError: The memory is not registered, or the peer is not connected.
        """
        try:
            handle = self._agent.prep_xfer_dlist(peer or _LOCAL, rows, memory or self._memory)
        except Exception as error:
            raise TransferError(
                f"NIXL cannot prepare {len(rows)} rows of {one_line(_whose(peer))} memory: "
                f"{one_line(error)}"
            ) from error
        prepared = Prepared(peer, handle)
        self._lists.add(prepared)
        return prepared

    def release_prepared(self, prepared: Prepared) -> None:
        """Give a prepared list back, of which no read is in flight."""
        self._lists.discard(prepared)
        self._give_back("a list", self._agent.release_dlist_handle, prepared)

    def read(
        self,
        local: Prepared,
        local_indices: Indices,
        remote: Prepared,
        remote_indices: Indices,
    ) -> Transfer:
        """Post a read of a peer's memory into our own.

        Args:
            local: A list of our own memory.
            local_indices: Where to, shape (descriptors,); at least one.
            remote: A list of the peer's memory.
            remote_indices: Where from, of the same length.

        Raises:
            InDoubtError: NIXL refused it after it had begun.
            TransferError: NIXL refused it before.
        """
        assert local.peer is None and remote.peer is not None
        try:
            handle = self._agent.make_prepped_xfer(
                "READ", local.handle, local_indices, remote.handle, remote_indices
            )
        except Exception as error:
            raise TransferError(
                f"{one_line(_cannot_read(local_indices, remote))}: {one_line(error)}"
            ) from error
        transfer = Transfer(remote.peer, handle)
        self._reads.add(transfer)
        try:
            state = self._agent.transfer(handle)
        except Exception as error:
            raise InDoubtError(
                f"{one_line(_cannot_read(local_indices, remote))}: {one_line(error)}"
            ) from error
        if state == "ERR":
            raise InDoubtError(_cannot_read(local_indices, remote))
        transfer.ended_at_once = state == "DONE"
        return transfer

    def poll(self, transfer: Transfer) -> TransferState:
        """Look at a posted read, and let the agent advance.

        One that is done is to be released. One that has failed may still write.
        """
        if transfer.ended_at_once:
            return TransferState.DONE
        try:
            state = self._agent.check_xfer_state(transfer.handle)
        except Exception:
            return TransferState.FAILED
        return {"DONE": TransferState.DONE, "PROC": TransferState.IN_FLIGHT}.get(
            state, TransferState.FAILED
        )

    def telemetry(self, transfer: Transfer) -> Any:
        """What NIXL measured of a read that is done; None where it cannot tell."""
        try:
            return self._agent.get_xfer_telemetry(transfer.handle)
        except Exception:
            return None

    def release(self, transfer: Transfer) -> None:
        """Give a read back that is done."""
        self._reads.discard(transfer)
        self._give_back("a read", self._agent.release_xfer_handle, transfer)

    def notify(self, peer: str, message: bytes) -> None:
        """Send a peer a message.

        Raises:
            TransferError: The peer cannot be reached.
        """
        try:
            self._agent.send_notif(peer, notif_msg=message)
        except Exception as error:
            raise TransferError(f"NIXL cannot notify {quote(peer)}: {one_line(error)}") from error

    def take_notifications(self) -> list[tuple[str, bytes]]:
        """Messages that arrived since the last call, each with the name of its sender."""
        try:
            arrived = self._agent.get_new_notifs()
        except Exception as error:
            # Whatever a peer sent, it is not this engine's end.
            logger.warning("NIXL cannot tell what notifications arrived: %s", one_line(error))
            return []
        return [(peer, message) for peer, messages in arrived.items() for message in messages]

    def close(self) -> None:
        """End the agent, and with it all that it has begun: nothing of it writes after this.

        A peer that has not begun to answer what was posted may end itself over that, if it is alive
        (`Endpoint timeout` in UCX 1.23): what is in flight is to be waited for where it can be.
        """
        if self._agent is None:
            return
        # NIXL's agent goes with the last thing that refers to it. Until then it would write.
        for prepared in self._lists:
            prepared.handle = None
        for transfer in self._reads:
            transfer.handle = None
        self._lists.clear()
        self._reads.clear()
        for descriptors in self._registered:
            try:
                self._agent.deregister_memory(descriptors)
            except Exception as error:
                logger.warning("NIXL cannot deregister memory: %s", one_line(error))
        self._registered.clear()
        self._agent = None

    def _give_back(
        self, what: str, function: Callable[[Any], None], owner: Prepared | Transfer
    ) -> None:
        """Release something. Where NIXL fails at that, as with a peer that is gone, log it."""
        handle, owner.handle = owner.handle, None
        try:
            function(handle)
        except Exception as error:
            logger.warning("NIXL cannot release %s: %s", one_line(what), one_line(error))


THREAD_REST_US = 100
"""How long the progress thread of an agent that cannot be polled rests by default. An idle worker
with two such agents that knows 8 engines takes 0.09 of a core with it, and 2 without: measured with
LIBFABRIC over TCP, see decision 23."""


def nixl_module() -> str:
    """The name of NIXL's Python module, which differs between its packages. NIXL is installed."""
    assert NixlWrapper is not None
    return str(NixlWrapper.__module__)


def can_be_polled(backends: Sequence[str]) -> bool:
    """Whether an agent with these backends advances without a progress thread.

    UCX's does. LIBFABRIC's does as well, but where one of its peers ends, reads from others fail
    with those from that one (nixl 1.5.1). Further ones were not measured.
    """
    return list(backends) == ["UCX"]


def _cannot_read(local_indices: Indices, remote: Prepared) -> str:
    return f"NIXL cannot read {len(local_indices)} descriptors from {quote(remote.peer)}"


def _whose(peer: str | None) -> str:
    return "this worker's" if peer is None else f"{quote(peer)}'s"


@contextmanager
def progress_delay(delay_us: int) -> Iterator[None]:
    """Let the agents that are made within have progress threads that rest.

    NIXL's agent has such a setting, but its Python class always writes 0 into it, last seen in
    1.5.1. So the settings that the class fills in are of a type that keeps to ours instead.
    """
    bindings = sys.modules[nixl_module()].nixlBind
    settings = bindings.nixlAgentConfig

    class Settings(settings):  # type: ignore[misc, valid-type]
        @property
        def pthrDelay(self) -> int:
            return int(settings.pthrDelay.__get__(self))

        @pthrDelay.setter
        def pthrDelay(self, _: int) -> None:
            settings.pthrDelay.__set__(self, delay_us)

    bindings.nixlAgentConfig = Settings
    try:
        yield
    finally:
        bindings.nixlAgentConfig = settings
