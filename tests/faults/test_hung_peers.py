# SPDX-License-Identifier: Apache-2.0
"""A prefill engine whose workers hang while its scheduler answers: no network tells of that."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator

import pytest

from tests.e2e.pairs import ask_unaided, metric
from tests.faults.logs import Log
from tests.faults.stage import (
    LEASE_S,
    SLACK_S,
    Stage,
    answer_of,
    assert_failed,
    hung,
    post,
    spec,
    stopped,
)
from tests.faults.table import read_rows
from tests.tools.pdstack.helpers import wait_until
from tools.pdstack.layout import Layout
from tools.pdstack.stack import Engine

pytestmark = pytest.mark.e2e

ROWS = read_rows()
READ_LIMIT_S = 10.0


@pytest.fixture
def pair(stage: Stage) -> Iterator[tuple[Engine, Engine]]:
    """A prefill engine with workers of its own, and a decode engine, which share no memory."""
    overrides = dict(env={"UCX_TLS": "tcp,self"})
    waiting = {"kv_lease_duration": LEASE_S, "kv_read_timeout_s": READ_LIMIT_S}
    decode = spec("patient-decode")
    assert decode.kv_transfer is not None
    transfer = dataclasses.replace(decode.kv_transfer, extra_config=waiting)
    engines = stage.stack.start_engines(
        dataclasses.replace(spec("hung-prefill"), layout=Layout(tp_size=2), **overrides),
        dataclasses.replace(decode, kv_transfer=transfer, **overrides),
    )
    yield engines[0], engines[1]
    stage.stack.stop(*engines)


def prefilled(stage: Stage, prefill: Engine, text: str) -> dict:
    """Let a prompt be computed, and return where its blocks are."""
    what_for = {"do_remote_decode": True, "do_remote_prefill": False}
    reply = post(prefill, stage.model, text, max_tokens=1, kv_transfer_params=what_for)
    answer_of(reply)
    return dict(reply.json()["kv_transfer_params"])


# `test_hosts` has one of engines that have met, and a host that is cut off before that.
@pytest.mark.nightly
@pytest.mark.parametrize("connected", [True, False], ids=["connected", "never met"])
def test_hung_prefill_engine_costs_its_requests_in_time(
    stage: Stage, pair: tuple[Engine, Engine], connected: bool
) -> None:
    """The client hears of it, others are served meanwhile, and all blocks come back."""
    prefill, decode = pair
    text, other, after = stage.text(), stage.text(), stage.text()
    if connected:
        before = stage.text()
        answer_of(stage.decoded(before, prefilled(stage, prefill, before), decode))
    right = stage.right_answer(after)
    params = prefilled(stage, prefill, text)
    log = Log(decode)
    with hung(prefill):
        reply = stage.being_decoded(text, params, decode)
        assert ask_unaided(decode, stage.model, other)
        assert_failed(reply.result(READ_LIMIT_S + SLACK_S))
        (line,) = log.complaints()
        assert ROWS["the prefill engine's workers hang"].tells("500", line, "lease"), line
        assert ask_unaided(decode, stage.model, other)
    assert answer_of(stage.decoded(after, prefilled(stage, prefill, after), decode)) == right
    stage.assert_blocks_are_free(decode)
    wait_until(
        lambda: (
            not any(
                metric(prefill, name)
                for name in ("vllm:kv_cache_usage_perc", "vllm:nixl_held_blocks")
            )
        ),
        "the return of all blocks",
        LEASE_S + SLACK_S,
    )


@pytest.mark.nightly
def test_machine_that_stands_still_costs_nothing(stage: Stage) -> None:
    """Both engines stand still for longer than a lease, as in a machine that is suspended."""
    text, other = stage.text(), stage.text()
    right = stage.right_answer(text)
    params = stage.prefilled(text)
    log = Log(stage.prefill)
    with stopped(stage.prefill), stopped(stage.decode):
        goes_on_at_s = time.monotonic() + LEASE_S + 2.0
        wait_until(lambda: time.monotonic() > goes_on_at_s, "the end of a lease", 2 * LEASE_S)
    # A step of the prefill engine's, which could end the lease.
    assert ask_unaided(stage.prefill, stage.model, other)
    assert answer_of(stage.decoded(text, params)) == right
    (line,) = log.complaints()
    row = ROWS["the machine of both engines stands still for longer than a lease"]
    assert row.tells("its answer", line, "given back"), line
