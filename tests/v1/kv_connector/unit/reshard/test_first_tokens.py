# SPDX-License-Identifier: Apache-2.0
"""Answers that begin with the prefill engine's token: vLLM's schedulers, and workers over NIXL.

The model of the prefill engine says token 7, and that of the decode engine 8.
"""

from __future__ import annotations

import json
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.config import StructuredOutputsConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreEventType, FinishReason
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from tests.v1.kv_connector.unit.reshard.serving import PROMPT_TOKENS, Serving, from_prefill, until
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine import compat
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.scheduling import first_tokens
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.scheduling.first_tokens import (
    FirstTokens,
    _digest,
)

OPTION = {"seed_first_token": True}
OFF = {"seed_first_token": False}
PREFILLED, DECODED = "cmpl-x-0-aaaaaaaa", "cmpl-x-0-bbbbbbbb"
TOLD, COMPUTED = 7, 8
GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 0.7}
SAMPLED_ALIKE = (
    GREEDY,
    SAMPLED,
    *({**SAMPLED, **each} for each in ({"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1})),
    {**GREEDY, "presence_penalty": 0.5},
    {**SAMPLED, "frequency_penalty": 0.5},
    {**SAMPLED, "repetition_penalty": 1.1},
    {**SAMPLED, "logit_bias": {3: 1.0, 4: 2.0}},
    {**SAMPLED, "allowed_token_ids": [7, 8]},
)

pytestmark = pytest.mark.skipif(
    not compat.CONNECTORS_GIVE_FIRST_OUTPUTS, reason="this base asks connectors for no outputs"
)


def told(token: object = TOLD, sampled_with: dict = GREEDY, **changes) -> dict:
    """What a prefill engine says of a prompt, and of the token behind it."""
    digest = _digest(SamplingParams(**sampled_with), (False, False))
    return from_prefill(**{"remote_sampled_token": token, "remote_sampled_with": digest, **changes})


def prefill(p: Serving, **asked_for) -> dict:
    """Compute a prompt as routers ask for it; returns what they pass on."""
    asked_for = {"min_tokens": 1, **GREEDY, **asked_for}
    p.add(PREFILLED, {"do_remote_decode": True}, max_tokens=1, **asked_for)
    p.end(p.begin(), said=[TOLD])
    return p.handed_over[PREFILLED]


def prefilled(**asked_for) -> SimpleNamespace:
    """A request at the prefill engine, which has sampled its token."""
    return SimpleNamespace(
        output_token_ids=[TOLD],
        kv_transfer_params={"do_remote_decode": True},
        resumable=False,
        sampling_params=SamplingParams(**asked_for),
    )


def read(d: Serving, params: dict, **asked_for) -> Request:
    """Have a request read, whose answer has two tokens."""
    request = d.add(DECODED, params, **{"max_tokens": 2, **GREEDY, **asked_for})
    assert d.step() == {}
    d.step(received=[DECODED])
    return request


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
    read(d, told())
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
    assert params["remote_sampled_token"] == TOLD
    read(d, params)
    assert finish(d) == [TOLD, COMPUTED]


def test_nothing_is_told_or_taken_over_where_it_is_off(serving):
    """At either end."""
    assert "remote_sampled_token" not in prefill(serving(**OFF))
    d = serving(**OFF)
    read(d, told())
    assert finish(d) == [COMPUTED, COMPUTED]
    assert num_counted(d) == 0


def test_prefill_engine_samples_without_the_routers_minimum(serving):
    """It keeps an engine from saying that the answer is over, so that it says something else."""
    p = serving(**OPTION)
    request = p.add(PREFILLED, {"do_remote_decode": True}, min_tokens=1, **GREEDY)
    assert request.sampling_params.min_tokens == 0
    others = p.add("other", None, max_tokens=1, min_tokens=1, **GREEDY)
    assert others.sampling_params.min_tokens == 1


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    "asked_for", [{}, SAMPLED, {**SAMPLED, "allowed_token_ids": [7, 8]}], ids=str
)
def test_token_that_ends_the_answer_is_the_only_one_allowed(serving, asked_for, asynchronous):
    """The prefill engine offers its blocks all the same, and the answer ends in a step of vLLM's.

    If the token was drawn here once more, answers would end less often than the model says.
    """
    p, d = serving(**OPTION), serving(**OPTION, asynchronous=asynchronous)
    params = prefill(p, stop_token=TOLD, **asked_for)
    assert p.finished == {PREFILLED: FinishReason.STOP}
    assert params["remote_sampled_token"] == TOLD
    request = read(d, params, stop_token=TOLD, **asked_for)
    asked = request.sampling_params
    assert DECODED not in d.answers
    scheduled = d.begin()
    (new,) = scheduled.scheduled_new_reqs
    assert new.sampling_params.allowed_token_ids == [TOLD]
    assert new.sampling_params.stop_token_ids == asked.stop_token_ids == [TOLD]
    d.end(scheduled, said=[TOLD])
    assert d.answers[DECODED] == [TOLD]
    assert d.finished == {DECODED: FinishReason.STOP}
    assert num_counted(d) == 0


def test_parameters_that_requests_share_stay_as_they_are(serving):
    """An engine in its client's process may be given one object for all prompts."""
    d = serving(**OPTION)
    request = d.add(DECODED, told(), max_tokens=2, stop_token=TOLD, **GREEDY)
    shared = request.sampling_params
    d.step()
    d.step(received=[DECODED])
    assert request.sampling_params.allowed_token_ids == [TOLD]
    assert shared.allowed_token_ids is None


@pytest.mark.parametrize("asked_for", SAMPLED_ALIKE, ids=str)
def test_sampled_token_is_taken_over_where_it_was_sampled_alike(serving, asked_for):
    """And computed where anything that decides the draw differs, which only costs a forward."""
    p, d, other = serving(**OPTION), serving(**OPTION), serving(**OPTION)
    params = prefill(p, **asked_for)
    read(other, dict(params), **{**asked_for, "temperature": 0.4})
    read(d, params, **asked_for)
    assert took_over(d)
    assert finish(d) == [TOLD, COMPUTED]
    assert DECODED not in other.answers
    assert finish(other) == [COMPUTED, COMPUTED]


def test_digest_tells_all_that_decides_a_draw():
    """One changed field is another digest, and the order of biases is the same one."""
    digests = [_digest(SamplingParams(**asked_for)) for asked_for in SAMPLED_ALIKE]
    words = SamplingParams(**SAMPLED)
    words._bad_words_token_ids = [[3], [4, 5]]
    digests.append(_digest(words))
    assert len(set(digests)) == len(digests)
    one, other = (
        {"logit_bias": dict(each)} for each in ([(3, 1.0), (4, 2.0)], [(4, 2.0), (3, 1.0)])
    )
    assert _digest(SamplingParams(**one)) == _digest(SamplingParams(**other))


def test_what_does_not_decide_a_draw_may_differ(serving):
    """Routers ask the prefill engine for one token, and may leave out what presents an answer."""
    p, d = serving(**OPTION), serving(**OPTION)
    params = prefill(p, **SAMPLED)
    read(d, params, **SAMPLED, n=3, stop_token=3, max_tokens=9, skip_special_tokens=False)
    assert took_over(d)


def test_token_of_a_build_that_does_not_say_how_it_sampled_is_not_taken_over(serving):
    """Those of `reshard.1` name it otherwise, and so they do not read what is told here."""
    d = serving(**OPTION)
    read(d, from_prefill(remote_first_token=TOLD))
    assert finish(d) == [COMPUTED, COMPUTED]
    assert "remote_first_token" not in prefill(serving(**OPTION), **SAMPLED)


@pytest.mark.parametrize(
    "asked_for",
    [
        {**SAMPLED, "seed": 3},
        {"prompt_logprobs": 1},
        {"logprobs": 1, "logprob_token_ids": [3]},
        {"thinking_token_budget": 5},
        {"extra_args": {"mine": 1}},
    ],
    ids=str,
)
def test_what_more_than_a_draw_decides_is_neither_told_nor_taken_over(serving, asked_for):
    """What else a client asks for may change the first token, or is told with it."""
    p = serving(**OPTION)
    assert "remote_sampled_token" not in prefill(p, **asked_for)
    d = serving(**OPTION)
    how = {**GREEDY, **asked_for}
    d.add(DECODED, told(sampled_with={"temperature": how["temperature"]}), max_tokens=2, **how)
    d.step()
    d.step(received=[DECODED] if d.num_used_blocks() and DECODED not in d.answers else [])
    assert not took_over(d)


@pytest.mark.parametrize(
    ("asked_for", "params"),
    [
        ({"min_tokens": 2}, {}),
        ({"max_tokens": 1}, {}),
        ({}, {"remote_sampled_token": 1 << 30}),
        # One less is held than the prompt has: the token is another one's.
        ({}, {"remote_num_tokens": PROMPT_TOKENS - 1}),
        ({}, {"remote_num_tokens": None, "remote_sampled_token": None}),
        ({}, {"remote_sampled_with": None}),
        ({}, {"remote_sampled_with": "another"}),
    ],
    ids=[
        "minimum",
        "one token",
        "no token of the model's",
        "fewer tokens",
        "untold",
        "unsaid",
        "unlike",
    ],
)
def test_answer_is_computed_where_the_token_is_not_its_first(serving, asked_for, params):
    """It has as many tokens as ever, all of the decode engine's."""
    d = serving(**OPTION)
    read(d, told(**params), **asked_for)
    assert DECODED not in d.answers
    assert set(finish(d)) == {COMPUTED}
    assert num_counted(d) == 0


ROW = LogprobsLists(
    np.array([[TOLD, 3, 5, 9]], np.int32),
    np.array([[-2.25, -0.5, -1.75, -4.0]], np.float32),
    np.array([4], np.int64),
)
"""Of a step in which another request has asked for three."""
RANKED = [[TOLD, 3, 5], [-2.25, -0.5, -1.75], 4]


def prefill_ranked(p: Serving, row: LogprobsLists | None = ROW, **asked_for) -> dict:
    """Compute a prompt whose client wants log-probabilities; returns what routers pass on."""
    asked_for = {**GREEDY, "logprobs": 2, **asked_for}
    p.add(PREFILLED, {"do_remote_decode": True}, **asked_for)
    p.end(p.begin(), said=[TOLD], logprobs=row)
    return p.handed_over[PREFILLED]


@pytest.mark.parametrize("wanted", [0, 2])
def test_log_probabilities_travel_with_the_token(serving, wanted):
    """As many as its client has asked for, as the prefill engine has them, through JSON."""
    p, d = serving(**OPTION), serving(**OPTION)
    params = json.loads(json.dumps(prefill_ranked(p, logprobs=wanted)))
    assert params["remote_sampled_logprobs"] == [*(each[: wanted + 1] for each in RANKED[:2]), 4]
    read(d, params, logprobs=wanted)
    assert took_over(d)
    (of_first,) = d.logprobs[DECODED]
    for said, right in zip(of_first[:2], ROW[:2], strict=True):
        assert said.dtype == right.dtype
        assert said.tolist() == right[:, : wanted + 1].tolist()
    assert of_first.sampled_token_ranks.tolist() == [4]
    assert finish(d) == [TOLD, COMPUTED]


def test_log_probabilities_that_nobody_asks_for_are_not_given_out(serving):
    """A front end that does not expect them would fail, with all of its requests."""
    d = serving(**OPTION)
    read(d, told(remote_sampled_logprobs=RANKED))
    assert took_over(d)
    assert d.logprobs[DECODED] == [None]


@pytest.mark.parametrize(
    "ranked",
    [
        None,
        [[TOLD, 3], [-2.25, -0.5], 4],
        [[TOLD, 3, 5, 9], [-2.25, -0.5, -1.75, -4.0], 4],
        [[TOLD, 3, 5], [-2.25, -0.5], 4],
        [[3, TOLD, 5], [-0.5, -2.25, -1.75], 4],
        [[TOLD, 3, 1 << 30], [-2.25, -0.5, -1.75], 4],
        [[], [], 4],
    ],
    ids=["untold", "fewer", "more", "uneven", "another token's", "no model's", "none"],
)
def test_answer_is_computed_without_the_log_probabilities_that_are_wanted(serving, ranked):
    """The decode engine says its own."""
    d = serving(**OPTION)
    read(d, told(remote_sampled_logprobs=ranked), logprobs=2)
    assert DECODED not in d.answers
    assert finish(d) == [COMPUTED, COMPUTED]


@pytest.mark.parametrize(
    "ranked",
    ["3", [[TOLD]], [[TOLD], [-1.0], 0], [[-1], [-1.0], 1], [[TOLD], ["-1"], 1]]
    + [[[TOLD], [each], 1] for each in (float("nan"), float("-inf"), 1e300, 10**400)]
    + [[[TOLD] * 130, [-1.0] * 130, 1]],
    ids=lambda each: str(each)[:24],
)
def test_log_probabilities_that_are_none_make_parameters_malformed(serving, ranked):
    """Whether or not the client has asked for them."""
    d = serving(**OPTION)
    d.add(DECODED, told(remote_sampled_logprobs=ranked), max_tokens=2, **GREEDY)
    d.begin()
    assert "malformed" in d.told.receive[DECODED].fault


@pytest.mark.parametrize(
    ("asked_for", "row"),
    [
        ({}, None),
        ({}, ROW._replace(logprobs=np.array([[-2.25, -0.5, float("-inf"), 0.0]], np.float32))),
        ({"logprobs": -1}, ROW),
        ({"logprobs": 129}, ROW),
    ],
    ids=["none", "excluded", "all", "too many"],
)
def test_token_is_not_told_without_its_log_probabilities(serving, asked_for, row):
    """Nor where there are too many, or some that JSON does not have."""
    assert "remote_sampled_token" not in prefill_ranked(serving(**OPTION), row, **asked_for)


def test_log_probabilities_of_another_kind_are_computed(serving):
    """Processed ones would be those of the only token allowed where it ends the answer."""
    request = prefilled(logprobs=2)
    request.last_logprobs = ROW
    for has_logprobs in (True, False):
        tokens = FirstTokens(99, 99, lambda: None, has_logprobs=has_logprobs)
        assert bool(tokens.of_offer(request)) is has_logprobs


@pytest.mark.parametrize("token", ["7", -1, 1.5, [7], 1 << 40])
def test_token_that_is_none_makes_parameters_malformed(serving, token):
    """They name no source: the request fails, as others whose parameters a router has changed."""
    d = serving(**OPTION)
    d.add(DECODED, told(token), max_tokens=2, **GREEDY)
    d.begin()
    assert "malformed" in d.told.receive[DECODED].fault


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_request_that_was_not_received_does_not_begin(serving, policy):
    """Its client has an error, or an answer that is computed here from its first token on."""
    d = serving(policy, **OPTION)
    d.add(DECODED, told(TOLD), max_tokens=2, **GREEDY)
    d.step()
    (blocks,) = d.scheduler.kv_cache_manager.get_block_ids(DECODED)
    d.step(received=[DECODED], failed={DECODED: blocks})
    assert DECODED not in d.answers or d.answers[DECODED] == []
    answered = finish(d)
    assert answered == ([] if policy == "fail" else [COMPUTED, COMPUTED])


def test_request_that_was_aborted_does_not_begin(serving):
    """Its blocks are back when it was received, and nothing is known of it any more."""
    d = serving(**OPTION)
    d.add(DECODED, told(TOLD), max_tokens=2, **GREEDY)
    d.step()
    d.abort(DECODED)
    d.step(received=[DECODED])
    assert DECODED not in d.answers and d.is_through()
    tokens = d.scheduler.connector.connector_scheduler.first_tokens
    assert not tokens._reading and not tokens._told and not tokens._received


def test_request_that_was_preempted_goes_on_behind_its_first_token(serving):
    """It is computed anew with it, and says nothing twice."""
    d = serving(**OPTION)
    read(d, told(TOLD), max_tokens=3)
    d.end(d.begin(), said=[COMPUTED])
    d.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert finish(d) == [TOLD, COMPUTED, COMPUTED]


def test_prefill_ends_with_the_first_token(serving):
    """Durations that vLLM derives from events are none below zero."""
    d = serving(**OPTION)
    request = d.add(DECODED, told(TOLD), max_tokens=2, **GREEDY)
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
    read(d, told())
    assert took_over(d)
    # A step asks as well.
    assert num_counted(d) == 0


def test_all_connectors_of_several_are_asked():
    """A request may be any one's."""
    given = [SimpleNamespace(take_first_outputs=lambda each=each: each) for each in ([1], [], [2])]
    assert list(MultiConnector.take_first_outputs(SimpleNamespace(_connectors=given))) == [1, 2]


class Grammar:
    """Allows one token after the other."""

    def __init__(self, *allowed: int) -> None:
        self.allowed, self.accepted = allowed, []

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """Return them, if they are allowed."""
        behind = [*self.accepted, *tokens]
        return tokens if [*self.allowed[: len(behind)]] == behind else []

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Go on behind them; nothing does behind a token that is not allowed."""
        assert self.validate_tokens(tokens) == tokens
        self.accepted += tokens
        return True


CONSTRAINED = {"structured_outputs": StructuredOutputsParams(regex="[0-9]+")}


@pytest.mark.parametrize("allowed", [TOLD, COMPUTED])
def test_grammar_goes_on_behind_the_token(serving, allowed):
    """By one token each; where the decode engine's does not allow it, another one is computed."""
    d, grammar = serving(**OPTION), Grammar(allowed, COMPUTED)
    request = d.add(
        DECODED, told(sampled_with={**GREEDY, **CONSTRAINED}), max_tokens=2, **CONSTRAINED, **GREEDY
    )
    request.structured_output_request.grammar = grammar
    d.step()
    d.step(received=[DECODED])
    assert took_over(d) is (allowed == TOLD)
    assert finish(d) == [allowed, COMPUTED] == grammar.accepted


def test_grammars_are_compared():
    """A token that was drawn under another grammar is not taken over, nor with other ends of it."""
    others = StructuredOutputsParams(regex="[1-9]+"), StructuredOutputsParams(json_object=True)
    asked_for = [{"structured_outputs": each} for each in others]
    asked_for += [CONSTRAINED, {**CONSTRAINED, "stop_token_ids": [3]}, {}]
    digests = {_digest(SamplingParams(**each), (False, False)) for each in asked_for}
    digests.add(_digest(SamplingParams(**CONSTRAINED), (True, False)))
    assert len(digests) == 6
    # What is drawn without a grammar is told as ever.
    assert _digest(SamplingParams(), (False, False)) == _digest(SamplingParams())


@pytest.mark.parametrize("parser", ["", "a parser"])
def test_answers_that_reason_before_a_grammar_are_computed(parser):
    """Its parser decides from which token on the grammar counts."""
    config = StructuredOutputsConfig()
    config.reasoning_parser = parser
    tokens = FirstTokens(9, 9, lambda: None, grammar_rules=first_tokens._grammar_rules(config))
    for asked_for, is_told in ({}, True), (CONSTRAINED, not parser):
        assert bool(tokens.of_offer(prefilled(**asked_for))) is is_told


@pytest.mark.parametrize(
    "asked_for",
    [
        {"trace_decode_token_ids": [7]},
        {"min_tokens": 2},
    ],
    ids=str,
)
def test_prefill_engine_does_not_tell_a_token_that_a_minimum_has_chosen(asked_for):
    """Nor one that a field of a later release may have."""
    tokens = FirstTokens(100, 100, lambda: None)
    for more, is_told in ({}, True), (asked_for, False):
        request = prefilled(**SAMPLED, max_tokens=2, **more)
        assert bool(tokens.of_offer(request)) is is_told


@pytest.mark.parametrize(
    ("chosen", "logged"),
    [(True, "seed_first_token does nothing here: logits processors"), (None, ""), (False, "")],
    ids=str,
)
def test_installed_logits_processors_keep_tokens_from_being_told(
    serving, monkeypatch, logged_lines, chosen, logged
):
    """They see all requests, and may count their tokens; who has asked for the option is told."""
    monkeypatch.setattr(first_tokens, "entry_points", lambda **_: ["a processor"])
    assert "remote_sampled_token" not in prefill(serving(seed_first_token=chosen))
    assert any(logged in line for line in logged_lines) if logged else not logged_lines


@pytest.mark.parametrize("chosen", [True, None], ids=str)
def test_engine_says_at_its_start_that_it_takes_tokens_over(serving, logged_lines, chosen):
    """With the option that turns it off: it is on by default."""
    p = serving(**({} if chosen is None else {"seed_first_token": chosen}))
    assert "remote_sampled_token" in prefill(p)
    assert any("seed_first_token false" in line for line in logged_lines)


@pytest.fixture
def logged_lines(monkeypatch) -> list[str]:
    """What the module logs."""
    lines: list[str] = []
    for level in ("info", "warning"):
        monkeypatch.setattr(
            first_tokens.logger, level, lambda text, *args: lines.append(text % args)
        )
    return lines


def draws(logits: torch.Tensor, sampling: SamplingParams, count: int) -> list[int]:
    """Tokens that vLLM's sampler draws."""
    allowed = None
    if sampling.allowed_token_ids:
        allowed = torch.ones(count, len(logits), dtype=torch.bool)
        allowed[:, sampling.allowed_token_ids] = False
    none = torch.zeros(count)
    metadata = SamplingMetadata(
        temperature=torch.full((count,), sampling.temperature),
        all_greedy=False,
        all_random=True,
        top_p=torch.full((count,), sampling.top_p),
        top_k=None,
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=none,
        presence_penalties=none,
        repetition_penalties=none,
        output_token_ids=[],
        allowed_token_ids_mask=allowed,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
    return Sampler()(logits.repeat(count, 1), metadata).sampled_token_ids.flatten().tolist()


@pytest.mark.nightly
@pytest.mark.parametrize("scale", [0.3, 4.0], ids=["flat", "peaked"])
def test_distribution_is_that_of_a_decode_engine_that_samples(serving, scale):
    """Of 10,000 first tokens, one of which ends the answer; by chi-squared, at 0.001."""
    count, end = 10_000, 3
    torch.manual_seed(45)
    logits = torch.randn(12) * scale
    logits[end] = logits.max() - 0.5
    asked_for = {"temperature": 0.8, "top_p": 0.95, "stop_token": end}
    sampled = SamplingParams(temperature=0.8, top_p=0.95)
    p, d = serving(**OPTION), serving(**OPTION)
    found = []
    for token in draws(logits, sampled, count):
        p.add(PREFILLED, {"do_remote_decode": True}, max_tokens=1, min_tokens=1, **asked_for)
        p.end(p.begin(), said=[token])
        d.add(DECODED, p.handed_over.pop(PREFILLED), max_tokens=2, **asked_for)
        d.step()
        d.step(received=[DECODED])
        scheduled = d.begin()
        (new,) = scheduled.scheduled_new_reqs
        d.end(scheduled, said=draws(logits, new.sampling_params, 1))
        found.append(d.answers.pop(DECODED)[0])
        p.step(sent=[PREFILLED])
        d.step()
    one, other = Counter(found), Counter(draws(logits, sampled, count))
    kinds = one.keys() | other.keys()
    assert end in kinds
    # Of degrees of freedom that many, the value that a thousandth exceeds, by Wilson and Hilferty.
    freedom = len(kinds) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert sum((one[k] - other[k]) ** 2 / (one[k] + other[k]) for k in kinds) < limit


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
