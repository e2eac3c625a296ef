# SPDX-License-Identifier: Apache-2.0
"""Requests whose parameters or prompts are not those that were prefilled get no one's KV."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest
import torch

from tests.e2e.pairs import (
    ask_with_embeddings,
    embeddings,
    post,
    post_embeddings,
    text_of,
)
from tests.faults.logs import Log
from tests.faults.stage import (
    LEASE_RAN_OUT,
    LEASE_S,
    PROMPT_TOKENS,
    SLACK_S,
    Params,
    Stage,
    answer_of,
    assert_failed,
)
from tests.faults.table import read_rows
from tests.tools.pdstack.helpers import wait_until
from tools.pdstack.stack import Engine

pytestmark = pytest.mark.e2e

ROWS = read_rows()
MORE_THAN_FIT = 4096
"""Tokens of an answer: four times what the engines' contexts have in all."""

GIVEN_UP_S = LEASE_S / 2
"""What a client that is refused may cost others on a slow machine. The lease began before."""
Asked = tuple[str, Params]


def another_prompt(stage: Stage, text: str, params: Params) -> Asked:
    """The last character is another: one token in the last block."""
    return text[:-1] + ("a" if text[-1] != "a" else "b"), params


def shorter_prompt(stage: Stage, text: str, params: Params) -> Asked:
    """Two tokens were cut off, as where an engine is given less room."""
    return text[:-2], params


def others_blocks(stage: Stage, text: str, params: Params) -> Asked:
    """One's own held request, and the blocks of somebody else's."""
    victim = stage.prefilled(stage.text())
    stage.abandoned += 1
    return text, {**params, "remote_block_ids": victim["remote_block_ids"]}


def others_request(stage: Stage, text: str, params: Params) -> Asked:
    """All of somebody else's parameters, with a prompt of one's own."""
    victim = stage.prefilled(stage.text())
    stage.abandoned += 1
    return text, victim


FAULTS = {
    "another prompt of the same length": another_prompt,
    "a shorter prompt than the prefilled one": shorter_prompt,
    "somebody else's blocks": others_blocks,
    "somebody else's request": others_request,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_nobody_reads_what_was_computed_for_something_else(stage: Stage, fault: str) -> None:
    """The request fails and says why, or is computed."""
    act: Callable[[Stage, str, Params], Asked] = FAULTS[fault]
    log, recomputing_log = (Log(each) for each in (stage.decode, stage.recomputing))
    prefilled = stage.text()
    text, params = act(stage, prefilled, stage.prefilled(prefilled))
    assert_failed(stage.decoded(text, params))
    (line,) = log.complaints()
    assert ROWS[fault].tells("500", line, "lease"), line

    prefilled = stage.text()
    text, params = act(stage, prefilled, stage.prefilled(prefilled))
    assert answer_of(stage.decoded(text, params, stage.recomputing)) == stage.right_answer(text)
    (line,) = recomputing_log.complaints()
    assert ROWS[fault].matches(line), line
    # Nobody is told of what may be another's, and vLLM's clean-up of a failed request is not heard.
    stage.abandoned += 2


def test_nobody_reads_what_was_computed_for_other_embeddings(stage: Stage) -> None:
    """One number of one row is another; the same rows are read."""
    fault, served = "a prompt given as other embeddings", stage.stack.model
    log, recomputing_log = (Log(each) for each in (stage.decode, stage.recomputing))

    def prefilled(rows: torch.Tensor) -> Params:
        what_for = {"do_remote_decode": True}
        reply = post_embeddings(
            stage.prefill, stage.model, rows, max_tokens=1, kv_transfer_params=what_for
        )
        params: Params = reply.json()["kv_transfer_params"]
        return params

    def decoded(rows: torch.Tensor, params: Params, by: Engine) -> httpx.Response:
        return post_embeddings(by, stage.model, rows, kv_transfer_params=params)

    def right_answer(rows: torch.Tensor) -> str:
        return ask_with_embeddings(stage.prefill, stage.model, rows, cache_salt="unaided")

    rows = embeddings(served, PROMPT_TOKENS)
    before = stage.decode.nixl_counters()
    reply = decoded(rows, prefilled(rows), stage.decode)
    assert reply.json()["choices"][0]["text"] == right_answer(rows)
    wait_until(
        lambda: (stage.decode.nixl_counters() - before).bytes_moved > 0,
        "the report of what was read",
        SLACK_S,
    )
    others = embeddings(served, PROMPT_TOKENS, seed=1)
    params = prefilled(others)
    others[PROMPT_TOKENS // 2, 0] += 1
    assert_failed(decoded(others, params, stage.decode))
    (line,) = log.complaints()
    assert ROWS[fault].tells("500", line, "lease"), line

    others = embeddings(served, PROMPT_TOKENS, seed=2)
    params = prefilled(others)
    others[PROMPT_TOKENS // 2, 0] += 1
    reply = decoded(others, params, stage.recomputing)
    assert reply.json()["choices"][0]["text"] == right_answer(others)
    (line,) = recomputing_log.complaints()
    assert ROWS[fault].matches(line), line
    stage.abandoned += 2


def test_blocks_of_all_these_requests_come_back(stage: Stage) -> None:
    """When their leases have run out."""
    stage.assert_blocks_come_back()


def test_prompt_that_has_grown_is_completed(stage: Stage) -> None:
    """What was prefilled is used, and what came to it is computed: the answer is one engine's."""
    text = text_of("grown", PROMPT_TOKENS)
    params = stage.prefilled(text)
    longer = text_of("grown", PROMPT_TOKENS + 2)
    assert longer.startswith(text)
    before = stage.decode.nixl_counters()
    assert answer_of(stage.decoded(longer, params)) == stage.right_answer(longer)
    assert (stage.decode.nixl_counters() - before).bytes_moved > 0


@pytest.mark.parametrize(
    "asked",
    [{"max_tokens": MORE_THAN_FIT}, {"stream_options": {"include_usage": True}}],
    ids=["too much", "a body that does not pass validation"],
)
def test_requests_that_are_refused_give_their_blocks_back(
    stage: Stage, asked: dict[str, object]
) -> None:
    """Long before their lease is over: what clients ask is changed for prefill."""
    wait_until(lambda: not stage.holds_blocks(), "the return of all blocks", LEASE_S + SLACK_S)
    expired = stage.prefill_log.find(LEASE_RAN_OUT)
    for _ in range(3):
        text = stage.text()
        params = stage.prefilled(text)
        wait_until(stage.holds_blocks, "the report of blocks that are held", SLACK_S)
        reply = post(stage.decode, stage.model, text, **asked, kv_transfer_params=params)
        assert reply.status_code == httpx.codes.BAD_REQUEST, reply.text
        wait_until(lambda: not stage.holds_blocks(), "what a refused request held", GIVEN_UP_S)
    assert stage.prefill_log.find(LEASE_RAN_OUT) == expired
