# SPDX-License-Identifier: Apache-2.0
"""Devices whose streams run when the schedule says so, in place of `torch.cuda`.

What is launched on a stream is done in the order in which it was launched, and some time later.
Streams know nothing of each other; an event says how far one has come. Every thread has a device
that is its own choice: before it has chosen, the first of its process, where nothing of a worker's
is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from unittest import mock

import torch

from tests.v1.kv_connector.unit.reshard.simulation.wire import Owner, OwnerAt, check
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.memory.staging import ArenaCopy
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport import arena
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.arena import ArenaCopier


@dataclass(eq=False, slots=True)
class Kernel:
    """Something that was launched.

    Attributes:
        run: What it does.
        owners: Whose memory it writes into.
    """

    run: Callable[[], None]
    owners: Sequence[Owner | None] = ()


class Stream:
    """What a device does one after the other.

    Args:
        device: The device.

    Attributes:
        pending: What it has still to do.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.pending: deque[Kernel] = deque()
        self.num_launched = self.num_done = 0
        device.streams.append(self)

    def launch(self, kernel: Kernel) -> None:
        """Do something after all else."""
        self.pending.append(kernel)
        self.num_launched += 1

    def run_one(self) -> None:
        """Do the next."""
        self.pending.popleft().run()
        self.num_done += 1

    def synchronize(self) -> None:
        """Do all."""
        while self.pending:
            self.run_one()


class Device:
    """A device of a process.

    Attributes:
        type: As torch calls it.
        streams: The default one first, on which the model computes.
    """

    type = "cuda"

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        Stream(self)

    def launch(self, run: Callable[[], None], owners: Sequence[Owner | None] = ()) -> None:
        """Launch something from the running thread, on the stream that it has for this device."""
        stream = _running.streams.get(self, self.streams[0])
        stream.launch(Kernel(run, owners))

    @property
    def is_chosen(self) -> bool:
        """Whether it is the running thread's device."""
        return _running.device is self

    def may_write(self, owner: Owner) -> bool:
        """Whether something was launched that still writes into what is somebody's."""
        return any(
            owner is each
            for stream in self.streams
            for kernel in stream.pending
            for each in kernel.owners
        )

    def synchronize(self) -> None:
        """Do all that was launched."""
        for stream in self.streams:
            stream.synchronize()


@dataclass(eq=False)
class Thread:
    """A thread of a worker's.

    Attributes:
        device: Its own; that of the process without a choice.
        streams: On what it launches, for devices where that is not the default stream.
    """

    device: Device = field(default_factory=Device)
    streams: dict[Device, Stream] = field(default_factory=dict)

    def running(self) -> _Running:
        """Within this block, what is done is done by this thread."""
        return _Running(self)


class _Running:
    """A block of a thread's: entered at each turn, which a generator would make slower."""

    __slots__ = ("_before", "_thread")

    def __init__(self, thread: Thread) -> None:
        self._thread = thread

    def __enter__(self) -> None:
        global _running
        self._before, _running = _running, self._thread

    def __exit__(self, *_: object) -> None:
        global _running
        _running = self._before


_running = Thread()


class Event:
    """A point in a stream; before it is recorded, none."""

    def __init__(self) -> None:
        self._stream: Stream | None = None
        self._number = 0

    def record(self, stream: Stream | None = None) -> None:
        """Stand for all that was launched on a stream, by default on the running thread's."""
        device = _running.device
        self._stream = stream or _running.streams.get(device, device.streams[0])
        self._number = self._stream.num_launched

    def query(self) -> bool:
        """Whether all of that is done."""
        return self._stream is None or self._stream.num_done >= self._number

    def synchronize(self) -> None:
        """Do all of that."""
        while not self.query():
            assert self._stream is not None
            self._stream.run_one()


def set_device(device: Device) -> None:
    """Choose the running thread's device."""
    _running.device = device


@contextmanager
def _launching_on(stream: Stream) -> Iterator[None]:
    """Within this block, the running thread's device is a stream's, and it launches on that."""
    thread = _running
    device, streams = thread.device, dict(thread.streams)
    thread.device, thread.streams = stream.device, {**streams, stream.device: stream}
    try:
        yield
    finally:
        thread.device, thread.streams = device, streams


@dataclass(frozen=True)
class DeviceArena:
    """An arena, as a copier on a device sees it.

    Attributes:
        tensor: Its memory.
        device: Whose it is.
        owner_at: Whose a byte is.
    """

    tensor: torch.Tensor
    device: Device
    owner_at: OwnerAt
    is_cuda = True


class DeviceCopies:
    """Makes copies out of an arena, or into it, by the copier for devices, late.

    Args:
        arena: The arena.
        caches: What is at the other end.
    """

    failure_rate = 0.0
    """Nothing that a device does fails by itself."""

    def __init__(self, arena: DeviceArena, caches: Iterable[torch.Tensor]) -> None:
        self._device = arena.device
        self._copier = ArenaCopier(arena, caches)
        (self._stream,) = self._device.streams[1:]

    @property
    def pending(self) -> Sequence[Kernel]:
        """Copies that are not made."""
        return self._stream.pending

    def scatter(self, copy: ArenaCopy) -> Event:
        """Make a copy out of the arena later."""
        return self._copier.scatter(copy)

    def gather(self, copy: ArenaCopy) -> Event:
        """Make a copy into the arena later."""
        return self._copier.gather(copy)

    def make_one(self) -> None:
        """Make the oldest copy."""
        self._stream.run_one()

    def may_write(self, owner: Owner) -> bool:
        """Whether a copy may still write into what is somebody's."""
        return self._device.may_write(owner)

    def close(self) -> None:
        """Make all copies."""
        self._copier.close()


@contextmanager
def devices() -> Iterator[None]:
    """Within this block there is no other device."""
    late = {
        "scatter": partial(_scatter, arena.scatter),
        "gather": partial(_gather, arena.gather),
    }
    with (
        mock.patch.multiple(
            torch.cuda, Event=Event, Stream=Stream, stream=_launching_on, set_device=set_device
        ),
        mock.patch.multiple(arena, **late),
    ):
        yield


def check_gathered(owner: Owner | None) -> None:
    """See that what is gathered is offered.

    Later it may be another's: whoever reads it finds that it is not held any more.
    """
    offered = owner is not None and owner.offered
    check(offered, f"memory of {owner} is gathered, which is not offered")


def _gather(
    make: Callable[..., None], copy: ArenaCopy, arena: DeviceArena, memories: Sequence[object]
) -> None:
    """Launch a copy into an arena."""
    for source in copy.addresses.tolist():
        check_gathered(arena.owner_at(source))
    arena.device.launch(partial(make, copy, arena.tensor, memories))


def _scatter(
    make: Callable[..., None], copy: ArenaCopy, arena: DeviceArena, memories: Sequence[object]
) -> None:
    """Launch a copy out of an arena."""
    targets = copy.addresses.tolist()
    owners = [arena.owner_at(target) for target in targets]

    def run() -> None:
        for target, owner in zip(targets, owners, strict=True):
            now = arena.owner_at(target)
            check(now is owner, f"a copy for {owner} is made into memory of {now}")
        make(copy, arena.tensor, memories)

    arena.device.launch(run, owners)
