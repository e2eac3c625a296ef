# SPDX-License-Identifier: Apache-2.0
"""The scheduler's half of the connector.

It extends upstream's scheduler, and keeps its request states and the parameters that routers pass
on. It also answers handshakes for all pipeline stages. Which requests wait for blocks, and which
tokens are read, given up and offered, is decided by the other modules of this folder.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.scheduler import NixlConnectorScheduler
from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from ...errors import one_line, quote
from ...protocol.bounds import without_brackets
from ...protocol.early import EarlyRequest, early_request, prefill_params
from ...protocol.ids import BlockIds, EngineId, RequestId
from ...protocol.messages import Receive, RemoteEngineAddress, RemoteRequest
from ...protocol.metadata import encode_replies, factors_digest
from ...protocol.params import (
    Params,
    already_requested,
    check_host,
    faulty,
    is_disaggregated,
    note_requested,
    offered_tokens,
    partly_computed,
    remote_blocks,
    remote_request,
    sanitize_params,
    without_source,
    write_secret,
)
from ...protocol.subscriptions import Computed, Gone, News, Offered
from ...transport.limits import raise_file_limit
from ...transport.side_channel import HandshakeServer
from ...transport.subscriber import Subscriber
from ..caches.geometry import full_groups, state_groups, tokens_of_blocks, window_groups
from ..compat import (
    OUTPUTS_OUTLIVE_PREEMPTION,
    PREFILLS_STOP_SHORT,
    REQUEST_NUMBERS,
    tokens_in_flight,
)
from ..content import prompt_digest
from ..metadata import ReshardConnectorMetadata, ReshardHandshakeMetadata, WorkerReport
from ..settings import read_settings, remarks
from ..stats import ReshardStats
from ..weights import Adapters
from .first_tokens import open_first_tokens
from .offers import OfferBook, host_for_workers
from .prompts import Prompts
from .receives import (
    TokenCounts,
    address_of,
    fingerprint_of,
    is_placeholder,
    note_adapter,
    num_to_offer,
    offered_adapter,
    part_of,
    receive_of,
)
from .remote_reads import RemoteRead, RemoteReads

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger(__name__)

_ASK_UCX = " With UCX_LOG_LEVEL=info, UCX logs the transports that it takes when a peer connects."
"""NIXL 1.5.1 does not tell them. On a prefill engine, too, UCX prints them in each worker's log."""


_FIRST_REQUESTS = 100
"""Requests after which an engine says that none of them had parameters."""


class ReshardScheduler(NixlConnectorScheduler):
    """The part of the connector that vLLM's scheduler calls. Belongs to the scheduler's thread.

    Attributes:
        first_tokens: First tokens sampled by prefill engines, and the outputs made from them.
    """

    _server: HandshakeServer | None = None

    def __init__(
        self, vllm_config: VllmConfig, engine_id: EngineId, kv_cache_config: KVCacheConfig
    ) -> None:
        assert vllm_config.kv_transfer_config is not None
        settings = read_settings(vllm_config.kv_transfer_config)
        self._settings = settings
        self._key = settings.channel_key()
        self._trusted = settings.trusted()
        self._dispatches_early = settings.early_dispatch
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self.side_channel_host: str = without_brackets(self.side_channel_host)
        for remark in remarks(vllm_config.kv_transfer_config, settings, self.side_channel_host):
            logger.warning("%s.", one_line(remark))
        parallel_config = vllm_config.parallel_config
        # True if steps are scheduled before the output of earlier ones is known.
        self._is_ahead = (
            vllm_config.scheduler_config.async_scheduling
            or parallel_config.pipeline_parallel_size > 1
        )
        self._state_groups = state_groups(kv_cache_config)
        block_tokens = tokens_of_blocks(
            kv_cache_config, parallel_config.decode_context_parallel_size
        )
        has_windows = bool(window_groups(kv_cache_config))
        self._counts = TokenCounts(tuple(block_tokens), self._state_groups, has_windows)
        self._offers = OfferBook()
        self._adapters = Adapters()
        # With drafts, a step's tokens may be rejected: no part of a prompt is told of.
        is_told = vllm_config.speculative_config is None
        full = full_groups(kv_cache_config) if is_told else frozenset()
        self._prompts = Prompts(
            [tokens * (group in full) for group, tokens in enumerate(block_tokens)],
            partial(tokens_in_flight, is_ahead=self._is_ahead),
            lambda: (self.engine_id, self.side_channel_host, self.side_channel_port),
        )
        self._subscriber = Subscriber(self._deliver, REQUEST_NUMBERS, self._key, self._trusted)
        # Without the null block. 0 with drafts, because their extra blocks are not counted here.
        num_blocks = kv_cache_config.num_blocks - 1 if is_told else 0
        longest_blocks = self._counts.num_blocks(vllm_config.model_config.max_model_len)
        self._stats = ReshardStats()
        self._reads = RemoteReads(
            self._subscriber,
            self._trusted,
            self._stats.record_blocks_in_doubt,
            num_blocks,
            longest_blocks,
        )
        self._block_pool: BlockPool | None = None
        raise_file_limit()
        self._shortages: dict[str, str] = {}
        # Requests without parameters before the first one with them; then less than any number.
        self._num_without = 0.0
        self.first_tokens = open_first_tokens(
            vllm_config,
            settings,
            self._stats.record_first_token,
            prefills_all=not (has_windows or self._num_left_to_decode()),
        )

    def serve_handshake(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Answer other engines' handshakes with the descriptions of all workers.

        Later bases call this again when an engine wakes up. Its caches are where they were, as it
        does not take their memory away, and it goes on answering.

        Args:
            metadata: Handshakes of the workers, by (pp_rank, tp_rank).

        Raises:
            LocalChannelError: The side channel's port cannot be used.
        """
        if self._server is not None:
            return
        handshakes: dict[tuple[int, int], ReshardHandshakeMetadata] = {}
        for rank, handshake in metadata.items():
            assert isinstance(handshake, ReshardHandshakeMetadata)
            handshakes[rank] = handshake
        replies = encode_replies(handshakes)
        self._stats.record_factors(factors_digest(replies[max(replies)]))
        self._server = HandshakeServer(
            self.side_channel_host,
            self.side_channel_port,
            replies,
            self._key,
            self.engine_id,
        )
        self._server.start()
        self._prompts.server = self._server
        transfer_config = self.vllm_config.kv_transfer_config
        assert transfer_config is not None
        both_ways = self.is_bidirectional_kv_xfer_enabled
        self._log_served(self._server.port)
        if self._is_ahead and (transfer_config.is_kv_producer or both_ways):
            host = host_for_workers(self.vllm_config.parallel_config, self.side_channel_host)
            self._offers.announce_from(host)

    def _log_served(self, port: int) -> None:
        """Log where other engines ask this one what it is, and what they are told."""
        config, settings = self.vllm_config.parallel_config, self._settings
        sizes = {
            ", DP %d": config.data_parallel_size,
            ", DCP %d": config.decode_context_parallel_size,
            ", PCP %d": config.prefill_context_parallel_size,
        }
        logger.info(
            "Engine %s answers handshakes at %s:%d: TP %d, PP %d%s, NIXL backend %s.%s",
            quote(self.engine_id),
            quote(self.side_channel_host),
            port,
            config.tensor_parallel_size,
            config.pipeline_parallel_size,
            one_line("".join(text % size for text, size in sizes.items() if size > 1)),
            one_line(" ".join(settings.backends)),
            _ASK_UCX if "UCX" in settings.backends else "",
        )

    def set_kv_cache_manager(self, manager: Any) -> None:
        """Set the cache manager, which owns the blocks; never called on 0.22.1.

        vLLM has it remove the blocks outside of the next token's window when a request ends. A
        reader computes the last tokens of a prompt anew, so that their windows are kept, too; the
        scheduler of 0.22.1 is patched to do so.
        """
        self._reads.manager = manager
        self._prompts.block_ids_of = manager.get_block_ids
        if not window_groups(self.kv_cache_config):
            return
        remove, num_anew = manager.remove_skipped_blocks, max(self._num_left_to_decode(), 1)

        def remove_skipped_blocks(*, processed_computed_tokens: int, **others: Any) -> None:
            remove(processed_computed_tokens=max(processed_computed_tokens - num_anew, 0), **others)

        manager.remove_skipped_blocks = remove_skipped_blocks

    def set_block_pool(self, block_pool: BlockPool) -> None:
        """Set the block pool, for the number of free blocks."""
        self._block_pool = block_pool

    def hold_back(self, request: Request, resume: Callable[[], None]) -> bool:
        """Return whether vLLM must not add a request to its scheduler yet.

        Args:
            request: A new request, or one that was held back.
            resume: Has vLLM come to the request again; any thread may call it.
        """
        held = self._reads.holds_back(request.request_id, self._num_free_blocks())
        if held is None and not self._reads.is_written(request.request_id):
            early = early_request(request.kv_transfer_params, request.request_id, self._trusted)
            if isinstance(early, EarlyRequest):
                self._park(request, early, resume)
                return True
        return bool(held)

    def drop(self, request_ids: Iterable[RequestId]) -> None:
        """Forget requests that are held back: their clients have left."""
        self._reads.drop(request_ids)

    def _park(
        self, request: Request, early: EarlyRequest, resume: Callable[[], None] | None
    ) -> None:
        """Ask for a request that was sent to both engines at once, or give it up unseen."""
        self._count_request(has_params=True)
        content = None if is_placeholder(request) else prompt_digest(request)
        num_blocks = self._counts.num_blocks(request.num_tokens)
        self._reads.park(request, early.place, early.name, content, num_blocks, resume)

    def _deliver(self, news: News) -> None:
        """Take news of a request; called by the subscriber's thread."""
        self._reads.deliver(news)

    def _num_free_blocks(self) -> int:
        return 0 if self._block_pool is None else self._block_pool.get_num_free_blocks()

    def on_new_request(self, request: Request) -> None:
        """Add a new request as upstream does, with sanitized parameters.

        If a prompt has several answers (`n`), one request reads it, and the others compute it. A
        request also computes its prompt if a read under the same id is still under way. A request
        that vLLM made up reads nothing; it gives up an offer that no request of this engine has
        read: see `remote_reads`.
        """
        params: Any = request.kv_transfer_params
        early = early_request(params, request.request_id, self._trusted)
        is_written = self._reads.is_written(request.request_id)
        if isinstance(early, EarlyRequest) and not is_written:
            # If vLLM cannot hold it back, it waits in vLLM's scheduler.
            if self._reads.waiting(request.request_id) is None:
                self._park(request, early, None)
            if is_placeholder(request):
                request.kv_transfer_params = None
                return
            # Until `_enter` fills in others.
            request.kv_transfer_params = partly_computed(early.place, early.name or "unknown", 0)
            note_adapter(request, self._adapters)
            return
        if isinstance(early, str):
            params, fault = faulty(early), None
        else:
            params, fault = sanitize_params(
                prefill_params(params),
                reads_back=self.is_bidirectional_kv_xfer_enabled,
                trusted=self._trusted,
            )
        if fault is not None:
            logger.warning(
                "Computing all of request %s: %s", quote(request.request_id), one_line(fault)
            )
        self._count_request(has_params=is_disaggregated(params))
        if params and is_written and not is_placeholder(request):
            # Even with malformed parameters: this id stands for blocks that are still written into.
            params = without_source(params)
        self._take_params(request, params)

    def _take_params(self, request: Request, params: Params | None) -> None:
        """Begin with a request, once its parameters are known."""
        remote = remote_request(params) if params and is_disaggregated(params) else None
        if params and remote is not None:
            if is_placeholder(request):
                is_free = self._reads.may_give_up(remote)
            else:
                is_free = self._reads.claim(request, remote)
            params = params if is_free else without_source(params)
        request.kv_transfer_params = params
        note_adapter(request, self._adapters)
        if params and params.get("do_remote_decode"):
            # Upstream may leave out the prompt's last tokens.
            self._prompts.add(request, params)
        super().on_new_request(request)
        if params and params.get("do_remote_prefill") and not is_placeholder(request):
            source = remote_blocks(params)
            if not isinstance(source, str):
                self.first_tokens.begin(request)
                held = RemoteRequest(address_of(source), source.remote_request_id)
                self._reads.renew(request, held)
        if params and params.get("do_remote_decode"):
            self.first_tokens.ask(request)

    def _enter(self, read: RemoteRead) -> None:
        """Go on with a request that another engine offers, or computes, or will not offer."""
        request, news = read.request, read.news
        if isinstance(news, Computed):
            place = RemoteEngineAddress(news.engine_id, news.host, news.port)
            request.kv_transfer_params = partly_computed(place, news.request_id, news.total_tokens)
            return
        self._reads.settle(read)
        if isinstance(news, Offered):
            params, _ = sanitize_params(news.params, reads_back=False, trusted=self._trusted)
            if read.has_waited:
                self._stats.record_prefill_wait(time.monotonic() - read.since_s)
        else:
            assert isinstance(news, Gone)
            params = faulty(f"its prefill engine will not offer it: {one_line(news.reason)}")
        self._take_params(request, params)

    def _read_on(self, read: RemoteRead) -> None:
        """Have workers read more of a prefetched request: what is computed now, or all the rest."""
        request, news, outbox = read.request, read.news, self._reads.outbox
        if isinstance(news, Computed):
            if check_host(news.host, self._trusted) is None:
                outbox.prefetch[request.request_id] = part_of(request, read.block_ids, news)
            return
        expected = offered_tokens(request.kv_transfer_params)
        self._enter(read)
        params = request.kv_transfer_params or {}
        if offered_tokens(params) != expected and remote_request(params) is not None:
            self._take_params(request, faulty("other tokens are offered than were computed"))
            params = request.kv_transfer_params
        assert params is not None
        note_requested(params)
        receive = self._receive(request, read.block_ids)
        if isinstance(news, Offered):
            receive = replace(receive, attempt=news.attempt)
        outbox.receive[request.request_id] = receive

    def _count_request(self, *, has_params: bool) -> None:
        """Count a new request; say once if none of the first ones concerns another engine."""
        self._stats.record_request(has_params=has_params)
        self._num_without = -math.inf if has_params else self._num_without + 1
        if self._num_without == _FIRST_REQUESTS:
            logger.warning(
                "None of the first %d requests had kv_transfer_params: have a router send each to "
                "a prefill engine first, with do_remote_decode, and then to a decode engine, with "
                "the kv_transfer_params of that answer.",
                _FIRST_REQUESTS,
            )

    # Upstream's scheduler returns an int; the connector's interface also allows None, after which
    # vLLM asks again in the next step.
    def get_num_new_matched_tokens(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens to read, and whether asynchronously; (None, False) to wait.

        A request that was sent to both engines waits until `remote_reads` allows it blocks. No more
        are read than `TokenCounts` allows.

        Upstream assumes that the whole prompt was prefilled. If the prompt has grown since, the
        rest is computed here.

        No request reads twice: a request that starts over, because it was preempted or because its
        blocks did not arrive, would wait forever for a read that is never posted.

        Upstream counts no tokens for a prompt of embeddings. Such a prompt is read like any other,
        but not read back: the last answer consists of tokens, and this prompt of embedding rows.
        """
        if (read := self._reads.waiting(request.request_id)) is not None:
            self._reads.hear()
            if not self._reads.may_have_blocks(read, self._num_free_blocks()):
                return None, False
            self._enter(read)
        params = request.kv_transfer_params
        if already_requested(params) or request.skip_reading_prefix_cache:
            return 0, False
        count: int
        if request.prompt_token_ids is not None:
            count, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        elif params and params.get("do_remote_prefill"):
            prefilled = self._num_prefilled(request.num_prompt_tokens)
            count, is_async = max(prefilled - num_computed_tokens, 0), True
        else:
            count, is_async = 0, False
        count = self._counts.num_to_read(
            count,
            offered_tokens(params),
            num_computed_tokens,
            request.num_tokens,
        )
        return count, is_async and count > 0

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ReshardConnectorMetadata:
        """Return this step's requests to the workers."""
        self._prompts.begin_step(computes=scheduler_output.total_num_scheduled_tokens > 0)
        wanted = dict(self._reqs_need_recv)
        self._reqs_need_recv.clear()
        upstream: Any = super().build_connector_meta(scheduler_output)
        now_s = time.perf_counter()
        leases_s = {
            request_id: max(expires_at_s - now_s, 0.0)
            for request_id, expires_at_s in upstream.reqs_to_send.items()
        }
        # Further fields are for upstream's worker.
        for request_id, (request, block_ids, *_) in wanted.items():
            read = self._reads.waiting(request_id)
            # Without blocks, the producer is notified, but workers report nothing.
            if any(block_ids):
                self._reads.begin(request, block_ids)
            if read is None:
                receive = self._receive(request, block_ids)
                self._reads.outbox.receive[request_id] = receive
            elif any(block_ids):
                self._read_on(read)
            else:
                # All of it is cached here.
                self._reads.leave(read)
        for read in self._reads.take_heard():
            self._read_on(read)
        metadata = self._reads.take_outbox()
        metadata.admitted = upstream.reqs_in_batch
        metadata.withdrawn = upstream.reqs_not_processed
        self._offers.write_to(metadata, leases_s)
        return metadata

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Process the workers' reports; `remote_reads` decides what vLLM sees of failed reads."""
        super().update_connector_output(connector_output)
        told = connector_output.kv_connector_worker_meta
        self._prompts.end_step()
        if isinstance(told, WorkerReport):
            for request_id in self._reads.fail(told.failed):
                self._stop_heartbeat(request_id)
            self._shortages |= told.shortages
            if self._server is not None:
                self._server.shortage = next(filter(None, self._shortages.values()), "")
        self._prompts.end(connector_output.finished_sending or (), "it is not held there any more")
        if connector_output.finished_recving:
            connector_output.finished_recving = self._reads.receive(
                connector_output.finished_recving
            )
            self.first_tokens.receive(connector_output.finished_recving)

    def take_stats(self) -> ReshardStats | None:
        """Return the scheduler's statistics since the last call; None if there are none."""
        return None if self._stats.is_empty() else self._stats.take()

    def has_pending_push_work(self) -> bool:
        """Return whether the engine must step even if it has nothing to compute, or is paused."""
        return self._reads.has_work

    def _receive(self, request: Request, local_block_ids: BlockIds) -> Receive:
        """Return what to read for a request."""
        num_prefilled = self._num_prefilled(request.num_prompt_tokens)
        return receive_of(request, local_block_ids, num_prefilled)

    def _num_prefilled(self, num_prompt_tokens: int) -> int:
        """Return how many tokens of a prompt a prefill engine computes."""
        num_left = self._num_left_to_decode()
        return num_prompt_tokens - num_left * (num_prompt_tokens > num_left)

    def _num_left_to_decode(self) -> int:
        """Return how many tokens at the end of a longer prompt a prefill engine leaves out."""
        return int(self._prefill_backoff()) if PREFILLS_STOP_SHORT else 0

    def request_finished(
        self, request: Request, block_ids: BlockIds
    ) -> tuple[bool, dict[str, Any] | None]:
        """End a request; return whether its blocks are held, and the next engine's parameters.

        Unlike upstream's, the parameters include the number of pipeline stages. Not offered are:

        - blocks and tokens beyond the answer, such as those of drafts;
        - a request that nobody will read;
        - a request without another engine's parameters, which workers would never report as sent;
        - recurrent state that includes tokens beyond the answer;
        - blocks that a step in flight may be filling: in 0.22.1, the output of a step from before
          a preemption can still end the request.
        """
        self.first_tokens.finish(request.request_id)
        if self._reads.finish(request):
            return False, None
        delay_free, params = self._request_finished(request, block_ids)
        if delay_free:
            assert params is not None
            self._prompts.offer(request.request_id, dict(params))
        else:
            was_aborted = request.status is RequestStatus.FINISHED_ABORTED
            reason = "its prefill was aborted" if was_aborted else "nothing of it is held there"
            self._prompts.end([request.request_id], reason)
        if params is not None and self._dispatches_early and params.get("do_remote_prefill"):
            # For routers, this means that the next engine needs only this address.
            params["transfer_mode"] = "push"
        return delay_free, params

    def _request_finished(
        self, request: Request, block_ids: BlockIds
    ) -> tuple[bool, dict[str, Any] | None]:
        if not is_disaggregated(request.kv_transfer_params):
            return False, None
        num_tokens = num_to_offer(request.num_computed_tokens, request.num_tokens)
        state_is_past_answer = bool(self._state_groups) and request.num_computed_tokens > num_tokens
        was_restarted = (
            OUTPUTS_OUTLIVE_PREEMPTION and self._is_ahead and request.num_preemptions > 0
        )
        must_not_offer = (
            state_is_past_answer or was_restarted or self._prompts.is_given_up(request.request_id)
        )
        block_ids = (
            tuple([] for _ in block_ids)
            if must_not_offer
            else self._counts.blocks_of(num_tokens, block_ids)
        )
        delay_free, params = super().request_finished(request, block_ids)
        if (
            is_placeholder(request)
            and remote_request(request.kv_transfer_params or {}) is not None
            and self._reqs_need_recv.pop(request.request_id, None) is not None
        ):
            self._reads.give_up(self._receive(request, ()))
        if must_not_offer and params is not None:
            self._reqs_not_processed.add(request.request_id)
            params = None
        if delay_free:
            assert params is not None
            params["remote_num_tokens"] = num_tokens
            if (adapter := offered_adapter(request, self._adapters)) is not None:
                params["remote_adapter"] = adapter
            fingerprint = fingerprint_of(request, num_tokens, params["remote_block_ids"])
            secret = self._offers.offer(
                request.request_id,
                sum(map(len, block_ids)),
                fingerprint,
                request.trace_headers,
                () if self._settings.packing_arena_bytes == 0 else params["remote_block_ids"],
            )
            params["remote_secret"] = write_secret(secret)
            params |= self.first_tokens.of_offer(request)
        if params is not None:
            params["pp_size"] = self.vllm_config.parallel_config.pipeline_parallel_size
        return delay_free, params

    def _stop_heartbeat(self, req_id: str) -> None:
        """Stop renewing a request's lease; upstream calls this once it is received or has ended."""
        self._reads.stop_renewal(req_id)
        super()._stop_heartbeat(req_id)

    def shutdown(self) -> None:
        """Stop answering handshakes, asking for requests and announcing offers."""
        self._offers.close()
        self._subscriber.close()
        if self._server is not None:
            self._server.close()
            self._server = None
        super().shutdown()
