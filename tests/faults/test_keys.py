# SPDX-License-Identifier: Apache-2.0
"""Engines that know one another by a key read from each other, and nobody else learns anything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import zmq

from tests.e2e.pairs import ask, ask_unaided, post
from tests.faults.logs import Log
from tests.faults.stage import (
    HANDSHAKE_LIMIT_S,
    LEASE_RAN_OUT,
    SLACK_S,
    Params,
    Stage,
    assert_failed,
    spec,
)
from tests.faults.table import read_rows
from tests.tools.pdstack.helpers import wait_until
from tools.pdstack.errors import ProcessDiedError
from tools.pdstack.ports import HOST
from tools.pdstack.stack import Engine, PDStack
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.compatibility import SPOKEN
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.authentication import (
    read_channel_key,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.side_channel import (
    HandshakeServer,
)

pytestmark = pytest.mark.e2e

ROWS = read_rows()


def write_key(path: Path) -> str:
    """Make a key in the way that is documented."""
    path.touch(0o600)
    path.write_bytes(zmq.curve_keypair()[1] + b"\n")
    return str(path)


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The option that gives an engine its key."""
    return {"side_channel_key_file": write_key(tmp_path_factory.mktemp("keys") / "key")}


@pytest.fixture(scope="module")
def keyed(stage: Stage, key: dict[str, str]) -> Iterator[Engine]:
    """An engine with a key, beside those of the stage; it asks only this machine's one address."""
    options = {**key, "trusted_peers": [f"{HOST}/32"]}
    (engine,) = stage.stack.start_engines(spec("key", options=options))
    yield engine
    stage.stack.stop(engine)


@pytest.fixture
def port_of_another_key(tmp_path: Path) -> Iterator[int]:
    """Where somebody answers handshakes who has another key."""
    key = read_channel_key(write_key(tmp_path / "another"))
    replies = {version: [b"never sent"] for version in range(SPOKEN.oldest, SPOKEN.newest + 1)}
    with closing(HandshakeServer(HOST, 0, replies, key)) as server:
        server.start()
        yield server.port


def prefilled(stage: Stage, engine: Engine, text: str) -> Params:
    """Let a prompt be computed, as a router does, and return where its blocks are."""
    what_for = {"do_remote_decode": True, "do_remote_prefill": False}
    reply = post(engine, stage.model, text, max_tokens=1, kv_transfer_params=what_for)
    params: Params = reply.json()["kv_transfer_params"]
    return params


def test_engines_without_each_others_key_learn_nothing(
    stage: Stage, keyed: Engine, port_of_another_key: int
) -> None:
    """Each client gets an error, logs one line with the remedy, and engines go on by themselves."""
    log, keyed_log = Log(stage.decode), Log(keyed)
    # None of them has the text of another: what an engine has computed, it does not read.
    at_keyed, at_prefill, elsewhere = (stage.text() for _ in range(3))
    elsewhere_params = {**stage.prefilled(elsewhere), "remote_port": port_of_another_key}
    asked = {
        "no side_channel_key_file, where the other engine has one": (
            at_keyed,
            prefilled(stage, keyed, at_keyed),
            stage.decode,
        ),
        "an impostor without the decode engine's key": (
            at_prefill,
            stage.prefilled(at_prefill),
            keyed,
        ),
        "another side_channel_key_file": (elsewhere, elsewhere_params, keyed),
    }
    stage.abandoned += 2
    # Each takes as long as a handshake may.
    replies = [stage.being_decoded(*each) for each in asked.values()]
    for reply in replies:
        assert_failed(reply.result(HANDSHAKE_LIMIT_S + SLACK_S))
    lines = [*log.complaints(), *keyed_log.find("Handshake with engine")]
    for fault, (_, named, _) in asked.items():
        address = "{remote_host}:{remote_port}".format(**named)
        (line,) = (each for each in lines if f" at {address} failed" in each)
        assert ROWS[fault].tells("500", line, "lease"), line
    (line,) = keyed_log.find("somebody without this engine's key")
    assert ROWS["a decode engine without the prefill engine's key"].tells("500", line, "lease")
    assert ask_unaided(keyed, stage.model, stage.text())


def test_host_outside_of_the_trusted_networks_is_not_asked(stage: Stage, keyed: Engine) -> None:
    """The request fails as one with malformed parameters does."""
    text = stage.text()
    params = prefilled(stage, keyed, text)
    log = Log(keyed)
    elsewhere = {**params, "remote_host": "127.0.0.2"}
    assert_failed(post(keyed, stage.model, text, kv_transfer_params=elsewhere))
    (line,) = log.complaints(but=LEASE_RAN_OUT)
    assert ROWS["a host outside of trusted_peers"].tells("500", line, "lease"), line


@pytest.mark.nightly
def test_engines_with_the_same_key_read_from_each_other(
    stage: Stage, keyed: Engine, key: dict[str, str]
) -> None:
    """The answer is one engine's, and bytes were moved."""
    (decode,) = stage.stack.start_engines(spec("decode-key", options=key))
    text = stage.text()
    right = ask_unaided(keyed, stage.model, text)
    before = decode.nixl_counters()
    with stage.router_to(keyed, decode) as router:
        assert ask(router, stage.model, text) == right
    wait_until(
        lambda: (decode.nixl_counters() - before).bytes_moved > 0,
        "the report of what was read",
        SLACK_S,
    )
    stage.stack.stop(decode)


@pytest.mark.nightly
def test_key_that_everybody_can_read_is_refused_at_the_start(stage: Stage, tmp_path: Path) -> None:
    """The engine ends, and says which file and what to do."""
    path = Path(write_key(tmp_path / "key"))
    path.chmod(0o644)
    open_key = spec("open-key", options={"side_channel_key_file": str(path)})
    with pytest.raises(ProcessDiedError) as caught, PDStack(stage.stack.model, tmp_path) as stack:
        stack.start_engines(open_key)
    _, _, line = caught.value.cause.partition("LocalChannelError: ")
    assert ROWS["a side_channel_key_file that everybody can read"].tells(
        "the engine does not start", line, "none"
    ), caught.value.cause
