# SPDX-License-Identifier: Apache-2.0
"""Engines that cannot read from one another say so, and lose nothing but the request."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest
import zmq

from tests.e2e.pairs import ask_unaided, post
from tests.faults.logs import Log
from tests.faults.stage import LEASE_RAN_OUT, Stage, assert_failed, spec
from tests.faults.table import read_rows
from tools.pdstack.cpu import why_no_fp8_cache
from tools.pdstack.engine import ServedModel
from tools.pdstack.ports import HOST
from tools.pdstack.stack import Engine, PDStack
from tools.pdstack.tiny_models import write_tiny_llama
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.compatibility import SPOKEN

pytestmark = pytest.mark.e2e

Stranger = Callable[[str], Engine]

ROWS = read_rows()
OTHER_VERSION = SPOKEN.newest + 1
# The one other dtype that a cache can have on CPU beside the model's own.
NO_FP8_CACHE = why_no_fp8_cache()
ANOTHER_MODEL, UPSTREAMS = "another model", "upstream's connector"
DIFFERS = {
    ANOTHER_MODEL: spec("other-model"),
    "a block size that does not fit": spec("block-size", "--block-size", "64"),
    UPSTREAMS: spec("upstream", module_path="vllm.distributed.kv_transfer.kv_connector.v1.nixl"),
    "another dtype": spec("dtype", "--dtype", "bfloat16"),
    "another KV-cache dtype": spec("kv-cache-dtype", "--kv-cache-dtype", "fp8"),
}


@pytest.fixture(scope="module")
def stranger_of(stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stranger]:
    """Starts an engine that differs from the healthy ones when its fault is first acted out."""
    other = write_tiny_llama(
        tmp_path_factory.mktemp("tiny") / "other", num_layers=3, num_kv_heads=4, seed=1
    )
    run = tmp_path_factory.mktemp("strangers")
    started: dict[str, Engine] = {}
    # Clients and routers know it by the same name.
    others = PDStack(ServedModel(other.directory, stage.model), run)
    with PDStack(stage.stack.model, run) as stack, others:

        def start(fault: str) -> Engine:
            if fault not in started:
                owner = others if fault == ANOTHER_MODEL else stack
                (started[fault],) = owner.start_engines(DIFFERS[fault])
            return started[fault]

        yield start


@pytest.mark.parametrize(
    "fault",
    [
        ANOTHER_MODEL,
        # What is compared before, and in one place with the model.
        pytest.param("a block size that does not fit", marks=pytest.mark.nightly),
        pytest.param("another dtype", marks=pytest.mark.nightly),
        pytest.param(
            "another KV-cache dtype",
            marks=[
                pytest.mark.nightly,
                pytest.mark.skipif(bool(NO_FP8_CACHE), reason=NO_FP8_CACHE),
            ],
        ),
    ],
)
def test_decode_engine_that_does_not_match_is_refused(
    stage: Stage, stranger_of: Stranger, fault: str
) -> None:
    """Its client gets an error, its log one line with the remedy, and it goes on by itself."""
    stranger, text = stranger_of(fault), stage.text()
    logs = [Log(each) for each in (stranger, stage.prefill)]
    with stage.router_to(stage.prefill, stranger) as router:
        assert_failed(post(router, stage.model, text))
    stage.abandoned += 1
    (line,), nothing = (log.complaints(but=LEASE_RAN_OUT) for log in logs)
    assert ROWS[fault].tells("500", line, "lease"), line
    assert nothing == []
    assert ask_unaided(stranger, stage.model, text)
    stage.assert_blocks_are_free(stranger)


@pytest.mark.nightly
def test_upstreams_connector_cannot_read_from_ours(stage: Stage, stranger_of: Stranger) -> None:
    """Its client gets an error, and our log one line; what it says itself quotes us."""
    stranger, text = stranger_of(UPSTREAMS), stage.text()
    theirs, ours = (Log(each) for each in (stranger, stage.prefill))
    with stage.router_to(stage.prefill, stranger) as router:
        assert_failed(post(router, stage.model, text))
    stage.abandoned += 1
    (line,) = ours.complaints(but=LEASE_RAN_OUT)
    assert ROWS["upstream's connector reads from this one"].tells("500", line, "lease"), line
    assert theirs.find("the one that asks does: install the plugin vllm-kv-reshard")
    assert ask_unaided(stranger, stage.model, text)


@pytest.mark.nightly
def test_ours_cannot_read_from_upstreams_connector(stage: Stage, stranger_of: Stranger) -> None:
    """The client gets an error, the log one line with the remedy, and the other engine lives."""
    stranger, text = stranger_of(UPSTREAMS), stage.text()
    theirs, log = (Log(each) for each in (stranger, stage.decode))
    with stage.router_to(stranger, stage.decode) as router:
        assert_failed(post(router, stage.model, text))
    (line,) = log.complaints()
    assert ROWS["this connector reads from upstream's"].tells("500", line, "lease"), line
    assert theirs.find("which runs upstream's NixlConnector: install the plugin vllm-kv-reshard")
    assert ask_unaided(stranger, stage.model, text)


@contextmanager
def side_channel_of_another_version() -> Iterator[int]:
    """Answer handshakes as a later version of the connector does; yields the port."""
    refusal = f"request reshard/{SPOKEN.newest} is unknown, reshard/{OTHER_VERSION} is not"
    says = {"connector": "reshard", "version": OTHER_VERSION, "refusal": refusal}
    context = zmq.Context()
    listener = context.socket(zmq.REP)
    port = listener.bind_to_random_port(f"tcp://{HOST}")
    over = threading.Event()

    def serve() -> None:
        while not over.is_set():
            if listener.poll(100):
                listener.recv()
                listener.send(msgspec.msgpack.encode(says))
        listener.close(linger=0)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield port
    finally:
        over.set()
        thread.join()
        context.term()


def test_another_version_is_not_read_from(stage: Stage) -> None:
    """The client gets an error, and the log one line that names both versions."""
    text = stage.text()
    params = stage.prefilled(text)
    stage.abandoned += 1
    log = Log(stage.decode)
    with side_channel_of_another_version() as port:
        assert_failed(stage.decoded(text, {**params, "remote_port": port}))
    (line,) = log.complaints()
    assert ROWS["another version of the connector"].tells("500", line, "lease"), line


def test_another_version_that_reads_is_refused(stage: Stage) -> None:
    """It is told what this engine speaks, and the log has one line."""
    params = stage.prefilled(stage.text())
    stage.abandoned += 1
    log = Log(stage.prefill)
    with zmq.Context() as context, context.socket(zmq.REQ) as client:
        client.linger = 0
        client.connect(f"tcp://{HOST}:{params['remote_port']}")
        client.send(msgspec.msgpack.encode((f"reshard/{OTHER_VERSION}".encode(), 0)))
        assert client.poll(10_000)
        reply = msgspec.msgpack.decode(client.recv())
    assert (reply["connector"], reply["version"]) == ("reshard", SPOKEN.newest)
    known = str(SPOKEN)
    assert reply["refusal"] == f"request reshard/{OTHER_VERSION} is unknown, {known} is not"
    (line,) = log.complaints(but=LEASE_RAN_OUT)
    assert ROWS["another version of the connector reads from this one"].tells(
        "500", line, "lease"
    ), line
