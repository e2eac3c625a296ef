# SPDX-License-Identifier: Apache-2.0
"""What the KV of a request depends on, beside its tokens."""

from __future__ import annotations

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.content import content_keys


def request(**values) -> Request:
    """A request for ten tokens."""
    prompt = {"prompt_token_ids": list(range(10))} | values
    return Request("a", sampling_params=SamplingParams(), pooling_params=None, **prompt)


def picture(offset: int) -> MultiModalFeatureSpec:
    """An item of three tokens."""
    place = PlaceholderRange(offset, 3)
    return MultiModalFeatureSpec(data=None, modality="image", identifier="hash", mm_position=place)


def test_text_depends_on_nothing_else():
    """Most requests have no keys."""
    assert content_keys(request(), 10) == []


def test_adapters_are_known_by_name():
    """Nodes keep one adapter in different places, under numbers of their own."""
    here, there = LoRARequest("sql", 1, "here"), LoRARequest("sql", 2, "there")
    assert content_keys(request(lora_request=here), 10) == [("lora", "sql")]
    assert content_keys(request(lora_request=there), 10) == [("lora", "sql")]


def test_salt_is_a_key():
    """Tenants do not share."""
    assert content_keys(request(cache_salt="tenant"), 10) == [("cache_salt", "tenant")]


@pytest.mark.parametrize(("num_tokens", "seen"), [(10, 2), (6, 1), (5, 1), (2, 0)])
def test_items_count_as_far_as_their_tokens_do(num_tokens, seen):
    """What comes after the tokens that are held has no part in them."""
    asked = request(mm_features=[picture(2), picture(6)])
    keys = [("mm", "hash", 2, 3), ("mm", "hash", 6, 3)]
    assert content_keys(asked, num_tokens) == keys[:seen]


def test_embeddings_are_hashed():
    """Their tokens are placeholders, so what they are counts."""
    embeds = torch.rand(10, 4, dtype=torch.bfloat16)
    other = embeds.clone()
    other[7] += 1
    ours, theirs = (request(prompt_token_ids=None, prompt_embeds=each) for each in (embeds, other))
    assert content_keys(ours, 10) != content_keys(theirs, 10)
    assert content_keys(ours, 7) == content_keys(theirs, 7)
