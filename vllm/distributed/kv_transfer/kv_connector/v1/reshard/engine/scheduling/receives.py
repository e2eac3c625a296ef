# SPDX-License-Identifier: Apache-2.0
"""Which of a request's parameters count, how many of its tokens, and what workers read for it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.utils.math_utils import cdiv

from ...errors import quote
from ...protocol.bounds import TrustedPeers
from ...protocol.fingerprint import OfferFingerprint, fingerprint
from ...protocol.ids import BlockIds
from ...protocol.messages import Receive, RemoteEngineAddress
from ...protocol.params import (
    Params,
    RemoteBlocks,
    bind_adapter,
    is_disaggregated,
    own_adapter,
    remote_blocks,
    sanitize_params,
)
from ...protocol.subscriptions import Computed
from ..content import content_keys, content_token_ids

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from ..weights import Adapters

logger = init_logger(__name__)


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Counts tokens and blocks of this engine's requests.

    Attributes:
        block_tokens: Tokens of a sequence that one block id stands for, for each KV-cache group.
        state_groups: Groups that keep recurrent state.
        has_windows: Whether some group keeps only the last tokens.
    """

    block_tokens: tuple[int, ...]
    state_groups: Collection[int]
    has_windows: bool

    def num_blocks(self, num_tokens: int) -> int:
        """Return how many blocks `num_tokens` tokens take at most, over all KV-cache groups."""
        return sum(cdiv(num_tokens, tokens) for tokens in self.block_tokens)

    def blocks_of(self, num_tokens: int, block_ids: BlockIds) -> BlockIds:
        """Return the blocks of a request that hold its first `num_tokens` tokens.

        Upstream's scheduler finds which block has the state, so all blocks of state groups are
        kept.
        """
        return tuple(
            ids if number in self.state_groups else ids[: cdiv(num_tokens, tokens)]
            for number, (ids, tokens) in enumerate(zip(block_ids, self.block_tokens, strict=True))
        )

    def num_to_read(
        self,
        num_asked: int,
        num_offered: int | None,
        num_computed: int,
        num_tokens: int,
    ) -> int:
        """Return how many tokens behind the locally computed ones are read from another engine.

        No more are read than are offered. Recurrent state covers exactly as many tokens as its
        producer says; where fewer are needed, all are computed here.

        vLLM recomputes a prompt's last token for its logits. With windows that token is not read:
        if it counted as computed, the blocks that only its own window reaches back to would already
        be freed.

        Args:
            num_asked: How many would be read if all of them were offered.
            num_offered: How many of the sequence are offered; None if the producer did not say.
            num_computed: How many are computed here.
            num_tokens: How many the request has.
        """
        count = num_asked
        if count > 0 and num_offered is not None:
            count = max(min(count, num_offered - num_computed), 0)
            if self.state_groups and num_computed + count != num_offered:
                return 0
        if self.has_windows and 0 < count == num_tokens - num_computed:
            count -= 1
        return count


def num_to_offer(num_computed: int, num_tokens: int) -> int:
    """Return how many tokens of an ended request have their KV in its blocks.

    The last token was sampled but not computed. Any count beyond that comes from a step in flight,
    or from drafts behind the token that ended the answer.
    """
    return min(num_computed, num_tokens - 1)


def is_placeholder(request: Request) -> bool:
    """Return whether vLLM made up this request for one that its API server has not seen through.

    Such a request has the one token 0, and the parameters of the true one. A request that vLLM
    refuses while paused is aborted at once, too, but has its own prompt.
    """
    return bool(request.abort_immediately) and request.prompt_token_ids == [0]


def note_adapter(request: Request, adapters: Adapters) -> None:
    """Bind a new request's blocks to what its adapter is; have it read nothing if that is unknown.

    It reads nothing either where vLLM's prefix cache might serve it KV of other files. Blocks that
    an engine of an older build holds stay bound to the adapter's name.
    """
    params, lora = request.kv_transfer_params, request.lora_request
    if lora is None:
        return
    adapter = adapters.identify(lora)
    if not params or not is_disaggregated(params):
        return
    name, path = quote(lora.lora_name), quote(lora.lora_path)
    if adapter.digest is not None and not bind_adapter(params, adapter.digest):
        logger.warning_once(
            "Adapter %s is known by its name alone to an engine that computes with it: install "
            "this build there.",
            name,
        )
    if adapter.digest is None or not adapter.is_cached_anew:
        request.skip_reading_prefix_cache = True
        seen = "changed" if adapter.digest else "are not there"
        logger.warning_once(
            "Nothing is read for adapter %s, from the prefix cache neither: its files at %s %s, "
            "which vLLM does not see; load it from another path.",
            *(name, path, seen),
        )


def offered_adapter(request: Request, adapters: Adapters) -> str | None:
    """Return what the adapter that computed an ended request is; None if it has none to tell of."""
    adapter = own_adapter(request.kv_transfer_params)
    if adapter is None or request.lora_request is None:
        return None
    now = adapters.identify(request.lora_request).digest
    if now != adapter:
        # Which files computed its blocks cannot be told: they are nobody's.
        adapter = f"{quote(adapter)} or {quote(now)}"
        bind_adapter(request.kv_transfer_params, adapter)
    return adapter


def _adapter_fault(request: Request, source: RemoteBlocks) -> str | None:
    """Return how a request's adapter here differs from that of the blocks to read, or None."""
    theirs, ours = source.remote_adapter, own_adapter(request.kv_transfer_params)
    if theirs in (None, ours):
        return None
    name = request.lora_request and request.lora_request.lora_name
    return (
        f"its adapter {quote(name)} is {quote(theirs)} there and {quote(ours)} here: load the same "
        "files on both engines"
    )


def receive_of(
    request: Request,
    local_block_ids: BlockIds,
    num_prefilled: int,
) -> Receive:
    """Return what to read for a request; with a fault if its parameters are malformed.

    Args:
        request: The request.
        local_block_ids: The blocks to fill, of each KV-cache group.
        num_prefilled: Number of tokens of its prompt that a prefill engine computes.
    """
    source = remote_blocks(request.kv_transfer_params or {})
    if isinstance(source, str):
        nowhere = RemoteEngineAddress("unknown", "unknown", 0)
        return Receive(nowhere, request.request_id, local_block_ids, (), 0, 0, fault=source)
    # Without a number of held tokens, assume all tokens of the prompt that are computed there.
    remote_tokens = source.remote_num_tokens or num_prefilled
    # If nothing is read and the prompt is shorter than what is held, that is another prompt's, and
    # is left to its lease. A made-up request has no prompt, and shows the secret instead.
    made_up = is_placeholder(request)
    is_bound = not made_up and (any(local_block_ids) or request.num_tokens >= remote_tokens)
    blocks = source.remote_block_ids
    return Receive(
        address_of(source),
        source.remote_request_id,
        local_block_ids,
        blocks,
        # Tokens being read already count as computed.
        local_tokens=min(remote_tokens, request.num_computed_tokens),
        remote_tokens=remote_tokens,
        fingerprint=fingerprint_of(request, remote_tokens, blocks) if is_bound else None,
        fault=_adapter_fault(request, source) if any(local_block_ids) else None,
        secret=source.secret if made_up else None,
        trace_headers=request.trace_headers,
    )


def part_of(request: Request, local_block_ids: BlockIds, computed: Computed) -> Receive:
    """Return what can be read of a request that is not offered yet."""
    return Receive(
        RemoteEngineAddress(computed.engine_id, computed.host, computed.port),
        computed.request_id,
        local_block_ids,
        computed.block_ids,
        local_tokens=min(computed.total_tokens, request.num_computed_tokens),
        remote_tokens=computed.num_tokens,
        trace_headers=request.trace_headers,
        attempt=computed.attempt,
    )


def to_give_up(params: Params, trusted: TrustedPeers | None) -> Receive | None:
    """Return an offer that nobody will read; None if nobody can be told so."""
    sanitized, _ = sanitize_params(params, reads_back=False, trusted=trusted)
    source = remote_blocks(sanitized or {}) if sanitized and "remote_block_ids" in sanitized else ""
    if isinstance(source, str) or source.secret is None:
        return None
    blocks, num_tokens = source.remote_block_ids, source.remote_num_tokens or 0
    name = source.remote_request_id
    return Receive(address_of(source), name, (), blocks, 0, num_tokens, secret=source.secret)


def address_of(source: RemoteBlocks) -> RemoteEngineAddress:
    """Return the address of the engine that a request's parameters name."""
    return RemoteEngineAddress(source.remote_engine_id, source.remote_host, source.remote_port)


def fingerprint_of(request: Request, num_tokens: int, block_ids: BlockIds) -> OfferFingerprint:
    """Return the fingerprint of a request's first tokens in this or another engine's blocks."""
    keys = content_keys(request, num_tokens)
    return fingerprint(content_token_ids(request), num_tokens, keys, block_ids)
