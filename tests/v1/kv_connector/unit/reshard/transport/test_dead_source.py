# SPDX-License-Identifier: Apache-2.0
"""A source that ended while nothing was read from it, and is read from again, over real NIXL."""

from __future__ import annotations

import os
from contextlib import suppress
from multiprocessing.connection import Connection

import numpy as np
import psutil
import pytest

from tests.v1.kv_connector.unit.reshard.forking import ANSWER_S, started
from tests.v1.kv_connector.unit.reshard.transport.backends import BACKENDS, available
from tests.v1.kv_connector.unit.reshard.transport.channels import wait_until
from tests.v1.kv_connector.unit.reshard.transport.remotes import nixl_reader
from tests.v1.kv_connector.unit.reshard.transport.source_process import (
    BYTES,
    COUNT,
    serving_sources,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import TransferError
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.agent import (
    TransferState,
    can_be_polled,
)

TLS = "tcp,self"
END_S = 30.0
"""How long the read and the end of its agent may take together; with UCX, far less than 1 s."""

_NEVER_ENDS = pytest.mark.xfail(
    reason="libfabric's provider for TCP tries to connect for ever, and NIXL (1.5.1) waits for it",
    raises=TimeoutError,
    strict=True,
)


@pytest.mark.parametrize(
    "backend",
    [pytest.param(each, marks=[_NEVER_ENDS] if each == "LIBFABRIC" else []) for each in BACKENDS],
)
def test_read_from_a_source_that_has_ended_is_no_end_of_the_reader(backend):
    """It fails, and its agent can be closed, both in a process that may be ended if not."""
    available(backend)
    with serving_sources(backend, TLS, 1) as (source,):
        given = (backend, source.address, source.metadata)
        with started(_read_again, *given) as (reader, pipe):
            pipe.recv()
            source.kill()
            pipe.send(None)
            assert pipe.poll(ANSWER_S), "it does not read again"
            pipe.recv()
            reader.join(END_S)
            if reader.is_alive():
                raise TimeoutError("it does not end")
            assert reader.exitcode == 0


def _read_again(pipe: Connection, backend: str, address: int, metadata: bytes) -> None:
    """Read from a source before and after its end."""
    os.environ["UCX_TLS"] = TLS
    agent = nixl_reader("reader", backend)
    memory = np.zeros((COUNT, BYTES), np.uint8)
    agent.register([(memory.ctypes.data, memory.nbytes, 0)])
    peer = agent.connect(metadata)
    local, remote = (
        agent.prepare(np.array([[start, BYTES, 0, BYTES, COUNT]], dtype=np.uint64), whose)
        for start, whose in ((memory.ctypes.data, None), (address, peer))
    )
    indices = np.arange(COUNT, dtype=np.int32)
    first = agent.read(local, indices, remote, indices)
    wait_until(lambda: agent.poll(first) is TransferState.DONE)
    agent.release(first)
    pipe.send(None)
    pipe.recv()
    if not can_be_polled([backend]):
        # Its thread gives the connection up; a read before that fails at once.
        connections = psutil.Process().net_connections
        states = psutil.CONN_ESTABLISHED, psutil.CONN_CLOSE_WAIT
        wait_until(lambda: all(each.status not in states for each in connections("tcp")))
    pipe.send(None)
    with suppress(TransferError):
        again = agent.read(local, indices, remote, indices)
        wait_until(lambda: agent.poll(again) is TransferState.FAILED)
    agent.close()
