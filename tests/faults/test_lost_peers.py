# SPDX-License-Identifier: Apache-2.0
"""Engines and routers that end, cannot be found or never come back cost their requests only."""

from __future__ import annotations

import dataclasses
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import SimpleQueue

import httpx
import pytest

from tests.e2e.pairs import ask_unaided, metric
from tests.faults.logs import Log
from tests.faults.stage import (
    HANDSHAKE_LIMIT_S,
    SLACK_S,
    Params,
    Stage,
    answer_of,
    assert_failed,
    kill,
    post,
    spec,
    stopped,
)
from tests.faults.table import read_rows
from tests.tools.pdstack.helpers import wait_until
from tools.pdstack.errors import ProcessDiedError
from tools.pdstack.ports import HOST, PortAllocator
from tools.pdstack.stack import Engine, PDStack

pytestmark = pytest.mark.e2e

ROWS = read_rows()
NIXLS_OWN = "nixl_agent.cpp"
"""What NIXL writes past the logger of vLLM about a peer that is gone."""


def wait_for_reads(*engines: Engine) -> None:
    """Wait until each of some idle engines reads the blocks of a request."""
    # What waits was given to the workers in the same step, and nothing else is asked of them.
    for engine in engines:
        wait_until(
            lambda engine=engine: metric(engine, "vllm:num_requests_waiting") == 1.0,
            f"a read by {engine.name}",
            SLACK_S,
        )


@contextmanager
def silent_listener() -> Iterator[int]:
    """Accept connections and never say a word; yields the port."""
    with socket.create_server((HOST, 0)) as listener:
        yield listener.getsockname()[1]


@contextmanager
def full_listener() -> Iterator[int]:
    """Answer no connection, as a host does that cannot be reached; yields the port.

    Linux drops what comes while as many wait to be accepted as may. An address of no host's would
    be refused at once by some networks.
    """
    with socket.create_server((HOST, 0), backlog=0) as listener:
        address = listener.getsockname()
        with socket.create_connection(address):
            yield address[1]


@pytest.fixture(scope="module")
def abandoned() -> dict[str, tuple[str, str]]:
    """By the fault, what the client saw, and the request whose blocks are left to their lease."""
    return {}


def test_request_that_a_router_drops_gives_its_blocks_back(
    stage: Stage, abandoned: dict[str, tuple[str, str]]
) -> None:
    """No decode engine ever hears of it; its blocks are held for the lease, and then free."""
    params = stage.prefilled(stage.text())
    stage.abandoned += 1
    wait_until(stage.holds_blocks, "the report of blocks that are held", SLACK_S)
    abandoned["the router drops a request"] = "nothing", params["remote_request_id"]


@contextmanager
def decode_engine_that_never_answers() -> Iterator[tuple[str, SimpleQueue[Params]]]:
    """Be healthy, and take requests; yields the base URL, and the parameters of each request."""
    asked: SimpleQueue[Params] = SimpleQueue()
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *values: object) -> None:
            """Say nothing."""

        def do_GET(self) -> None:
            """Be healthy."""
            self.send_response(200)
            self.end_headers()

        def do_POST(self) -> None:
            """Never answer."""
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.put(body["kv_transfer_params"])
            over.wait()

    with ThreadingHTTPServer((HOST, 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://{HOST}:{server.server_port}", asked
        finally:
            over.set()
            server.shutdown()
            thread.join()


def test_router_that_is_killed_between_its_engines(
    stage: Stage, abandoned: dict[str, tuple[str, str]]
) -> None:
    """The client loses its connection; the prefill engine's blocks are free after the lease."""
    with decode_engine_that_never_answers() as (url, asked):
        decode = dataclasses.replace(stage.decode, port=int(url.rpartition(":")[2]))
        router = stage.stack.start_router([stage.prefill], [decode])
        reply = stage.in_background(post, router, stage.model, stage.text())
        params = asked.get(timeout=SLACK_S)
        stage.abandoned += 1
        kill(router)
        stage.stack.stop(router)
        with pytest.raises(httpx.TransportError):
            reply.result(SLACK_S)
    abandoned["the router is killed"] = "connection lost", params["remote_request_id"]


def test_wrong_addresses_cost_their_requests_only(stage: Stage) -> None:
    """They fail in bounded time, others are served meanwhile, and each is told in one line."""
    log, recomputing_log = (Log(each) for each in (stage.decode, stage.recomputing))
    with silent_listener() as silent_port, full_listener() as full_port:
        nobody = {"remote_port": PortAllocator().take()}
        wrong = {
            "nothing listens at the port": nobody,
            "something else listens at the port": {"remote_port": silent_port},
            "a host that cannot be reached": {"remote_port": full_port},
            "a host without an address": {"remote_host": "no-such-host.invalid"},
        }
        requests = {}
        for fault, changes in wrong.items():
            text = stage.text()
            requests[fault] = text, {**stage.prefilled(text), **changes}
        text = stage.text()
        right = stage.right_answer(text)
        params = {**stage.prefilled(text), **nobody}
        stage.abandoned += len(wrong) + 1
        replies = [stage.being_decoded(*request) for request in requests.values()]
        recomputed = stage.being_decoded(text, params, stage.recomputing)
        stage.assert_serving()
        # Those that are refused, or have no address, are known to lead nowhere.
        refused, *silent, nameless = replies
        assert not any(reply.done() for reply in silent)
        for reply, limit_s in (refused, 0.0), *((each, HANDSHAKE_LIMIT_S) for each in silent):
            assert_failed(reply.result())
            assert reply.result().elapsed.total_seconds() < limit_s + SLACK_S
        assert_failed(nameless.result())
        assert answer_of(recomputed.result()) == right
        # Nothing is told twice.
        stage.assert_blocks_come_back()
    lines = log.complaints()
    assert len(lines) == len(wrong), lines
    for fault, (_, params) in requests.items():
        address = "{remote_host}:{remote_port}".format(**params)
        (line,) = (each for each in lines if f" at {address} failed" in each)
        assert ROWS[fault].tells("500", line, "lease"), line
    (line,) = recomputing_log.complaints()
    assert ROWS["nothing listens at the port"].matches(line)


def test_blocks_of_all_these_requests_come_back(
    stage: Stage, abandoned: dict[str, tuple[str, str]]
) -> None:
    """Each lease that ran out is told in one line."""
    stage.assert_blocks_come_back()
    for fault, (client, request_id) in abandoned.items():
        (line,) = stage.prefill_log.find(request_id)
        assert ROWS[fault].tells(client, line, "lease"), line


@pytest.mark.nightly
def test_taken_port_is_refused_at_the_start(stage: Stage, tmp_path: Path) -> None:
    """A second engine with the side channel of a running one ends, and says why in one line."""
    taken = stage.prefill.spec.side_channel_port
    second = dataclasses.replace(spec("second"), side_channel_port=taken)
    with pytest.raises(ProcessDiedError) as caught, PDStack(stage.stack.model, tmp_path) as stack:
        stack.start_engines(second)
    _, _, line = caught.value.cause.partition("LocalChannelError: ")
    assert ROWS["the side channel's port is taken"].tells(
        "the engine does not start", line, "none"
    ), caught.value.cause


def test_decode_engine_that_is_killed_during_a_read(stage: Stage) -> None:
    """The client loses its connection, the prefill engine frees the blocks, a new one serves."""
    text = stage.text()
    log = Log(stage.prefill)
    params = stage.prefilled(text)
    with stopped(stage.prefill):
        reply = stage.being_decoded(text, params)
        wait_for_reads(stage.decode)
        assert not reply.done()
        kill(stage.decode)
    stage.abandoned += 1
    with pytest.raises(httpx.TransportError):
        reply.result(SLACK_S)
    assert ask_unaided(stage.prefill, stage.model, text)
    # Most of a lease is over when it has started.
    stage.restart_decode()
    stage.assert_blocks_come_back()
    (line,) = log.complaints()
    assert ROWS["the decode engine is killed during a read"].tells(
        "connection lost", line, "lease"
    ), line


def test_prefill_engine_that_is_killed_during_a_read_and_restarts(stage: Stage) -> None:
    """Requests fail or are computed, also with the old parameters; new ones are read again."""
    texts = [stage.text(), stage.text()]
    readers = [stage.decode, stage.recomputing]
    right = [stage.right_answer(text) for text in texts]
    stage.connect(stage.recomputing)
    params = [stage.prefilled(text) for text in texts]
    logs = [Log(each) for each in readers]
    replies: list[Future[httpx.Response]] = []
    with ExitStack() as until_killed:
        until_killed.enter_context(stopped(stage.prefill))
        for text, each, reader in zip(texts, params, readers, strict=True):
            replies.append(stage.being_decoded(text, each, reader))
        wait_for_reads(*readers)
        # Only the one without an address is known to lead nowhere.
        assert not any(reply.done() for reply in replies[:-1])
        kill(stage.prefill)
    failed, recomputed = (reply.result(SLACK_S) for reply in replies)
    told = [log.complaints(but=NIXLS_OWN) for log in logs]
    # Before anything is asserted: the tests after this one have the same engines.
    stage.restart_prefill()
    assert_failed(failed)
    assert answer_of(recomputed) == right[1]
    lost = ROWS["the prefill engine is killed during a read"]
    retried = ROWS["nothing listens at the port"]
    for (line,) in told:
        # Where NIXL has given up all reads of a request at once, it tries a new connection.
        assert lost.tells("500", line, "lost") or retried.matches(line), line

    logs = [Log(each) for each in readers]
    failed, recomputed = (
        stage.decoded(text, each, reader)
        for text, each, reader in zip(texts, params, readers, strict=True)
    )
    assert_failed(failed)
    assert answer_of(recomputed) == right[1]
    for log in logs:
        (line,) = log.complaints(but=NIXLS_OWN)
        assert ROWS["the prefill engine has restarted"].tells("500", line, "lost"), line
