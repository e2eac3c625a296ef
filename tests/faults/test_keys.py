# SPDX-License-Identifier: Apache-2.0
"""Engines that know one another by a key read from each other, and nobody else learns anything."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import zmq

from tests.e2e.pairs import ask, ask_unaided, post
from tests.faults.logs import Log
from tests.faults.stage import SLACK_S, Params, Stage, assert_failed, spec
from tests.faults.table import read_rows
from tests.tools.pdstack.helpers import wait_until
from tools.pdstack.errors import ProcessDiedError
from tools.pdstack.ports import HOST
from tools.pdstack.stack import Engine, PDStack

pytestmark = pytest.mark.faults

ROWS = read_rows()


@dataclass(frozen=True)
class Keyed:
    """Engines with a key, beside those of the stage, which have none.

    Attributes:
        prefill: Has the key.
        decode: Has it, too, and asks nowhere but at the one address of this machine.
        stranger: A decode engine with another key.
    """

    prefill: Engine
    decode: Engine
    stranger: Engine


def write_key(path: Path) -> str:
    """Make a key in the way that is documented."""
    path.touch(0o600)
    path.write_bytes(zmq.curve_keypair()[1] + b"\n")
    return str(path)


@pytest.fixture(scope="module")
def keyed(stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    """They stay up for all of these tests."""
    directory = tmp_path_factory.mktemp("keys")
    key, other = ({"side_channel_key_file": write_key(directory / name)} for name in "ab")
    with PDStack(stage.stack.model, tmp_path_factory.mktemp("keyed")) as stack:
        yield Keyed(
            *stack.start_engines(
                spec("prefill-key", options=key),
                spec("decode-key", options={**key, "trusted_peers": [f"{HOST}/32"]}),
                spec("decode-other-key", options=other),
            )
        )


def prefilled(stage: Stage, engine: Engine, text: str) -> Params:
    """Let a prompt be computed, as a router does, and return where its blocks are."""
    what_for = {"do_remote_decode": True, "do_remote_prefill": False}
    reply = post(engine, stage.model, text, max_tokens=1, kv_transfer_params=what_for)
    params: Params = reply.json()["kv_transfer_params"]
    return params


def test_engines_with_the_same_key_read_from_each_other(stage: Stage, keyed: Keyed) -> None:
    """The answer is one engine's, and bytes were moved."""
    text = stage.text()
    right = ask_unaided(keyed.prefill, stage.model, text)
    before = keyed.decode.nixl_counters()
    with stage.router_to(keyed.prefill, keyed.decode) as router:
        assert ask(router, stage.model, text) == right
    wait_until(
        lambda: (keyed.decode.nixl_counters() - before).bytes_moved > 0,
        "the report of what was read",
        SLACK_S,
    )


@pytest.mark.parametrize(
    "fault",
    ["another side_channel_key_file", "no side_channel_key_file, where the other engine has one"],
)
def test_decode_engine_without_the_right_key_learns_nothing(
    stage: Stage, keyed: Keyed, fault: str
) -> None:
    """Its client gets an error, both logs one line with the remedy, and it goes on by itself."""
    stranger = keyed.stranger if fault.startswith("another") else stage.decode
    text = stage.text()
    params = prefilled(stage, keyed.prefill, text)
    theirs = Log(stranger.child.log_path)
    assert_failed(post(stranger, stage.model, text, kv_transfer_params=params))
    (line,) = theirs.complaints()
    assert ROWS[fault].tells("500", line, "lease"), line
    # Said once a minute at most.
    said = keyed.prefill.child.log_path.read_text(errors="replace")
    row = ROWS["a decode engine without the prefill engine's key"]
    told = [each for each in said.splitlines() if row.log.split("…")[1].strip() in each]
    assert told, said
    assert ask_unaided(stranger, stage.model, text)


def test_host_that_a_client_names_cannot_pose_as_a_peer(stage: Stage, keyed: Keyed) -> None:
    """An engine with a key neither asks who has none, nor believes what it says."""
    text = stage.text()
    params = stage.prefilled(text)
    stage.abandoned += 1
    log = Log(keyed.decode.child.log_path)
    assert_failed(post(keyed.decode, stage.model, text, kv_transfer_params=params))
    (line,) = log.complaints()
    row = ROWS["an impostor without the decode engine's key"]
    assert row.tells("500", line, "lease"), line


def test_host_outside_of_the_trusted_networks_is_not_asked(stage: Stage, keyed: Keyed) -> None:
    """The request fails as one with malformed parameters does."""
    text = stage.text()
    params = prefilled(stage, keyed.prefill, text)
    log = Log(keyed.decode.child.log_path)
    elsewhere = {**params, "remote_host": "127.0.0.2"}
    assert_failed(post(keyed.decode, stage.model, text, kv_transfer_params=elsewhere))
    (line,) = log.complaints()
    assert ROWS["a host outside of trusted_peers"].tells("500", line, "lease"), line
    stage.assert_blocks_are_free(keyed.decode, keyed.stranger)


@pytest.mark.full
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
