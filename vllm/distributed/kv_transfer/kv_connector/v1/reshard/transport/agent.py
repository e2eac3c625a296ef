# SPDX-License-Identifier: Apache-2.0
"""A worker's end of NIXL: register memory, prepare lists, post reads, poll, notify.

It adds no policy to NIXL, only types, errors that name the peer, and a definite end: nothing that
an agent has begun writes after `close`.

Four events in NIXL look like the end of a read, but are not. Measured with 1.5.1 over TCP, all of a
read's bytes landed after its handle had been released, after its peer had been removed, after its
memory had been deregistered, and after it was taken for failed. A read has ended only when it is
done, or when the agent that posted it is gone. So a read's handle is never released before the read
is done, and there is no way to forget a peer that is still being read from: its agent is closed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from vllm.distributed.nixl_utils import NixlWrapper, nixl_agent_config
from vllm.logger import init_logger

from ..errors import InDoubtError, LocalLayoutError, TransferError, one_line, quote
from ..memory.leg import Indices, Rows
from .cpu import running_on
from .limits import require_room

logger = init_logger(__name__)

_LOCAL = "NIXL_INIT_AGENT"

CHECK_BACKENDS = (
    "see what UCX or libfabric says in the lines before, correct UCX_TLS, UCX_NET_DEVICES or "
    "backends, and raise the limit of open files (ulimit -n) if there are too few"
)
_LOCKED_MEMORY = "raise the limit of locked memory (ulimit -l), and see the lines before of UCX"
_COMPARE = "compare backends, UCX_TLS and the versions of nixl of both engines"
LOOK_THERE = (
    "see that its engine runs and its data ports can be reached; the next request connects anew"
)
_LEFT = "nothing need be done, as it goes with the agent"

_SETTLE_POLLS, _SETTLE_POLL_S = 50, 1e-3
"""How often an agent with failed reads is polled before it is closed."""

_MAKING = threading.Lock()
"""Held while an agent is made, because some of what that sets applies to the whole process."""

Memory = Literal["DRAM", "VRAM"]
"""Host memory, or device memory."""


class TransferState(Enum):
    """State of a posted read."""

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
        ended_at_once: Whether posting it completed it, as between processes of one machine, where
            NIXL reads few descriptors while it posts them.
        ended_in: The final state that its connection has counted; None while it is in flight.
    """

    peer: str
    handle: Any
    ended_at_once: bool = False
    ended_in: TransferState | None = None


class NixlAgent:
    """A worker's NIXL agent.

    It belongs to one thread at a time: NIXL does not promise that two may use an agent at once.

    An agent that is read from has a progress thread of NIXL's, which answers while the worker
    computes. An agent that reads is *polled*: it advances when its reads are polled or its
    notifications are taken. Its other threads sleep unless they share in a read of many
    descriptors.

    Args:
        name: Unique among all agents that may meet.
        memory: Where the KV cache lies.
        backends: NIXL backends, in order of preference.
        num_threads: Threads of the UCX backend, among which it divides reads of 1,024 descriptors
            and more; each takes resources of the network card. 0 for none.
        polled: Whether it advances only when polled.
        progress_delay_us: How long NIXL's progress thread rests when it found nothing to do. 0 for
            no rest: the least latency, for one core.
        cores: Where NIXL's threads may run, and this one while it waits for a peer; None for where
            the calling thread may.

    Raises:
        LocalLayoutError: NIXL is not installed, lacks files, threads or ports, or cannot open a
            backend.
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
        require_room(num_threads)
        self.name = name
        self._memory = memory
        self._backends = list(backends)
        config = nixl_agent_config(
            enable_prog_thread=not polled or not can_be_polled(backends),
            num_threads=num_threads,
            backends=self._backends,
            capture_telemetry=True,
        )
        opening = _remedied("NIXL cannot open its backends", CHECK_BACKENDS, LocalLayoutError)
        with opening, _MAKING, progress_delay(progress_delay_us), running_on(cores):
            self._agent = NixlWrapper(name, config)
        require_backends(backends, self._agent.get_plugin_list())
        self._cores = cores
        self._registered: list[Any] = []
        self._lists: set[Prepared] = set()
        self._reads: set[Transfer] = set()
        # An endpoint may have: see `_settle`.
        self._has_failed = False

    @property
    def is_open(self) -> bool:
        """Whether it has not been closed; only a hint to other threads."""
        return self._agent is not None

    def register(
        self, regions: Sequence[tuple[int, int, int]], memory: Memory | None = None
    ) -> None:
        """Register memory with NIXL, so that it can be read and written.

        Args:
            regions: Address, size in bytes and device id of each region.
            memory: Kind of memory of the regions; None for the KV cache's.

        Raises:
            LocalLayoutError: It cannot be registered.
        """
        with _remedied("NIXL cannot register memory", _LOCKED_MEMORY, LocalLayoutError):
            descriptors = self._agent.get_reg_descs(
                [(*region, "") for region in regions], memory or self._memory
            )
            self._agent.register_memory(descriptors, backends=self._backends)
        self._registered.append(descriptors)

    def metadata(self) -> bytes:
        """Return what a peer needs to `connect`; complete once all memory is registered.

        Raises:
            LocalLayoutError: NIXL does not tell.
        """
        with _remedied("NIXL does not describe its agent", CHECK_BACKENDS, LocalLayoutError):
            metadata = self._agent.get_agent_metadata()
        return bytes(metadata)

    def connect(self, metadata: bytes) -> str:
        """Connect a peer; return its name.

        With LIBFABRIC over TCP this blocks while the peer's process is stopped or gone, as does
        `close` once such a peer was read from: see decision 23.

        Raises:
            TransferError: The metadata does not describe an agent that this one can reach.
        """
        # NIXL may yield in a loop until the peer has answered. If two workers that share a core do
        # so, neither lets the other's threads run.
        with _remedied("NIXL does not accept a peer's metadata", _COMPARE), running_on(self._cores):
            peer = self._agent.add_remote_agent(metadata)
        return peer.decode() if isinstance(peer, bytes) else str(peer)

    def disconnect(self, peer: str) -> None:
        """Disconnect a peer that has no read in flight and whose lists are released."""
        try:
            self._agent.remove_remote_agent(peer)
        except Exception as error:
            logger.warning("NIXL cannot forget %s: %s: %s", quote(peer), one_line(error), _LEFT)

    def prepare(
        self, rows: Rows, peer: str | None = None, memory: Memory | None = None
    ) -> Prepared:
        """Prepare strided descriptors, of a peer's memory or of our own.

        Args:
            rows: Shape (rows, 5), as in `lowering`.
            peer: The agent whose memory it is; None for our own.
            memory: Kind of memory; None for the KV cache's.

        Raises:
            TransferError: The memory is not registered, or the peer is not connected.
        """
        whose = "this worker's" if peer is None else f"{quote(peer)}'s"
        with _remedied(
            f"NIXL cannot prepare {len(rows)} rows of {one_line(whose)} memory", _COMPARE
        ):
            handle = self._agent.prep_xfer_dlist(peer or _LOCAL, rows, memory or self._memory)
        prepared = Prepared(peer, handle)
        self._lists.add(prepared)
        return prepared

    def release_prepared(self, prepared: Prepared) -> None:
        """Release a prepared list that no read in flight uses."""
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
            local_indices: Descriptors to read into, shape (descriptors,); at least one.
            remote: A list of the peer's memory.
            remote_indices: Descriptors to read from, of the same length.

        Raises:
            InDoubtError: NIXL refused it after it had begun.
            TransferError: NIXL refused it before.
        """
        assert local.peer is None and remote.peer is not None
        what = f"NIXL cannot read {len(local_indices)} descriptors from {quote(remote.peer)}"
        with _remedied(what, LOOK_THERE):
            handle = self._agent.make_prepped_xfer(
                "READ", local.handle, local_indices, remote.handle, remote_indices
            )
        transfer = Transfer(remote.peer, handle)
        self._reads.add(transfer)
        try:
            with _remedied(what, LOOK_THERE, InDoubtError):
                state = self._agent.transfer(handle)
            if state == "ERR":
                raise InDoubtError(f"{one_line(what)}: {LOOK_THERE}")
        except InDoubtError:
            self._has_failed = True
            raise
        transfer.ended_at_once = state == "DONE"
        return transfer

    def poll(self, transfer: Transfer) -> TransferState:
        """Return the state of a posted read, and let the agent advance.

        Release a read that is done. A failed read may still write.
        """
        if transfer.ended_at_once:
            return TransferState.DONE
        try:
            state = self._agent.check_xfer_state(transfer.handle)
        except Exception:
            state = "ERR"
        if state == "DONE":
            return TransferState.DONE
        if state == "PROC":
            return TransferState.IN_FLIGHT
        self._has_failed = True
        return TransferState.FAILED

    def telemetry(self, transfer: Transfer) -> Any:
        """Return what NIXL measured of a read that is done; None where it has nothing."""
        try:
            return self._agent.get_xfer_telemetry(transfer.handle)
        except Exception:
            return None

    def release(self, transfer: Transfer) -> None:
        """Release a read that is done."""
        self._reads.discard(transfer)
        self._give_back("a read", self._agent.release_xfer_handle, transfer)

    def notify(self, peer: str, message: bytes) -> None:
        """Send a message to a peer.

        Raises:
            TransferError: The peer cannot be reached.
        """
        with _remedied(f"NIXL cannot notify {quote(peer)}", LOOK_THERE):
            self._agent.send_notif(peer, notif_msg=message)

    def take_notifications(self) -> list[tuple[str, bytes]]:
        """Return messages that arrived since the last call, each with its sender's name."""
        try:
            arrived = self._agent.get_new_notifs()
        except Exception as error:
            # Nothing that a peer sends may end this engine.
            logger.warning(
                "NIXL cannot tell what notifications arrived: %s: %s", one_line(error), _LEFT
            )
            return []
        return [(peer, message) for peer, messages in arrived.items() for message in messages]

    def close(self) -> None:
        """Close the agent: nothing that it has begun writes after this.

        A live peer that has not begun to answer a posted read may terminate over this (`Endpoint
        timeout` in UCX 1.23), so wait for reads in flight where possible.
        """
        if self._agent is None:
            return
        if self._has_failed:
            self._settle()
        # NIXL's agent ends with the last reference to it. Until then it may write.
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
                logger.warning("NIXL cannot deregister memory: %s: %s", one_line(error), _LEFT)
        self._registered.clear()
        self._agent = None

    def _settle(self) -> None:
        """Let UCX be done with endpoints that have failed: without that it may abort the process.

        It does over shared memory, if a process with several agents was killed (UCX of nixl 1.5.1,
        `ucs_arbiter_group_is_empty`): 6 of 8 readers aborted, and none of 12 after 100 polls.
        """
        for _ in range(_SETTLE_POLLS):
            with suppress(Exception):
                self._agent.get_new_notifs()
            time.sleep(_SETTLE_POLL_S)

    def _give_back(
        self, what: str, function: Callable[[Any], None], owner: Prepared | Transfer
    ) -> None:
        """Release a handle; log it where NIXL fails at that, as with a peer that is gone."""
        handle, owner.handle = owner.handle, None
        try:
            function(handle)
        except Exception as error:
            logger.warning("NIXL cannot release %s: %s: %s", one_line(what), one_line(error), _LEFT)


THREAD_REST_US = 100
"""Default rest of the progress thread of an agent that cannot be polled. An idle worker with two
such agents and 8 connected engines takes 0.09 of a core with it, and 2 without: measured with
LIBFABRIC over TCP, see decision 23."""


def nixl_module() -> str:
    """Return the name of the installed NIXL's Python module, which differs between packages."""
    assert NixlWrapper is not None
    return str(NixlWrapper.__module__)


def can_be_polled(backends: Sequence[str]) -> bool:
    """Return whether an agent with these backends advances without a progress thread.

    UCX's does. LIBFABRIC's does as well, but when one of its peers ends, reads from others fail
    along with those from that peer (nixl 1.5.1). Other backends were not measured.
    """
    return list(backends) == ["UCX"]


def require_backends(backends: Sequence[str], known: Sequence[str]) -> None:
    """Check that NIXL has backends of these names.

    Raises:
        LocalLayoutError: It has not.
    """
    if unknown := [quote(name) for name in backends if name not in known]:
        raise LocalLayoutError(
            f"backends names {one_line(', '.join(unknown))}, but NIXL here has "
            f"{one_line(', '.join(sorted(known)))}: correct it"
        )


_TRIAL = """
import signal, sys
signal.alarm(60)
from nixl._api import nixl_agent, nixl_agent_config
agent = nixl_agent("trial", nixl_agent_config(backends=[]))
print("known:", *agent.get_plugin_list(), flush=True)
for name in sys.argv[1:]:
    agent.create_backend(name)
"""


def try_backends(backends: Sequence[str]) -> str | None:
    """Open backends in a process of its own; return what NIXL and UCX say that is wrong, if so.

    Raises:
        LocalLayoutError: NIXL does not have one of them.
    """
    command = [sys.executable, "-c", _TRIAL, *backends]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    if known := re.search(r"^known: (.*)", said, re.MULTILINE):
        require_backends(backends, known[1].split())
    if not done.returncode and "is not available" not in said:
        return None
    pattern = r"(?:UCX +(?:WARN|ERROR) +|^E\d.*?\] |^[\w.]*Error: )(.+)"
    return "; ".join(re.findall(pattern, said, re.MULTILINE)) or "it says nothing"


@contextmanager
def _remedied(what: str, remedy: str, kind: type[Exception] = TransferError) -> Iterator[None]:
    """Have an error within this context say what NIXL cannot do, and what to do about it."""
    try:
        yield
    except Exception as error:
        raise kind(f"{one_line(what)}: {one_line(error)}: {one_line(remedy)}") from error


@contextmanager
def progress_delay(delay_us: int) -> Iterator[None]:
    """Make progress threads of agents that are made within this context rest for `delay_us`.

    NIXL's agent has such a setting, but its Python class always writes 0 into it, last seen in
    1.5.1. So this replaces the settings class by one that ignores that write and sets our delay.
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
