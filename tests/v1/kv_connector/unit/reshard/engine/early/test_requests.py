# SPDX-License-Identifier: Apache-2.0
"""When a worker looks at other engines' boards, and what becomes of looks."""

from __future__ import annotations

import logging
import re

import pytest

from tests.v1.kv_connector.unit.reshard.engine.boards import Connection, Peers
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.connecting.peers import Peer
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.early.abandoned_reads import (
    BOARD_READ_LIMIT_S,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.early.requests import (
    EarlyRequests,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.early.watched_engine import (
    LOOK_REQUESTS,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import RemoteEngineChangedError
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.board import (
    Board,
    BoardUpdate,
    Record,
    State,
    encode_record,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.fingerprint import fingerprint
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    Receive,
    RemoteEngineAddress,
    RemoteRequest,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.states import ReadState

ADDRESS = RemoteEngineAddress("prefill", "10.0.0.1", 5600)
NUM_TOKENS, BLOCKS = 64, [[3, 1]]


class Watched:
    """An engine that computes prompts of the same length, and a worker that waits for them."""

    def __init__(self) -> None:
        self.peers, self.board, self.waits = Peers(), Board(ADDRESS.engine_id), []
        self.early = EarlyRequests(self.peers, self.waits.append)
        self.reader.board, self.reader.lands = self.board, True
        self.now_s = 0.0
        self.number = 0

    @property
    def reader(self):
        """What its board is read with."""
        return self.peers.connections.setdefault(ADDRESS, Connection()).reader

    def post(self, name: str, state: State) -> None:
        """The engine goes on with a request."""
        self.number += 1
        record = b""
        if state is State.OFFERED:
            record = encode_record(Record.of(f"p-{name}", NUM_TOKENS, BLOCKS))
        self.board.tell([BoardUpdate(self.number, name, state, f"p-{name}", record)])

    def wait(self, name: str) -> None:
        """Another one does, too, and has blocks for it."""
        self.early.begin({name: RemoteRequest(ADDRESS, name)}, self.now_s)
        self.until(lambda: name in self.early.take_news().may_have_blocks)
        bound = fingerprint(range(NUM_TOKENS), NUM_TOKENS, None, [])
        receive = Receive(ADDRESS, name, [[7, 8]], [], NUM_TOKENS, NUM_TOKENS, bound, is_early=True)
        self.early.take_over(name, receive)

    def until(self, is_so) -> None:
        """Turns, each when it is due, and looks that land at once."""
        for _ in range(10_000):
            self.early.advance(self.now_s)
            if is_so():
                return
            due_s = self.now_s if self.early.is_looking else self.early.next_due_s
            self.now_s = max(self.now_s + 1e-4, due_s)
        pytest.fail("nothing comes")

    def compute(self, name: str, took_s: float) -> float:
        """Have a prompt computed in that time; returns how late its offer was seen."""
        self.post(name, State.LAST_CHUNK)
        self.wait(name)
        offered_s = self.now_s + took_s
        self.until(lambda: self.now_s >= offered_s)
        self.post(name, State.OFFERED)
        self.until(lambda: self.early.ready)
        (offered,) = self.early.ready
        self.early.ready.clear()
        assert offered.request_id == name and offered.receive.remote_block_ids == BLOCKS
        return self.now_s - offered_s


def with_a_look_that_hangs(name: str) -> Watched:
    """A worker that looks at a request's last chunk, which takes for ever."""
    watched = Watched()
    watched.post(name, State.LAST_CHUNK)
    watched.wait(name)
    watched.reader.lands = False
    watched.until(lambda: watched.early.is_looking)
    return watched


@pytest.mark.parametrize("took_s", [0.03, 0.1, 0.3, 3.0])
def test_offer_is_seen_soon_with_few_looks(took_s):
    """It is seen late by a fiftieth of its last chunk, or 10 ms, and by the look under way."""
    watched = Watched()
    watched.compute("first", 1.0)
    looks = watched.reader.num_posted
    assert watched.compute("next", took_s) < min(max(0.02 * took_s, 1e-3), 10e-3) + 1e-3
    # 50 in the first 50 ms, 115 until half a second, and one each 10 ms: and one for the record.
    assert watched.reader.num_posted - looks < min(1e3 * took_s, 165 + 100 * took_s) + 5
    assert watched.waits and max(watched.waits) < took_s + 1.1


def test_look_that_hangs_while_its_engine_restarts_is_not_forgotten():
    """Its engine is gone, and its connection with it: nobody else would miss that look."""
    watched = with_a_look_that_hangs("x")
    gone = watched.peers.connections.pop(ADDRESS)
    error = RemoteEngineChangedError("another one is there", "next")
    watched.early.on_handshake_failed(Peer(ADDRESS, 0.0), error)
    ((request_id, *_),) = watched.early.refused
    watched.early.refused.clear()
    assert request_id == "x" and not len(watched.early)
    watched.until(lambda: watched.peers.broken_off or watched.now_s > 2 * BOARD_READ_LIMIT_S)
    assert watched.peers.broken_off == [gone]


def test_all_are_looked_at_where_one_look_has_no_room_for_them():
    """Those that were left out are first the next time."""
    watched = Watched()
    watched.reader.num_free = 2
    for name in "abcde":
        watched.post(name, State.LAST_CHUNK)
        watched.wait(name)
    watched.post("e", State.OFFERED)
    watched.until(lambda: watched.early.ready)
    assert watched.early.ready[0][0] == "e"


def test_look_is_bounded_however_many_wait():
    """A thread that goes through all of them at once is kept from reads."""
    watched = Watched()
    names = [f"x{number}" for number in range(2 * LOOK_REQUESTS + 1)]
    for name in names:
        watched.post(name, State.KNOWN)
    requests = {name: RemoteRequest(ADDRESS, name) for name in names}
    watched.early.begin(requests, watched.now_s)
    for name in names:
        watched.post(name, State.LAST_CHUNK)
    told: set[str] = set()

    def all_are_told() -> bool:
        told.update(watched.early.take_news().may_have_blocks)
        return told == set(names)

    watched.until(all_are_told)
    assert watched.reader.num_posted == 3


def test_offer_that_cannot_be_understood_ends_the_wait():
    """As of a producer whose names are longer than a record may say."""
    watched = Watched()
    watched.post("x", State.LAST_CHUNK)
    watched.wait("x")
    record = encode_record(Record.of("p" * 2000, NUM_TOKENS, BLOCKS))
    watched.board.tell([BoardUpdate(9, "x", State.OFFERED, "p", record)])
    watched.until(lambda: watched.early.refused)
    ((request_id, _, reason, *_),) = watched.early.refused
    assert request_id == "x" and "cannot be understood" in reason


def test_blocks_that_come_for_a_request_that_is_not_waited_for():
    """It fails: nobody else would tell of it."""
    watched = Watched()
    receive = Receive(ADDRESS, "x", [[7, 8]], [], NUM_TOKENS, NUM_TOKENS, None, is_early=True)
    watched.early.take_over("x", receive)
    ((request_id, *_),) = watched.early.refused
    assert request_id == "x"


def test_time_in_which_nobody_could_look_is_no_time():
    """A look that was under way meanwhile has all of its time left."""
    watched = with_a_look_that_hangs("x")
    watched.now_s += 2 * BOARD_READ_LIMIT_S
    watched.early.stood_still(2 * BOARD_READ_LIMIT_S)
    watched.early.advance(watched.now_s)
    assert not watched.peers.broken_off
    watched.now_s += BOARD_READ_LIMIT_S
    watched.early.advance(watched.now_s)
    assert watched.peers.broken_off


def test_engine_that_cannot_be_looked_at_is_asked_anew_at_once():
    """Nobody else may want it, and the thread would sleep."""
    watched = Watched()
    watched.post("x", State.LAST_CHUNK)
    watched.wait("x")
    watched.until(lambda: watched.early.is_looking)
    num_asked, watched.reader.fails = watched.peers.num_asked, True
    watched.early.advance(watched.now_s)
    assert watched.peers.broken_off and watched.peers.num_asked == num_asked + 1
    watched.reader.fails = False
    watched.post("x", State.OFFERED)
    watched.until(lambda: watched.early.ready)


def test_offer_counts_from_when_it_was_seen():
    """Not from when the scheduler had blocks for it: what that takes is waited for as well."""
    watched = Watched()
    watched.early.begin({"x": RemoteRequest(ADDRESS, "x")}, watched.now_s)
    watched.post("x", State.OFFERED)
    watched.until(watched.early.take_renewed)
    seen_s = watched.now_s
    watched.until(lambda: watched.now_s >= seen_s + 0.5)
    receive = Receive(ADDRESS, "x", [[7, 8]], [], 20, 20, None, is_early=True)
    watched.early.take_over("x", receive)
    (offered,) = watched.early.ready
    assert offered.offered_at_s == seen_s


def with_blocks(watched: Watched, name: str, num_tokens: int) -> None:
    """A request that has blocks, of which nothing is known yet."""
    watched.early.begin({name: RemoteRequest(ADDRESS, name)}, watched.now_s)
    receive = Receive(ADDRESS, name, [[7, 8]], [], num_tokens, num_tokens, None, is_early=True)
    watched.early.take_over(name, receive)


def test_what_is_computed_is_handed_on_in_some_parts():
    """However often another engine says that there is more: each is a record to be read."""
    watched = Watched()
    with_blocks(watched, "x", 6400)
    parts = []
    for num_tokens in range(1, 6400, 10):
        record = encode_record(Record.of("p-x", num_tokens, [[1]], attempt=3))
        watched.number += 1
        watched.board.tell(
            [BoardUpdate(watched.number, "x", State.KNOWN, "p-x", record, num_computed=num_tokens)]
        )
        looks = watched.reader.num_taken
        watched.until(lambda looks=looks: watched.reader.num_taken >= looks + 2)
        parts += watched.early.computed
        watched.early.computed.clear()
    assert 50 < len(parts) <= 64
    assert {each.request_id for each in parts} == {"x"}
    tokens = [each.part.remote_tokens for each in parts]
    assert tokens == sorted(tokens) and tokens[0] >= 100
    assert all(each.part.attempt == 3 and not each.part.is_early for each in parts)


def test_refused_request_tells_where_it_was_and_for_how_long():
    """Not since when its failure is taken note of."""
    watched = Watched()
    watched.early.begin({"x": RemoteRequest(ADDRESS, "x")}, 0.0)
    receive = Receive(ADDRESS, "x", [[7, 8]], [], NUM_TOKENS, NUM_TOKENS, None, is_early=True)
    watched.early.take_over("x", receive)
    watched.until(lambda: watched.early.refused)
    (refusal,) = watched.early.refused
    assert "was not known there within 10 s" in refusal.reason
    assert (refusal.state, refusal.since_s) == (ReadState.AWAITING_PREFILL, 0.0)
    assert watched.now_s >= 10.0


@pytest.mark.parametrize("has_blocks", [True, False])
def test_refused_request_tells_since_when_its_last_chunk_was_computed(has_blocks):
    """Whether it has blocks by then, or is given some to fail in."""
    watched = Watched()
    watched.early.begin({"x": RemoteRequest(ADDRESS, "x")}, 0.0)
    watched.until(lambda: watched.now_s >= 1.0)
    watched.post("x", State.LAST_CHUNK)
    watched.until(lambda: watched.early.take_news().may_have_blocks)
    seen_s = watched.now_s
    receive = Receive(ADDRESS, "x", [[7, 8]], [], NUM_TOKENS, NUM_TOKENS, None, is_early=True)
    if has_blocks:
        watched.early.take_over("x", receive)
    watched.post("x", State.ABORTED)
    watched.until(lambda: watched.early.refused or watched.early.take_news().faults)
    if not has_blocks:
        watched.early.take_over("x", receive)
    (refusal,) = watched.early.refused
    assert refusal.reason == State.ABORTED.fault
    assert refusal.state is ReadState.IN_LAST_CHUNK
    assert 1.0 <= refusal.since_s <= seen_s


def test_log_tells_how_far_a_request_is(caplog_vllm):
    """Each turn once: its name there, the state, the engine, and how long it was in the last."""
    caplog_vllm.set_level(logging.DEBUG, "vllm")
    watched = Watched()
    watched.compute("x", 1.0)
    lines = [each.message for each in caplog_vllm.records if "Request x" in each.message]
    assert [re.sub(r"\d+\.\d ms", "… ms", line) for line in lines] == [
        "Request x: waiting for its prefill at engine prefill, which knows it as x.",
        "Request x: having its last chunk computed at engine prefill, after … ms of waiting for "
        "its prefill.",
        "Request x: offered at engine prefill, after … ms of having its last chunk computed.",
    ]
    assert 1000 <= float(re.search(r"after (.*) ms", lines[-1])[1]) < 1012


def test_log_tells_why_a_request_will_not_be_offered(caplog_vllm):
    """Though the engine that reads it has no blocks for it, and no line of its own."""
    caplog_vllm.set_level(logging.DEBUG, "vllm")
    watched = Watched()
    watched.early.begin({"x": RemoteRequest(ADDRESS, "x")}, 0.0)
    watched.until(lambda: watched.early.take_news().faults)
    assert re.search(
        r"Request x will not be offered by engine prefill, after 10\d{3}\.\d ms of waiting for "
        r"its prefill: it was not known there within 10 s",
        caplog_vllm.text,
    )
