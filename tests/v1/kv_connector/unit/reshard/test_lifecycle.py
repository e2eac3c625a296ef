# SPDX-License-Identifier: Apache-2.0
"""The life of a request in vLLM's own schedulers, with the connector that they create by name.

Workers are played by the tests, but for the last ones, in which two schedulers and the workers of
both engines serve a request together over real NIXL.
"""

from __future__ import annotations

import pytest
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from tests.bases import RELEASE
from tests.v1.kv_connector.unit.reshard.engine.workers import (
    NUM_BLOCKS,
    assert_received,
    fill,
)
from tests.v1.kv_connector.unit.reshard.serving import (
    BLOCK_TOKENS,
    PROMPT_TOKENS,
    REMOTE_BLOCKS,
    from_decode,
    from_prefill,
    until,
)


def test_prefill_holds_blocks_until_they_are_sent(serving):
    """The next engine is told where they are; they are freed when all workers report so."""
    p = serving()
    p.add("p-a", {"do_remote_decode": True})
    assert p.step() == {"p-a": PROMPT_TOKENS}
    assert p.told.admitted == {"p-a"}
    params = p.handed_over["p-a"]
    assert params["do_remote_prefill"] and not params["do_remote_decode"]
    assert (params["remote_request_id"], params["remote_engine_id"]) == ("p-a", "engine-0")
    assert (params["remote_num_tokens"], params["tp_size"], params["pp_size"]) == (40, 1, 1)
    (block_ids,) = params["remote_block_ids"]
    assert len(block_ids) == p.num_used_blocks() == 3
    p.step()
    assert 0 < p.told.offered["p-a"].lease_s <= 30
    p.step()
    assert p.num_used_blocks() == 3
    p.step(sent=["p-a"])
    assert p.is_through()


def test_prefill_aborted_while_it_runs_is_withdrawn(serving):
    """Its blocks are free at once, and workers forget it."""
    p = serving()
    p.add("p-a", {"do_remote_decode": True}, max_tokens=8)
    p.step()
    p.abort("p-a")
    assert p.is_through()
    p.step()
    assert p.told.withdrawn == {"p-a"}
    assert not p.told.offered


def test_prefill_aborted_before_it_ran_leaves_nothing(serving):
    """No engine was told of it, and none waits."""
    p = serving()
    p.add("p-a", {"do_remote_decode": True})
    p.abort("p-a")
    assert p.is_through()
    p.step()
    assert not p.told.offered and not p.told.admitted


def test_decode_waits_for_its_blocks_and_goes_on(serving):
    """The prompt is read, not computed; its lease is renewed until it has been read."""
    d = serving()
    request = d.add("d-a", from_prefill(), max_tokens=2)
    assert d.step() == {}
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    (receive,) = d.told.receive.values()
    assert receive.remote_block_ids == REMOTE_BLOCKS
    assert [len(ids) for ids in receive.local_block_ids] == [3]
    assert (receive.local_tokens, receive.remote_tokens) == (40, 40)
    assert [awaited.request_id for awaited in d.told.awaited.values()] == ["p-a"]
    assert d.step() == {}
    assert not d.told.receive and not d.told.awaited and not d.told.ended
    d.step(received=["d-a"])
    assert d.step() == {"d-a": 1}
    assert d.told.ended == {"d-a"}
    d.step()
    assert d.finished == {"d-a": FinishReason.LENGTH}
    assert d.is_through()


def test_workers_are_told_once_whose_leases_to_renew(serving):
    """Steps that take long, or never come, cost no lease."""
    d = serving()
    d.add("d-a", from_prefill())
    told = []
    for _ in range(3):
        d.step()
        told += [(each.source.host, each.request_id) for each in d.told.awaited.values()]
    assert told == [("127.0.0.1", "p-a")]


def test_leases_are_renewed_where_their_own_request_says(serving):
    """A request that names the right engine at a wrong address costs no other its lease."""
    d = serving()
    d.add("wrong", from_prefill(remote_host="192.0.2.66", remote_request_id="x"))
    d.add("d-a", from_prefill(), first_token=100)
    d.step()
    told = {each.source.host: each.request_id for each in d.told.awaited.values()}
    assert told == {"192.0.2.66": "x", "127.0.0.1": "p-a"}
    d.abort("wrong")
    d.step()
    assert d.told.ended == {"wrong"}


def test_cached_prefix_is_not_read(serving):
    """Only the blocks after what an earlier request left in the cache are filled."""
    d = serving()
    d.add("before", num_tokens=2 * BLOCK_TOKENS)
    d.step()
    d.add("d-a", from_prefill())
    d.step()
    (receive,) = d.told.receive.values()
    assert [len(ids) for ids in receive.local_block_ids] == [1]
    assert receive.remote_block_ids == REMOTE_BLOCKS
    d.step(received=["d-a"])
    assert d.step() == {"d-a": 1}
    assert d.is_through()


def test_wholly_cached_prompt_is_not_read_and_its_producer_is_told(serving):
    """A prompt that is all there runs at once, and the other engine may free its blocks."""
    p = serving(bidirectional_kv_xfer=True, kv_recompute_threshold=0)
    p.add("before", num_tokens=2 * BLOCK_TOKENS)
    p.step()
    remote = from_decode(remote_num_tokens=2 * BLOCK_TOKENS, remote_block_ids=[[5, 2]])
    p.add("p-a", remote)
    assert p.step() == {"p-a": PROMPT_TOKENS - 2 * BLOCK_TOKENS}
    (receive,) = p.told.receive.values()
    assert not any(receive.local_block_ids)
    assert receive.source.engine_id == "prefill"


def test_decode_aborted_before_it_was_scheduled_tells_the_producer(serving):
    """A read of nothing releases the blocks there; the engine has a step to do for it."""
    d = serving()
    d.add("d-a", from_prefill())
    d.abort("d-a")
    assert d.is_through()
    assert d.scheduler.has_requests()
    d.step()
    (receive,) = d.told.receive.values()
    assert not any(receive.local_block_ids)
    assert receive.remote_request_id == "p-a"
    assert not d.told.awaited
    d.step()
    assert not d.told.receive


def test_decode_aborted_while_it_is_read_keeps_its_blocks_until_then(serving):
    """Nobody else gets blocks that NIXL may still write into."""
    d = serving()
    d.add("d-a", from_prefill())
    d.step()
    d.abort("d-a")
    d.step()
    assert d.num_used_blocks() == 3
    assert d.told.ended == {"d-a"}
    d.step(received=["d-a"])
    assert d.is_through()


@pytest.mark.parametrize("cached", [0, 2])
def test_failed_read_with_policy_fail_is_an_error_of_its_request(serving, cached):
    """The request ends with an error, and another one goes on."""
    d = serving("fail")
    if cached:
        d.add("before", num_tokens=cached * BLOCK_TOKENS)
        d.step()
    d.add("running", first_token=100, max_tokens=4)
    d.add("d-a", from_prefill())
    d.step()
    (receive,) = d.told.receive.values()
    (blocks,) = receive.local_block_ids
    d.step(received=["d-a"], failed={"d-a": blocks})
    assert d.finished["d-a"] == FinishReason.ERROR
    assert "running" not in d.finished
    for _ in range(2):
        d.step()
    assert d.finished["running"] == FinishReason.LENGTH
    assert d.is_through()


@pytest.mark.parametrize("cached", [0, 2])
def test_failed_read_with_policy_recompute_is_computed(serving, cached):
    """What was not read is computed, what was cached is kept, and nothing is read again."""
    d = serving("recompute")
    if cached:
        d.add("before", num_tokens=cached * BLOCK_TOKENS)
        d.step()
    d.add("d-a", from_prefill())
    d.step()
    (receive,) = d.told.receive.values()
    (blocks,) = receive.local_block_ids
    d.step(received=["d-a"], failed={"d-a": blocks})
    assert d.step() == {"d-a": PROMPT_TOKENS - cached * BLOCK_TOKENS}
    assert not d.told.receive
    assert d.finished["d-a"] == FinishReason.LENGTH
    assert d.is_through()


MALFORMED = {
    "no blocks": dict(remote_block_ids=None),
    "no address": dict(remote_host=None, remote_port="x"),
    "blocks of no group": dict(remote_block_ids=[1, 2]),
    "names that are no names": dict(remote_engine_id=["a"], remote_request_id={"a": 1}),
    "tokens that are no number": dict(remote_num_tokens="many"),
    "what only schedulers may say": dict(remote_host=7, _remote_blocks_processed=True),
}


@pytest.mark.parametrize("changes", MALFORMED.values(), ids=MALFORMED.keys())
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_malformed_parameters_cost_their_request_only(serving, policy, changes):
    """It fails or is computed, as configured; the others go on, and nothing raises."""
    d = serving(policy)
    d.add("running", first_token=100, max_tokens=4)
    d.add("d-a", from_prefill(**changes))
    d.step()
    receive = d.told.receive["d-a"]
    assert "malformed" in receive.fault
    (blocks,) = receive.local_block_ids
    d.step(received=["d-a"], failed={"d-a": blocks})
    for _ in range(3):
        d.step()
    expected = FinishReason.ERROR if policy == "fail" else FinishReason.LENGTH
    assert d.finished == {"d-a": expected, "running": FinishReason.LENGTH}
    assert d.is_through()


def test_malformed_parameters_of_an_aborted_request_harm_nobody(serving):
    """There is nobody to tell, and the step goes on."""
    d = serving()
    d.add("d-a", from_prefill(remote_host=None))
    d.abort("d-a")
    d.step()
    assert "malformed" in d.told.receive["d-a"].fault
    assert d.is_through()


def test_decode_offers_its_blocks_for_the_next_turn(serving):
    """With transfer in both directions, they are held for as long as configured."""
    d = serving(bidirectional_kv_xfer=True, decoder_kv_blocks_ttl=60)
    d.add("d-a", from_prefill(), max_tokens=2)
    d.step()
    assert d.told.admitted == {"d-a"}
    d.step(received=["d-a"])
    d.step()
    d.step()
    params = d.handed_over["d-a"]
    assert params["do_remote_decode"] and not params["do_remote_prefill"]
    assert params["remote_num_tokens"] == PROMPT_TOKENS + 1
    d.step()
    assert 30 < d.told.offered["d-a"].lease_s <= 60
    assert d.num_used_blocks() == 3
    d.step(sent=["d-a"])
    assert d.is_through()


def test_prefill_reads_the_last_turn_back(serving):
    """It waits for the decode engine's blocks, computes the rest, and offers all of it."""
    p = serving(bidirectional_kv_xfer=True, kv_recompute_threshold=8)
    request = p.add("p-a", from_decode(remote_num_tokens=33))
    assert p.step() == {}
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    (receive,) = p.told.receive.values()
    assert (receive.local_tokens, receive.remote_tokens) == (33, 33)
    p.step(received=["p-a"])
    assert p.step() == {"p-a": PROMPT_TOKENS - 33}
    assert p.handed_over["p-a"]["remote_num_tokens"] == PROMPT_TOKENS
    p.step(sent=["p-a"])
    assert p.is_through()


def test_too_little_is_not_read_back(serving):
    """It is computed instead, and the decode engine may free its blocks."""
    p = serving(bidirectional_kv_xfer=True, kv_recompute_threshold=34)
    p.add("p-a", from_decode(remote_num_tokens=33))
    assert p.step() == {"p-a": PROMPT_TOKENS}
    (receive,) = p.told.receive.values()
    assert not any(receive.local_block_ids)


def test_failed_read_of_the_last_turn_is_computed_anew(serving):
    """The request does not wait again for a read that nobody posts."""
    p = serving("recompute", bidirectional_kv_xfer=True, kv_recompute_threshold=8)
    p.add("p-a", from_decode(remote_num_tokens=33))
    p.step()
    (receive,) = p.told.receive.values()
    (blocks,) = receive.local_block_ids
    p.step(received=["p-a"], failed={"p-a": blocks})
    assert p.step() == {"p-a": PROMPT_TOKENS}
    assert "p-a" in p.handed_over


def test_preempted_reader_of_the_last_turn_is_computed_anew(serving):
    """What it had read is gone, and is not waited for."""
    p = serving(bidirectional_kv_xfer=True, kv_recompute_threshold=8)
    p.add("p-a", from_decode(remote_num_tokens=33), max_tokens=3)
    p.step()
    p.step(received=["p-a"])
    assert p.step() == {"p-a": PROMPT_TOKENS - 33}
    assert p.scheduler.reset_prefix_cache(reset_running_requests=True)
    p.step()
    assert p.step() == {"p-a": 1} or "p-a" in p.finished


@pytest.mark.parametrize("params", [{"hint": 1}, {"_remote_blocks_processed": True}])
def test_blocks_that_no_engine_asked_about_are_not_held(serving, params):
    """Parameters of somebody else's do not make a decode engine offer a request's blocks."""
    d = serving(bidirectional_kv_xfer=True)
    d.add("d-a", params)
    d.step()
    assert "d-a" not in d.handed_over
    d.step()
    assert not d.told.offered
    assert d.is_through()


def test_prefill_offers_its_prompt_with_asynchronous_scheduling(serving):
    """The step that begins before the answer is there adds nothing to what is offered."""
    p = serving(asynchronous=True)
    p.add("p-a", {"do_remote_decode": True})
    first = p.begin()
    p.end(p.begin())
    assert not p.handed_over
    p.end(first)
    assert p.handed_over["p-a"]["remote_num_tokens"] == PROMPT_TOKENS
    assert len(p.handed_over["p-a"]["remote_block_ids"][0]) == 3
    p.step()
    p.step(sent=["p-a"])
    assert p.is_through()


def test_token_of_a_step_in_flight_is_not_offered(serving):
    """An answer that stops while its next step is under way ends with what was said."""
    d = serving(asynchronous=True, bidirectional_kv_xfer=True)
    request = d.add("d-a", from_prefill(), max_tokens=20, stop_token=9)
    d.step()
    d.step(received=["d-a"])
    first = d.begin()
    second = d.begin()
    assert list(second.num_scheduled_tokens) == ["d-a"]
    d.end(first, said=[9])
    assert d.finished == {"d-a": FinishReason.STOP}
    assert d.handed_over["d-a"]["remote_num_tokens"] == request.num_tokens - 1 == PROMPT_TOKENS
    d.end(second)
    d.step()
    d.step(sent=["d-a"])
    assert d.is_through()


@pytest.mark.parametrize("end", ["stopped", "aborted"])
@pytest.mark.parametrize("role", ["kv_consumer", "kv_both", "kv_producer"])
def test_blocks_that_a_step_in_flight_writes_are_not_read_into(serving, role, end):
    """Another request gets them, to be read into, only when the model is through with them.

    Consumers' schedulers see to that. Elsewhere it is for workers to wait, who wait in any case for
    what the device has still to do.
    """
    d = serving(asynchronous=True, role=role, bidirectional_kv_xfer=True)
    d.add("gone", num_tokens=20, max_tokens=20, stop_token=9)
    first, second = d.begin(), d.begin()
    assert list(second.num_scheduled_tokens) == ["gone"]
    written = set(d.scheduler.kv_cache_manager.get_block_ids("gone")[0])
    # Others take all blocks but three; a prompt that is to be read needs four.
    pool = d.scheduler.kv_cache_manager.block_pool
    others = pool.get_new_blocks(NUM_BLOCKS - 1 - len(written) - 3)
    if end == "aborted":
        d.abort("gone")
    d.end(first, said=[9])
    params = from_prefill(remote_num_tokens=60, remote_block_ids=[[5, 2, 9, 7]])
    d.add("d-a", params, num_tokens=60, first_token=500)
    third = d.begin()
    if RELEASE != "0.22.1" and role != "kv_producer":
        assert not d.told.receive
        d.end(second)
        d.end(third)
        third = d.begin()
    else:
        d.end(second)
    (set_local_cache,) = d.told.receive["d-a"].local_block_ids
    assert written & set(set_local_cache)
    d.end(third, received=["d-a"])
    for _ in range(3):
        d.step()
    d.step(sent=d.handed_over)
    pool.free_blocks(others)
    assert d.is_through()


def test_drafts_behind_the_end_of_an_answer_are_not_offered(serving):
    """An answer that stops within drafts that were accepted, others being rejected."""
    d = serving(bidirectional_kv_xfer=True)
    request = d.add("d-a", from_prefill(), max_tokens=20, stop_token=9)
    d.step()
    d.step(received=["d-a"])
    d.step()
    request.spec_token_ids = [7, 9, 7, 7, 7, 7]
    scheduled = d.begin()
    assert scheduled.num_scheduled_tokens == {"d-a": 7}
    d.end(scheduled, said=[7, 9, 7, 7])
    assert d.finished == {"d-a": FinishReason.STOP}
    params = d.handed_over["d-a"]
    assert params["remote_num_tokens"] == request.num_tokens - 1 == PROMPT_TOKENS + 2
    assert len(params["remote_block_ids"][0]) == 3


def test_read_takes_no_blocks_for_drafts(serving):
    """As many blocks are filled as the prompt has, also where drafts will want another one."""
    d = serving()
    d.scheduler.num_spec_tokens = d.scheduler.num_lookahead_tokens = 5
    request = d.add("d-a", from_prefill(remote_num_tokens=48), num_tokens=48, max_tokens=4)
    d.step()
    (receive,) = d.told.receive.values()
    assert [len(ids) for ids in receive.local_block_ids] == [3]
    assert (receive.local_tokens, receive.remote_tokens) == (48, 48)
    d.step(received=["d-a"])
    d.step()
    assert request.num_output_tokens == 1


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (dict(tp=2), dict()),
        (dict(pp=2), dict(tp=2)),
        (dict(mla=True, tp=4), dict(mla=True, pp=2)),
    ],
    ids=["TP2 to TP1", "PP2 to TP2", "MLA TP4 to PP2"],
)
def test_request_passes_from_engine_to_engine(wholes, prefill, decode):
    """Prefilled here, read there, decoded there, and nothing is left anywhere."""
    p, d = wholes("prefill", prefill), wholes("decode", decode)
    p.serving.add("p-a", {"do_remote_decode": True})
    p.step()
    params = p.serving.handed_over["p-a"]
    (src_blocks,) = params["remote_block_ids"]
    whole = fill(p.engine, src_blocks)
    d.serving.add("d-a", params, max_tokens=2)
    assert d.step() == {}
    ((dst_blocks,),) = [receive.local_block_ids for receive in d.serving.told.receive.values()]
    until(lambda: "d-a" in d.serving.finished, p, d)
    assert d.serving.finished == {"d-a": FinishReason.LENGTH}
    assert_received(d.engine, dst_blocks, whole)
    until(p.serving.is_through, p, d)
    assert d.serving.is_through()


@pytest.mark.parametrize("scheduled", [False, True])
def test_aborted_reader_releases_the_producer(wholes, caplog_vllm, scheduled):
    """Before it is scheduled and while it is read: blocks there are freed, and not by a lease."""
    p, d = wholes("prefill", dict(tp=2)), wholes("decode", dict(pp=2))
    p.serving.add("p-a", {"do_remote_decode": True})
    p.step()
    d.serving.add("d-a", p.serving.handed_over["p-a"])
    if scheduled:
        d.step()
    d.serving.abort("d-a")
    until(lambda: p.serving.is_through() and d.serving.is_through(), p, d)
    assert not d.serving.finished
    assert "lease ran out" not in caplog_vllm.text


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_engine_that_has_gone_costs_its_requests_only(wholes, policy):
    """Their blocks cannot be read: they fail or are computed, and the others are served."""
    p, d = wholes("prefill", dict(tp=2)), wholes("decode", dict(pp=2), policy=policy)
    # Another engine, its own, answers there now.
    port = d.serving.scheduler.connector.connector_scheduler.side_channel_port
    d.serving.add("lost", from_prefill(remote_engine_id="gone", remote_port=port))
    p.serving.add("p-a", {"do_remote_decode": True}, first_token=50)
    p.step()
    d.serving.add("d-a", p.serving.handed_over["p-a"], first_token=50)
    until(lambda: {"lost", "d-a"} <= d.serving.finished.keys(), p, d)
    expected = FinishReason.ERROR if policy == "fail" else FinishReason.LENGTH
    assert d.serving.finished == {"lost": expected, "d-a": FinishReason.LENGTH}
    until(lambda: p.serving.is_through() and d.serving.is_through(), p, d)


def test_turns_go_to_and_fro(wholes):
    """The next turn's prefill reads what the decode engine holds of the last one."""
    both = dict(bidirectional_kv_xfer=True, kv_recompute_threshold=8)
    p, d = wholes("prefill", dict(tp=2), **both), wholes("decode", dict(pp=2), **both)
    p.serving.add("p-a", {"do_remote_decode": True}, num_tokens=20)
    p.step()
    d.serving.add("d-a", p.serving.handed_over["p-a"], max_tokens=14, num_tokens=20)
    until(lambda: "d-a" in d.serving.handed_over, p, d)
    params = d.serving.handed_over["d-a"]
    (src_blocks,) = params["remote_block_ids"]
    assert params["remote_num_tokens"] == 33
    whole = fill(d.engine, src_blocks, seed=5)
    # As where the last turn was prefilled elsewhere: nothing of it is in the cache here, once the
    # blocks of that turn were given back.
    until(p.serving.scheduler.reset_prefix_cache, p, d)
    p.serving.add("p-b", params, prompt=[*range(20), *[7] * 20])
    p.step()
    (receive,) = p.serving.told.receive.values()
    (dst_blocks,) = receive.local_block_ids
    until(lambda: "p-b" in p.serving.handed_over, p, d)
    assert_received(p.engine, dst_blocks, whole)
    until(d.serving.is_through, p, d)
