# SPDX-License-Identifier: Apache-2.0
"""What the KV of a request depends on, beside its tokens."""

from __future__ import annotations

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.content import (
    content_keys,
    content_token_ids,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.params import bind_adapter


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


def test_adapters_are_known_by_what_they_are():
    """Nodes keep one adapter in different places, under numbers of their own."""
    here, there = LoRARequest("sql", 1, "here"), LoRARequest("other", 2, "there")
    for adapter in here, there:
        asked = request(lora_request=adapter)
        assert content_keys(asked, 10) == [("lora", adapter.lora_name)]
        asked.kv_transfer_params = {"do_remote_decode": True}
        assert bind_adapter(asked.kv_transfer_params, "5ca1ab1e")
        assert content_keys(asked, 10) == [("adapter", "5ca1ab1e")]


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


def test_embeddings_between_tokens_are_bound_to_their_places():
    """Rows that stand for tokens count for nothing; the others do, and where they are."""
    embeds = torch.zeros(10, 4)
    embeds[3:7] = torch.rand(4, 4)
    mask = [not 3 <= place < 7 for place in range(10)]

    def keys(rows: torch.Tensor, is_token_ids: list[bool], num_tokens: int = 10):
        return content_keys(
            request(prompt_embeds=rows, prompt_is_token_ids=is_token_ids), num_tokens
        )

    ours, behind, within = (embeds.clone() for _ in range(3))
    behind[8] += 1
    within[5] += 1
    assert keys(ours, mask) == keys(behind, mask)
    assert keys(ours, mask) != keys(within, mask)
    assert keys(ours, mask, 5) == keys(within, mask, 5)
    # A row of zeros is not the token 0, nor one that stands elsewhere.
    assert keys(ours, mask) != keys(ours, [*mask[:7], False, True, True])
    moved = torch.roll(embeds, 1, 0)
    assert keys(ours, mask) != keys(moved, [mask[-1], *mask[:-1]])


def test_embeddings_of_a_prompt_that_has_grown_are_those_before():
    """Tokens behind them, as an answer's, bring no rows that count."""
    embeds, mask = torch.rand(10, 4), [False] * 6 + [True] * 4
    first = request(prompt_embeds=embeds, prompt_is_token_ids=mask)
    grown = request(
        prompt_token_ids=list(range(12)),
        prompt_embeds=torch.cat([embeds, torch.zeros(2, 4)]),
        prompt_is_token_ids=[*mask, True, True],
    )
    assert content_keys(first, 11) == content_keys(grown, 11)


def test_tokens_are_as_they_are():
    """Prompt and answer."""
    asked = request()
    asked.append_output_token_ids(42)
    assert list(content_token_ids(asked)) == [*range(10), 42]


def test_tokens_where_embeddings_stand_are_zero():
    """Whatever placeholder a tokenizer has there; behind the prompt all are the answer's."""
    mask = [place not in (3, 4) for place in range(10)]
    asked = request(prompt_embeds=torch.rand(10, 4), prompt_is_token_ids=mask)
    asked.append_output_token_ids(42)
    assert list(content_token_ids(asked)) == [0, 1, 2, 0, 0, 5, 6, 7, 8, 9, 42]
