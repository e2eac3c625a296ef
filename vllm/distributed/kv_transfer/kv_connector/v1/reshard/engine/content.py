# SPDX-License-Identifier: Apache-2.0
"""What the KV of a request depends on, beside its tokens.

vLLM's own block hashes take in the same, but not so that another engine could compare: they name a
LoRA adapter by its path as well, depend on the size of blocks, and begin with a number of the
process's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import TYPE_CHECKING

import torch

from .releases import ITEM_HASHES

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request


def content_keys(request: Request, num_tokens: int) -> list[tuple[str | int, ...]]:
    """What the KV of a request's first tokens depends on, the same at both engines.

    Args:
        request: The request.
        num_tokens: How many of its tokens.
    """
    keys: list[tuple[str | int, ...]] = []
    if request.lora_request is not None:
        keys.append(("lora", request.lora_request.lora_name))
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
    """A request's tokens, the same at both engines: 0 where embeddings stand among them.

    vLLM 0.22.1 has placeholders there, which are other tokens with other tokenizers.
    """
    mask: list[bool] | None = request.prompt_is_token_ids
    token_ids: Sequence[int] = request.all_token_ids
    if mask is None:
        return token_ids
    prompt = [token if is_token else 0 for token, is_token in zip(token_ids, mask, strict=False)]
    return [*prompt, *token_ids[len(prompt) :]]


def _embeddings_digest(request: Request, num_tokens: int) -> str:
    """Digest of the embeddings among a request's first tokens, and of where they stand.

    Where tokens stand between them, vLLM's tensor has rows for these, too, as far as the prompt
    goes: they mean nothing. A row of 4096 numbers of 16 bits takes 10 us: 0.3 s for 32k of them,
    as long as vLLM's own block hashes do.
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
    """Why multimodal items have no names by which two engines know them; None where they have."""
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
    """What multimodal items are named by; two engines name one item alike where it is the same."""
    if vllm_config.model_config.multimodal_config is None:
        return "none"
    # Their hashes take in the name or path of the model.
    return str(vllm_config.model_config.model)


def items_hashed_as(vllm_config: VllmConfig) -> str:
    """How multimodal items are hashed, which is their name."""
    multimodal = vllm_config.model_config.multimodal_config
    return "none" if multimodal is None else ITEM_HASHES.meaning
