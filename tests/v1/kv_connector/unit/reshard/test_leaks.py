# SPDX-License-Identifier: Apache-2.0
"""Nothing grows with the requests that have been: a thousand come and go, and all is as before.

Every container that an owner of state has is counted, whatever it is called: one that is added
tomorrow is counted, too.
"""

from __future__ import annotations

import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import RequestStatus

from tests.v1.kv_connector.unit.reshard.containers import largest, sizes
from tests.v1.kv_connector.unit.reshard.engine.connections import (
    Producers,
    RecordingConnection,
    read_of,
)
from tests.v1.kv_connector.unit.reshard.engine.producers import LEASE_S, OFFER, Producer
from tests.v1.kv_connector.unit.reshard.engine.schedulers import PARAMS, request, scheduler
from tests.v1.kv_connector.unit.reshard.protocol.tables import entries
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.reading.notifier import (
    Notifier,
    Renewals,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.scheduling import (
    remote_reads,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.stats import ReshardStats
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.ledgers import ProducerLedger
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.messages import (
    RemoteEngineAddress,
    RemoteRequest,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.tasks import Tasks

NUM_REQUESTS = 1_000


class Growing:
    """What forgets to forget."""

    def __init__(self) -> None:
        self.names: dict[str, set[str]] = {}


def test_counting_sees_what_grows():
    """At any depth, in containers that were there before and in those that were not."""
    growing = Growing()
    before = sizes(growing)
    growing.names["a"] = {"b"}
    assert sizes(growing) == {**before, "Growing.names": 1, "Growing.names['a']": 1}


def test_producer_forgets_what_it_held():
    """However requests end: read, read early, by lease, withdrawn, or named by strangers."""
    producer = Producer()
    producer.side.collect_released(0.0)
    before = sizes(producer.side)
    for number in range(NUM_REQUESTS):
        now_s, name = float(number), str(number)
        way = number % 6
        if way == 1:
            producer.tell(now_s, admitted={name})
            producer.hear(name)
            producer.hear(name, fingerprint=OFFER.__class__(1, 1, 1), notifier="stranger")
            producer.side.collect_released(now_s)
        if way == 2:
            producer.tell(now_s, admitted={name})
            producer.tell(now_s, withdrawn={name})
        else:
            producer.offer(name, now_s=now_s)
        if way in (0, 3):
            producer.hear(name, "never seen")
        if way == 4:
            producer.hear(name, fingerprint=OFFER.__class__(1, 1, 1))
        producer.side.collect_released(now_s)
        producer.stats.reset()
    producer.side.collect_released(NUM_REQUESTS + LEASE_S)
    producer.stats.reset()
    assert sizes(producer.side) == before
    assert not entries(producer.side.table_address).any()


def test_notifier_forgets_what_it_has_told():
    """Also those that cannot be told."""
    stats, tasks, engines = ReshardStats(), Tasks(), Producers()
    notifier = Notifier("d0", stats, engines, tasks)
    before = sizes(notifier)
    for number in range(NUM_REQUESTS):
        peers = [(f"p{number % 2 * number}", 1), ("p0", 2)]
        connections = [RecordingConnection("p0", releases=peers) for _ in range(3)]
        notifier._peers = Producers(*connections)
        notifier.release(read_of(str(number)), connections[0])
        notifier.renew(read_of(str(number)).source, [str(number)])
        for _ in range(2):
            notifier.flush()
            tasks.run(0.0)
        notifier.flush()
        stats.reset()
    notifier._peers = engines
    assert sizes(notifier) == before and not tasks.ready


def test_ledger_of_a_producer_in_use_stays_as_large_as_what_it_holds():
    """Leases of requests that were read are forgotten before they run out."""
    ledger = ProducerLedger()
    for number in range(NUM_REQUESTS):
        ledger.admit([str(number)])
        ledger.offer(str(number), 1e9, OFFER)
        if number >= 10:
            ledger.withdraw([str(number - 10)])
    assert len(ledger) == 10
    assert largest(ledger) <= 20


def test_renewals_end_with_their_requests():
    """Whoever holds the blocks."""
    renewals = Renewals(30.0)
    before = sizes(renewals)
    for number in range(NUM_REQUESTS):
        source = RemoteEngineAddress(f"p{number}", "host", 1)
        renewals.begin({str(number): RemoteRequest(source, "p-a")})
        renewals.take_due(float(number))
        renewals.stop([str(number)])
    assert sizes(renewals) == before


FLAGS = {
    "reads": {"do_remote_prefill": True},
    "is held": {"do_remote_decode": True},
    "names blocks and asks for nothing": {},
}


@pytest.mark.parametrize("asked", FLAGS)
@pytest.mark.parametrize("ended", [RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_ABORTED])
def test_scheduler_forgets_its_requests(asked, ended, monkeypatch):
    """Those that read, those that are held, and those that only look as if they did.

    The last that have read are remembered, as vLLM may tell of them once more.
    """
    monkeypatch.setattr(remote_reads, "MAX_REMEMBERED", 100)
    owner, remembered = scheduler(), "ReshardScheduler._reads._ended"
    owner.build_connector_meta(SchedulerOutput.make_empty())
    before = sizes(owner)
    for number in range(NUM_REQUESTS):
        params = {name: value for name, value in PARAMS.items() if name != "do_remote_prefill"}
        params |= FLAGS[asked] | {"remote_request_id": f"p-{number}"}
        long = 3000 if number % 100 == 0 else 40
        one = request(params, long, request_id=str(number))
        owner.on_new_request(one)
        one.append_output_token_ids(7)
        one.status = ended
        owner.request_finished(one, ([5, 2, 9],))
        owner.build_connector_meta(SchedulerOutput.make_empty())
        owner.take_stats()
    try:
        after = sizes(owner)
        assert after.pop(remembered) <= 100 < NUM_REQUESTS
        assert after == {name: size for name, size in before.items() if name != remembered}
    finally:
        owner.shutdown()
