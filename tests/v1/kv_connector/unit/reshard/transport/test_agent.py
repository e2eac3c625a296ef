# SPDX-License-Identifier: Apache-2.0
"""What NIXL is told, and what its errors become; `transport` has the rest."""

from __future__ import annotations

import os
import re
import sys
import uuid
from multiprocessing.connection import Connection
from unittest.mock import Mock

import numpy as np
import psutil
import pytest
from vllm.distributed.nixl_utils import NixlWrapper

from tests.v1.kv_connector.unit.reshard.forking import started
from tests.v1.kv_connector.unit.reshard.transport.channels import wait_until
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import (
    LocalLayoutError,
    TransferError,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport import agent as agent_module
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.agent import (
    NixlAgent,
    Prepared,
    Transfer,
    TransferState,
    try_backends,
)


@pytest.fixture
def agents() -> tuple[NixlAgent, NixlAgent]:
    """Two agents that have nothing registered."""
    return tuple(NixlAgent(f"{role}-{uuid.uuid4()}", num_threads=1) for role in ("a", "b"))


def test_memory_that_is_not_registered_is_refused(agents):
    """The error names whose memory it is."""
    rows = np.array([[4096, 64, 0, 64, 2]], dtype=np.uint64)
    with pytest.raises(TransferError, match="1 rows of this worker's memory"):
        agents[0].prepare(rows)


def test_unknown_peer_is_refused(agents):
    """Lists and messages for a peer that never shook hands are errors, not crashes."""
    with pytest.raises(TransferError, match="nobody's memory"):
        agents[0].prepare(np.array([[4096, 64, 0, 64, 2]], dtype=np.uint64), "nobody")
    with pytest.raises(TransferError, match="cannot notify nobody"):
        agents[0].notify("nobody", b"")


def test_garbage_is_no_peer(agents):
    """Metadata that no agent wrote is refused with a typed error."""
    with pytest.raises(TransferError, match="does not accept a peer's metadata"):
        agents[0].connect(b"garbage")


def test_progress_delay_reaches_nixl(monkeypatch):
    """What NIXL is configured with is the delay that was asked for, and only for this agent."""
    fingerprints = sys.modules[NixlWrapper.__module__].nixlBind
    make_agent, settings, delays_us = fingerprints.nixlAgent, fingerprints.nixlAgentConfig, []

    def spy(name, config):
        delays_us.append(config.pthrDelay)
        return make_agent(name, config)

    monkeypatch.setattr(fingerprints, "nixlAgent", spy)
    NixlAgent(f"patient-{uuid.uuid4()}", num_threads=1, progress_delay_us=250)
    assert delays_us == [250]
    assert fingerprints.nixlAgentConfig is settings


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux's affinity")
def test_nixls_threads_may_run_where_they_are_told(monkeypatch):
    """They get the cores that were asked for; the calling thread keeps its own."""
    fingerprints = sys.modules[NixlWrapper.__module__].nixlBind
    make_agent, seen = fingerprints.nixlAgent, []

    def spy(name, config):
        seen.append(os.sched_getaffinity(0))
        return make_agent(name, config)

    monkeypatch.setattr(fingerprints, "nixlAgent", spy)
    own = os.sched_getaffinity(0)
    one_core = {min(own)}
    os.sched_setaffinity(0, one_core)
    try:
        NixlAgent(f"free-{uuid.uuid4()}", num_threads=1, cores=own)
        assert seen == [own]
        assert os.sched_getaffinity(0) == one_core
    finally:
        os.sched_setaffinity(0, own)


def test_agent_that_reads_has_no_threads_that_work():
    """It advances when it is polled: there is only one for telemetry, which sleeps."""
    this = psutil.Process()
    # The first one starts what UCX has for all of a process.
    first = NixlAgent(f"first-{uuid.uuid4()}", num_threads=0, polled=True)
    before = this.num_threads()
    agent = NixlAgent(f"reader-{uuid.uuid4()}", num_threads=0, polled=True)
    assert this.num_threads() <= before + 1
    agent.close()
    first.close()


def test_large_reads_are_divided_among_threads_that_sleep(agents):
    """Whatever the order of descriptors that do not adjoin, every byte comes, and agents rest."""
    count, rng = 4096, np.random.default_rng(0)
    reader = NixlAgent(f"reader-{uuid.uuid4()}", num_threads=2, polled=True)
    source = rng.integers(0, 256, (count, 64), dtype=np.uint8)
    destination = np.zeros_like(source)
    for agent, own in ((agents[0], source), (reader, destination)):
        agent.register([(own.ctypes.data, own.nbytes, 0)])
    peer = reader.connect(agents[0].metadata())
    # Of every row, the first half.
    remote, local = (
        reader.prepare(np.array([[own.ctypes.data, 32, 0, 64, count]], np.uint64), whose)
        for own, whose in ((source, peer), (destination, None))
    )
    remote_indices, local_indices = (rng.permutation(count).astype(np.int32) for _ in range(2))
    transfer = reader.read(local, local_indices, remote, remote_indices)
    wait_until(lambda: reader.poll(transfer) is TransferState.DONE)
    reader.release(transfer)
    expected = np.zeros_like(source)
    expected[local_indices, :32] = source[remote_indices, :32]
    np.testing.assert_array_equal(destination, expected)
    reader.close()


def test_closed_agent_leaves_nothing(agents):
    """Lists and reads go with it, and a second time changes nothing."""
    reader, source = NixlAgent(f"reader-{uuid.uuid4()}", num_threads=0, polled=True), agents[0]
    memory = np.arange(128, dtype=np.uint8).reshape(2, 64)
    for agent, own in zip((source, reader), memory, strict=True):
        agent.register([(own.ctypes.data, own.nbytes, 0)])
    peer = reader.connect(source.metadata())
    remote, local = (
        reader.prepare(np.array([[own.ctypes.data, 64, 0, 64, 1]], dtype=np.uint64), whose)
        for own, whose in zip(memory, (peer, None), strict=True)
    )
    indices = np.zeros(1, dtype=np.int32)
    transfer = reader.read(local, indices, remote, indices)
    assert None not in (remote.handle, local.handle, transfer.handle)
    reader.close()
    assert remote.handle is local.handle is transfer.handle is None
    reader.close()


def errors_of_nixl() -> list[type[Exception]]:
    """Every type of error that NIXL has, one for each of its codes."""
    bindings = vars(sys.modules[NixlWrapper.__module__].nixlBind)
    return [
        each
        for name, each in bindings.items()
        if name.startswith("nixl") and isinstance(each, type) and issubclass(each, Exception)
    ]


REMEDY = re.compile(r": (?:see|correct|compare|raise|nothing need be done)\b[^:]+$")
INDICES = np.zeros(1, dtype=np.int32)
ROWS = np.array([[4096, 64, 0, 64, 1]], dtype=np.uint64)
OPERATIONS = {
    "get_reg_descs": lambda agent: agent.register([(4096, 64, 0)]),
    "register_memory": lambda agent: agent.register([(4096, 64, 0)]),
    "get_agent_metadata": lambda agent: agent.metadata(),
    "add_remote_agent": lambda agent: agent.connect(b"metadata"),
    "prep_xfer_dlist": lambda agent: agent.prepare(ROWS, "peer"),
    "make_prepped_xfer": lambda agent: agent.read(
        Prepared(None, 1), INDICES, Prepared("peer", 2), INDICES
    ),
    "transfer": lambda agent: agent.read(Prepared(None, 1), INDICES, Prepared("peer", 2), INDICES),
    "send_notif": lambda agent: agent.notify("peer", b""),
}
WARNED = {
    "remove_remote_agent": lambda agent: agent.disconnect("peer"),
    "get_new_notifs": lambda agent: agent.take_notifications(),
    "release_dlist_handle": lambda agent: agent.release_prepared(Prepared("peer", 2)),
    "release_xfer_handle": lambda agent: agent.release(Transfer("peer", 3)),
    "deregister_memory": lambda agent: agent.close(),
}


def test_every_error_of_nixl_comes_with_a_remedy(agents, monkeypatch):
    """Whatever fails, with whichever code: one line that ends with what to do."""
    lines: list[str] = []
    monkeypatch.setattr(
        agent_module.logger, "warning", lambda text, *values: lines.append(text % values)
    )
    errors = errors_of_nixl()
    assert len(errors) >= 10
    agent, _ = agents
    wrapped = agent._agent
    for error in errors:
        for name in (*OPERATIONS, *WARNED):
            agent._agent = Mock(wraps=None)
            getattr(agent._agent, name).side_effect = error("NIXL_ERR_\nX")
            agent._registered[:] = [None]
            if name in OPERATIONS:
                with pytest.raises((TransferError, LocalLayoutError)) as caught:
                    OPERATIONS[name](agent)
                lines.append(str(caught.value))
            else:
                WARNED[name](agent)
            assert len(lines) == 1, (name, lines)
            assert "NIXL" in lines[0] and lines[0].isprintable()
            assert REMEDY.search(lines.pop().partition("NIXL_ERR_")[2]), name
    agent._agent = wrapped
    agent._registered.clear()


def test_backend_that_nixl_does_not_have_is_refused_by_name():
    """With those that it has."""
    with pytest.raises(
        LocalLayoutError, match=r"names ucx, but NIXL here has .*LIBFABRIC.*UCX: correct"
    ):
        NixlAgent(f"misspelt-{uuid.uuid4()}", backends=("ucx",))


def test_backend_that_cannot_be_opened_is_refused_with_the_settings():
    """As where UCX_TLS leaves no transport; in a process of its own, as UCX reads it once."""
    with started(_open_without_transports) as (_, pipe):
        error = pipe.recv()
    assert isinstance(error, LocalLayoutError)
    assert "NIXL cannot open its backends: NIXL_ERR_BACKEND: see what UCX" in str(error)
    assert "correct UCX_TLS, UCX_NET_DEVICES" in str(error)


def _open_without_transports(pipe: Connection) -> None:
    """Say what opening an agent raises."""
    os.environ["UCX_TLS"] = "none-such"
    try:
        NixlAgent("a")
    except Exception as error:
        pipe.send(error)


def test_backends_are_tried_in_a_process_of_their_own(monkeypatch):
    """What UCX says of transports and devices is told, with what there is instead."""
    assert try_backends(["UCX"]) is None
    with pytest.raises(LocalLayoutError, match=r"names ucx, but NIXL here has .*UCX: correct it"):
        try_backends(["ucx"])
    for name, what in (("UCX_TLS", "transport"), ("UCX_NET_DEVICES", "network device")):
        with monkeypatch.context() as patch:
            patch.setenv("UCX_TLS", "tcp")
            patch.setenv(name, "none-such")
            fault = try_backends(["UCX"])
        assert f"{what} 'none-such' is not available, please use one or more of: " in fault
