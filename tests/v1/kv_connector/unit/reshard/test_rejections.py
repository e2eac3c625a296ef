# SPDX-License-Identifier: Apache-2.0
"""Requests that end before they are read: whoever holds blocks for them hears of it at once.

What vLLM's API server and its engine do about such a request is vLLM's own here.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.engine import EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

from tests.v1.kv_connector.unit.reshard.engine.workers import DEADLINE_S
from tests.v1.kv_connector.unit.reshard.serving import (
    BLOCK_TOKENS,
    PROMPT_TOKENS,
    Serving,
    Whole,
    from_decode,
    from_prefill,
    until,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import Receive

SECRET = 0x00C0FFEE00C0FFEE
SENT_ON = from_prefill(remote_secret=f"{SECRET:016x}")
CLEANUP = OpenAIServingChat._with_kv_transfer_rejection_cleanup


def too_long() -> None:
    """More tokens are asked for than fit the decode engine."""
    raise ValueError("max_tokens is too large")


def unknown_adapter() -> Any:
    """The model that is asked for is a LoRA adapter that the decode engine does not have."""
    return sys.modules[CLEANUP.__module__].ErrorResponse.model_construct()


def too_many_answers() -> None:
    """Several of the most likely answer."""
    SamplingParams(n=2, temperature=0.0)


def client_leaves() -> None:
    """Before its prompt has gone to the engine."""
    raise asyncio.CancelledError


REFUSALS = [too_long, unknown_adapter, too_many_answers, client_leaves]


async def _add(serving: Serving, added: EngineCoreRequest) -> None:
    """Take up a request as vLLM's engine does."""
    core = SimpleNamespace(
        scheduler=serving.scheduler,
        abort_requests=lambda names: [serving.abort(name) for name in names],
    )
    hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
    EngineCore.add_request(core, Request.from_engine_core_request(added, hasher))


def answer(
    serving: Serving, params: dict, server: Callable[[], Any] = too_long, name: str = "d-a"
) -> None:
    """What vLLM's API server does about a request, with what comes of it there.

    Args:
        serving: Its engine.
        params: What came with the request.
        server: What comes of it.
        name: What its client calls it.
    """
    client = SimpleNamespace(
        engine_core=SimpleNamespace(add_request_async=partial(_add, serving)),
        has_kv_connector=True,
        vllm_config=serving.scheduler.vllm_config,
        _get_data_parallel_rank=lambda raw_request: None,
    )
    client.engine_client = client
    client.notify_kv_transfer_request_rejected = partial(
        AsyncLLM.notify_kv_transfer_request_rejected, client
    )

    raised: list[type] = []

    async def being_answered() -> Any:
        try:
            return server()
        except BaseException as error:
            raised.append(type(error))
            raise

    asked = SimpleNamespace(request_id=name, kv_transfer_params=params)
    try:
        asyncio.run(CLEANUP(client, being_answered(), asked, None))
    except BaseException as error:
        if type(error) not in raised:
            raise


def given_up(serving: Serving) -> list[Receive]:
    """What workers are told in the next step to give up, and nothing else."""
    assert serving.scheduler.has_requests()
    serving.step()
    assert not serving.told.receive and not serving.told.awaited
    return serving.told.given_up


@pytest.mark.parametrize("refusal", REFUSALS)
@pytest.mark.parametrize("tokens", [1, PROMPT_TOKENS])
def test_request_that_was_refused_is_given_up(serving, refusal, tokens):
    """With the secret alone, also where the prompt had a single token, as vLLM's has."""
    d = serving()
    answer(d, {**SENT_ON, "remote_num_tokens": tokens}, refusal)
    (receive,) = given_up(d)
    assert (receive.remote_request_id, receive.source.engine_id) == ("p-a", "prefill")
    assert (receive.secret, receive.fingerprint, receive.fault) == (SECRET, None, None)
    assert not any(receive.local_block_ids)
    assert d.is_through()
    d.step()
    assert not d.told.given_up


def test_request_that_was_answered_is_not_given_up(serving):
    """Its own end tells whoever holds its blocks."""
    d = serving()
    answer(d, SENT_ON, str)
    assert not d.scheduler.has_requests()


def test_requests_of_one_name_are_all_given_up(serving):
    """A client may call all of its requests the same."""
    d = serving()
    for each in ("p-a", "p-b", "p-a"):
        answer(d, {**SENT_ON, "remote_request_id": each}, name="mine")
    assert {receive.remote_request_id for receive in given_up(d)} == {"p-a", "p-b"}


def test_parameters_without_a_secret_give_nothing_up(serving):
    """A router may have dropped it, or an engine of another build holds the blocks."""
    d = serving()
    answer(d, from_prefill())
    assert given_up(d) == []
    assert d.is_through()


@pytest.mark.parametrize("secret", ["", "C0FFEE", SECRET, f"{SECRET:016X}", f"{SECRET:016x}\n"])
def test_malformed_secret_is_malformed_parameters(serving, secret):
    """Of a request that is refused nobody is told; one that should be read fails."""
    d = serving()
    answer(d, from_prefill(remote_secret=secret))
    d.add("d-b", from_prefill(remote_secret=secret))
    d.step()
    assert not d.told.given_up
    faults = {name: receive.fault for name, receive in d.told.receive.items()}
    assert faults.keys() == {"d-a", "d-b"} and all("malformed" in each for each in faults.values())


@pytest.mark.parametrize("is_read", [False, True])
def test_request_whose_client_leaves_is_told_of_once(serving, is_read):
    """While it waits, or is read, its engine tells; vLLM's clean-up after that does not again."""
    d = serving()
    d.add("d-a", dict(SENT_ON))
    if is_read:
        d.step()
        (receive,) = d.told.receive.values()
    d.abort("d-a")
    answer(d, SENT_ON, client_leaves)
    d.step()
    assert not d.told.given_up
    if not is_read:
        (receive,) = d.told.receive.values()
        assert not any(receive.local_block_ids)
    else:
        d.step(received=["d-a"])
    assert receive.fingerprint is not None and receive.secret is None
    assert d.is_through()


def test_request_that_failed_is_not_given_up_by_vllm(serving):
    """What is held under its name may be another's: what its engine told, or did not, counts."""
    d = serving("fail")
    d.add("d-a", dict(SENT_ON))
    d.step()
    ((blocks,),) = (receive.local_block_ids for receive in d.told.receive.values())
    d.step(received=["d-a"], failed={"d-a": blocks})
    assert d.finished == {"d-a": FinishReason.ERROR}
    answer(d, SENT_ON)
    assert given_up(d) == []


def test_request_that_another_one_reads_is_not_given_up(serving):
    """It is that one's."""
    d = serving()
    d.add("d-a", dict(SENT_ON), max_tokens=2)
    d.step()
    answer(d, SENT_ON, name="d-b")
    assert given_up(d) == []
    d.step(received=["d-a"])
    d.step()
    d.step()
    assert d.finished == {"d-a": FinishReason.LENGTH}


def test_answers_to_one_prompt_that_wait_are_told_of_once(serving):
    """One of them would have read."""
    d = serving()
    for name in ("0_d-a", "1_d-a"):
        d.add(name, dict(SENT_ON))
    for name in ("1_d-a", "0_d-a"):
        d.abort(name)
    d.step()
    assert list(d.told.receive) == ["0_d-a"]
    assert not d.told.given_up
    assert d.is_through()


def test_request_of_a_paused_engine_shows_its_tokens(serving):
    """It is refused in the engine, where its own prompt is known."""
    d = serving()
    request = d.add("d-a", dict(SENT_ON))
    request.abort_immediately = True
    d.abort("d-a")
    d.step()
    (receive,) = d.told.receive.values()
    assert receive.fingerprint is not None and receive.secret is None
    assert not d.told.given_up


def test_engine_that_reads_back_gives_up_nothing_of_a_refused_turn(serving):
    """Of a prompt that a prefill engine refuses, vLLM says nothing: the turn may come again."""
    p = serving(bidirectional_kv_xfer=True, kv_recompute_threshold=8)
    answer(p, from_decode(remote_secret=f"{SECRET:016x}"))
    assert not p.scheduler.has_requests()


def test_every_offer_has_a_secret_of_its_own(serving):
    """In both directions, and workers of the holder know it."""
    secrets = set()
    both = dict(bidirectional_kv_xfer=True)
    for number in range(3):
        p, d = serving(**both), serving(**both)
        p.add("p-a", {"do_remote_decode": True})
        p.step()
        d.add("d-a", from_prefill())
        d.step()
        d.step(received=["d-a"])
        d.step()
        for each, name in ((p, "p-a"), (d, "d-a")):
            secret = each.handed_over[name]["remote_secret"]
            assert re.fullmatch("[0-9a-f]{16}", secret)
            each.step()
            assert each.told.offered[name].secret == int(secret, 16)
            each.step()
            assert not each.told.offered
            secrets.add(secret)
        assert len(secrets) == 2 * (number + 1)


@pytest.mark.parametrize("refusal", REFUSALS)
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [(dict(tp=2), dict()), (dict(pp=2), dict(tp=2)), (dict(mla=True, tp=4), dict(mla=True, pp=2))],
    ids=["TP2 to TP1", "PP2 to TP2", "MLA TP4 to PP2"],
)
def test_blocks_of_a_refused_request_come_back(wholes, caplog_vllm, prefill, decode, refusal):
    """All ranks of the holder hear of it, by their first handshake or later, and before a lease."""
    lease_s = 2 * DEADLINE_S
    p, d = wholes("prefill", prefill, kv_lease_duration=lease_s), wholes("decode", decode)
    for name in ("p-a", "p-b"):
        p.serving.add(name, {"do_remote_decode": True})
        p.step()
        answer(d.serving, p.serving.handed_over[name], refusal)
        until(p.serving.is_through, p, d)
    assert d.serving.is_through()
    assert "is held on" not in caplog_vllm.text


def test_blocks_of_a_refused_answer_come_back(wholes):
    """What a decode engine holds of a turn goes by the same way, where another decodes the next."""
    both = dict(bidirectional_kv_xfer=True, kv_recompute_threshold=8)
    p, d = wholes("prefill", dict(tp=2), **both), wholes("decode", dict(pp=2), **both)
    p.serving.add("p-a", {"do_remote_decode": True})
    p.step()
    d.serving.add("d-a", p.serving.handed_over["p-a"])
    until(lambda: "d-a" in d.serving.handed_over, p, d)
    params = d.serving.handed_over["d-a"]
    answer(p.serving, {**params, "do_remote_prefill": True, "do_remote_decode": False})
    until(lambda: p.serving.is_through() and d.serving.is_through(), p, d)


def held_on(whole: Whole, other: Whole, caplog: pytest.LogCaptureFixture, words: str) -> None:
    """Step engines until a log says something; blocks are still held."""
    until(lambda: words in caplog.text, whole, other)
    assert "p-a" in whole.serving.scheduler.requests
    assert whole.serving.num_used_blocks() == 3


def test_wrong_secret_frees_nothing(wholes, caplog_vllm):
    """It is told of as what does not fit always is, and the right one still counts."""
    p, d = wholes("prefill", dict(tp=2)), wholes("decode", dict(pp=2))
    p.serving.add("p-a", {"do_remote_decode": True})
    p.step()
    params = p.serving.handed_over["p-a"]
    answer(d.serving, {**params, "remote_secret": f"{SECRET:016x}"})
    held_on(p, d, caplog_vllm, "under that name, or has another secret")
    answer(d.serving, params)
    until(p.serving.is_through, p, d)
    assert "its lease ran out" not in caplog_vllm.text


def test_somebody_elses_request_is_not_given_up_with_ones_own(wholes, caplog_vllm):
    """One with another prompt fails; vLLM's clean-up after it leaves the blocks to their owner."""
    p, d = wholes("prefill", dict(tp=2)), wholes("decode", dict(pp=2))
    p.serving.add("p-a", {"do_remote_decode": True})
    p.step()
    params = p.serving.handed_over["p-a"]
    d.serving.add("d-a", dict(params), first_token=500)
    until(lambda: "d-a" in d.serving.finished, p, d)
    assert d.serving.finished == {"d-a": FinishReason.ERROR}
    answer(d.serving, params)
    until(d.serving.is_through, p, d)
    held_on(p, d, caplog_vllm, "other tokens than this prompt's")
    d.serving.add("d-b", dict(params))
    until(p.serving.is_through, p, d)
    until(d.serving.is_through, p, d)
    assert d.serving.finished["d-b"] == FinishReason.LENGTH
