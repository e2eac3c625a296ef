# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of the connector.

The life of a request is upstream's, and so are the parameters that routers pass on. What differs is
the handshake, which serves all stages, and what the workers are told.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.scheduler import NixlConnectorScheduler
from vllm.logger import init_logger

from .messages import (
    BlockIds,
    Heartbeats,
    Receive,
    RemoteEngineAddress,
    ReshardConnectorMetadata,
)
from .metadata import WorkerHandshake, encode_reply
from .side_channel import HandshakeServer

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = init_logger(__name__)

_SOURCE_FIELDS = (
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
)


class ReshardScheduler(NixlConnectorScheduler):
    """Upstream's scheduler with a handshake for all stages. Belongs to the scheduler's thread."""

    _server: HandshakeServer | None = None

    def serve_handshake(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Answer other engines' handshakes with what all workers say of themselves.

        Args:
            metadata: The workers' handshakes by (pp_rank, tp_rank).

        Raises:
            LocalChannelError: The side channel's port cannot be used.
        """
        handshakes: dict[tuple[int, int], WorkerHandshake] = {}
        for rank, handshake in metadata.items():
            assert isinstance(handshake, WorkerHandshake)
            handshakes[rank] = handshake
        self._server = HandshakeServer(
            self.side_channel_host, self.side_channel_port, encode_reply(handshakes)
        )
        self._server.start()

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ReshardConnectorMetadata:
        """What the workers are asked to do in this step."""
        wanted: dict[str, tuple[Request, BlockIds]] = dict(self._reqs_need_recv)
        self._reqs_need_recv.clear()
        upstream: Any = super().build_connector_meta(scheduler_output)
        now_s = time.perf_counter()
        metadata = ReshardConnectorMetadata(
            admitted=upstream.reqs_in_batch,
            withdrawn=upstream.reqs_not_processed,
            offered={
                request_id: max(expires_at_s - now_s, 0.0)
                for request_id, expires_at_s in upstream.reqs_to_send.items()
            },
            heartbeats=[
                Heartbeats(
                    RemoteEngineAddress(engine_id, info.host, info.port),
                    frozenset(info.req_ids),
                )
                for engine_id, info in upstream.heartbeat_by_engine.items()
            ],
        )
        for request_id, (request, block_ids) in wanted.items():
            if (receive := _receive(request, block_ids)) is not None:
                metadata.receive[request_id] = receive
        return metadata

    def request_finished(
        self, request: Request, block_ids: BlockIds
    ) -> tuple[bool, dict[str, Any] | None]:
        """As upstream's; the parameters for the next engine say how many stages there are."""
        delay_free, params = super().request_finished(request, block_ids)
        if params is not None:
            params["pp_size"] = self.vllm_config.parallel_config.pipeline_parallel_size
        return delay_free, params

    def shutdown(self) -> None:
        """Stop answering handshakes."""
        if self._server is not None:
            self._server.close()
            self._server = None
        super().shutdown()


def _receive(request: Request, local_block_ids: BlockIds) -> Receive | None:
    """What to read for a request; None where its parameters do not say from whom."""
    params = request.kv_transfer_params or {}
    missing = [name for name in _SOURCE_FIELDS if params.get(name) is None]
    if missing:
        # A request that was aborted before it was scheduled may come with anything.
        logger.warning(
            "Request %s cannot be released at the engine that computed it: its kv_transfer_params "
            "lack %s. The router must pass them on unchanged.",
            request.request_id,
            ", ".join(missing),
        )
        return None
    remote_tokens = params.get("remote_num_tokens") or request.num_prompt_tokens
    return Receive(
        source=RemoteEngineAddress(
            params["remote_engine_id"], params["remote_host"], int(params["remote_port"])
        ),
        remote_request_id=params["remote_request_id"],
        local_block_ids=local_block_ids,
        remote_block_ids=params.get("remote_block_ids") or (),
        local_tokens=min(remote_tokens, request.num_prompt_tokens),
        remote_tokens=remote_tokens,
    )
