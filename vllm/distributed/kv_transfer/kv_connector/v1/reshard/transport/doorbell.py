# SPDX-License-Identifier: Apache-2.0
"""How workers wake their scheduler while it waits only for them.

    connector's thread of each worker        a thread of the engine's core
    Ringer.ring()       --- TCP --->         Doorbell: wake()

A scheduler receives reports with its steps. Where there is nothing to compute, it takes no steps
for a while, and a worker that has something to report rings. The report itself still goes with the
next step, so a lost ring costs only latency, the rest of a pause.

A step tells workers the doorbell's address and public key: see `sockets`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import zmq
from vllm.logger import init_logger

from ..protocol.quoting import one_line, quote
from .cpu import running_on
from .sockets import (
    CHECK_ADDRESS,
    InternalAddress,
    Receiver,
    Sender,
    connect_internally,
    listen_internally,
)

logger = init_logger(__name__)

_MAX_RING_BYTES = 1 << 10
"""Maximum size of a ring, which holds only a worker's name."""


class Doorbell(Receiver):
    """Receives the rings of an engine's workers, in a thread of its own.

    Any other thread may use `num_ringers` and `close`.

    Args:
        host: Address of this machine to listen at, on a free port.
        wake: Called by the thread at each ring.

    Raises:
        ZMQError: The address cannot be bound, or ZeroMQ was built without CURVE.
        RuntimeError: There are no more threads.
    """

    def __init__(self, host: str, wake: Callable[[], None]) -> None:
        # Other threads read only its size.
        self._ringers = ringers = set[bytes]()

        def open_socket(socket: zmq.Socket[bytes]) -> InternalAddress:
            return listen_internally(socket, host, _MAX_RING_BYTES)

        def hear(worker: bytes) -> None:
            ringers.add(worker)
            wake()

        super().__init__(zmq.PULL, "reshard-doorbell", open_socket, hear)

    @property
    def num_ringers(self) -> int:
        """Number of workers that have rung: each rings once it is connected."""
        return len(self._ringers)


class Ringer(Sender):
    """Rings a worker's scheduler. Belongs to one thread; any may `close` it after the last ring.

    It rings once when it is made, so that the doorbell counts this worker.

    Args:
        address: The doorbell's address.
        worker: This worker's name, unique within the engine.
        cores: Where ZeroMQ's threads may run; None for where the calling thread may.

    Raises:
        ZMQError: There are no more sockets, or ZeroMQ was built without CURVE.
        OSError: The cores are not this process's any more.
    """

    def __init__(
        self, address: InternalAddress, worker: str, cores: Collection[int] | None = None
    ) -> None:
        self._worker = worker.encode()
        with running_on(cores):
            # The first socket starts ZeroMQ's threads.
            super().__init__(zmq.PUSH, lambda socket: connect_internally(socket, address))
        self.ring()

    def ring(self) -> None:
        """Have the scheduler take a step soon; does not block."""
        # If the queue is full, earlier rings are still unread.
        self.send(self._worker)


def open_doorbell(host: str, wake: Callable[[], None]) -> Doorbell | None:
    """Open a doorbell; on failure, log it and return None, as an engine can do without."""
    try:
        return Doorbell(host, wake)
    except (zmq.ZMQError, RuntimeError) as error:
        _do_without(host, error)
        return None


def open_ringer(
    address: InternalAddress, worker: str, cores: Collection[int] | None
) -> Ringer | None:
    """Open a ringer; on failure, log it and return None: the scheduler then does not rest."""
    try:
        return Ringer(address, worker, cores)
    except (zmq.ZMQError, OSError) as error:
        _do_without(address.host, error)
        return None


def _do_without(host: str, error: Exception) -> None:
    logger.warning(
        "Workers cannot wake their scheduler at %s (%s): while it waits for transfers alone, it "
        "takes a step each millisecond. %s.",
        quote(host),
        one_line(error),
        CHECK_ADDRESS,
    )
