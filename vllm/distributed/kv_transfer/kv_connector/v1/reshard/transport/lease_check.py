# SPDX-License-Identifier: Apache-2.0
"""Whether leases still held once the blocks under them had been read.

All requests that have just been read from one worker are looked up in its table at once, with one
small read. Everything here belongs to the engine's thread of the worker that reads.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..errors import TransferError
from ..memory.lowering import Rows
from ..protocol.leases import BUCKET_BYTES, WORDS_PER_BUCKET, LeaseTableAddress, entry_of
from ..protocol.ledgers import RequestId
from .agent import NixlAgent, Prepared, Transfer, TransferState

_NUM_LOOKUPS = 1 << 12
"""Requests that are looked up at the same time; more wait for their turn."""


@dataclass(frozen=True, slots=True)
class PreparedTable:
    """A peer's table.

    Attributes:
        buckets: The list of its buckets.
        num_buckets: How many there are.
    """

    buckets: Prepared
    num_buckets: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one lookup.

    Attributes:
        request_id: The request, as the reader calls it.
        fault: Why its bytes cannot be trusted; None where its lease held.
        peer_broken: The lookup itself has failed.
    """

    request_id: RequestId
    fault: str | None
    peer_broken: bool = False


@dataclass(frozen=True, slots=True)
class _Lookup:
    """One read of some buckets of a peer's table: for each request a bucket, and the word in it."""

    request_ids: list[RequestId]
    words: npt.NDArray[np.uint64]
    landed_in: npt.NDArray[np.int32]
    transfer: Transfer


def prepare_table(agent: NixlAgent, table: LeaseTableAddress, peer: str) -> PreparedTable:
    """Prepare a peer's table to be read.

    Raises:
        TransferError: NIXL does not know the peer, or not this memory of its.
    """
    return PreparedTable(agent.prepare(_rows(table), peer, "DRAM"), table.num_buckets)


class LeaseChecker:
    """Reads buckets of peers' tables.

    Args:
        agent: This worker's agent; the memory to read into is registered with it.
    """

    def __init__(self, agent: NixlAgent) -> None:
        self._agent = agent
        self._buckets = np.zeros((_NUM_LOOKUPS, WORDS_PER_BUCKET), dtype=np.uint64)
        memory = LeaseTableAddress(self._buckets.ctypes.data, _NUM_LOOKUPS)
        agent.register([(memory.address, memory.size_bytes, 0)], "DRAM")
        self._local = agent.prepare(_rows(memory), memory="DRAM")
        self._free = deque(range(_NUM_LOOKUPS))
        self._wanted: dict[PreparedTable, list[tuple[RequestId, RequestId]]] = defaultdict(list)
        self._lookups: list[_Lookup] = []

    def want(self, request_id: RequestId, remote_request_id: RequestId, at: PreparedTable) -> None:
        """Look a request up; there will be one verdict.

        Args:
            request_id: The request, as we call it.
            remote_request_id: The request, as its holder calls it.
            at: The table of a worker that its blocks were read from.
        """
        self._wanted[at].append((request_id, remote_request_id))

    def advance(self) -> list[Verdict]:
        """Post what is wanted, and see what was found."""
        verdicts = [verdict for table in list(self._wanted) for verdict in self._post(table)]
        in_flight = []
        for lookup in self._lookups:
            state = self._agent.poll(lookup.transfer)
            if state is TransferState.IN_FLIGHT:
                in_flight.append(lookup)
                continue
            self._agent.release(lookup.transfer)
            verdicts += self._judge(lookup, done=state is TransferState.DONE)
            self._free.extend(lookup.landed_in.tolist())
        self._lookups = in_flight
        return verdicts

    def close(self) -> None:
        """Give everything back."""
        for lookup in self._lookups:
            self._agent.release(lookup.transfer)
        self._lookups.clear()
        self._agent.release_prepared(self._local)

    def _post(self, table: PreparedTable) -> list[Verdict]:
        """Look up what is wanted at a table, as far as there is room; returns what failed."""
        wanted = self._wanted.pop(table)
        if rest := wanted[len(self._free) :]:
            self._wanted[table] = rest
        wanted = wanted[: len(self._free)]
        if not wanted:
            return []
        entries = [entry_of(remote_id, table.num_buckets) for _, remote_id in wanted]
        request_ids = [request_id for request_id, _ in wanted]
        landed_in = np.array([self._free.popleft() for _ in wanted], dtype=np.int32)
        buckets = np.array([entry.bucket for entry in entries], dtype=np.int32)
        try:
            transfer = self._agent.read(self._local, landed_in, table.buckets, buckets)
        except TransferError as error:
            self._free.extend(landed_in.tolist())
            return [Verdict(request_id, str(error), True) for request_id in request_ids]
        words = np.array([entry.word for entry in entries], dtype=np.uint64)
        self._lookups.append(_Lookup(request_ids, words, landed_in, transfer))
        return []

    def _judge(self, lookup: _Lookup, *, done: bool) -> list[Verdict]:
        peer = lookup.transfer.peer
        if not done:
            fault = f"the lease at {peer} could not be looked up"
            return [Verdict(request_id, fault, True) for request_id in lookup.request_ids]
        found = (self._buckets[lookup.landed_in] == lookup.words[:, np.newaxis]).any(axis=1)
        fault = (
            f"its lease at {peer} had run out when all was read: give readers longer there with "
            "kv_lease_duration"
        )
        return [
            Verdict(request_id, None if holds else fault)
            for request_id, holds in zip(lookup.request_ids, found.tolist(), strict=True)
        ]


def _rows(table: LeaseTableAddress) -> Rows:
    """The descriptors of a table, one for each bucket; shape (1, 5), as in `lowering`."""
    row = (table.address, BUCKET_BYTES, 0, BUCKET_BYTES, table.num_buckets)
    return np.array([row], dtype=np.uint64)
