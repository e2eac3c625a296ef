# SPDX-License-Identifier: Apache-2.0
"""Whole engines of workers in one process: real NIXL, real side channels, no model.

Every worker has its own KV cache, agent and ledgers; what vLLM's engine would do, calling
`submit` and `collect` in every step, the test does.
"""

from __future__ import annotations

import dataclasses
import re
import threading
import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from itertools import cycle
from types import SimpleNamespace

import pytest
import torch
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.kv_cache_interface import KVCacheConfig

from tests.bases import requires_base
from tests.v1.kv_connector.unit.reshard.engine.configs import stand_at, worker_config
from tests.v1.kv_connector.unit.reshard.engine.workers import (
    NUM_BLOCKS,
    OFFER,
    Progress,
    assert_received,
    every_strategy,
    fill,
    lost_blocks,
    pairs_of_layouts,
    receive,
    stats_with,
    wait_until,
)
from tests.v1.kv_connector.unit.reshard.protocol.tables import seen, strike
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.metadata import (
    Offer,
    ReshardConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.worker import (
    CacheDevice,
    ReshardWorker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import LocalLayoutError
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.plan.shards import MeshRank
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.description import (
    decode_worker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.ledgers import (
    Notice,
    ProducerLedger,
    Receipt,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    Announcement,
    Receive,
    RemoteEngineAddress,
    RemoteRequest,
    encode_announcement,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.announcements import (
    open_announcer,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.lease_check import LeaseChecker

LAYOUTS = {
    "TP2 to TP1": (dict(tp=2), dict(tp=1)),
    "TP1 to TP2": (dict(tp=1), dict(tp=2)),
    "TP3 to TP2, 6 heads": (dict(tp=3, heads=6), dict(tp=2, heads=6)),
    "TP4 to TP2, 2 heads": (dict(tp=4), dict(tp=2)),
    "PP2 to PP1": (dict(pp=2), dict(pp=1)),
    "PP1 to PP2": (dict(pp=1), dict(pp=2)),
    "PP2 x TP2 to PP3": (dict(pp=2, tp=2), dict(pp=3)),
    "uneven PP2 to uneven PP2": (dict(pp=2, partition=[1, 3]), dict(pp=2, partition=[3, 1])),
    "MLA TP4 to TP1": (dict(tp=4, mla=True), dict(tp=1, mla=True)),
    "MLA PP2 x TP2 to TP2": (dict(pp=2, tp=2, mla=True), dict(tp=2, mla=True)),
}


@pairs_of_layouts(
    LAYOUTS,
    {"TP1 to TP2", "TP3 to TP2, 6 heads", "PP2 x TP2 to PP3", "MLA PP2 x TP2 to TP2"},
)
@every_strategy
def test_request_is_received_and_released(engines, prefill, decode):
    """The KV cache arrives in the right bytes, and every prefill worker is released once."""
    p, d = engines("prefill", **prefill), engines("decode", **decode)
    address = p.serve()
    whole = fill(p, [5, 2, 9])
    p.offer("p-a")
    d.start(receive={"d-a": receive(address, [3, 4, 1], [5, 2, 9])})
    progress = Progress(p, d)
    progress.until(d, received="d-a")
    progress.until(p, sent="p-a")
    assert_received(d, [3, 4, 1], whole)
    for worker in d.workers.values():
        assert worker.report.take_failed() == {}
        assert worker.report.take_stats().data["bytes_transferred"]


@requires_base("0.32.0", "0.33.0", reason="it has no MLA on CPU")
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [(dict(tp=2), dict(tp=1)), (dict(pp=2), dict(tp=1)), (dict(tp=1), dict(tp=2))],
    ids=["TP2 to TP1", "PP2 to TP1", "TP1 to TP2"],
)
def test_latents_of_cpu_mla(engines, prefill, decode):
    """Of the size that its kernels take, in blocks of the size that they take."""
    backend = resolve_obj_by_qualname("vllm.v1.attention.backends.mla.cpu_mla.CPUMLABackend")
    form = dict(mla=True, head_size=576, backend=backend)
    p, d = engines("prefill", **form, **prefill), engines("decode", **form, **decode)
    said = decode_worker(p.workers[MeshRank(0, 0)].handshake.body)
    assert said.cache.layers["layers.0"].meaning["numbers"] == "float32"
    address = p.serve()
    whole = fill(p, [5, 2, 9])
    p.offer("p-a")
    d.start(receive={"d-a": receive(address, [3, 4, 1], [5, 2, 9])})
    progress = Progress(p, d)
    progress.until(d, received="d-a")
    progress.until(p, sent="p-a")
    assert_received(d, [3, 4, 1], whole)


@pytest.mark.parametrize(("src_tokens", "dst_tokens"), [(16, 48), (48, 16), (16, 24)])
@every_strategy
def test_blocks_of_other_sizes(engines, src_tokens, dst_tokens):
    """Sequences are matched by tokens, whatever the blocks."""
    p = engines("prefill", block_tokens=src_tokens, tp=2)
    d = engines("decode", block_tokens=dst_tokens)
    address = p.serve()
    src_blocks = [5, 2, 9][: 48 // src_tokens]
    dst_blocks = [3, 4, 1][: 48 // dst_tokens]
    whole = fill(p, src_blocks)
    p.offer("p-a")
    d.start(receive={"d-a": receive(address, dst_blocks, src_blocks)})
    Progress(p, d).until(d, received="d-a")
    assert_received(d, dst_blocks, whole)


@every_strategy
def test_prefix_that_is_cached_here_is_not_read(engines):
    """Only the last blocks are filled; earlier blocks of the source are left alone."""
    p, d = engines("prefill", tp=2), engines("decode")
    address = p.serve()
    whole = fill(p, [5, 2, 9])
    p.offer("p-a")
    d.start(receive={"d-a": receive(address, [4], [5, 2, 9], tokens=40)})
    progress = Progress(p, d)
    progress.until(d, received="d-a")
    assert_received(d, [4], whole, start_token=32)
    (stats,) = [worker.report.take_stats() for worker in d.workers.values()]
    assert sum(stats.data["bytes_transferred"]) == whole.nbytes // 3


def test_full_cache_hit_releases_without_a_word(engines):
    """Nothing is read or reported, and the prefill engine is released all the same."""
    p, d = engines("prefill", tp=4, mla=True), engines("decode", pp=2, mla=True)
    address = p.serve()
    p.offer("p-a")
    d.start(receive={"d-a": receive(address, [], [5, 2, 9])})
    progress = Progress(p, d)
    progress.until(p, sent="p-a")
    assert not any(progress.received.values())


def test_words_after_a_read_cost_no_looks(engines, monkeypatch):
    """The call that sends a notification has sent it: a read has shown that it leaves at once."""
    looks: list[LeaseChecker] = []
    monkeypatch.setattr(LeaseChecker, "reach", lambda checker, *_: looks.append(checker))
    p, d = engines("prefill", tp=2), engines("decode")
    address = p.serve()
    fill(p, [5, 2, 9])
    progress = Progress(p, d)
    for name in ("p-a", "p-b"):
        p.offer(name)
        request = receive(address, [3, 4, 1], [5, 2, 9], remote_request_id=name)
        d.start(receive={f"d-{name}": request})
        progress.until(p, sent=name)
    assert not looks


@pytest.mark.parametrize("fingerprint", [None, replace(OFFER, content=9)])
def test_empty_read_does_not_take_somebody_elses_blocks(engines, caplog_vllm, fingerprint):
    """Who knows a request's name and not its tokens is not believed, or says nothing."""
    p, d = engines("prefill", tp=2), engines("decode")
    address = p.serve()
    whole = fill(p, [5, 2, 9])
    p.offer("p-a", "p-b")
    empty = replace(receive(address, [], [5, 2, 9]), fingerprint=fingerprint)
    d.start(receive={"thief": empty})
    progress = Progress(p, d)
    # What a producer hears after that, it hears after that.
    other = receive(address, [], [5, 2, 9], remote_request_id="p-b")
    d.start(receive={"d-b": other})
    progress.until(p, sent="p-b")
    assert ("p-a is held on" in caplog_vllm.text) is (fingerprint is not None)
    d.start(receive={"d-a": receive(address, [3, 4, 1], [5, 2, 9])})
    progress.until(d, received="d-a")
    assert not lost_blocks(d.workers[MeshRank(0, 0)])
    assert_received(d, [3, 4, 1], whole)
    progress.until(p, sent="p-a")


@every_strategy
def test_caches_are_described_with_their_blocks_and_device(engines):
    """Blocks are those that the scheduler counts, whatever the kernel's are."""
    (worker,) = engines("prefill", blocks_per_id=2).workers.values()
    cache = decode_worker(worker.handshake.body).cache
    assert (cache.num_block_ids, cache.device_id) == (NUM_BLOCKS, 0)
    assert {layer.blocks_per_id for layer in cache.layers.values()} == {2}


def test_worker_without_caches_is_refused(monkeypatch):
    """The message says which option gives the stage a layer."""
    stand_at(monkeypatch, MeshRank(0, 0))
    config = worker_config(tp=1, extra_config={})
    with (
        closing(ReshardWorker(config, "decode", KVCacheConfig(4, [], []))) as worker,
        pytest.raises(LocalLayoutError, match=r"no layer of this worker .*VLLM_PP_LAYER_PARTITION"),
    ):
        worker.register_kv_caches({})


def test_threads_know_the_device_when_they_begin(engines, monkeypatch):
    """That which makes agents begins before the connector's, and registers the same caches."""
    found = {}

    def choose(device):
        found[threading.current_thread().name.partition("_")[0]] = device.place

    monkeypatch.setattr(CacheDevice, "choose", choose)
    engines("decode", tp=1)
    wait_until(lambda: len(found) == 2)
    assert found == dict.fromkeys(("reshard-dialer", "reshard-connector"), torch.device("cpu"))


def test_requests_are_independent(engines):
    """Many requests in flight, between several engines, do not touch one another."""
    ps = [engines(f"prefill-{n}", tp=n) for n in (1, 2)]
    ds = [engines(f"decode-{n}", pp=n) for n in (1, 2)]
    progress = Progress(*ps, *ds)
    wholes = {}
    for number, p in enumerate(ps):
        address = p.serve()
        for which, d in enumerate(ds):
            request, block = f"{p.engine_id}-{d.engine_id}", 4 * which + 1
            wholes[request] = fill(p, [block, block + 1, block + 2], seed=2 * number + which)
            p.offer(request)
            local = [4 * number + offset for offset in (2, 0, 1)]
            remote = [block, block + 1, block + 2]
            d.start(receive={request: receive(address, local, remote, remote_request_id=request)})
    for number, p in enumerate(ps):
        for d in ds:
            request = f"{p.engine_id}-{d.engine_id}"
            progress.until(d, received=request)
            assert_received(d, [4 * number + offset for offset in (2, 0, 1)], wholes[request])
    for p in ps:
        for d in ds:
            progress.until(p, sent=f"{p.engine_id}-{d.engine_id}")


def test_idle_engines_leave_nothing_behind(engines):
    """After `engine_ttl` all that was prepared is given back; the next request does it anew."""
    now_s = time.monotonic()
    d = engines("decode", engine_ttl=60, clock=lambda: now_s)
    peers, addresses = d.transfer_engines[MeshRank(0, 0)].peers, {}
    for name, layout in {"wide": dict(tp=2), "deep": dict(pp=2)}.items():
        p = engines(name, **layout)
        addresses[name] = p, p.serve()
    for request_id, name in (("a", "wide"), ("b", "deep"), ("c", "wide")):
        p, address = addresses[name]
        whole = fill(p, [5, 2, 9])
        p.offer("p-a")
        d.start(receive={request_id: receive(address, [3, 4, 1], [5, 2, 9])})
        progress = Progress(p, d)
        progress.until(d, received=request_id)
        progress.until(p, sent="p-a")
        assert_received(d, [3, 4, 1], whole)
        (connection,) = d.connections
        now_s += 59.0
        for _ in range(3):
            progress.step()
        assert connection.is_connected and len(peers) == 1
        now_s += 2.0
        wait_until(lambda: not len(peers), progress.step)
        wait_until(lambda connection=connection: not connection.is_connected, progress.step)
        assert not peers.retired


def test_handshake_is_told_in_one_line(engines, caplog_vllm):
    """The engine's log says once, however many requests there are, what is read from whom."""
    p, d = engines("prefill", tp=2), engines("decode")
    address = p.serve()
    progress = Progress(p, d)
    caplog_vllm.set_level("INFO")
    for request in ("a", "b"):
        fill(p, [5, 2, 9])
        p.offer(f"p-{request}")
        wanted = receive(address, [3, 4, 1], [5, 2, 9], remote_request_id=f"p-{request}")
        d.start(receive={request: wanted})
        progress.until(d, received=request)
    (line,) = [text for text in caplog_vllm.messages if "From engine" in text]
    assert re.fullmatch(
        r"From engine prefill of 2 ranks, rank pp0tp0 reads layers 0-\d+, heads \[0, \d+\) from "
        r"pp0tp0; layers 0-\d+, heads \[\d+, \d+\) from pp0tp1\. The handshake took [\d.]+ ms\.",
        line,
    )


def test_unreachable_engine_fails_its_requests_only(engines):
    """Blocks are reported invalid, the reason is logged, and others are served."""
    p, d = engines("prefill"), engines("decode")
    address = p.serve()
    nobody = RemoteEngineAddress("nobody", "127.0.0.1", 9)
    whole = fill(p, [5, 2, 9])
    p.offer("p-a")
    d.start(
        receive={
            "lost": receive(nobody, [6, 7, 8], [0, 1, 2]),
            "d-a": receive(address, [3, 4, 1], [5, 2, 9]),
        }
    )
    progress = Progress(p, d)
    progress.until(d, received="d-a")
    assert_received(d, [3, 4, 1], whole)
    progress.until(d, received="lost")
    for worker in d.workers.values():
        assert lost_blocks(worker) == {6, 7, 8}
        assert worker.report.take_stats().data["read_failures"] == ["handshake"]


def test_failed_handshake_is_told_once_for_all_that_waited(engines, caplog_vllm):
    """One line names the engine, what is wrong, and the requests that it cost, but not too many."""
    p, d = engines("prefill"), engines("decode")
    gone = dataclasses.replace(p.serve(), engine_id="gone")
    wanted = {f"d-{number}": receive(gone, [number], [number], tokens=16) for number in range(10)}
    d.start(receive={**wanted, "cached": receive(gone, [], [], tokens=16)})
    progress = Progress(d)
    for request_id in wanted:
        progress.until(d, received=request_id)
    (line,) = (each.getMessage() for each in caplog_vllm.records if each.levelname == "ERROR")
    named = ", ".join(f"d-{number}" for number in range(8))
    assert f"failed, and with it requests {named} and 2 more: side channel" in line
    assert line.endswith("send the request through prefill again")


def test_other_dtype_is_refused_at_the_handshake(engines, caplog_vllm):
    """The message names what differs, with both values and the remedy."""
    p, d = engines("prefill", dtype=torch.bfloat16), engines("decode")
    address = p.serve()
    d.start(receive={"d-a": receive(address, [3], [5], tokens=16)})
    Progress(d).until(d, received="d-a")
    assert "dtype is bfloat16 there and float32 here" in caplog_vllm.text
    for worker in d.workers.values():
        assert lost_blocks(worker) == {3}


@pytest.mark.parametrize(
    ("remote", "tokens", "message"),
    [
        ([5, 2, NUM_BLOCKS], 48, f"names block {NUM_BLOCKS} but"),
        ([5, 2, -1], 48, "names block 5 but"),
        ([2, 9], 48, "needs tokens [0, 48)"),
        ([0, 2, 9], 48, "those of tokens [16, 48)"),
    ],
)
def test_blocks_that_cannot_be_are_refused(engines, caplog_vllm, remote, tokens, message):
    """Nothing is read for a request whose remote blocks do not exist or are too few."""
    p, d = engines("prefill"), engines("decode")
    address = p.serve()
    fill(p, [5, 2, 9])
    # The producer is not told: it holds them for the lease.
    p.offer("p-a", lease_s=0.5)
    d.start(receive={"d-a": receive(address, [3, 4, 1], remote, tokens=tokens)})
    progress = Progress(p, d)
    progress.until(d, received="d-a")
    assert message in caplog_vllm.text
    (worker,) = d.workers.values()
    assert lost_blocks(worker) == {1, 3, 4}
    assert worker.report.take_stats().data["bytes_transferred"] == []
    progress.until(p, sent="p-a")


def test_more_blocks_than_tokens_are_refused(engines, caplog_vllm):
    """Blocks that cannot be matched with tokens are not guessed at."""
    p, d = engines("prefill"), engines("decode")
    address = p.serve()
    p.offer("p-a")
    d.start(receive={"d-a": receive(address, [3, 4, 1], [5, 2, 9, 6])})
    Progress(p, d).until(d, received="d-a")
    assert "has more blocks than its tokens fill" in caplog_vllm.text
    assert lost_blocks(d.workers[MeshRank(0, 0)]) == {1, 3, 4}


def test_faulty_request_fails_without_a_handshake(engines, caplog_vllm):
    """What the scheduler knows to be unreadable is reported, by every worker."""
    d = engines("decode", pp=2)
    nowhere = RemoteEngineAddress("unknown", "unknown", 0)
    fault = "its kv_transfer_params are malformed"
    faulty = Receive(nowhere, "d-a", [[3, 4]], (), 0, 0, fault=fault)
    d.start(receive={"d-a": faulty})
    Progress(d).until(d, received="d-a")
    assert fault in caplog_vllm.text
    for rank, worker in d.workers.items():
        assert lost_blocks(worker) == {3, 4}
        assert not len(d.transfer_engines[rank].peers)


def test_restarted_engine_is_served_again(engines):
    """A prefill engine with a new id at the old address needs no restart of the decode engine."""
    d = engines("decode")
    p = engines("before", tp=2)
    address = p.serve()
    fill(p, [5, 2, 9])
    p.offer("p-a")
    d.start(receive={"one": receive(address, [3, 4, 1], [5, 2, 9])})
    Progress(p, d).until(d, received="one")
    p.close()

    again = engines("after", tp=1)
    address = again.serve(address.port)
    whole = fill(again, [5, 2, 9], seed=3)
    again.offer("p-a")
    d.start(receive={"two": receive(address, [3, 4, 1], [5, 2, 9])})
    progress = Progress(again, d)
    progress.until(d, received="two")
    assert_received(d, [3, 4, 1], whole)
    assert len(d.transfer_engines[MeshRank(0, 0)].peers) == 1


def test_lease_runs_out_without_readers(engines, caplog_vllm):
    """A router that drops a request costs the prefill engine its blocks for the lease only."""
    p = engines("prefill", tp=2)
    p.offer("p-a", lease_s=0.05)
    Progress(p).until(p, sent="p-a")
    assert "Freeing the blocks of request p-a" in caplog_vllm.text


def test_leases_are_renewed_without_steps(engines, monkeypatch):
    """They outlive their terms on every prefill worker while the engine that waits stands still.

    They end when it does not wait any longer.
    """
    now_s, ends_s, renew = time.monotonic(), {}, ProducerLedger.renew

    def note(ledger: ProducerLedger, request_ids: Iterable[str], expires_at_s: float) -> None:
        renew(ledger, request_ids, expires_at_s)
        ends_s[ledger] = expires_at_s

    monkeypatch.setattr(ProducerLedger, "renew", note)
    p = engines("prefill", tp=4, mla=True, lease_s=10.0, clock=lambda: now_s)
    d = engines("decode", mla=True, kv_lease_duration=10.0, clock=lambda: now_s)
    address = p.serve()
    progress, reading = Progress(p), Progress(d)
    d.start(awaited={"d-a": RemoteRequest(address, "p-a")})
    # A heartbeat that is due before waits for the next one, and its clock does not get there.
    wait_until(lambda: d.is_connected_with(address), reading.step)
    p.offer("p-a", lease_s=10.0)
    tables = [each.producer.table_address for each in p.transfer_engines.values()]
    wait_until(lambda: all(seen(table, "p-a").fingerprint for table in tables), progress.step)

    def are_renewed() -> bool:
        return len(ends_s) == len(p.workers) and min(ends_s.values()) >= now_s + 10.0

    for _ in range(3):
        now_s += 9.0
        # The clock of its thread is this one, which does not wake it.
        reading.step()
        wait_until(are_renewed, progress.step)
    assert not any(progress.sent.values())
    d.start(ended={"d-a"})

    def wait_for_a_lease() -> None:
        # More than once: a renewal may still be on its way.
        nonlocal now_s
        now_s += 10.0
        progress.step()

    wait_until(
        lambda: all("p-a" in progress.sent["prefill", rank] for rank in p.workers),
        wait_for_a_lease,
    )


def test_late_reader_fails(engines, caplog_vllm):
    """Blocks that are read after their lease ran out count as invalid, and both logs say why."""
    p, d = engines("prefill", tp=2), engines("decode")
    address = p.serve()
    fill(p, [5, 2, 9])
    p.offer("p-a", lease_s=0.0)
    progress = Progress(p, d)
    progress.until(p, sent="p-a")
    d.start(receive={"d-a": receive(address, [3, 4, 1], [5, 2, 9])})
    progress.until(d, received="d-a")
    assert "had run out when all was read" in caplog_vllm.text
    assert lost_blocks(d.workers[MeshRank(0, 0)]) == {1, 3, 4}
    late = "num_notifications_after_expiry"
    taken = (worker.report.take_stats() for worker in cycle(p.workers.values()))
    wait_until(lambda: (stats := next(taken)) and stats.data[late], progress.step)


@pytest.mark.parametrize("source_rank", [0, 1])
def test_lease_that_runs_out_during_a_read_is_a_failure(engines, monkeypatch, source_rank):
    """Bytes may be another request's where one of the producers let go before all was read."""
    p, d = engines("prefill", tp=2), engines("decode")
    address = p.serve()
    fill(p, [5, 2, 9])
    p.offer("p-a", "p-b")
    confirm = LeaseChecker.confirm

    async def confirm_after_expiry(self, tasks, remote_request_id, *more):
        if remote_request_id == "p-a":
            source = p.transfer_engines[MeshRank(0, source_rank)]
            strike(source.producer.table_address, "p-a")
        await confirm(self, tasks, remote_request_id, *more)

    monkeypatch.setattr(LeaseChecker, "confirm", confirm_after_expiry)
    other = receive(address, [6, 7, 8], [5, 2, 9], remote_request_id="p-b")
    d.start(receive={"d-a": receive(address, [3, 4, 1], [5, 2, 9]), "d-b": other})
    progress = Progress(p, d)
    progress.until(d, received="d-a")
    progress.until(d, received="d-b")
    assert lost_blocks(d.workers[MeshRank(0, 0)]) == {1, 3, 4}


def test_what_happened_is_counted(engines):
    """Both ends report held blocks, handshakes, notifications and failures, each kind once."""
    p, d = engines("prefill", tp=2), engines("decode")
    address = p.serve()
    fill(p, [5, 2, 9])
    p.start(admitted={"p-a"})
    p.start(offered={"p-a": Offer(OFFER, 30.0, 3)})
    progress = Progress(p, d)
    (reader,) = d.workers.values()
    for producer in p.workers.values():
        assert stats_with(producer, "held_blocks", progress).data["held_blocks"] == [3]
    d.start(
        receive={
            "whole": receive(address, [3, 4, 1], [5, 2, 9]),
            "expired": receive(address, [6, 7, 8], [5, 2, 9], remote_request_id="p-b"),
        }
    )
    for request_id in ("whole", "expired"):
        progress.until(d, received=request_id)
    progress.until(p, sent="p-a")
    # The producers hear of it before it is counted that they were told.
    counted = stats_with(reader, "notifications_sent", progress).data
    assert len(counted["handshake_seconds"]) == 1
    # Only the one that was received: the other is a failure.
    (exposed_s,) = counted["exposed_transfer_seconds"]
    assert 0 < counted["handshake_seconds"][0] <= exposed_s
    assert counted["read_failures"] == ["lease"]
    assert counted["read_strategies"] == ["direct"] * 4
    # Each of two producers is told of both requests, together where they ended in one poll.
    assert sum(counted["notifications_sent"]) in (2, 4)
    for producer in p.workers.values():
        assert producer.report.take_stats().data["held_blocks"] == [0]
        assert producer.report.take_stats() is None


def test_running_request_is_nobodys_to_release(engines, monkeypatch):
    """Who says that he has read what is still being computed does not make its producer free it."""
    heard, hear = [], ProducerLedger.hear

    def note(ledger: ProducerLedger, request_id: str, notice: Notice) -> Receipt:
        heard.append(hear(ledger, request_id, notice))
        return heard[-1]

    monkeypatch.setattr(ProducerLedger, "hear", note)
    p, d = engines("prefill"), engines("decode")
    address = p.serve()
    p.start(admitted={"p-a"})
    progress = Progress(p, d)
    d.start(receive={"d-a": receive(address, [], [])})
    wait_until(lambda: Receipt.EARLY in heard, progress.step)
    assert not any(progress.sent.values())
    p.start(offered={"p-a": Offer(OFFER, 30.0)})
    progress.until(p, sent="p-a")


@pytest.mark.parametrize(
    ("held", "message"),
    [
        (replace(OFFER, num_tokens=47), "is of 47 tokens, and 48 are wanted here"),
        (replace(OFFER, content=9), "was computed for 48 other tokens"),
        (replace(OFFER, blocks=9), "lies in other blocks"),
    ],
)
def test_bytes_of_another_prompt_are_not_used(engines, caplog_vllm, held, message):
    """A producer that offers something else under the request's name costs that request alone."""
    p, d = engines("prefill", tp=2), engines("decode")
    address = p.serve()
    fill(p, [5, 2, 9])
    p.offer("p-b")
    p.start(admitted={"p-a"})
    p.start(offered={"p-a": Offer(held, 30.0)})
    other = receive(address, [6, 7, 8], [5, 2, 9], remote_request_id="p-b")
    d.start(receive={"d-a": receive(address, [3, 4, 1], [5, 2, 9]), "d-b": other})
    progress = Progress(p, d)
    progress.until(d, received="d-a")
    progress.until(d, received="d-b")
    (reader,) = d.workers.values()
    assert lost_blocks(reader) == {1, 3, 4}
    assert reader.report.take_stats().data["read_failures"] == ["fingerprint"]
    assert message in caplog_vllm.text
    # The producer is told of the other one only: this may be somebody else's.
    progress.until(p, sent="p-b")
    assert not any("p-a" in sent for sent in progress.sent.values())


def test_reader_that_is_faster_than_its_producer_waits_for_the_offer(engines):
    """A producer answers a step before its workers hear of it."""
    p, d = engines("prefill", tp=2), engines("decode")
    address = p.serve()
    whole = fill(p, [5, 2, 9])
    p.start(admitted={"p-a"})
    d.start(receive={"d-a": receive(address, [3, 4, 1], [5, 2, 9])})
    progress = Progress(p, d)
    (reader,) = d.workers.values()
    # It was looked up once, and is to be looked up again.
    wait_until(
        lambda: any(each.leases.is_busy and not each.leases for each in d.connections),
        progress.step,
    )
    assert not progress.received[d.engine_id, MeshRank(0, 0)]
    p.start(offered={"p-a": Offer(OFFER, 30.0)})
    progress.until(d, received="d-a")
    assert not lost_blocks(reader)
    assert_received(d, [3, 4, 1], whole)


def test_reader_need_not_wait_for_the_step_with_the_offer(engines):
    """All workers of a producer hear of it from their scheduler while they compute another step."""
    p, d = engines("prefill", tp=2), engines("decode")
    address = p.serve()
    whole = fill(p, [5, 2, 9])
    progress = Progress(p, d)
    announcement = encode_announcement(Announcement(1, "p-a", OFFER))
    with closing(open_announcer("127.0.0.1")) as announcer:
        p.start(announcer=announcer.address)
        p.start(admitted={"p-a"})
        d.start(receive={"d-a": receive(address, [3, 4, 1], [5, 2, 9])})

        def step() -> None:
            # Nobody hears it who is not connected yet.
            announcer.send(announcement)
            progress.step()

        wait_until(lambda: progress.received[d.engine_id, MeshRank(0, 0)], step)
    assert_received(d, [3, 4, 1], whole)
    # They hold it until the step has told them so.
    assert not any(progress.sent[p.engine_id, rank] for rank in p.workers)
    p.start(num_offers=1, offered={"p-a": Offer(OFFER, 30.0)})
    progress.until(p, sent="p-a")


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        (None, []),
        (torch.device("cpu"), []),
        (torch.device("cuda", 1), [torch.device("cuda", 1)]),
    ],
    ids=str,
)
def test_thread_works_with_the_device_of_the_caches(monkeypatch, place, expected):
    """On CPU, and before the caches are registered, there is none to choose."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    device = CacheDevice(on_cpu=False)
    device.place = place
    device.choose()
    assert chosen == expected


def test_steps_that_read_wait_for_what_was_launched_before(monkeypatch):
    """Those that read nothing need not, nor any where all is computed at once."""
    recorded = []
    address = RemoteEngineAddress("prefill", "p.example", 5600)
    reading = ReshardConnectorMetadata(receive={"d-a": receive(address, [3], [5])})
    event = SimpleNamespace(record=lambda: recorded.append("now"))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    device = CacheDevice(on_cpu=False)
    assert device.computed_before(ReshardConnectorMetadata()) is None and recorded == []
    assert device.computed_before(reading) is event and recorded == ["now"]
    assert CacheDevice(on_cpu=True).computed_before(reading) is None
