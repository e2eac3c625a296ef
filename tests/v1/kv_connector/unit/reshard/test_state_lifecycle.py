# SPDX-License-Identifier: Apache-2.0
"""The life of a request whose layers keep state, in vLLM's own schedulers.

State is that of exactly so many tokens: a prompt's last one is left for the engine that decodes,
and what is not the state of the tokens that are wanted is not read.
"""

from __future__ import annotations

import pytest
import torch
from vllm.v1.engine import FinishReason
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.request import RequestStatus

from tests.bases import requires_base
from tests.v1.kv_connector.unit.reshard.serving import (
    BLOCK_TOKENS,
    PROMPT_TOKENS,
    Serving,
    from_decode,
    from_prefill,
)

pytestmark = requires_base(
    "0.32.0", "0.33.0", reason="state is left to upstream's connector on 0.22.1"
)

STATES = {
    mode: MambaSpec(
        block_size=BLOCK_TOKENS if mode == "align" else 1 << 16,
        # Channels in either order.
        shapes=((16, 16), (2, 4, 4)),
        dtypes=(torch.float32, torch.float32),
        page_size_padded=BLOCK_TOKENS * 2 * 2 * 8 * 4,
        mamba_cache_mode=mode,
    )
    for mode in ("none", "align")
}
HELD = PROMPT_TOKENS - 1
REMOTE = dict(remote_block_ids=[[5, 2, 9], [4]], remote_num_tokens=HELD)
every_mode = pytest.mark.parametrize("mode", STATES)


def run(engine: Serving, request_id: str) -> int:
    """Step until a request has ended; returns how many tokens were computed."""
    computed = 0
    for _ in range(50):
        if request_id in engine.finished:
            return computed
        computed += sum(engine.step().values())
    raise AssertionError(f"{request_id} does not end")


@every_mode
def test_what_is_told_of_a_prompt_before_its_end_has_no_state(serving, mode):
    """State is that of all of it: blocks of other groups are told of as they are full."""
    p = serving(state=STATES[mode])
    prompts = p.scheduler.connector.connector_scheduler._prompts
    prompts.server = server = FakeServer()
    p.scheduler.max_num_scheduled_tokens = BLOCK_TOKENS
    server.publisher.claimed.add("cmpl-x-0-aaaaaaaa")
    p.add("cmpl-x-0-aaaaaaaa", {"do_remote_decode": True})
    while "cmpl-x-0-aaaaaaaa" not in p.finished:
        p.step()
    assert [each.num_tokens for each in server.computed] == [BLOCK_TOKENS, 2 * BLOCK_TOKENS]
    for number, each in enumerate(server.computed, start=1):
        full, state = each.block_ids
        assert (len(full), state) == (number, [])
    assert server.offered


class FakeServer:
    """In place of a side channel: keeps what a scheduler says of its prompts."""

    def __init__(self) -> None:
        self.publisher = self
        self.claimed: set[str] = set()
        self.given_up: set[str] = set()
        self.computed: list = []
        self.offered: list = []
        self.came_round_s = 0.0

    def tell(self, event) -> None:
        """Apply an event."""
        event(self)

    def add(self, *_) -> None:
        """A request has arrived."""

    def compute(self, _, computed) -> None:
        """A part is computed."""
        self.computed.append(computed)

    def offer(self, *offered) -> None:
        """It is offered."""
        self.offered.append(offered)


@every_mode
def test_prefill_leaves_the_last_token_and_offers_one_state(serving, mode):
    """What is held is the state after all tokens but the last, in one block of its group."""
    p = serving(state=STATES[mode])
    p.add("p-a", {"do_remote_decode": True})
    assert run(p, "p-a") == HELD
    params = p.handed_over["p-a"]
    assert params["remote_num_tokens"] == HELD
    full, state = params["remote_block_ids"]
    assert (len(full), len(state)) == (3, 1)
    assert 0 not in state
    p.step()
    assert p.told.offered["p-a"].fingerprint.num_tokens == HELD
    p.step(sent=["p-a"])
    assert p.is_through()


@every_mode
def test_state_after_all_of_a_prompt_is_not_read(serving, mode):
    """Prompt log-probabilities want all of it at one engine; the other computes, and tells so."""
    p, d = serving(state=STATES[mode]), serving(state=STATES[mode])
    p.add("p-a", {"do_remote_decode": True}, prompt_logprobs=1)
    assert run(p, "p-a") == PROMPT_TOKENS
    assert p.handed_over["p-a"]["remote_num_tokens"] == PROMPT_TOKENS
    d.add("d-a", p.handed_over["p-a"])
    computed = d.step()["d-a"]
    (receive,) = d.told.receive.values()
    assert not any(receive.local_block_ids) and receive.fingerprint.num_tokens == PROMPT_TOKENS
    assert computed + run(d, "d-a") == PROMPT_TOKENS


@every_mode
def test_decode_reads_the_state_and_computes_the_last_token(serving, mode):
    """The state of its group's one block, after as many tokens as are held."""
    d = serving(state=STATES[mode])
    request = d.add("d-a", from_prefill(**REMOTE), max_tokens=3)
    assert d.step() == {}
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    (receive,) = d.told.receive.values()
    assert [len(ids) for ids in receive.local_block_ids] == [3, 1]
    assert 0 not in receive.local_block_ids[1]
    assert (receive.local_tokens, receive.remote_tokens) == (HELD, HELD)
    assert receive.fingerprint.num_tokens == HELD
    d.step(received=["d-a"])
    assert d.step() == {"d-a": 1}
    for _ in range(3):
        d.step()
    assert d.finished == {"d-a": FinishReason.LENGTH}
    assert d.is_through()


@every_mode
@pytest.mark.parametrize("held", [PROMPT_TOKENS, PROMPT_TOKENS + 8])
def test_state_of_more_tokens_is_not_read(serving, mode, held):
    """Keys and values of more tokens would do; all is computed, and the producer is told."""
    d = serving(state=STATES[mode])
    d.add("d-a", from_prefill(**{**REMOTE, "remote_num_tokens": held}))
    computed = sum(d.step().values())
    assert not any(d.told.receive["d-a"].local_block_ids)
    assert computed + run(d, "d-a") == PROMPT_TOKENS


@every_mode
def test_state_of_fewer_tokens_is_read_and_the_rest_computed(serving, mode):
    """A prompt that has grown since goes on from where its state ends."""
    d = serving(state=STATES[mode])
    d.add("d-a", from_prefill(**{**REMOTE, "remote_num_tokens": HELD - 5}))
    d.step()
    (receive,) = d.told.receive.values()
    assert (receive.local_tokens, receive.remote_tokens) == (HELD - 5, HELD - 5)
    d.step(received=["d-a"])
    assert sum(d.step().values()) in (6, PROMPT_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS)


@every_mode
def test_failed_read_is_computed_in_every_group(serving, mode):
    """Other blocks hold what is computed anew, of the state as of the KV cache."""
    d = serving("recompute", state=STATES[mode])
    d.add("d-a", from_prefill(**REMOTE))
    d.step()
    (receive,) = d.told.receive.values()
    failed = set().union(*receive.local_block_ids)
    d.step(received=["d-a"], failed={"d-a": failed})
    assert run(d, "d-a") == PROMPT_TOKENS
    d.step()
    assert d.is_through()


@every_mode
def test_state_that_went_on_is_not_offered(serving, mode):
    """A step in flight has taken in a token behind the end of the answer."""
    d = serving(state=STATES[mode], asynchronous=True, bidirectional_kv_xfer=True)
    d.add("d-a", from_prefill(**REMOTE), max_tokens=20, stop_token=9)
    d.step()
    d.step(received=["d-a"])
    first = d.begin()
    second = d.begin()
    assert list(second.num_scheduled_tokens) == ["d-a"]
    d.end(first, said=[9])
    assert d.finished == {"d-a": FinishReason.STOP}
    assert "d-a" not in d.handed_over
    d.end(second)
    d.step()
    assert not d.told.offered
    assert d.is_through()


@every_mode
def test_state_of_a_turn_goes_to_and_fro(serving, mode):
    """A decode engine offers the state after its answer; a prefill engine goes on from there."""
    d = serving(state=STATES[mode], bidirectional_kv_xfer=True)
    d.add("d-a", from_prefill(**REMOTE), max_tokens=2)
    d.step()
    d.step(received=["d-a"])
    run(d, "d-a")
    params = d.handed_over["d-a"]
    assert params["remote_num_tokens"] == PROMPT_TOKENS + 1
    assert [len(ids) for ids in params["remote_block_ids"]] == [3, 1]
    p = serving(state=STATES[mode], bidirectional_kv_xfer=True, kv_recompute_threshold=8)
    p.add("p-a", from_decode(remote_num_tokens=33, remote_block_ids=[[5, 2, 9], [4]]))
    p.step()
    (receive,) = p.told.receive.values()
    assert (receive.local_tokens, receive.remote_tokens) == (33, 33)
    assert [len(ids) for ids in receive.local_block_ids] == [3, 1]
