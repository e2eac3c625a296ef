# SPDX-License-Identifier: Apache-2.0
"""A rank that is many engines, or that reads from as many; no side channel lies between."""

from __future__ import annotations

import gc
import os
import resource
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any
from unittest import mock

import psutil
from vllm.distributed.nixl_utils import NixlWrapper

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine import worker as worker_module
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.caches.geometry import (
    memory_regions,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.connecting.dialer import (
    Answer,
    Ask,
    Dialer,
    LocalEndpoint,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.connecting.peers import IDLE_LANE_S
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.description import (
    WorkerDescription,
    decode_worker,
    encode_worker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    RemoteEngineAddress,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.agent import NixlAgent

from .host import ConnectorHost
from .specs import EngineSpec, PeersUsage, RequestSpec, Watch

_HOST = "127.0.0.1"
_FIRST_PORT = 10_000
"""Nobody listens there: answers are at hand."""

_REST_US = 10_000
"""How long the agents of one process that is many engines rest: their threads share its cores."""

_SETTLE_S = 2.0 * IDLE_LANE_S + 1.0
"""For lanes to be renewed that are not in use."""

_FEW = 8
"""After fewer reads than that nothing is renewed that was not before."""

_BLOCK = 1


class PeersHost(ConnectorHost):
    """One rank.

    Args:
        spec: The engine.
        rank: Its position in the engine's mesh.
    """

    def __init__(self, spec: EngineSpec, rank: int) -> None:
        # As between machines, but that shared memory would do here.
        os.environ["UCX_TLS"] = "tcp,self"
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._described: list[WorkerDescription] = []

        def note(description: WorkerDescription) -> bytes:
            self._described.append(description)
            return encode_worker(description)

        begin = Dialer.begin

        def begin_here(dialer: Dialer, local: LocalEndpoint, _: Ask) -> None:
            begin(dialer, local, self._answer)

        with (
            mock.patch.object(worker_module, "encode_worker", note),
            mock.patch.object(Dialer, "begin", begin_here),
        ):
            super().__init__(spec, rank)
        self._agents: list[NixlAgent] = []
        self._engines: dict[RemoteEngineAddress, tuple[WorkerDescription, dict[str, Any]]] = {}
        self._unread: list[RemoteEngineAddress] = []
        self._nixl_s: list[float] = []

    def be_many(self, count: int) -> list[tuple[bytes, dict[str, Any]]]:
        """Be so many engines, with an agent for each, that hold one request in the same blocks.

        Returns:
            For each, what it says in a handshake, and of the request.
        """
        (own,) = self._described
        tokens = self._config.vllm_config.cache_config.block_size
        offer = self.offer([RequestSpec("held", [_BLOCK], tokens)])
        self.hold(offer.metadata)
        table, regions = own.lease_table, memory_regions(self._config.tensors)
        engines = []
        for _ in range(count):
            name = str(uuid.uuid4())
            agent = NixlAgent(name, num_threads=0, progress_delay_us=_REST_US)
            agent.register(regions)
            agent.register([(table.address, table.size_bytes, 0)], "DRAM")
            self._agents.append(agent)
            described = replace(own, engine_id=name, agent_metadata=agent.metadata())
            params = {**offer.params["held"], "remote_engine_id": name, "remote_host": _HOST}
            engines.append((encode_worker(described), params))
        return engines

    def hear_of(self, engines: Sequence[tuple[bytes, dict[str, Any]]]) -> None:
        """Have an answer at hand of each of these engines, which lie at places of their own."""
        for port, (body, params) in enumerate(engines, start=_FIRST_PORT):
            description = decode_worker(body)
            address = RemoteEngineAddress(description.engine_id, _HOST, port)
            self._engines[address] = description, {**params, "remote_port": port}
        self._unread = list(self._engines)
        nixl_s, add_remote_agent = self._nixl_s, NixlWrapper.add_remote_agent

        def connect(agent: NixlWrapper, metadata: bytes) -> Any:
            began_s = time.monotonic()
            try:
                return add_remote_agent(agent, metadata)
            finally:
                nixl_s.append(time.monotonic() - began_s)

        NixlWrapper.add_remote_agent = connect

    def _answer(self, address: RemoteEngineAddress) -> Future[Answer]:
        """What an engine says; it is not asked."""
        answer: Future[Answer] = Future()
        answer.set_result((self._engines[address][0],))
        return answer

    def read_from(self, count: int) -> PeersUsage:
        """Read a block from so many engines that were not read from, one after another."""
        self._nixl_s.clear()
        handshakes_s = []
        tokens = self._config.vllm_config.cache_config.block_size
        for _ in range(count):
            address = self._unread.pop(0)
            name = f"from-{address.port}"
            wanted = RequestSpec(name, [_BLOCK], tokens, self._engines[address][1])
            first, others = self.ask([wanted], computes=False)
            reading = self.read(first, others, [name], Watch())
            handshakes_s.append(reading.posted_s - reading.began_s)
            self.forget([name])
        process = psutil.Process()
        peak = process.num_fds()
        if count > _FEW:
            time.sleep(_SETTLE_S)
        gc.collect()
        return PeersUsage(
            process.memory_info().rss,
            process.num_fds(),
            peak,
            process.num_threads(),
            handshakes_s,
            list(self._nixl_s),
        )
