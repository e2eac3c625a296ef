# SPDX-License-Identifier: Apache-2.0
"""What hosts that clients name cost a whole worker, and what stays of them."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import psutil
import pytest

from tests.v1.kv_connector.unit.reshard.engine.workers import (
    Engine,
    Progress,
    assert_received,
    fill,
    receive,
)
from tests.v1.kv_connector.unit.reshard.transport.channels import serving, wait_until
from tests.v1.kv_connector.unit.reshard.transport.loading import start_of_address
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.connecting import (
    peers as peers_module,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.description import (
    decode_worker,
    encode_worker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    RemoteEngineAddress,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.metadata import (
    WorkerHandshake,
    encode_reply,
)


def answer_as(engine: Engine, engine_id: str) -> list[bytes]:
    """What an engine answers, under another name of the same length; so do NIXL's agents."""
    reply = {}
    for rank, worker in engine.workers.items():
        said = decode_worker(worker.handshake.body)
        own, other = engine.engine_id.encode(), engine_id.encode()
        assert len(own) == len(other)
        metadata = said.agent_metadata.replace(own + b"/", other + b"/")
        body = encode_worker(replace(said, engine_id=engine_id, agent_metadata=metadata))
        reply[rank.pp_rank, rank.tp_rank] = WorkerHandshake(worker.handshake.factors, body)
    return encode_reply(reply)


def test_client_that_names_many_ports_keeps_no_descriptors(engines, monkeypatch):
    """They are all one liar's, which answers as an engine does and holds nothing."""
    monkeypatch.setattr(peers_module, "MAX_UNPROVEN", 2)
    monkeypatch.setattr(peers_module, "MAX_DEAD_CONNECTIONS", 4)
    evil, good, decode = engines("evil"), engines("good"), engines("decode")
    whole = fill(good, [5, 2, 9])
    place, progress = good.serve(), Progress(decode, good)
    (transfer_engine,) = decode.transfer_engines.values()
    descriptors = []
    for number in range(20):
        with serving(answer_as(evil, f"e{number:03}")) as liar:
            address = RemoteEngineAddress(f"e{number:03}", "127.0.0.1", liar.port)
            lied = receive(address, [6], [7], tokens=16, remote_request_id=f"x{number}")
            decode.start(receive={f"lied {number}": lied})
            progress.until(decode, received=f"lied {number}")
        descriptors.append(psutil.Process().num_fds())
    assert len(transfer_engine.peers) <= 2
    # What ten more have left is not more than what the first ten had.
    assert max(descriptors[10:]) <= max(descriptors[:10]) + 8
    good.offer("p-a")
    decode.start(receive={"honest": receive(place, [3, 4, 1], [5, 2, 9])})
    progress.until(decode, received="honest")
    assert_received(decode, [3, 4, 1], whole)
    (worker,) = decode.workers.values()
    assert "honest" not in worker.report.take_failed()


def test_engine_is_read_whoever_bears_its_agents_name(engines):
    """Liars on its lane say what it says, but for a byte that has UCX take them for others."""
    good, decode = engines("good"), engines("decode")
    whole = fill(good, [5, 2, 9])
    place, progress = good.serve(), Progress(decode, good)
    (transfer_engine,) = decode.transfer_engines.values()
    lanes = transfer_engine.peers.lanes
    (worker,) = good.workers.values()
    said = decode_worker(worker.handshake.body)
    changed = bytearray(said.agent_metadata)
    changed[start_of_address(said.agent_metadata) + 3] ^= 1

    def connected() -> list[int]:
        return sorted(len(lane.connections) for lane in lanes.ready)

    with ExitStack() as liars:
        for number in range(4):
            body = encode_worker(
                replace(said, engine_id=f"liar{number}", agent_metadata=bytes(changed))
            )
            answer = {(0, 0): WorkerHandshake(worker.handshake.factors, body)}
            liar = liars.enter_context(serving(encode_reply(answer)))
            address = RemoteEngineAddress(f"liar{number}", "127.0.0.1", liar.port)
            lied = receive(address, [6], [7], tokens=16, remote_request_id=f"x{number}")
            decode.start(receive={f"lied {number}": lied})
            wait_until(lambda number=number: sum(connected()) == number + 1)
        assert connected() == [4]
        good.offer("p-a")
        decode.start(receive={"honest": receive(place, [3, 4, 1], [5, 2, 9])})
        progress.until(decode, received="honest")
    assert_received(decode, [3, 4, 1], whole)


def test_engine_that_gives_a_good_read_stays(engines, monkeypatch):
    """Those that give none make room for each other beside it."""
    monkeypatch.setattr(peers_module, "MAX_UNPROVEN", 2)
    good, decode = engines("good"), engines("decode")
    fill(good, [5, 2, 9])
    place, progress = good.serve(), Progress(decode, good)
    (transfer_engine,) = decode.transfer_engines.values()
    good.offer("p-a")
    decode.start(receive={"honest": receive(place, [3, 4, 1], [5, 2, 9])})
    progress.until(decode, received="honest")
    with ExitStack() as liars:
        for number in range(5):
            liar = liars.enter_context(serving(answer_as(good, f"e{number:03}")))
            address = RemoteEngineAddress(f"e{number:03}", "127.0.0.1", liar.port)
            lied = receive(address, [6], [7], tokens=16, remote_request_id=f"x{number}")
            decode.start(receive={f"lied {number}": lied})
            progress.until(decode, received=f"lied {number}")
    peers = {peer.address: peer for peer in transfer_engine.peers}
    assert place in peers and peers[place].is_proven and len(peers) == 3


@pytest.mark.parametrize("field", ["engine_id", "host"])
def test_name_with_a_line_feed_begins_no_line(engines, caplog_vllm, field):
    """Of an engine, a host or a request, in a handshake that fails and in a malformed one."""
    forged = "x\nERROR 11-23 16:00:00 [core.py:1] EngineCore was hacked\x1b[31m"
    decode = engines("decode")
    progress = Progress(decode)
    address = replace(RemoteEngineAddress("engine", "127.0.0.1", 9), **{field: forged})
    fault = receive(address, [4], [5], remote_request_id=forged)
    decode.start(
        receive={
            f"a{forged}": receive(address, [3], [5], tokens=16, remote_request_id=forged),
            f"b{forged}": replace(fault, fault=forged),
        }
    )
    progress.until(decode, received=f"a{forged}")
    progress.until(decode, received=f"b{forged}")
    messages = [record.getMessage() for record in caplog_vllm.records]
    assert any("was hacked" in each for each in messages)
    assert all(each.isprintable() for each in messages if "hacked" in each)
