# SPDX-License-Identifier: Apache-2.0
"""What the scheduler makes of the parameters that a router passes on."""

from __future__ import annotations

import contextlib
import json
import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from tests.bases import requires_base
from tests.v1.kv_connector.unit.reshard.engine.schedulers import PARAMS, request, scheduler
from tests.v1.kv_connector.unit.reshard.transport.channels import (
    FACTORS,
    WORKERS,
    wait_until,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.compat import (
    FAILED_READS_ARE_NAMED,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.metadata import (
    ReshardHandshakeMetadata,
    WorkerReport,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.scheduling import (
    scheduler as scheduler_module,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.scheduling.scheduler import (
    ReshardScheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.bounds import TrustedPeers
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.description import (
    encode_worker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.fingerprint import (
    OfferFingerprint,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    Announcement,
    Receive,
    RemoteEngineAddress,
    RemoteRequest,
    decode_announcement,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.params import sanitize_params
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.announcements import listen_to


def picture(name: str) -> MultiModalFeatureSpec:
    """A multimodal item that takes a prompt's tokens from the third on."""
    return MultiModalFeatureSpec(
        data=None, modality="image", identifier=name, mm_position=PlaceholderRange(2, 4)
    )


def allocate(owner: ReshardScheduler, new: Request, block_ids: list[int]) -> Receive:
    """A request gets blocks for all that is not cached: what its workers are asked to read."""
    blocks = SimpleNamespace(blocks=(), get_unhashed_block_ids_all_groups=lambda: (block_ids,))
    owner.update_state_after_alloc(new, blocks, new.num_prompt_tokens if block_ids else 0)
    (receive,) = owner.build_connector_meta(SchedulerOutput.make_empty()).receive.values()
    return receive


def test_parameters_become_a_read():
    """Address, blocks and tokens are taken as the other engine wrote them."""
    receive = allocate(scheduler(), request(PARAMS), [3, 4, 1])
    assert receive.fault is None
    assert receive.source == RemoteEngineAddress("prefill", "10.0.0.1", 5600)
    assert (receive.remote_request_id, receive.remote_block_ids) == ("p-a", [[5, 2, 9]])
    assert (receive.local_tokens, receive.remote_tokens) == (40, 40)


@pytest.mark.parametrize(
    ("remote", "local", "expected"), [(None, 40, (40, 40)), (50, 40, (40, 50))]
)
def test_tokens_are_counted_at_each_end(remote, local, expected):
    """Without a count the prompt is what was computed; a longer remote sequence is told apart."""
    receive = allocate(scheduler(), request(PARAMS | {"remote_num_tokens": remote}, local), [3])
    assert (receive.local_tokens, receive.remote_tokens) == expected


@pytest.mark.parametrize(
    "change",
    [
        {"remote_engine_id": None},
        {"remote_engine_id": ["prefill"]},
        {"remote_request_id": 7},
        {"remote_host": None},
        {"remote_port": "abc"},
        {"remote_port": 0},
        {"remote_port": 1 << 16},
        {"remote_block_ids": [1, 2, 3]},
        {"remote_block_ids": [["a"]]},
        {"remote_block_ids": [[None]]},
        {"remote_block_ids": [[-1]]},
        {"remote_block_ids": [[1 << 31]]},
        {"remote_block_ids": [[1.5]]},
        {"remote_num_tokens": "9"},
        {"remote_num_tokens": 4.5},
    ],
)
def test_malformed_parameters_are_a_fault_of_the_request(change):
    """The request fails with a readable line; the engine lives on."""
    params, _ = sanitize_params(PARAMS | change, reads_back=False)
    receive = allocate(scheduler(), request(params), [3, 4, 1])
    assert "the router must pass on unchanged" in receive.fault
    assert "\n" not in receive.fault
    assert list(receive.local_block_ids) == [[3, 4, 1]]


@pytest.mark.parametrize(
    ("host", "fault"),
    [("10.0.0.1", None), ("192.0.2.1", "192.0.2.1 is not among"), ("engine.example", None)],
)
def test_hosts_outside_of_the_trusted_networks_are_a_fault_of_the_request(host, fault):
    """A name is not: who looks it up sees whether its address is among them."""
    trusted = TrustedPeers.parse(["10.0.0.0/8"])
    params, _ = sanitize_params(PARAMS | {"remote_host": host}, reads_back=False, trusted=trusted)
    receive = allocate(scheduler(), request(params), [3, 4, 1])
    if fault is None:
        assert (receive.fault, receive.source.host) == (None, host)
    else:
        assert f"its kv_transfer_params are not followed: host {fault}" in receive.fault
    # What need not be read is computed instead, and says why.
    again = {name: value for name, value in PARAMS.items() if name != "do_remote_prefill"}
    _, why = sanitize_params(again | {"remote_host": host}, reads_back=True, trusted=trusted)
    assert (why is None) is (fault is None)


@given(
    params=st.one_of(
        st.none(),
        st.dictionaries(
            st.sampled_from(sorted(PARAMS)),
            st.recursive(
                st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
                st.lists,
                max_leaves=4,
            ),
        ),
    )
)
def test_nothing_that_json_can_say_raises(params):
    """Whatever a router makes of the parameters, the scheduler's step goes on."""
    params, _ = sanitize_params((params or {}) | {"do_remote_prefill": True}, reads_back=False)
    receive = allocate(scheduler(), request(params), [3])
    assert receive.fault is not None or receive.source.port > 0


def serve(owner: ReshardScheduler) -> None:
    """Have a scheduler answer others, and tell its workers."""
    owner.side_channel_host, owner.side_channel_port = "127.0.0.2", 0
    described = (ReshardHandshakeMetadata(FACTORS, encode_worker(each)) for each in WORKERS)
    owner.serve_handshake({(0, number): each for number, each in enumerate(described)})


def test_engine_that_wakes_up_goes_on_answering():
    """0.33 hands over its workers' metadata again then: the port is this engine's own already."""
    owner = scheduler()
    serve(owner)
    server = owner._server
    serve(owner)
    assert owner._server is server
    owner.shutdown()


def arrive(owner: ReshardScheduler, params, num_prompt_tokens: int = 40):
    """A request that the scheduler has been told of."""
    new = request(params, num_prompt_tokens)
    owner.on_new_request(new)
    return new


@pytest.mark.parametrize(
    "change", [{"remote_block_ids": None}, {"remote_block_ids": []}, {"remote_host": None}]
)
def test_request_that_cannot_be_read_does_not_wait_for_ever(change):
    """It is scheduled like one that can, so that the read fails, and nothing raises."""
    owner = scheduler()
    new = arrive(owner, PARAMS | change)
    assert owner.get_num_new_matched_tokens(new, 0) == (40, True)
    receive = allocate(owner, new, [3, 4, 1])
    assert "malformed" in receive.fault
    assert list(receive.local_block_ids) == [[3, 4, 1]]


@pytest.mark.parametrize("change", [{"remote_engine_id": ["a"]}, {"remote_request_id": {"a": 1}}])
def test_values_that_cannot_be_keys_harm_nobody(change):
    """What a router made of the names does not raise where they would be looked up."""
    owner = scheduler()
    arrive(owner, PARAMS | {"tp_size": 1} | change)
    assert not owner.build_connector_meta(SchedulerOutput.make_empty()).awaited


@pytest.mark.parametrize(
    ("engine", "announces"),
    [
        ({"stages": 1}, False),
        ({"stages": 2}, True),
        ({"stages": 1, "ahead": True}, True),
        ({"stages": 2, "role": "kv_consumer"}, False),
        ({"stages": 2, "role": "kv_consumer", "bidirectional": True}, True),
    ],
)
def test_offers_are_announced_where_steps_are_scheduled_ahead(engine, announces):
    """By engines that offer anything, to workers that are told in the first step."""
    owner = scheduler(**engine)
    serve(owner)
    try:
        first, second = (owner.build_connector_meta(SchedulerOutput.make_empty()) for _ in range(2))
        assert (first.announcer is not None) == announces
        assert second.announcer is None
    finally:
        owner.shutdown()


def test_host_in_brackets_is_told_without_them(monkeypatch, caplog_vllm):
    """As URLs write it; and one by which nobody else comes here is warned of when it starts."""
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "[fd00::1]")
    assert scheduler().side_channel_host == "fd00::1"
    assert "VLLM_NIXL_SIDE_CHANNEL_HOST" not in caplog_vllm.text
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "[::1]")
    assert scheduler().side_channel_host == "::1"
    assert "VLLM_NIXL_SIDE_CHANNEL_HOST is '::1'" in caplog_vllm.text


@pytest.mark.parametrize(
    ("engine", "layout"),
    [
        ({"role": "kv_producer"}, "TP 2, PP 3, NIXL backend UCX."),
        (
            {"stages": 1, "replicas": 4, "shares": 2},
            "TP 2, PP 1, DP 4, DCP 2, NIXL backend UCX.",
        ),
    ],
)
def test_engine_says_once_where_it_is_asked_and_what_it_is(engine, layout, caplog_vllm):
    """With the port that it listens on; UCX alone has transports."""
    owner = scheduler(**engine)
    serve(owner)
    owner.shutdown()
    said = caplog_vllm.records[-1].getMessage()
    assert caplog_vllm.text.count("answers handshakes at") == 1
    (digest,) = owner.take_stats().data["factors"]
    assert re.fullmatch("[0-9a-f]{16}", digest)
    what, ucx = said.split(" With ")
    assert re.sub(r":\d+:", ":PORT:", what) == (
        f"Engine engine answers handshakes at 127.0.0.2:PORT: {layout}"
    )
    assert ":0:" not in what and ucx.startswith("UCX_LOG_LEVEL=info")


@pytest.mark.parametrize(
    ("workers", "host"),
    [
        ({"distributed_executor_backend": "mp"}, "127.0.0.1"),
        ({"distributed_executor_backend": "mp", "nnodes_within_dp": 2}, "127.0.0.2"),
        ({"distributed_executor_backend": "ray"}, "127.0.0.2"),
    ],
)
def test_announcer_is_where_all_workers_reach_it(workers, host):
    """On one machine nobody else does."""
    owner = scheduler()
    vars(owner.vllm_config.parallel_config).update(workers)
    serve(owner)
    try:
        announcer = owner.build_connector_meta(SchedulerOutput.make_empty()).announcer
        assert announcer.host == host
    finally:
        owner.shutdown()


def test_offer_is_announced_when_its_request_ends():
    """With the fingerprint that the next step tells of."""
    owner = scheduler()
    serve(owner)
    heard: list[Announcement] = []
    fingerprints: list[OfferFingerprint] = []

    def is_heard() -> bool:
        name = f"p-{len(fingerprints)}"
        fingerprints.append(offer(owner, request({"do_remote_decode": True}, 40, name))[1])
        return bool(heard)

    with contextlib.ExitStack() as stack:
        stack.callback(owner.shutdown)
        told = owner.build_connector_meta(SchedulerOutput.make_empty())
        listener = listen_to(told.announcer, lambda data: heard.append(decode_announcement(data)))
        stack.callback(listener.close)
        wait_until(is_heard)
    number = heard[0].number
    name, block_ids = f"p-{number - 1}", ([5, 2, 9],)
    assert heard[0] == Announcement(number, name, fingerprints[number - 1], block_ids)


@pytest.mark.parametrize(
    ("stages", "outlive", "num_preemptions", "offers"),
    [(3, True, 1, False), (3, True, 0, True), (1, True, 1, True), (3, False, 1, True)],
)
def test_blocks_that_may_be_being_filled_are_not_offered(
    stages, outlive, num_preemptions, offers, monkeypatch
):
    """A request that began anew was ended by the output of a step from before that."""
    monkeypatch.setattr(scheduler_module, "OUTPUTS_OUTLIVE_PREEMPTION", outlive)
    owner = scheduler(stages=stages)
    prefilled = arrive(owner, {"do_remote_decode": True})
    prefilled.append_output_token_ids(7)
    prefilled.num_preemptions = num_preemptions
    prefilled.status = RequestStatus.FINISHED_LENGTH_CAPPED
    delay_free, params = owner.request_finished(prefilled, ([5, 2, 9],))
    assert (delay_free, params is not None) == (offers, offers)
    told = owner.build_connector_meta(SchedulerOutput.make_empty())
    assert (prefilled.request_id in told.withdrawn) == (not offers)


def test_prefill_engine_that_does_not_read_back_computes():
    """Blocks of the last turn on a decode engine are not waited for where they are not read."""
    last_turn = PARAMS | {"do_remote_prefill": False, "do_remote_decode": True}
    owner = scheduler(bidirectional=False)
    new = arrive(owner, last_turn, 400)
    assert owner.get_num_new_matched_tokens(new, 0) == (0, False)
    assert new.kv_transfer_params["do_remote_decode"] is True


@pytest.mark.parametrize("tokens", ["many", 4.5, None])
def test_prefill_engine_reads_back_only_what_is_well_formed(tokens, caplog_vllm):
    """A malformed account of the last turn costs its reuse, not the request."""
    last_turn = PARAMS | {"do_remote_prefill": False, "do_remote_decode": True}
    owner = scheduler(bidirectional=True)
    good = arrive(owner, last_turn | {"remote_num_tokens": 300}, 400)
    assert owner.get_num_new_matched_tokens(good, 0) == (300, True)
    bad = arrive(owner, last_turn | {"remote_num_tokens": tokens}, 400)
    assert owner.get_num_new_matched_tokens(bad, 0) == (0, False)
    assert ("Computing all of request d-a" in caplog_vllm.text) == (tokens is not None)


@pytest.mark.parametrize(("computed", "blocks"), [(31, 2), (32, 2), (33, 3)])
def test_only_computed_blocks_are_offered(computed, blocks):
    """Blocks allocated ahead, as for a draft model's tokens, are not told to the next engine."""
    owner = scheduler(block_size=16)
    finished = arrive(owner, {"do_remote_decode": True}, 31)
    finished.append_output_token_ids([7] * 9)
    finished.status, finished.num_computed_tokens = RequestStatus.FINISHED_LENGTH_CAPPED, computed
    delay_free, params = owner.request_finished(finished, ([7, 3, 5, 2],))
    assert delay_free
    assert params["remote_block_ids"] == ([7, 3, 5, 2][:blocks],)
    assert (params["tp_size"], params["pp_size"]) == (2, 3)


@requires_base("0.32.0", "0.33.0", reason="its layers do not say what is shared out")
@pytest.mark.parametrize(("computed", "blocks"), [(31, 1), (32, 1), (33, 2)])
def test_block_of_ranks_that_share_tokens_out_is_as_many(computed, blocks):
    """A block id is one of each of two ranks, of twice as many tokens together."""
    owner = scheduler(block_size=16, shares=2)
    finished = arrive(owner, {"do_remote_decode": True}, 31)
    finished.append_output_token_ids([7] * 9)
    finished.status, finished.num_computed_tokens = RequestStatus.FINISHED_LENGTH_CAPPED, computed
    _, params = owner.request_finished(finished, ([7, 3, 5],))
    assert params["remote_block_ids"] == ([7, 3, 5][:blocks],)


def test_one_request_reads_and_its_siblings_compute():
    """Several answers to one prompt do not take each other's blocks away; later ones may read."""
    owner = scheduler()
    first, second = arrive(owner, dict(PARAMS)), request(dict(PARAMS), request_id="d-b")
    owner.on_new_request(second)
    assert owner.get_num_new_matched_tokens(first, 0) == (40, True)
    assert owner.get_num_new_matched_tokens(second, 0) == (0, False)
    for finished in (second, first):
        finished.status = RequestStatus.FINISHED_STOPPED
        owner.request_finished(finished, ([7, 3, 5],))
    assert owner.get_num_new_matched_tokens(arrive(owner, dict(PARAMS)), 0) == (40, True)


def test_renewals_need_no_size():
    """A router that does not pass on `tp_size` does not cost a request its lease."""
    owner = scheduler()
    arrive(owner, {name: value for name, value in PARAMS.items() if name != "tp_size"})
    (awaited,) = owner.build_connector_meta(SchedulerOutput.make_empty()).awaited.values()
    assert awaited == RemoteRequest(RemoteEngineAddress("prefill", "10.0.0.1", 5600), "p-a")


def test_sibling_on_a_prefill_engine_is_still_held():
    """A second answer that may not read back the last turn is computed, and then offered."""
    owner = scheduler(bidirectional=True)
    last_turn = PARAMS | {"do_remote_prefill": False, "do_remote_decode": True}
    arrive(owner, last_turn | {"remote_num_tokens": 300}, 400)
    second = request(last_turn | {"remote_num_tokens": 300}, 400, request_id="d-b")
    second.status = RequestStatus.FINISHED_LENGTH_CAPPED
    owner.on_new_request(second)
    assert owner.get_num_new_matched_tokens(second, 0) == (0, False)
    assert owner.request_finished(second, ([7, 3, 5],))[0]


def offer(
    owner: ReshardScheduler, prefilled: Request, block_ids=([5, 2, 9],)
) -> tuple[dict, OfferFingerprint]:
    """A request's end on a prefill engine: what the next engine is told, and what is offered."""
    owner.on_new_request(prefilled)
    prefilled.append_output_token_ids(7)
    prefilled.status = RequestStatus.FINISHED_LENGTH_CAPPED
    _, params = owner.request_finished(prefilled, block_ids)
    offered = owner.build_connector_meta(SchedulerOutput.make_empty())
    assert offered.offered.keys() == {prefilled.request_id}
    # By way of a router.
    return json.loads(json.dumps(params)), offered.offered[prefilled.request_id].fingerprint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"prompt_token_ids": list(range(42))}, None),
        ({"prompt_token_ids": list(range(38))}, "other tokens"),
        ({"prompt_token_ids": [*range(39), 99]}, "other tokens"),
        ({"cache_salt": "another tenant"}, "other tokens"),
        ({"lora_request": LoRARequest("another", 1, "here")}, "other tokens"),
        ({"lora_request": LoRARequest("adapter", 2, "elsewhere")}, None),
        ({"params": {"remote_num_tokens": None}}, None),
        ({"mm_features": [picture("another")]}, "other tokens"),
        ({"params": {"remote_block_ids": [[5, 2, 8]]}}, "other blocks"),
        ({"params": {"remote_num_tokens": 39}}, "is of 40 tokens, and 39"),
    ],
    ids=lambda value: next(iter(value), "same") if isinstance(value, dict) else "",
)
def test_reader_wants_what_was_offered(change, message):
    """The same prompt in the same blocks, or the difference is told."""
    values = {
        "prompt_token_ids": list(range(40)),
        "mm_features": [picture("one")],
        "lora_request": LoRARequest("adapter", 1, "here"),
    }
    common = {"sampling_params": SamplingParams(), "pooling_params": None}
    prefilled = Request("p-a", **common, **values)
    prefilled.kv_transfer_params = {"do_remote_decode": True}
    prefilled.num_computed_tokens = 40
    params, offered = offer(scheduler(), prefilled)
    asked = Request(
        "d-a",
        **common,
        **{name: value for name, value in (values | change).items() if name != "params"},
    )
    params |= change.get("params", {})
    asked.kv_transfer_params = params
    difference = offered.difference(allocate(scheduler(), asked, [3, 4, 1]).fingerprint)
    assert difference is None if message is None else message in difference


def embedded(name: str, params: dict, embeds: torch.Tensor) -> Request:
    """A request whose prompt is given as embeddings, and counts as computed."""
    made = Request(name, None, SamplingParams(), None, prompt_embeds=embeds)
    made.kv_transfer_params, made.num_computed_tokens = dict(params), len(embeds)
    return made


@pytest.mark.parametrize("num_tokens", [1, 5, 16, 40])
def test_prompt_of_embeddings_is_read(num_tokens):
    """As many tokens as it has rows, bound to what they are."""
    embeds = torch.rand(num_tokens, 4, dtype=torch.bfloat16)
    num_blocks = -(-num_tokens // 16)
    blocks = [5, 2, 9][:num_blocks]
    params, offered = offer(
        scheduler(), embedded("p-a", {"do_remote_decode": True}, embeds), (blocks,)
    )
    owner, asked = scheduler(), embedded("d-a", params, embeds.clone())
    owner.on_new_request(asked)
    assert owner.get_num_new_matched_tokens(asked, 0) == (num_tokens, True)
    receive = allocate(owner, asked, [3, 4, 1][:num_blocks])
    assert receive.remote_tokens == num_tokens
    assert offered.difference(receive.fingerprint) is None

    embeds[-1] *= 2
    other = allocate(scheduler(), embedded("d-a", params, embeds), [3, 4, 1][:num_blocks])
    assert "other tokens" in offered.difference(other.fingerprint)


def test_prompt_of_embeddings_is_read_as_far_as_it_is_not_cached():
    """Nothing is read of one that is cached, and none is read twice."""
    owner, asked = scheduler(), embedded("d-a", PARAMS, torch.rand(40, 4))
    owner.on_new_request(asked)
    assert owner.get_num_new_matched_tokens(asked, 32) == (8, True)
    assert owner.get_num_new_matched_tokens(asked, 40) == (0, False)
    allocate(owner, asked, [3])
    assert owner.get_num_new_matched_tokens(asked, 0) == (0, False)


def test_prompt_of_embeddings_with_malformed_parameters_does_not_wait_for_ever():
    """It is scheduled like one that can be read, so that the read fails."""
    owner = scheduler()
    asked = embedded("d-a", PARAMS | {"remote_port": 0}, torch.rand(40, 4))
    owner.on_new_request(asked)
    assert owner.get_num_new_matched_tokens(asked, 0) == (40, True)
    assert "malformed" in allocate(owner, asked, [3, 4, 1]).fault


def test_answer_to_embeddings_is_not_read_back():
    """What is held there is of an answer's tokens, and what is asked for is of rows."""
    owner = scheduler(bidirectional=True)
    params = PARAMS | {"do_remote_prefill": False, "do_remote_decode": True}
    params["remote_num_tokens"] = 100
    asked = embedded("p-a", params, torch.rand(102, 4))
    owner.on_new_request(asked)
    assert owner.get_num_new_matched_tokens(asked, 0) == (0, False)
    # Tokens are.
    again = arrive(owner, params | {"remote_request_id": "d-b"}, 102)
    assert owner.get_num_new_matched_tokens(again, 0) == (100, True)


def test_what_a_longer_prompt_has_more_is_computed_here():
    """Tokens that were not prefilled do not count as read."""
    owner = scheduler()
    assert owner.get_num_new_matched_tokens(arrive(owner, dict(PARAMS), 42), 0) == (40, True)
    again = arrive(owner, PARAMS | {"remote_request_id": "p-b"}, 42)
    assert owner.get_num_new_matched_tokens(again, 40) == (0, False)


def test_rejected_drafts_are_not_offered():
    """Positions that went through the model and are not the request's hold somebody's guesses."""
    owner = scheduler(block_size=16)
    answered = arrive(owner, {"do_remote_decode": True}, 30)
    answered.append_output_token_ids([7, 7, 7])
    answered.status, answered.num_computed_tokens = RequestStatus.FINISHED_STOPPED, 36
    _, params = owner.request_finished(answered, ([7, 3, 5],))
    assert (params["remote_num_tokens"], params["remote_block_ids"]) == (32, ([7, 3],))


def test_producer_is_told_of_a_full_hit_what_it_offers():
    """Nothing is read of a prompt that is wholly cached, and its producer lets go all the same."""
    prefilled = request({"do_remote_decode": True}, request_id="p-a")
    params, offered = offer(scheduler(), prefilled)
    assert allocate(scheduler(), request(params), []).fingerprint == offered


def test_producer_is_told_nothing_where_the_prompt_is_not_known():
    """As where vLLM makes up a prompt to give back what a refused request named."""
    made_up = request(PARAMS | {"remote_num_tokens": 40}, 1)
    assert allocate(scheduler(), made_up, []).fingerprint is None


@pytest.mark.skipif(not FAILED_READS_ARE_NAMED, reason="this base takes no blocks from requests")
@pytest.mark.parametrize(
    "again", [PARAMS, {**PARAMS, "remote_port": 0}], ids=["sound", "malformed"]
)
def test_name_whose_blocks_are_in_doubt_is_read_by_nobody_else(again):
    """Workers know it by its name; a second read under it would lose the blocks of the first."""
    owner, given_back = scheduler(), []
    pool = SimpleNamespace(free_blocks=given_back.extend)
    owner.set_kv_cache_manager(
        SimpleNamespace(
            block_pool=pool,
            pop_blocks_for_free=lambda _: ["first", "second"],
            get_block_ids=lambda _: ([],),
        )
    )

    def report(**told) -> None:
        """All workers report."""
        given = {"kv_connector_worker_meta": None, "finished_sending": None, **told}
        owner.update_connector_output(SimpleNamespace(**{"finished_recving": None, **given}))

    first = request(PARAMS)
    first.num_computed_tokens = 0
    owner.on_new_request(first)
    assert owner.get_num_new_matched_tokens(first, 0)[0]
    assert not allocate(owner, first, [1, 2, 3]).fault
    report(kv_connector_worker_meta=WorkerReport(failed={"d-a": frozenset()}))
    report(finished_recving={"d-a"})
    assert owner.has_pending_push_work()
    owner.request_finished(first, ([],))
    second = request(again)
    second.num_computed_tokens = 0
    owner.on_new_request(second)
    assert owner.get_num_new_matched_tokens(second, 0) == (0, False)
    assert owner.has_pending_push_work() and not given_back
    report(finished_recving={"d-a"})
    assert not owner.has_pending_push_work() and sorted(given_back) == ["first", "second"]


def test_side_channel_hears_of_workers_that_lack_descriptors():
    """It refuses further engines until all of them have some again."""
    owner = scheduler()
    owner._server = server = SimpleNamespace(shortage="")
    seen = []
    for shortages in ({"a": "81"}, {"b": "82"}, {"a": ""}, {}, {"b": ""}):
        news = WorkerReport(shortages=shortages)
        owner.update_connector_output(
            SimpleNamespace(
                kv_connector_worker_meta=news, finished_sending=None, finished_recving=None
            )
        )
        seen.append(server.shortage)
    assert seen == ["81", "81", "82", "82", ""]


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_engine_that_nobody_names_says_so_once(role, caplog_vllm):
    """A router that passes nothing on looks well: all is computed at the decode engine."""
    line = "None of the first 100 requests had kv_transfer_params"
    owner = scheduler(role=role)
    for number in range(250):
        owner.on_new_request(request(None, request_id=f"d-{number}"))
        assert caplog_vllm.text.count(line) == (number >= 99)
    assert owner.take_stats().data["requests"] == ["no"] * 250


@pytest.mark.parametrize("params", [PARAMS, {"do_remote_decode": True}])
def test_engine_that_is_named_says_nothing(params, caplog_vllm):
    """One request is enough, and each is counted for what it was."""
    owner = scheduler()
    owner.on_new_request(request(params, request_id="d-a"))
    for number in range(150):
        owner.on_new_request(request({"unknown": 1}, request_id=f"d-{number}"))
    assert "None of the first" not in caplog_vllm.text
    assert owner.take_stats().data["requests"] == ["yes"] + ["no"] * 150
