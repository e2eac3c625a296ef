# SPDX-License-Identifier: Apache-2.0
"""Reads what is computed of requests that are not offered yet.

What goes wrong with that fails no request: what was prefetched of it is *spoiled*, and all of it is
read once it is offered and nothing of that is under way any more.

All of this belongs to the connector's thread.
"""

from __future__ import annotations

from collections.abc import Callable

from vllm.logger import init_logger

from ..errors import ReshardError
from ..protocol.ids import RequestId
from ..protocol.ledgers import ConsumerLedger, ReadState
from ..protocol.messages import Receive
from ..protocol.quoting import one_line, quote
from ..transport.connection import PeerConnection
from ..transport.remote import LocalCache, RequestBlocks
from ..transport.transfers import Part, Transfers
from .prefetch import FullGroups, Prefetched
from .readings import Reading

logger = init_logger(__name__)


class Prefetcher:
    """Reads prompts while they are computed.

    Args:
        transfers: What is on its way.
        ledger: The account of all requests that are read.

    Attributes:
        reader: Where to read to, once the caches are registered.
    """

    def __init__(self, transfers: Transfers, ledger: ConsumerLedger[int]) -> None:
        self._transfers = transfers
        self._ledger = ledger
        self.reader: LocalCache | None = None

    def read(
        self,
        request_id: RequestId,
        reading: Reading | None,
        part: Receive,
        connection: PeerConnection,
        account: Callable[[], Reading],
    ) -> None:
        """Read what is computed of a request, as far as it can be, and was not read before.

        Args:
            request_id: The request.
            reading: What is known of it; None where nothing was read yet.
            part: What is computed.
            connection: What to read it with.
            account: Takes the request into account, if anything is to be read.
        """
        if reading is not None and reading.state is not ReadState.PREFETCHING:
            return
        try:
            self._read(request_id, reading, part, connection, account)
        except Exception as error:
            if isinstance(error, ReshardError):
                # Its source may say anything of it. What it offers is another matter.
                logger.debug("Request %s is not prefetched: %s", quote(request_id), one_line(error))
            else:
                logger.exception(
                    "Request %s is not prefetched, over an exception that nobody foresaw",
                    quote(request_id),
                )
            if reading is not None:
                self.spoil(reading)

    def spoil(self, reading: Reading) -> None:
        """What was prefetched of a request is of no use; what was not posted of it never is."""
        if reading.prefetched is not None and not reading.prefetched.is_spoiled:
            reading.prefetched.is_spoiled = True
            self._transfers.give_up(reading.request_id)

    def _read(
        self,
        request_id: RequestId,
        reading: Reading | None,
        part: Receive,
        connection: PeerConnection,
        account: Callable[[], Reading],
    ) -> None:
        prefetched = (reading and reading.prefetched) or Prefetched()
        if not prefetched.is_of(part, connection):
            if reading is not None:
                self.spoil(reading)
            return
        assert self.reader is not None
        legs = (each.leg for each in connection.engine.legs)
        groups = FullGroups.of(legs, part.remote_block_ids, self.reader.window_groups)
        wanted = prefetched.next(part, groups)
        if wanted is None:
            return
        parts = self._parts_of(wanted, connection)
        reading = reading or account()
        reading.prefetched = prefetched
        prefetched.take(part, wanted, groups, connection)
        keys = reading.take_keys(len(parts))
        self._ledger.prefetch(request_id, keys)
        try:
            self._transfers.start(
                request_id, parts, connection, first_key=keys.start, is_prefetch=True
            )
        except Exception:
            self.spoil(reading)
            # None of them is on its way.
            for key in keys:
                self._ledger.part_drained(request_id, key)
            raise

    def _parts_of(self, wanted: Receive, connection: PeerConnection) -> list[Part]:
        """The parts that some blocks are read in.

        Raises:
            RemoteLayoutError: They are not there.
        """
        assert self.reader is not None
        blocks = RequestBlocks(wanted, self.reader)
        return [
            part
            for leg in connection.engine.legs
            if not leg.leg.per_sequence
            for part in self._transfers.cut(leg, blocks.select(leg.leg))
        ]
