# SPDX-License-Identifier: Apache-2.0
"""Answers that begin with the prefill engine's token: vLLM's schedulers, and workers over NIXL.

The model of the prefill engine says token 7, and that of the decode engine 8.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.engine import EngineCoreEventType, FinishReason

from tests.v1.kv_connector.unit.reshard.serving import PROMPT_TOKENS, Serving, from_prefill, until
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine import compat

OPTION = {"seed_first_token": True}
PREFILLED, DECODED = "cmpl-x-0-aaaaaaaa", "cmpl-x-0-bbbbbbbb"
TOLD, COMPUTED = 7, 8
GREEDY = {"temperature": 0.0}

pytestmark = pytest.mark.skipif(
    not compat.CONNECTORS_GIVE_FIRST_OUTPUTS, reason="this base asks connectors for no outputs"
)


def prefill(p: Serving, **asked_for) -> dict:
    """Compute a prompt as routers ask for it; returns what they pass on."""
    asked_for = {"min_tokens": 1, **GREEDY, **asked_for}
    p.add(PREFILLED, {"do_remote_decode": True}, max_tokens=1, **asked_for)
    p.end(p.begin(), said=[TOLD])
    return p.handed_over[PREFILLED]


def read(d: Serving, params: dict, **asked_for) -> None:
    """Have a request read, whose answer has two tokens."""
    d.add(DECODED, params, **{"max_tokens": 2, **GREEDY, **asked_for})
    assert d.step() == {}
    d.step(received=[DECODED])


def finish(d: Serving) -> list[int]:
    """Take the steps that are left of the answer; returns it."""
    for _ in range(9):
        d.end(d.begin(), said=[COMPUTED])
    assert DECODED in d.finished
    return d.answers[DECODED]


def took_over(d: Serving) -> bool:
    """Whether the answer has begun with what was told."""
    return d.answers.get(DECODED) == [TOLD]


def num_counted(d: Serving) -> int:
    """How many answers the engine has counted that begin so, since it was asked last."""
    counted = d.scheduler.connector.get_kv_connector_stats()
    return 0 if counted is None else len(counted.data["first_tokens"])


@pytest.mark.parametrize("asynchronous", [False, True])
def test_answer_begins_when_its_prompt_was_received(serving, asynchronous):
    """In that very step; and the next one computes the second token, behind the first."""
    d = serving(**OPTION, asynchronous=asynchronous)
    read(d, from_prefill(remote_first_token=TOLD))
    assert took_over(d)
    scheduled = d.begin()
    (new,) = scheduled.scheduled_new_reqs
    assert scheduled.num_scheduled_tokens == {DECODED: 1}
    assert new.num_computed_tokens == PROMPT_TOKENS == new.prompt_len
    # What both model runners take the second token's input from.
    assert new.prefill_token_ids == [*new.prompt_token_ids, TOLD]
    d.end(scheduled, said=[COMPUTED])
    assert d.answers[DECODED] == [TOLD, COMPUTED]
    assert d.finished == {DECODED: FinishReason.LENGTH}
    assert d.is_through()


def test_what_is_told_is_what_was_sampled(serving):
    """A pair of engines with the option: all of a prompt but no token is computed twice."""
    p, d = serving(**OPTION), serving(**OPTION)
    params = prefill(p)
    assert params["remote_first_token"] == TOLD
    read(d, params)
    assert finish(d) == [TOLD, COMPUTED]


def test_nothing_is_told_or_taken_over_without_the_option(serving):
    """At either end."""
    assert "remote_first_token" not in prefill(serving())
    d = serving()
    read(d, from_prefill(remote_first_token=TOLD))
    assert finish(d) == [COMPUTED, COMPUTED]
    assert num_counted(d) == 0


def test_prefill_engine_samples_without_the_routers_minimum(serving):
    """It keeps an engine from saying that the answer is over, so that it says something else."""
    p = serving(**OPTION)
    request = p.add(PREFILLED, {"do_remote_decode": True}, min_tokens=1, **GREEDY)
    assert request.sampling_params.min_tokens == 0
    others = p.add("other", None, max_tokens=1, min_tokens=1, **GREEDY)
    assert others.sampling_params.min_tokens == 1


def test_token_that_ends_the_answer_is_computed_here(serving):
    """The prefill engine offers its blocks all the same, and the answer ends where it should."""
    p, d = serving(**OPTION), serving(**OPTION)
    params = prefill(p, stop_token=TOLD)
    assert p.finished == {PREFILLED: FinishReason.STOP}
    assert params["remote_first_token"] == TOLD
    read(d, params, stop_token=TOLD)
    assert DECODED not in d.answers
    d.end(d.begin(), said=[TOLD])
    assert d.finished == {DECODED: FinishReason.STOP}


@pytest.mark.parametrize(
    "asked_for",
    [
        {"temperature": 1.0},
        {"logprobs": 0},
        {"prompt_logprobs": 1},
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.1},
        {"logit_bias": {3: 1.0}},
        {"allowed_token_ids": [7, 8]},
        {"thinking_token_budget": 5},
        {"extra_args": {"mine": 1}},
    ],
    ids=str,
)
def test_what_greedy_sampling_does_not_decide_is_neither_told_nor_taken_over(serving, asked_for):
    """What else a client asks for may change the first token, or is told with it."""
    p = serving(**OPTION)
    assert "remote_first_token" not in prefill(p, **asked_for)
    d = serving(**OPTION)
    d.add(DECODED, from_prefill(remote_first_token=TOLD), max_tokens=2, **{**GREEDY, **asked_for})
    d.step()
    d.step(received=[DECODED] if d.num_used_blocks() and DECODED not in d.answers else [])
    assert not took_over(d)


@pytest.mark.parametrize(
    ("asked_for", "params"),
    [
        ({"min_tokens": 2}, {}),
        ({"max_tokens": 1}, {}),
        ({}, {"remote_first_token": 1 << 30}),
        # One less is held than the prompt has: the token is another one's.
        ({}, {"remote_num_tokens": PROMPT_TOKENS - 1}),
        ({}, {"remote_num_tokens": None, "remote_first_token": None}),
    ],
    ids=["minimum", "one token", "no token of the model's", "fewer tokens", "untold"],
)
def test_answer_is_computed_where_the_token_is_not_its_first(serving, asked_for, params):
    """It has as many tokens as ever, all of the decode engine's."""
    d = serving(**OPTION)
    read(d, from_prefill(**{"remote_first_token": TOLD, **params}), **asked_for)
    assert DECODED not in d.answers
    assert set(finish(d)) == {COMPUTED}
    assert num_counted(d) == 0


@pytest.mark.parametrize("token", ["7", -1, 1.5, [7], 1 << 40])
def test_token_that_is_none_makes_parameters_malformed(serving, token):
    """They name no source: the request fails, as others whose parameters a router has changed."""
    d = serving(**OPTION)
    d.add(DECODED, from_prefill(remote_first_token=token), max_tokens=2, **GREEDY)
    d.begin()
    assert "malformed" in d.told.receive[DECODED].fault


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_request_that_was_not_received_does_not_begin(serving, policy):
    """Its client has an error, or an answer that is computed here from its first token on."""
    d = serving(policy, **OPTION)
    d.add(DECODED, from_prefill(remote_first_token=TOLD), max_tokens=2, **GREEDY)
    d.step()
    (blocks,) = d.scheduler.kv_cache_manager.get_block_ids(DECODED)
    d.step(received=[DECODED], failed={DECODED: blocks})
    assert DECODED not in d.answers or d.answers[DECODED] == []
    answered = finish(d)
    assert answered == ([] if policy == "fail" else [COMPUTED, COMPUTED])


def test_request_that_was_aborted_does_not_begin(serving):
    """Its blocks are back when it was received, and nothing is known of it any more."""
    d = serving(**OPTION)
    d.add(DECODED, from_prefill(remote_first_token=TOLD), max_tokens=2, **GREEDY)
    d.step()
    d.abort(DECODED)
    d.step(received=[DECODED])
    assert DECODED not in d.answers and d.is_through()
    tokens = d.scheduler.connector.connector_scheduler.first_tokens
    assert not tokens._reading and not tokens._told and not tokens._received


def test_request_that_was_preempted_goes_on_behind_its_first_token(serving):
    """It is computed anew with it, and says nothing twice."""
    d = serving(**OPTION)
    read(d, from_prefill(remote_first_token=TOLD), max_tokens=3)
    d.end(d.begin(), said=[COMPUTED])
    d.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert finish(d) == [TOLD, COMPUTED, COMPUTED]


def test_prefill_ends_with_the_first_token(serving):
    """Durations that vLLM derives from events are none below zero."""
    d = serving(**OPTION)
    request = d.add(DECODED, from_prefill(remote_first_token=TOLD), max_tokens=2, **GREEDY)
    request.record_event(EngineCoreEventType.QUEUED)
    d.step()
    scheduler = d.scheduler.connector.connector_scheduler
    scheduler.first_tokens.receive([DECODED])
    ((client_index, output),) = scheduler.first_tokens.take_outputs()
    assert client_index == request.client_index
    assert [each.type for each in output.events] == [
        EngineCoreEventType.QUEUED,
        EngineCoreEventType.SCHEDULED,
    ]
    assert output.prefill_stats.num_external_cached_tokens == PROMPT_TOKENS


def test_answers_are_counted(serving):
    """Once each."""
    d = serving(**OPTION)
    read(d, from_prefill(remote_first_token=TOLD))
    assert took_over(d)
    # A step asks as well.
    assert num_counted(d) == 0


def test_all_connectors_of_several_are_asked():
    """A request may be any one's."""
    given = [SimpleNamespace(take_first_outputs=lambda each=each: each) for each in ([1], [], [2])]
    assert list(MultiConnector.take_first_outputs(SimpleNamespace(_connectors=given))) == [1, 2]


@pytest.mark.parametrize("early", [False, True], ids=["serial", "early"])
def test_whole_engines_hand_the_token_over(wholes, early):
    """By the router's parameters, or with the offer that the scheduler has asked for."""
    options = {**OPTION, "early_dispatch": early}
    p = wholes("prefill", {"pp": 2, **options}, **options)
    d = wholes("decode", {"tp": 2, **options}, **options)
    address = p.serving.scheduler.connector.connector_scheduler
    params = {
        "do_remote_prefill": True,
        "remote_engine_id": "prefill",
        "remote_host": "127.0.0.1",
        "remote_port": address.side_channel_port,
        "remote_request_id": "x",
    }
    if early:
        d.serving.add(DECODED, params, max_tokens=2, **GREEDY)
    p.serving.add(PREFILLED, {"do_remote_decode": True}, min_tokens=1, **GREEDY)
    p.step()
    if not early:
        d.serving.add(DECODED, p.serving.handed_over[PREFILLED], max_tokens=2, **GREEDY)
    until(lambda: DECODED in d.serving.answers, p, d)
    assert took_over(d.serving)
    scheduled = d.serving.begin()
    d.serving.end(scheduled, said=[COMPUTED], heard=d.work(scheduled))
    assert d.serving.answers[DECODED] == [TOLD, COMPUTED]
    until(lambda: p.serving.is_through() and d.serving.is_through(), p, d)
