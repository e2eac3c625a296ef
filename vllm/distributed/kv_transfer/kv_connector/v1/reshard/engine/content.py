# SPDX-License-Identifier: Apache-2.0
"""What the KV of a request depends on, besides its tokens.

vLLM's own block hashes cover the same, but two engines cannot compare them: they also include a
LoRA adapter's path, depend on the block size, and begin with a number of the process's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import TYPE_CHECKING

import torch

from ..protocol.fingerprint import fingerprint
from ..protocol.params import own_adapter
from .compat import ITEM_HASHES

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request


def content_keys(request: Request, num_tokens: int) -> list[tuple[str | int, ...]]:
    """Return what the KV of a request's first tokens depends on, equal at both engines.

    Args:
        request: The request.
        num_tokens: Number of its first tokens.
    """
    keys: list[tuple[str | int, ...]] = []
    if request.lora_request is not None:
        digest = own_adapter(request.kv_transfer_params)
        name = request.lora_request.lora_name
        keys.append(("lora", name) if digest is None else ("adapter", digest))
    if request.cache_salt:
        keys.append(("cache_salt", request.cache_salt))
    for item in request.mm_features:
        place = item.mm_position
        if place.offset < num_tokens:
            keys.append(("mm", item.identifier, place.offset, place.length))
    if request.prompt_embeds is not None:
        keys.append(("embeds", _embeddings_digest(request, num_tokens)))
    return keys


def content_token_ids(request: Request) -> Sequence[int]:
    """Return a request's tokens, equal at both engines: 0 in place of each embedding.

    vLLM 0.22.1 has placeholder tokens there, which differ between tokenizers.
    """
    mask: list[bool] | None = request.prompt_is_token_ids
    token_ids: Sequence[int] = request.all_token_ids
    if mask is None:
        return token_ids
    prompt = [token if is_token else 0 for token, is_token in zip(token_ids, mask, strict=False)]
    return [*prompt, *token_ids[len(prompt) :]]


def prompt_digest(request: Request) -> int:
    """Return a digest of a new request's prompt, equal at both engines.

    Without its adapter and embeddings: it tells requests of one name apart, and binds nothing.
    """
    keys: list[object] = [item.identifier for item in request.mm_features]
    keys.append(request.cache_salt)
    return fingerprint(content_token_ids(request), request.num_prompt_tokens, keys, []).content


def _embeddings_digest(request: Request, num_tokens: int) -> str:
    """Return a digest of the embeddings among a request's first tokens, and of their positions.

    vLLM's tensor also has rows for the prompt's tokens between embeddings; these rows mean nothing.
    A row of 4096 numbers of 16 bits takes 10 us: 0.3 s for 32k rows, as long as vLLM's own block
    hashes take.
    """
    assert request.prompt_embeds is not None
    rows = request.prompt_embeds[:num_tokens]
    positions = torch.arange(len(rows))
    if request.prompt_is_token_ids is not None:
        positions = positions[~torch.tensor(request.prompt_is_token_ids[: len(rows)])]
        rows = rows[positions]
    digest = sha256(positions.numpy())
    digest.update(rows.contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def counted_items(vllm_config: VllmConfig) -> str | None:
    """Return why two engines cannot know multimodal items by name; None where they can."""
    multimodal = vllm_config.model_config.multimodal_config
    if (
        multimodal is None
        or multimodal.mm_processor_cache_gb != 0
        or vllm_config.cache_config.enable_prefix_caching
    ):
        return None
    return (
        "--mm-processor-cache-gb 0 with --no-enable-prefix-caching has vLLM count multimodal items "
        "instead of hashing them, so that one cannot be told from another"
    )


def items_named_by(vllm_config: VllmConfig) -> str:
    """Return what multimodal items are named by; engines with equal values name an item alike."""
    if vllm_config.model_config.multimodal_config is None:
        return "none"
    # Their hashes include the model's name or path.
    return str(vllm_config.model_config.model)


def items_hashed_as(vllm_config: VllmConfig) -> str:
    """Return how multimodal items are hashed; the hash is an item's name."""
    multimodal = vllm_config.model_config.multimodal_config
    return "none" if multimodal is None else ITEM_HASHES.meaning
