# SPDX-License-Identifier: Apache-2.0
"""Operations of vLLM's that stop an engine or empty its caches, while others read or wait."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import FinishReason
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.request import RequestStatus

from tests.bases import requires_base
from tests.v1.kv_connector.unit.reshard.engine.workers import assert_received, fill, wait_until
from tests.v1.kv_connector.unit.reshard.serving import Whole, from_prefill
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import LocalLayoutError
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.ledgers import ProducerLedger

pytestmark = requires_base(
    "0.32.0", "0.33.0", reason="its core asks no connector whether there is work"
)

LEASE_S = 9.0
PAUSED = pytest.mark.parametrize("state", [PauseState.PAUSED_ALL, PauseState.PAUSED_NEW])


@pytest.fixture
def pair(wholes) -> tuple[Whole, Whole]:
    """An engine of two stages that prefills, and one of two ranks that decodes."""
    p = wholes("prefill", dict(pp=2, lease_s=LEASE_S), kv_lease_duration=LEASE_S)
    return p, wholes("decode", dict(tp=2, lease_s=LEASE_S))


def run_until(condition: Callable[[], object], *wholes: Whole) -> None:
    """Step engines until something is so, as vLLM's engine core does: only if there is work."""

    def go_round() -> None:
        for whole in wholes:
            if whole.serving.scheduler.has_requests():
                whole.step()

    wait_until(condition, go_round)


def prefilled(p: Whole, name: str, first_token: int = 0) -> dict:
    """Return what is handed over of a prompt."""
    p.serving.add(name, {"do_remote_decode": True}, first_token=first_token)
    run_until(lambda: name in p.serving.handed_over, p)
    return p.serving.handed_over[name]


@PAUSED
def test_paused_engine_tells_workers_whose_leases_to_renew(serving, state):
    """It takes one step for it, and stands still then; the request is read once it goes on."""
    d = serving()
    d.scheduler.set_pause_state(state)
    assert not d.scheduler.has_requests()
    request = d.add("d-a", from_prefill())
    assert d.scheduler.has_requests()
    d.step()
    assert [each.request_id for each in d.told.awaited.values()] == ["p-a"]
    assert not d.scheduler.has_requests()
    assert request.status == RequestStatus.WAITING and not d.told.receive
    d.scheduler.set_pause_state(PauseState.UNPAUSED)
    d.step()
    assert list(d.told.receive) == ["d-a"] and not d.told.awaited


@PAUSED
def test_lease_outlasts_a_pause_of_its_reader(pair, monkeypatch, state):
    """Each stage hears of it while the decode engine takes no steps."""
    (p, d), renewed, renew = pair, [], ProducerLedger.renew

    def note(ledger: ProducerLedger, request_ids, expires_at_s: float) -> int:
        renewed.append((ledger, expires_at_s))
        return renew(ledger, request_ids, expires_at_s)

    monkeypatch.setattr(ProducerLedger, "renew", note)
    d.serving.scheduler.set_pause_state(state)
    d.serving.add("d-a", prefilled(p, "p-a"))
    run_until(lambda: not d.serving.scheduler.has_requests(), d)

    def are_renewed_again() -> bool:
        ends_s = [[end_s for each, end_s in renewed if each is ledger] for ledger, _ in renewed]
        return len({id(ledger) for ledger, _ in renewed}) == 2 and all(
            max(each) > min(each) for each in ends_s
        )

    wait_until(are_renewed_again, p.step)
    d.serving.scheduler.set_pause_state(PauseState.UNPAUSED)
    run_until(lambda: "d-a" in d.serving.finished, p, d)
    assert d.serving.finished == {"d-a": FinishReason.LENGTH}
    run_until(p.serving.is_through, p)


@PAUSED
def test_paused_engine_serves_what_it_holds(pair, state):
    """Bytes and release are as ever; the pause is complete once all is read."""
    p, d = pair
    params = prefilled(p, "p-a")
    whole = fill(p.engine, params["remote_block_ids"][0])
    p.serving.scheduler.set_pause_state(state)
    assert p.serving.scheduler.has_requests()
    d.serving.add("d-a", params)
    d.step()
    ((blocks,),) = [each.local_block_ids for each in d.serving.told.receive.values()]
    run_until(lambda: "d-a" in d.serving.finished, p, d)
    assert_received(d.engine, blocks, whole)
    run_until(lambda: not p.serving.scheduler.has_requests(), p)
    assert p.serving.is_through()


@PAUSED
def test_read_goes_on_while_its_engine_is_paused(pair, state):
    """It gives the blocks back without a step, and is taken up when the engine goes on."""
    p, d = pair
    d.serving.add("d-a", prefilled(p, "p-a"))
    d.step()
    d.serving.scheduler.set_pause_state(state)
    run_until(p.serving.is_through, p)
    d.serving.scheduler.set_pause_state(PauseState.UNPAUSED)
    run_until(lambda: "d-a" in d.serving.finished, d)
    assert d.serving.finished == {"d-a": FinishReason.LENGTH}


def test_pause_that_aborts_gives_back_what_was_to_be_read(pair, caplog_vllm):
    """What is being read, and what waits; no lease has to run out."""
    p, d = pair
    d.serving.add("reading", prefilled(p, "p-a"))
    d.step()
    d.serving.add("waiting", prefilled(p, "p-b", 500), first_token=500)
    d.serving.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    d.serving.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    run_until(lambda: p.serving.is_through() and d.serving.is_through(), p, d)
    assert "lease ran out" not in caplog_vllm.text


def test_reset_of_a_prefix_cache_takes_no_blocks_from_readers(pair):
    """It is refused at both ends as long as somebody reads, and done afterwards."""
    p, d = pair
    params = prefilled(p, "p-a")
    whole = fill(p.engine, params["remote_block_ids"][0])
    assert not p.serving.scheduler.reset_prefix_cache(reset_connector=True)
    d.serving.add("d-a", params)
    d.step()
    ((blocks,),) = [each.local_block_ids for each in d.serving.told.receive.values()]
    assert not d.serving.scheduler.reset_prefix_cache(reset_connector=True)
    with pytest.raises(RuntimeError, match="remote KV transfer"):
        d.serving.scheduler.reset_prefix_cache(reset_running_requests=True)
    run_until(lambda: "d-a" in d.serving.finished, p, d)
    assert_received(d.engine, blocks, whole)
    run_until(lambda: p.serving.is_through() and d.serving.is_through(), p, d)
    assert all(each.serving.scheduler.reset_prefix_cache(reset_connector=True) for each in pair)


def test_pause_that_clears_caches_fails_while_its_engine_reads(pair):
    """As vLLM has it, where it keeps requests: it is paused all the same, and goes on reading."""
    p, d = pair
    core = EngineCoreProc.__new__(EngineCoreProc)
    core.scheduler, core.engines_running, core.batch_queue = d.serving.scheduler, False, None
    core.model_executor = SimpleNamespace(collective_rpc=lambda _: None)
    d.serving.add("d-a", prefilled(p, "p-a"))
    d.step()
    with pytest.raises(RuntimeError, match="remote KV transfer"):
        core.pause_scheduler("keep", clear_cache=True)
    assert core.is_scheduler_paused()
    run_until(p.serving.is_through, p)
    core.resume_scheduler()
    run_until(lambda: "d-a" in d.serving.finished, d)
    assert d.serving.finished == {"d-a": FinishReason.LENGTH}


def test_memory_of_a_cache_is_not_taken_away(engines):
    """0.33 asks before it does, also where engines do not have the option for it."""
    (worker,) = engines("prefill").workers.values()
    with pytest.raises(LocalLayoutError, match="start the engine with --enable-sleep-mode"):
        worker.unregister_kv_caches()
