# SPDX-License-Identifier: Apache-2.0
"""How workers wake their scheduler while it waits for nothing but them.

    connector's thread of each worker        a thread of the engine's core
    Ringer.ring()       --- TCP --->         Doorbell: wake()

A scheduler hears of transfers with the steps that it takes. Where there is nothing to compute it
takes none for a while, and a worker that has something to tell rings. What that is goes with the
next step as ever: a ring that is lost costs the rest of a pause, and latency only.

Workers learn from a step where the doorbell is, and its public key: see `sockets`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress

import zmq
from vllm.logger import init_logger

from ..protocol.quoting import one_line, quote
from .cpu import running_on
from .sockets import InternalAddress, Receiver, connect_internally, listen_internally

logger = init_logger(__name__)

_MAX_RING_BYTES = 1 << 10
"""The name of a worker is all that a doorbell is sent."""


class Doorbell:
    """Hears an engine's workers ring, in a thread of its own.

    `num_ringers` and `close` are for any other thread.

    Args:
        host: Address of this machine to listen at, on a port that is free.
        wake: Called by the thread at each ring.

    Attributes:
        address: Where it listens.

    Raises:
        ZMQError: The address cannot be bound, or ZeroMQ was built without CURVE.
        RuntimeError: There are no more threads.
    """

    def __init__(self, host: str, wake: Callable[[], None]) -> None:
        self._wake = wake
        # Only its size is read by another thread.
        self._ringers: set[bytes] = set()
        self._receiver = Receiver(zmq.PULL, "reshard-doorbell", self._hear)
        self.address = self._receiver.begin(
            lambda socket: listen_internally(socket, host, _MAX_RING_BYTES)
        )

    @property
    def num_ringers(self) -> int:
        """How many workers have rung: each does once it is connected."""
        return len(self._ringers)

    def close(self) -> None:
        """Hear nothing any more; may be called repeatedly."""
        self._receiver.close()

    def _hear(self, worker: bytes) -> None:
        self._ringers.add(worker)
        self._wake()


class Ringer:
    """A worker's button. Belongs to one thread, but for `close`, which comes after its last ring.

    It rings once when it is made, so that the scheduler knows of it.

    Args:
        address: The doorbell's.
        worker: This worker's name, as no other worker of the engine has it.
        cores: Where ZeroMQ's threads may run; None for where the calling thread may.

    Raises:
        ZMQError: There are no more sockets, or ZeroMQ was built without CURVE.
        OSError: The cores are not this process's any more.
    """

    def __init__(
        self, address: InternalAddress, worker: str, cores: Collection[int] | None = None
    ) -> None:
        self._worker = worker.encode()
        self._context = zmq.Context()
        try:
            with running_on(cores):
                # ZeroMQ's threads begin with the first socket.
                self._socket = self._context.socket(zmq.PUSH)
                connect_internally(self._socket, address)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self.ring()

    def ring(self) -> None:
        """Have the scheduler take a step soon; waits for nothing."""
        # Where no more fits, there are rings that it has not heard yet.
        with suppress(zmq.Again):
            self._socket.send(self._worker, zmq.NOBLOCK)

    def close(self) -> None:
        """Ring no more; may be called repeatedly."""
        self._context.destroy(linger=0)


def open_doorbell(host: str, wake: Callable[[], None]) -> Doorbell | None:
    """A doorbell, or a line in the log and None: an engine can do without."""
    try:
        return Doorbell(host, wake)
    except (zmq.ZMQError, RuntimeError) as error:
        _do_without(host, error)
        return None


def open_ringer(
    address: InternalAddress, worker: str, cores: Collection[int] | None
) -> Ringer | None:
    """A ringer, or a line in the log and None: a scheduler does not rest without."""
    try:
        return Ringer(address, worker, cores)
    except (zmq.ZMQError, OSError) as error:
        _do_without(address.host, error)
        return None


def _do_without(host: str, error: Exception) -> None:
    logger.warning(
        "Workers cannot wake their scheduler at %s (%s): while it waits for transfers alone, it "
        "takes a step each millisecond.",
        quote(host),
        one_line(error),
    )
