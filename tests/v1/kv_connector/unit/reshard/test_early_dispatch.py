# SPDX-License-Identifier: Apache-2.0
"""Requests that are sent to both engines at once: vLLM's schedulers, and workers over real NIXL.

There is no model: a step of the prefill engine computes what the test has filled its cache with.
"""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch
from vllm.v1.engine import FinishReason

from tests.v1.kv_connector.unit.reshard.early_pairs import (
    DECODED,
    LAYOUTS,
    LONG_TOKENS,
    OPTION,
    PATIENCE_S,
    POLICIES,
    PREFILLED,
    TOLD_WITHIN_S,
    WINDOW_TOKENS,
    add_both,
    assert_ended_by,
    begin_chunk,
    begin_last_chunk,
    bytes_of_token,
    bytes_read,
    compute,
    coordinates,
    cut_prompts,
    is_allocated,
    is_known,
    is_quiet,
    parked,
    prefetch,
    scheduler_of,
    until_claimed,
    wait_until_known,
)
from tests.v1.kv_connector.unit.reshard.engine.workers import assert_received, fill
from tests.v1.kv_connector.unit.reshard.serving import BLOCK_TOKENS, Whole, until
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol import subscriptions
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.transfers import Transfers


def test_prefill_engine_says_that_its_address_is_enough(pair):
    """What vllm-router looks at, and what serial routers pass on as ever."""
    p, _ = pair()
    p.serving.add(PREFILLED, {"do_remote_decode": True})
    p.step()
    params = p.serving.handed_over[PREFILLED]
    assert params["transfer_mode"] == "push" and params["tp_size"] == 1
    assert params["remote_block_ids"] and params["remote_request_id"] == PREFILLED


def note_waits(d, monkeypatch) -> list[float]:
    """Return how long requests have waited for their prefill, as that is recorded."""
    waits: list[float] = []
    monkeypatch.setattr(scheduler_of(d)._stats, "record_prefill_wait", waits.append)
    return waits


@LAYOUTS
def test_request_waits_without_blocks_and_is_read_once_offered(pair, prefill, decode, monkeypatch):
    """It has blocks once it is offered, and is read, and right."""
    p, d = pair(prefill, decode)
    waits = note_waits(d, monkeypatch)
    request = d.serving.add(DECODED, coordinates(p), max_tokens=2)
    for _ in range(20):
        assert d.step() == {}
    assert parked(d) and not is_allocated(d)
    p.serving.add(PREFILLED, {"do_remote_decode": True})
    end = begin_last_chunk(p)
    until(lambda: is_known(d), d)
    for _ in range(20):
        assert d.step() == {}
    assert parked(d) and not is_allocated(d)
    whole = end()
    until(lambda: is_allocated(d), d)
    (blocks,) = d.serving.scheduler.kv_cache_manager.get_block_ids(DECODED)
    until(lambda: request.num_output_tokens > 0, p, d)
    assert_received(d.engine, blocks[:3], whole)
    until(lambda: is_quiet(p, d), p, d)
    assert d.serving.finished == {DECODED: FinishReason.LENGTH}
    assert len(waits) == 1


def test_two_full_engines_do_not_wait_for_each_other(pair):
    """What still needs blocks there has none here, where what is offered there needs them."""
    p, d = pair()
    # As where several prompts have been admitted together, each with room for itself.
    p.serving.scheduler.scheduler_reserve_full_isl = False
    for whole, num_left in ((p, 4), (d, 5)):
        pool = whole.serving.scheduler.kv_cache_manager.block_pool
        pool.get_new_blocks(pool.get_num_free_blocks() - num_left)
    offered = "cmpl-y-0-bbbbbbbb"
    p.serving.add("cmpl-y-0-aaaaaaaa", {"do_remote_decode": True}, first_token=500)
    p.step()
    cut_prompts(p)
    p.serving.add(PREFILLED, {"do_remote_decode": True})
    d.serving.add(DECODED, coordinates(p))
    until(lambda: is_known(d), p, d)
    for _ in range(20):
        p.step()
        d.step()
    assert PREFILLED not in p.serving.finished
    d.serving.add(offered, coordinates(p, remote_request_id="y"), first_token=500)
    until(lambda: len(d.serving.finished) == 2, p, d)
    assert set(d.serving.finished.values()) == {FinishReason.LENGTH}


def test_request_that_is_offered_already_is_read_at_once(pair, monkeypatch):
    """The first one of a router goes to one engine after the other, and names no blocks either."""
    p, d = pair()
    waits = note_waits(d, monkeypatch)
    p.serving.add(PREFILLED, {"do_remote_decode": True})
    compute(p)
    d.serving.add(DECODED, coordinates(p))
    until(lambda: is_quiet(p, d), p, d)
    assert d.serving.finished == {DECODED: FinishReason.LENGTH}
    assert not waits


def test_replicas_of_prefill_context_parallelism_show_nothing(pair):
    """What a request waits for is seen where it is read; nothing is left of it at the replicas."""
    p, d = pair(num_replicas=1)
    cut_prompts(p)
    add_both(p, d)
    end = begin_last_chunk(p)
    until(lambda: is_allocated(d), d)
    (blocks,) = d.serving.scheduler.kv_cache_manager.get_block_ids(DECODED)
    whole = end()
    until(lambda: is_quiet(p, d), p, d)
    assert_received(d.engine, blocks[:3], whole)
    assert d.serving.finished == {DECODED: FinishReason.LENGTH}
    assert not p.aggregator._send_remaining_count


def test_serial_router_passes_blocks_on_as_before(pair):
    """What names blocks is read as ever, with the option on."""
    p, d = pair()
    p.serving.add(PREFILLED, {"do_remote_decode": True})
    compute(p)
    d.serving.add(DECODED, p.serving.handed_over[PREFILLED])
    d.step()
    (receive,) = d.serving.told.receive.values()
    assert any(receive.remote_block_ids)
    until(lambda: is_quiet(p, d), p, d)
    assert d.serving.finished == {DECODED: FinishReason.LENGTH}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("has_blocks", [False, True], ids=["parked", "with blocks"])
def test_prefill_that_is_aborted_ends_the_wait_at_once(pair, policy, has_blocks, clock):
    """By the policy: an error, or the prompt is computed."""
    p, d = pair(decode={"clock": clock}, policy=policy)
    cut_prompts(p)
    p.serving.add(PREFILLED, {"do_remote_decode": True})
    d.serving.add(DECODED, coordinates(p))
    wait_until_known(p, d, clock, has_blocks=has_blocks)
    p.serving.abort(PREFILLED)
    clock.until(lambda: is_quiet(p, d), p, d, within_s=TOLD_WITHIN_S)
    assert_ended_by(policy, d)


@pytest.mark.parametrize("policy", POLICIES)
def test_request_that_is_never_known_fails(pair, policy, monkeypatch):
    """After ten seconds, which are fewer here; the log says what to look at."""
    monkeypatch.setattr(subscriptions, "KNOWN_WITHIN_S", 0.3)
    p, d = pair(policy=policy)
    d.serving.add(DECODED, coordinates(p))
    until(lambda: is_quiet(p, d), p, d)
    assert_ended_by(policy, d)


def test_requests_of_one_name_are_told_apart_by_their_prompts(pair):
    """Two clients with one X-Request-Id: each reads its own, in whatever order they come."""
    p, d = pair()
    others = "cmpl-x-0-cccccccc", "cmpl-x-0-dddddddd"
    p.serving.add(PREFILLED, {"do_remote_decode": True})
    d.serving.add(others[1], coordinates(p), first_token=500)
    p.serving.add(others[0], {"do_remote_decode": True}, first_token=500)
    d.serving.add(DECODED, coordinates(p))
    until(lambda: is_quiet(p, d), p, d)
    assert set(d.serving.finished.values()) == {FinishReason.LENGTH}


def test_requests_of_one_name_after_one_another(pair):
    """A client that uses its X-Request-Id again is answered each time."""
    p, d = pair()
    for number in range(5):
        p.serving.add(f"cmpl-x-0-aaaaaaa{number}", {"do_remote_decode": True})
        name = f"cmpl-x-0-bbbbbbb{number}"
        d.serving.add(name, coordinates(p))
        until(lambda name=name: name in d.serving.finished, p, d)
    until(lambda: is_quiet(p, d), p, d)
    assert set(d.serving.finished.values()) == {FinishReason.LENGTH}


def test_request_whose_names_have_nothing_in_common_is_known_by_its_prompt(pair):
    """As of /v1/responses, which makes an id of its own at each engine."""
    p, d = pair()
    p.serving.add("resp_1-aaaaaaaa", {"do_remote_decode": True})
    d.serving.add("resp_2-bbbbbbbb", coordinates(p))
    until(lambda: is_quiet(p, d), p, d)
    assert d.serving.finished == {"resp_2-bbbbbbbb": FinishReason.LENGTH}


@pytest.mark.parametrize("is_first", [False, True], ids=["after its prefill", "before it"])
def test_request_that_is_refused_is_given_up_there(pair, is_first):
    """As soon as its prefill ends, and not with its lease."""
    p, d = pair()
    asked = {"do_remote_decode": True}
    if not is_first:
        p.serving.add(PREFILLED, asked)
        compute(p)
    d.serving.refuse(DECODED, coordinates(p))
    if is_first:
        until(lambda: scheduler_of(p)._server.publisher.num_subscribers, d)
        p.serving.add(PREFILLED, asked)
        until(lambda: scheduler_of(p)._prompts.is_given_up(PREFILLED), d)
    until(lambda: is_quiet(p, d), p, d)
    assert not d.serving.finished
    # The next one of that name is its own.
    p.serving.add("cmpl-x-0-cccccccc", asked)
    d.serving.add("cmpl-x-0-dddddddd", coordinates(p))
    until(lambda: is_quiet(p, d), p, d)
    assert d.serving.finished == {"cmpl-x-0-dddddddd": FinishReason.LENGTH}
    (stats,) = (each.report.take_stats() for each in p.engine.workers.values())
    assert stats is None or not stats.data["num_kv_expired_reqs"]


def test_client_that_leaves_gives_up_none_of_its_next_attempt(pair):
    """Which has the same name and the same prompt."""
    p, d = pair()
    asked = {"do_remote_decode": True}
    for number in range(5):
        p.serving.add(f"cmpl-x-0-aaaaaaa{number}", asked)
        d.serving.add(f"cmpl-x-0-bbbbbbb{number}", coordinates(p))
        d.serving.abort(f"cmpl-x-0-bbbbbbb{number}")
        p.serving.add(f"cmpl-x-0-ddddddd{number}", asked)
        d.serving.add(f"cmpl-x-0-ccccccc{number}", coordinates(p))
        until(lambda: is_quiet(p, d), p, d)
    assert set(d.serving.finished.values()) == {FinishReason.LENGTH}
    (stats,) = (each.report.take_stats() for each in p.engine.workers.values())
    assert stats is None or not stats.data["num_kv_expired_reqs"]


def test_step_that_takes_long_costs_nobody_a_request(pair, monkeypatch):
    """The prefill engine takes up requests between steps: a step is no reason to give one up."""
    monkeypatch.setattr(subscriptions, "KNOWN_WITHIN_S", 0.2)
    p, d = pair()
    p.serving.add("before", num_tokens=BLOCK_TOKENS)
    scheduled = p.serving.begin()
    d.serving.add(DECODED, coordinates(p))
    deadline_s = time.monotonic() + 1.5
    until(lambda: time.monotonic() > deadline_s, d)
    p.serving.add(PREFILLED, {"do_remote_decode": True})
    p.end(scheduled)
    until(lambda: is_quiet(p, d), p, d)
    assert d.serving.finished[DECODED] is FinishReason.LENGTH


@pytest.mark.parametrize("policy", POLICIES)
def test_engines_that_leave_different_tokens_to_the_decode_engine(pair, policy):
    """The offer says how many there are, as a router's parameters do."""
    p, d = pair(policy=policy)
    scheduler_of(d)._prefill_backoff = lambda: 1
    p.serving.add(PREFILLED, {"do_remote_decode": True})
    d.serving.add(DECODED, coordinates(p), max_tokens=2)
    until(lambda: is_quiet(p, d), p, d)
    assert d.serving.finished == {DECODED: FinishReason.LENGTH}


def test_vllm_that_holds_nothing_back_asks_in_every_step(pair):
    """As of the plugin: the request waits in vLLM's scheduler, and is read as well."""
    p, d = pair(holds=False)
    cut_prompts(p)
    request = add_both(p, d)
    end = begin_last_chunk(p)
    until(lambda: is_allocated(d), d)
    end()
    until(lambda: is_quiet(p, d), p, d)
    assert request.num_output_tokens == 2
    d.serving.add("cmpl-y-0-bbbbbbbb", coordinates(p, remote_request_id="y"))
    d.step()
    d.serving.abort("cmpl-y-0-bbbbbbbb")
    until(lambda: is_quiet(p, d), p, d)


def test_parked_requests_cost_a_step_nothing(pair):
    """However many there are, vLLM's scheduler does not know them."""
    p, d = pair()
    if not d.serving.holds:
        pytest.skip("the engine core of this base holds nothing back")
    for number in range(200):
        d.serving.add(f"cmpl-w{number}-0-aaaaaaaa", coordinates(p, remote_request_id=f"w{number}"))
    d.step()
    assert not d.serving.scheduler.requests and len(scheduler_of(d)._reads) == 200


@pytest.mark.parametrize("has_blocks", [False, True], ids=["parked", "with blocks"])
def test_client_that_leaves_stops_all(pair, has_blocks):
    """Its blocks are free at once; nothing is held for it there."""
    p, d = pair()
    cut_prompts(p)
    p.serving.add(PREFILLED, {"do_remote_decode": True})
    d.serving.add(DECODED, coordinates(p))
    until_claimed(p)
    d.step()
    end = begin_last_chunk(p) if has_blocks else partial(compute, p)
    if has_blocks:
        until(lambda: is_allocated(d), d)
    d.serving.abort(DECODED)
    until(lambda: not is_allocated(d), d)
    assert PREFILLED not in p.serving.finished
    until(lambda: scheduler_of(p)._prompts.is_given_up(PREFILLED))
    end()
    until(lambda: is_quiet(p, d), p, d)
    (stats,) = (each.report.take_stats() for each in p.engine.workers.values())
    assert stats is None or not stats.data["num_kv_expired_reqs"]


def test_engine_that_has_restarted_is_followed(pair):
    """Where the router still names the one before, whether that was connected or not."""
    p, d = pair()
    p.serving.add(PREFILLED, {"do_remote_decode": True})
    compute(p)
    d.serving.add(DECODED, coordinates(p, remote_engine_id="before"))
    until(lambda: is_quiet(p, d), p, d)
    assert d.serving.finished == {DECODED: FinishReason.LENGTH}
    d.serving.add("cmpl-y-0-bbbbbbbb", coordinates(p, remote_engine_id="b", remote_request_id="y"))
    p.serving.add("cmpl-y-0-aaaaaaaa", {"do_remote_decode": True})
    until(lambda: is_quiet(p, d), p, d)
    assert d.serving.finished["cmpl-y-0-bbbbbbbb"] is FinishReason.LENGTH
    (worker,) = d.engine.workers.values()
    # It is connected under its own name.
    assert not worker.report.take_stats().data["handshake_failures"]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("has_blocks", [False, True], ids=["parked", "with blocks"])
def test_engine_that_has_gone_ends_the_wait(pair, policy, has_blocks, clock):
    """As soon as it cannot be asked any more."""
    p, d = pair(decode={"clock": clock}, policy=policy)
    cut_prompts(p)
    p.serving.add(PREFILLED, {"do_remote_decode": True})
    d.serving.add(DECODED, coordinates(p))
    wait_until_known(p, d, clock, has_blocks=has_blocks)
    p.engine.close()
    clock.until(lambda: is_quiet(d), d, within_s=TOLD_WITHIN_S)
    assert_ended_by(policy, d)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("names", [pytest.param("nothing", marks=pytest.mark.nightly), "the same"])
def test_engine_that_is_followed_while_its_prompt_is_prefetched(pair, wholes, policy, names, clock):
    """What was read is the former engine's; its follower may well know a request of that name."""
    p, d = pair(decode={"clock": clock}, policy=policy)
    cut_prompts(p)
    p.serving.add(PREFILLED, {"do_remote_decode": True})
    d.serving.add(DECODED, coordinates(p))
    until_claimed(p)
    begin_chunk(p)()
    begin_chunk(p)
    clock.until(lambda: bytes_read(d) > 0, d, within_s=PATIENCE_S)
    before = coordinates(p)
    p.engine.close()
    port = before["remote_port"]
    follower = wholes("follower", OPTION, port=port, **OPTION)
    if names == "the same":
        follower.serving.add(PREFILLED, {"do_remote_decode": True}, first_token=500)
    clock.until(lambda: DECODED in d.serving.finished, d, within_s=TOLD_WITHIN_S)
    assert_ended_by(policy, d)
    follower.serving.abort(PREFILLED)
    # Routers name the engine before until they have an answer of this one.
    later = "cmpl-y-0-bbbbbbbb"
    follower.serving.add("cmpl-y-0-aaaaaaaa", {"do_remote_decode": True})
    d.serving.add(later, {**before, "remote_request_id": "y"})
    clock.until(lambda: is_quiet(follower, d), follower, d, within_s=PATIENCE_S)
    assert d.serving.finished[later] is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"do_remote_decode": True, "transfer_id": "t"}, {"transfer_id": "t"}),
        ({"remote_decoder": {"kv_request_id": "k"}}, None),
    ],
    ids=["transfer_id", "remote_prefiller"],
)
def test_names_of_llm_ds_routers(pair, asked, told):
    """The engines' own ids have nothing in common; each child is paired with its like."""
    p, d = pair()
    if told is None:
        address = {"remote_host": "127.0.0.1", "remote_port": coordinates(p)["remote_port"]}
        told = {"remote_prefiller": {"kv_request_id": "k", **address}}
    else:
        told = coordinates(p, **told)
    for child in (0, 1):
        p.serving.add(f"{child}_cmpl-p-0-aaaaaaaa", dict(asked), first_token=100 * child)
        d.serving.add(f"{child}_cmpl-d-0-bbbbbbbb", dict(told), first_token=100 * child)
    until(lambda: is_quiet(p, d), p, d)
    assert set(d.serving.finished.values()) == {FinishReason.LENGTH}
    (stats,) = (each.report.take_stats() for each in d.engine.workers.values())
    assert not (stats and stats.data["read_failures"])


def test_prompts_are_bound_to_their_tokens(pair, monkeypatch):
    """One name, and other prompts: what was read is not believed."""
    monkeypatch.setattr(subscriptions, "KNOWN_WITHIN_S", 0.3)
    p, d = pair()
    p.serving.add(PREFILLED, {"do_remote_decode": True}, first_token=500)
    d.serving.add(DECODED, coordinates(p))
    until(lambda: DECODED in d.serving.finished, p, d)
    assert d.serving.finished == {DECODED: FinishReason.ERROR}


def test_prefix_that_is_cached_here_is_not_read(pair):
    """Only what follows it waits, and is read."""
    p, d = pair()
    cut_prompts(p)
    d.serving.add("before", max_tokens=1, num_tokens=2 * BLOCK_TOKENS)
    d.step()
    d.step()
    p.serving.add(PREFILLED, {"do_remote_decode": True})
    d.serving.add(DECODED, coordinates(p))
    whole = compute(p)
    until(lambda: is_allocated(d), d)
    (blocks,) = d.serving.scheduler.kv_cache_manager.get_block_ids(DECODED)
    until(lambda: is_quiet(p, d), p, d)
    assert d.serving.finished[DECODED] is FinishReason.LENGTH
    # The model has written nothing into what was cached.
    start = 2 * BLOCK_TOKENS
    assert_received(d.engine, blocks[2:3], whole[:, :, :, start:])
    (worker,) = d.engine.workers.values()
    assert worker.report.take_stats().data["bytes_transferred"] == [whole[:, :, :, start:].nbytes]


def preempt(whole: Whole, request_id: str) -> None:
    """Take a request's blocks away, as for others that need them."""
    scheduler = whole.serving.scheduler
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    assert scheduler.requests[request_id].num_preemptions == 1


def test_prompt_that_is_preempted_there_is_read_once_it_is_computed_anew(pair):
    """Its blocks are others' for a while: nobody waits for it with blocks meanwhile."""
    p, d = pair()
    cut_prompts(p)
    add_both(p, d)
    p.step()
    preempt(p, PREFILLED)
    for _ in range(20):
        d.step()
    assert parked(d) and not is_allocated(d)
    end = begin_last_chunk(p)
    until(lambda: is_allocated(d), d)
    (dst_blocks,) = d.serving.scheduler.kv_cache_manager.get_block_ids(DECODED)
    whole = end()
    until(lambda: is_quiet(p, d), p, d)
    assert d.serving.finished == {DECODED: FinishReason.LENGTH}
    assert_received(d.engine, dst_blocks[:3], whole)


def test_request_that_is_preempted_here_is_computed_anew(pair):
    """Nothing is waited for a second time."""
    p, d = pair()
    p.serving.add(PREFILLED, {"do_remote_decode": True})
    request = d.serving.add(DECODED, coordinates(p), max_tokens=4)
    # The first may be the prefill engine's, before the request runs.
    until(lambda: request.num_output_tokens > 1, p, d)
    preempt(d, DECODED)
    until(lambda: is_quiet(p, d), p, d)
    assert request.num_preemptions == 1
    assert d.serving.finished == {DECODED: FinishReason.LENGTH}


def test_client_that_leaves_while_its_prompt_is_read(pair):
    """Its blocks are kept until nothing writes into them, and both engines are through then."""
    p, d = pair()
    p.serving.add(PREFILLED, {"do_remote_decode": True})
    d.serving.add(DECODED, coordinates(p))
    (consumer,) = (each.consumer for each in d.engine.transfer_engines.values())
    with pytest.MonkeyPatch.context() as patch:
        # Whatever arrives meanwhile, nobody takes note of it.
        patch.setattr(consumer, "advance", lambda *_: None)
        until(lambda: len(consumer), p, d)
        d.serving.abort(DECODED)
        d.step()
        assert is_allocated(d)
    until(lambda: is_quiet(p, d), p, d)
    (stats,) = (each.report.take_stats() for each in p.engine.workers.values())
    assert stats is None or not stats.data["num_kv_expired_reqs"]


def test_groups_with_windows_are_read(pair):
    """Of what has a window, as many blocks as that reaches back to, in the group's own places."""
    p, d = pair(window_tokens=WINDOW_TOKENS)
    cut_prompts(p)
    for layers in p.engine.caches.values():
        for number, cache in enumerate(layers.values()):
            cache.copy_(torch.rand(cache.shape, generator=torch.Generator().manual_seed(number)))
    p.serving.add(PREFILLED, {"do_remote_decode": True}, num_tokens=LONG_TOKENS)
    d.serving.add(DECODED, coordinates(p), num_tokens=LONG_TOKENS)
    until_claimed(p)
    begin_last_chunk(p, computes=lambda *_, **__: {})()
    until(lambda: d.serving.told.receive, d)
    (receive,) = d.serving.told.receive.values()
    until(lambda: is_quiet(p, d), p, d)
    assert d.serving.finished == {DECODED: FinishReason.LENGTH}
    theirs = p.serving.handed_over[PREFILLED]["remote_block_ids"]
    (sources,), (targets,) = p.engine.caches.values(), d.engine.caches.values()
    for group, (src, dst) in enumerate(zip(theirs, receive.local_block_ids, strict=True)):
        wanted = [block for block in dst if block]
        for layer in list(sources)[group::2]:
            found = targets[layer][:, wanted]
            assert torch.equal(found, sources[layer][:, src[-len(wanted) :]])


@LAYOUTS
def test_chunks_are_read_while_the_next_is_computed(pair, prefill, decode):
    """The last one is all that is left to be read at the offer, and nothing is read twice."""
    p, d = pair(prefill, decode)
    end, read = prefetch(p, d)
    (blocks,) = d.serving.scheduler.kv_cache_manager.get_block_ids(DECODED)
    request = d.serving.scheduler.requests[DECODED]
    assert PREFILLED not in p.serving.finished and request.num_output_tokens == 0
    whole = end()
    until(lambda: request.num_output_tokens > 0, p, d)
    assert_received(d.engine, blocks[:3], whole)
    assert read + bytes_read(d) == 3 * BLOCK_TOKENS * bytes_of_token(d)
    until(lambda: is_quiet(p, d), p, d)
    assert d.serving.finished == {DECODED: FinishReason.LENGTH}


def test_prefix_that_is_cached_here_is_not_prefetched(pair):
    """What is computed there of it is here already."""
    p, d = pair()
    d.serving.add("before", max_tokens=1, num_tokens=BLOCK_TOKENS)
    d.step()
    d.step()
    end, read = prefetch(p, d, num_cached=1)
    (blocks,) = d.serving.scheduler.kv_cache_manager.get_block_ids(DECODED)
    whole = end()
    until(lambda: is_quiet(p, d), p, d)
    assert_received(d.engine, blocks[1:3], whole[:, :, :, BLOCK_TOKENS:])
    assert read + bytes_read(d) == 2 * BLOCK_TOKENS * bytes_of_token(d)


def test_chunks_of_another_attempt_are_read_anew(pair):
    """Others may have had the blocks, and written there, while they were read."""
    p, d = pair()
    end, _ = prefetch(p, d, num_chunks=1, computes=partial(fill, seed=2))
    end()
    preempt(p, PREFILLED)
    for layers in p.engine.caches.values():
        for cache in layers.values():
            cache.zero_()
    end = begin_last_chunk(p)
    (blocks,) = d.serving.scheduler.kv_cache_manager.get_block_ids(DECODED)
    bytes_read(d)
    whole = end()
    until(lambda: is_quiet(p, d), p, d)
    assert d.serving.finished == {DECODED: FinishReason.LENGTH}
    assert_received(d.engine, blocks[:3], whole)
    assert bytes_read(d) == 3 * BLOCK_TOKENS * bytes_of_token(d)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("leaves", [False, True], ids=["aborted there", "left here"])
def test_request_that_ends_while_it_is_prefetched(pair, policy, leaves):
    """Its blocks are its own until nothing writes into them, and then nobody's."""
    p, d = pair(policy=policy)
    cut_prompts(p)
    p.serving.add(PREFILLED, {"do_remote_decode": True})
    d.serving.add(DECODED, coordinates(p))
    until_claimed(p)
    with pytest.MonkeyPatch.context() as patch:
        # Whatever arrives meanwhile, nobody takes note of it.
        patch.setattr(Transfers, "_has_left_nixl", lambda *_: False)
        begin_chunk(p)()
        begin_chunk(p)()
        begin_chunk(p)
        engines = d.engine.transfer_engines.values()
        until(lambda: any(len(each.transfers) for each in engines), d)
        if leaves:
            d.serving.abort(DECODED)
        else:
            p.serving.abort(PREFILLED)
            p.step()
        for _ in range(20):
            d.step()
        assert is_allocated(d)
    if leaves:
        until(lambda: not is_allocated(d), d)
        p.serving.abort(PREFILLED)
    until(lambda: is_quiet(p, d), p, d)
    if not leaves:
        assert_ended_by(policy, d)


def test_connection_that_breaks_costs_only_what_was_prefetched(pair, monkeypatch):
    """All of the request is read once it is offered, over the next one."""
    p, d = pair()
    end, _ = prefetch(p, d)
    (engine,) = d.engine.transfer_engines.values()
    (peer,) = engine.peers
    first = peer.connection
    advance = engine.consumer.advance

    def break_off(now_s, budget):
        if peer.connection is first:
            engine.peers.break_off(first, now_s)
        advance(now_s, budget)

    monkeypatch.setattr(engine.consumer, "advance", break_off)
    until(lambda: peer.connection is not first, d)
    (blocks,) = d.serving.scheduler.kv_cache_manager.get_block_ids(DECODED)
    whole = end()
    until(lambda: is_quiet(p, d), p, d)
    assert d.serving.finished == {DECODED: FinishReason.LENGTH}
    assert_received(d.engine, blocks[:3], whole)
    assert bytes_read(d) == 3 * BLOCK_TOKENS * bytes_of_token(d)


def test_requests_that_are_computed_leave_room_for_the_longest_prompt(pair):
    """What is offered finds room, and is not kept waiting by prompts that need more room there."""
    p, d = pair()
    names = "abcd"
    for number, name in enumerate(names):
        asked = {"do_remote_decode": True}
        p.serving.add(f"cmpl-{name}-0-aaaaaaaa", asked, first_token=100 * number)
        told = coordinates(p, remote_request_id=name)
        d.serving.add(f"cmpl-{name}-0-bbbbbbbb", told, first_token=100 * number)
    until_claimed(p, *(f"cmpl-{name}-0-aaaaaaaa" for name in names))
    # Each has a chunk computed, and none its last.
    cut_prompts(p)
    p.serving.scheduler.max_num_scheduled_tokens = len(names) * BLOCK_TOKENS
    p.serving.scheduler.scheduler_config.long_prefill_token_threshold = BLOCK_TOKENS
    p.step()
    begun = p.serving.begin()
    heard = p.work(begun)
    until(lambda: d.serving.num_used_blocks() == 9, d)
    for _ in range(20):
        d.step()
    # Three blocks each, of fifteen, of which the longest prompt takes four.
    waiting = {*d.serving.scheduler.requests, *d.serving.held}
    assert sum(map(partial(parked, d), waiting)) == 1
    assert d.serving.num_used_blocks() == 9
    p.serving.end(begun, heard=heard)
    until(lambda: is_quiet(p, d), p, d)
    assert len(d.serving.finished) == len(names)
    assert set(d.serving.finished.values()) == {FinishReason.LENGTH}


@pytest.mark.parametrize("drafting", ["prefill", "decode"])
def test_prompts_of_engines_that_draft_are_read_at_their_end(pair, drafting):
    """What drafts write is not taken for granted there; and here they take blocks of their own."""
    p, d = pair(drafting=drafting)
    cut_prompts(p)
    add_both(p, d, num_tokens=LONG_TOKENS)
    begin_chunk(p)()
    begin_chunk(p)()
    end = begin_chunk(p)
    until(lambda: is_known(d), d)
    for _ in range(20):
        d.step()
    assert parked(d) and not is_allocated(d)
    end()
    whole = compute(p)
    until(lambda: is_allocated(d), d)
    (blocks,) = d.serving.scheduler.kv_cache_manager.get_block_ids(DECODED)
    until(lambda: is_quiet(p, d), p, d)
    assert d.serving.finished == {DECODED: FinishReason.LENGTH}
    assert_received(d.engine, blocks[:4], whole)


def test_request_that_is_preempted_here_beside_one_that_is_prefetched(pair):
    """What is read into is not given to it, and goes on being read; both are right."""
    p, d = pair()
    end, read = prefetch(p, d)
    (blocks,) = d.serving.scheduler.kv_cache_manager.get_block_ids(DECODED)
    pool = d.serving.scheduler.kv_cache_manager.block_pool
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - 1)
    other = d.serving.add("other", num_tokens=BLOCK_TOKENS, first_token=900, max_tokens=4)
    until(lambda: other.num_preemptions == 1, d)
    assert d.serving.scheduler.kv_cache_manager.get_block_ids(DECODED) == (blocks,)
    whole = end()
    until(lambda: DECODED in d.serving.finished, p, d)
    assert_received(d.engine, blocks[:3], whole)
    # Nothing is read twice.
    assert read + bytes_read(d) == 3 * BLOCK_TOKENS * bytes_of_token(d)
    pool.free_blocks(taken)
    until(lambda: is_quiet(p, d), p, d)
    assert d.serving.finished == {DECODED: FinishReason.LENGTH, "other": FinishReason.LENGTH}
    assert d.serving.answers["other"] == [7] * 4
