# SPDX-License-Identifier: Apache-2.0
"""Steps of a decode engine that take longer than leases last."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.pairs import metric, post
from tests.faults.logs import Log
from tests.faults.stage import LEASE_RAN_OUT, LEASE_S, SLACK_S, Stage, answer_of, spec
from tests.faults.table import read_rows
from tests.tools.pdstack.helpers import wait_until
from tools.pdstack.stack import Engine

# The simulation plants what this shows, without engines.
pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

ROWS = read_rows()
MODULES = Path(__file__).parents[1] / "e2e/modules"
MODULE = "sleeps_in_a_step"
STEP_S = 2 * LEASE_S
BUSY_TOKENS = 600


@pytest.fixture
def decode(stage: Stage, tmp_path: Path) -> Iterator[Engine]:
    """A decode engine that runs one request at a time, and has a step that can take long."""
    (engine,) = stage.stack.start_engines(
        dataclasses.replace(
            spec("sleepy-decode", "--max-num-seqs", "1", module_path=MODULE, module_dir=MODULES),
            env={**spec("").env, "SLEEP_FILE": str(tmp_path / "seconds")},
        )
    )
    yield engine
    stage.stack.stop(engine)


def test_step_of_two_leases_costs_none(stage: Stage, decode: Engine, tmp_path: Path) -> None:
    """The blocks of a request that waits meanwhile are held: its lease is renewed without steps."""
    text, before = stage.text(), stage.text()
    right = stage.right_answer(text)
    log, freed = Log(decode), len(stage.prefill_log.find(LEASE_RAN_OUT))
    expired = stage.prefill.nixl_counters().expired_requests
    # One that runs, so that the next has to wait while steps go on.
    busy = stage.in_background(
        partial(post, decode, stage.model, before, max_tokens=BUSY_TOKENS, ignore_eos=True)
    )
    wait_until(lambda: metric(decode, "vllm:num_requests_running") == 1.0, "a request", SLACK_S)
    seconds = tmp_path / "seconds"
    (tmp_path / "new").write_text(str(STEP_S), encoding="utf-8")
    (tmp_path / "new").rename(seconds)
    params = stage.prefilled(text)
    asked_s = time.monotonic()
    reply = stage.being_decoded(text, params, decode)
    wait_until(lambda: not seconds.exists(), "the step, while the request waits", SLACK_S)
    assert answer_of(reply.result(STEP_S + SLACK_S)) == right
    assert time.monotonic() - asked_s > STEP_S
    answer_of(busy.result(SLACK_S))
    assert stage.prefill.nixl_counters().expired_requests == expired
    assert len(stage.prefill_log.find(LEASE_RAN_OUT)) == freed
    (line,) = log.find(MODULE)
    row = ROWS["a step of the decode engine takes longer than two leases"]
    assert row.tells("its answer", line, "given back"), line
    wait_until(lambda: not stage.holds_blocks(), "the return of all blocks", SLACK_S)
    stage.assert_blocks_are_free(decode)
