# SPDX-License-Identifier: Apache-2.0
"""Clients note down what became of each request, whatever that is."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing

import httpx
import pytest

from tests.tools.pdstack.helpers import wait_until
from tests.tools.soak.fake_server import answer_to
from tools.pdstack.ports import HOST, PortAllocator
from tools.soak import references
from tools.soak.checker import check
from tools.soak.clients import Clients, PrefillError, Server, Terms, coordinates_of
from tools.soak.history import Recorder
from tools.soak.workload import Ask, Manner, Turn, conversations

MESSAGES = (("system", "opening"), ("user", "question"))
TOKENS = 20
TURN = Turn(
    MESSAGES,
    TOKENS,
    answer_to({"messages": [{"content": text} for _, text in MESSAGES], "max_tokens": TOKENS}),
)
SOON_S = 60.0


@pytest.fixture
def recorder() -> Recorder:
    """A history that is being written."""
    return Recorder()


@pytest.fixture
def clients(recorder: Recorder) -> Iterator[Clients]:
    """Clients that can ask one thing."""
    with Clients("model", (TURN,), recorder, deadline_s=SOON_S) as clients:
        yield clients


@pytest.fixture
def silent() -> Iterator[Server]:
    """A server that takes connections and never says a word."""
    with closing(socket.create_server((HOST, 0))) as listener:
        yield Server("silent", f"http://{HOST}:{listener.getsockname()[1]}")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_answers", [1, 3])
def test_answers_are_noted_down(clients, engine, recorder, stream, num_answers):
    """Whole or as a stream, one or several: all of them are right."""
    ask = Ask(Manner.TURN, 0, num_answers=num_answers, stream=stream)
    request = clients.ask(engine, ask, Terms(SOON_S, label="here")).result(SOON_S)
    assert request.answered and request.status == 200
    assert request.answers == (TURN.answer,) * num_answers
    assert (request.asked, request.label) == ("engine", "here")
    assert recorder.history.requests == [request]
    assert check(recorder.history, [TURN.answer]) == []


def test_client_that_vanishes_has_seen_the_beginning(clients, engine):
    """It leaves in the middle of a stream."""
    ask = Ask(Manner.VANISH, 0, stream=True, leaves_after_tokens=3)
    request = clients.ask(engine, ask, Terms(SOON_S)).result(SOON_S)
    assert (request.left, request.complete, request.gave_up) == (True, False, False)
    assert request.answers == (TURN.answer[:3],)


def test_client_that_aborts_leaves_in_time(clients, silent):
    """It does not wait for an answer, and that is no fault of the server's."""
    ask = Ask(Manner.ABORT, 0, leaves_after_s=0.1)
    request = clients.ask(silent, ask, Terms(SOON_S)).result(SOON_S)
    assert (request.left, request.gave_up, request.status) == (True, False, None)


def test_patience_ends(clients, silent, recorder):
    """A request that never ends is noted down as such, and violates its deadline."""
    request = clients.ask(silent, Ask(Manner.TURN, 0), Terms(0.2, strict=True)).result(SOON_S)
    assert request.gave_up and not request.left
    (violation,) = check(recorder.history, [TURN.answer])
    assert violation.subject == "silent"


def test_lost_connection_is_no_answer(clients):
    """Nobody listens there; the request has ended all the same."""
    nobody = Server("nobody", f"http://{HOST}:{PortAllocator().take()}")
    request = clients.ask(nobody, Ask(Manner.TURN, 0), Terms(SOON_S)).result(SOON_S)
    assert request.status is None and request.error
    assert not request.gave_up


def test_load_goes_on_until_it_is_paused(clients, engine, recorder):
    """Requests of all clients come and end; in a lull none is in flight, and none begins."""
    clients.start_load(lambda: engine, seed=1, count=3)
    assert clients.in_flight == 0
    clients.resume()
    wait_until(lambda: len(recorder.history.requests) > 10, "requests of the load")
    clients.pause()
    wait_until(lambda: not clients.in_flight, "the end of what is in flight")
    requests = list(recorder.history.requests)
    assert clients.ask(engine, Ask(Manner.PROBE, 0), Terms(SOON_S)).result(SOON_S).answered
    assert [each for each in recorder.history.requests if each not in requests] == [
        recorder.history.requests[-1]
    ]
    assert check(recorder.history, [TURN.answer]) == []


def test_client_of_the_load_that_ends_is_told(clients):
    """A soak without load would find nothing, and must not look as if all were well."""

    def no_server() -> Server:
        raise LookupError("nobody is there")

    clients.start_load(no_server, seed=1, count=1)
    clients.resume()

    def told() -> bool:
        try:
            clients.pause()
        except LookupError:
            return True
        clients.resume()
        return False

    wait_until(told, "the end of the client")


def test_prompt_is_prefilled(clients, engine):
    """What the engine returns is for another one to read; nobody else is told."""
    params = clients.prefill(engine, Ask(Manner.PROBE, 0), SOON_S)
    assert params["remote_block_ids"] == [[1, 2]]


def test_engine_that_cannot_prefill_is_told(clients):
    """The message names it, and what went wrong."""
    nobody = Server("nobody", f"http://{HOST}:{PortAllocator().take()}")
    with pytest.raises(PrefillError, match="nobody did not prefill: ConnectError"):
        clients.prefill(nobody, Ask(Manner.PROBE, 0), SOON_S)


def test_clients_end_with_what_is_in_flight(silent, recorder):
    """Whoever closes them waits for nobody, and may close them again."""
    with Clients("model", (TURN,), recorder, deadline_s=SOON_S) as clients:
        future = clients.ask(silent, Ask(Manner.TURN, 0), Terms(SOON_S))
        wait_until(lambda: clients.in_flight == 1, "the request")
    clients.close()
    assert future.cancelled()
    assert recorder.history.requests == []


def test_references_are_one_engines_answers(engine):
    """Each turn holds what was said before it, the engine's own answers included."""
    planned = conversations(3, 4)
    turns = references.answer_all(engine.url, "model", planned)
    assert len(turns) == 12
    second = turns[1]
    assert [role for role, _ in second.messages] == ["system", "user", "assistant", "user"]
    assert second.messages[2] == ("assistant", turns[0].answer)


def test_unclear_answers_are_not_asked_for():
    """The least clear token of an answer counts."""
    tokens = [[-0.1, -3.0], [-0.7, -0.701], [-9.0, -0.2]]
    content = [{"top_logprobs": [{"logprob": each} for each in token]} for token in tokens]
    margin = references.margin_of({"logprobs": {"content": content}})
    assert margin == pytest.approx(0.001)
    assert margin < references.CLEAR_MARGIN


def test_both_engines_are_asked_under_one_name(clients, engine, recorder):
    """As by a router: the decode engine is told where the other one is, and of which request."""
    params = clients.prefill(engine, Ask(Manner.PROBE, 0), SOON_S)
    coordinates = coordinates_of(params)
    assert set(coordinates) == set(params) - {"remote_block_ids", "remote_request_id"}
    early = clients.ask_early(engine, engine, Ask(Manner.EARLY, 0), Terms(SOON_S), coordinates)
    assert early.prefill.result(SOON_S) is True
    assert early.decode.result(SOON_S).answered
    seen = httpx.get(f"{engine.url}/seen", trust_env=False).json()
    asked = {bool(each["params"].get("do_remote_decode")): each for each in seen[-2:]}
    router_id = asked[True]["request_id"]
    assert router_id and router_id == asked[False]["request_id"]
    assert asked[False]["params"] == {**coordinates, "remote_request_id": router_id}


def test_prefill_engine_that_is_gone_has_not_answered(clients, engine):
    """The decode engine is asked all the same."""
    gone = Server("gone", f"http://{HOST}:{PortAllocator().take()}")
    early = clients.ask_early(gone, engine, Ask(Manner.EARLY, 0), Terms(SOON_S), {})
    assert early.prefill.result(SOON_S) is False
    assert early.decode.result(SOON_S).answered


def test_engine_is_occupied_for_as_long_as_is_wanted(clients, silent, recorder):
    """Nothing is noted down of that, and nothing is left of it."""
    with clients.occupied(silent, 3):
        wait_until(lambda: clients.num_occupying == 3, "what occupies it")
    wait_until(lambda: not clients.num_occupying, "the end of that")
    assert recorder.history.requests == [] and not clients.in_flight
