# SPDX-License-Identifier: Apache-2.0
"""Holds blocks for other engines to read, until all readers are done or the lease expires.

All of this belongs to the connector's thread.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from vllm.logger import init_logger

from ..errors import RemoteLayoutError, ReshardError, one_line, quote
from ..protocol.fingerprint import OfferFingerprint
from ..protocol.ids import BlockIds, RequestId
from ..protocol.leases import LeaseTable, LeaseTableAddress
from ..protocol.ledgers import Notice, ProducerLedger, Receipt
from ..protocol.messages import (
    Announcement,
    Done,
    GaveUp,
    Pack,
    PackEntry,
    Renew,
    decode_notification,
)
from ..protocol.packing import NOTHING_PACKED, PackAddress
from ..protocol.states import HeldState
from ..transport.agent import NixlAgent
from ..transport.budget import Budget
from ..transport.pack_area import PackArea
from .metadata import ReshardConnectorMetadata
from .stats import ReshardStats
from .traces import PREFIX, Trace, trace_of_offer

logger = init_logger(__name__)

_ONE_OF_SEVERAL = re.compile(r"\d+_")
"""How vLLM begins the id of each of a prompt's several answers."""

_FIRST_OFFERS = 20
"""Offers after which a producer says that none of them was read."""


@dataclass(frozen=True, slots=True)
class _Request:
    """A request that is computed or held.

    Attributes:
        state: Its state.
        since_s: Since when it is in that state.
        num_blocks: Number of blocks it holds; 0 before its offer.
        trace: The trace of its offer; None before the offer, or where its client traces nothing.
    """

    state: HeldState
    since_s: float
    num_blocks: int = 0
    trace: Trace | None = None

    def end_trace(self, end: HeldState, last_reader: str, now_s: float) -> None:
        """Export the trace span of an offer, with the reason for its end."""
        if self.trace is not None:
            ended = {PREFIX + "end": end.value, PREFIX + "last_reader": last_reader}
            self.trace.span("offer", self.since_s, now_s, ended)


class ProducerSide:
    """The requests whose blocks a worker holds.

    Args:
        agent: This worker's agent, which registers the lease table.
        renewal_s: Seconds for which a renewal extends a lease.
        stats: Its metrics.
        name: The worker's name, for traces.

    Attributes:
        packs: Where windows are packed for readers; None where none are.
    """

    def __init__(
        self,
        agent: NixlAgent,
        renewal_s: float,
        stats: ReshardStats,
        name: str = "",
    ) -> None:
        self._name = name
        self._agent = agent
        self._renewal_s = renewal_s
        self._stats = stats
        self.packs: PackArea | None = None
        self._ledger = ProducerLedger()
        # Blocks of each offer, for readers that ask to have them packed.
        self._offered: dict[RequestId, tuple[OfferFingerprint, BlockIds]] = {}
        self._table = LeaseTable()
        address = self._table.address
        agent.register([(address.address, address.size_bytes, 0)], "DRAM")
        self._requests: dict[RequestId, _Request] = {}
        self._held_blocks = 0
        self._counted_blocks = 0
        self._num_offers = 0
        # Offers that have expired, as long as none was read.
        self._num_unread = 0.0
        # Requests no longer held and not reported yet, each with its last reader; empty if there
        # was none, or if it was done before the offer.
        self._gone: dict[RequestId, str] = {}

    def __len__(self) -> int:
        """Return the number of requests that are held or may still be offered."""
        return len(self._ledger)

    @property
    def table_address(self) -> LeaseTableAddress:
        """Address of the lease table, for readers."""
        return self._table.address

    @property
    def packing_address(self) -> PackAddress:
        """Where windows are packed, for readers."""
        return NOTHING_PACKED if self.packs is None else self.packs.address

    def apply_metadata(self, metadata: ReshardConnectorMetadata, now_s: float) -> None:
        """Apply the scheduler's metadata of a step."""
        # Withdrawals first: an id may be used again in the same step.
        self._ledger.withdraw(metadata.withdrawn)
        for request_id in metadata.withdrawn:
            self._table.remove(request_id)
            self._end(request_id, HeldState.WITHDRAWN, now_s)
        self._ledger.admit(metadata.admitted)
        for request_id in metadata.admitted:
            self._set_state(request_id, _Request(HeldState.ADMITTED, now_s))
            if not self._table.add(request_id):
                logger.warning(
                    "Request %s will not be read: too many requests are held for other engines.",
                    quote(request_id),
                )
        self._num_offers = metadata.num_offers
        for request_id, offer in metadata.offered.items():
            self._offered[request_id] = offer.fingerprint, offer.block_ids
            self._table.publish(request_id, offer.fingerprint)
            headers = offer.trace_headers
            trace = trace_of_offer(self._name, headers, offer.num_blocks) if headers else None
            offered = _Request(HeldState.OFFERED, now_s, offer.num_blocks, trace)
            expires_at_s = now_s + offer.lease_s
            if self._ledger.offer(request_id, expires_at_s, offer.fingerprint, offer.secret):
                self._set_state(request_id, offered, f", for {offer.lease_s:g} s")
            else:
                # Its readers were done before the offer.
                offered.end_trace(HeldState.RELEASED, "", now_s)

    def apply_announcement(self, announcement: Announcement) -> None:
        """Show an offer to readers, before the step that carries it.

        That step does the rest: until then no reader can release the request, and no lease runs.
        An announcement that arrives after it is ignored: the id may be another request's by then.
        """
        if announcement.number > self._num_offers:
            offered = announcement.fingerprint, announcement.block_ids
            self._offered[announcement.request_id] = offered
            self._table.publish(announcement.request_id, announcement.fingerprint)

    def extend_deadlines(self, for_s: float) -> None:
        """Extend all leases by seconds during which no notification could be received."""
        self._ledger.extend(for_s)

    def pack(self, now_s: float, budget: Budget) -> bool:
        """Pack windows for readers, within the budget; return whether one was packed."""
        if self.packs is None or not (self._requests or self.packs.is_serving):
            return False
        self._hear(now_s)
        return self.packs.serve(self._blocks_of, now_s, budget)

    @property
    def is_packing(self) -> bool:
        """Whether a reader waits for a window or reads one."""
        return self.packs is not None and self.packs.is_serving

    def hears_again_s(self, now_s: float) -> float:
        """Return when to hear at the latest what readers ask for; infinity if they may not."""
        if self.packs is None or not self._requests:
            return math.inf
        return self.packs.hears_again_s(now_s)

    def collect_released(self, now_s: float) -> set[RequestId]:
        """Return the requests released or expired since the last call; their blocks are free."""
        self._hear(now_s)
        self._gone |= dict.fromkeys(self._ledger.take_released(), "")
        for request_id, reader in self._gone.items():
            self._end(request_id, HeldState.RELEASED, now_s, reader)
        expiries = self._ledger.expire(now_s)
        # Once one was read or this was told, the number is below any other.
        self._num_unread = -math.inf if self._gone else self._num_unread + len(expiries)
        if self._num_unread >= _FIRST_OFFERS:
            self._num_unread = -math.inf
            logger.warning(
                "None of the first %d requests that were held was read: have the router pass on "
                "this engine's kv_transfer_params, and see the decode engine's log.",
                _FIRST_OFFERS,
            )
        self._gone |= {expiry.request_id: "" for expiry in expiries}
        for expiry in expiries:
            self._stats.record_kv_expired_req()
            logger.warning(
                "Freeing the blocks of request %s: its lease ran out after %d of %s readers were "
                "through. %s",
                quote(expiry.request_id),
                expiry.heard,
                "an unknown number of" if expiry.awaited is None else one_line(expiry.awaited),
                "Of several answers one is read: have the router ask prefill engines for n 1."
                if _ONE_OF_SEVERAL.match(expiry.request_id)
                else "Give readers longer with kv_lease_duration, if they are alive.",
            )
            self._end(expiry.request_id, HeldState.EXPIRED, now_s)
        for request_id in self._gone:
            # Before the scheduler may reuse the blocks: see `leases`.
            self._table.remove(request_id)
        self._tell_mismatches()
        if self._held_blocks != self._counted_blocks:
            self._counted_blocks = self._held_blocks
            self._stats.record_held_blocks(self._held_blocks)
        gone, self._gone = self._gone, {}
        return set(gone)

    def _hear(self, now_s: float) -> None:
        """Process the notifications of other engines' workers: renewals and releases."""
        for sender, message in self._agent.take_notifications():
            try:
                notification = decode_notification(message)
                if isinstance(notification, Renew):
                    self._ledger.renew(notification.request_ids, now_s + self._renewal_s)
                elif isinstance(notification, Pack):
                    if self.packs is not None:
                        self.packs.hear(notification, now_s)
                else:
                    self._count(notification)
            except ReshardError as error:
                logger.warning("From %s: %s", quote(sender), error)
            except Exception:
                # The requests it names are freed when their leases expire.
                logger.exception("What %s says is not taken note of", quote(sender))

    def _blocks_of(self, entry: PackEntry) -> BlockIds | None:
        """Return the blocks of the offer that a reader names; None if it is not offered.

        Raises:
            RemoteLayoutError: It is another offer.
        """
        offered = self._offered.get(entry.request_id)
        if offered is None:
            # Not yet, or no longer: the reader gives up by itself.
            return None
        fingerprint, block_ids = offered
        if fingerprint != entry.proof:
            raise RemoteLayoutError(
                f"a window of request {quote(entry.request_id)} is asked for with the fingerprint "
                "of another offer: send the decode engine the very prompt that was prefilled"
            )
        return block_ids

    def _count(self, done: Done | GaveUp) -> None:
        """Count a reader for all requests that it releases.

        If it was too late for some, one log line says so for all of them. A reader that gave up has
        read nothing, and is never too late.
        """
        late = []
        for release in done.releases:
            notice = Notice(done.notifier, release.num_notifiers, release.proof)
            try:
                receipt = self._ledger.hear(release.request_id, notice)
            except Exception:
                logger.exception("What %s says is not taken note of", quote(done.notifier))
                continue
            if receipt is Receipt.RELEASED:
                self._gone[release.request_id] = done.notifier
            elif receipt is Receipt.UNKNOWN and isinstance(done, Done):
                self._stats.record_late_notification()
                late.append(release.request_id)
        if late:
            logger.warning(
                "%s was too late for the blocks of request %s%s, which this worker does not hold "
                "any more. Give readers longer with kv_lease_duration.",
                quote(done.notifier),
                quote(late[0]),
                f" and of {len(late) - 1} more" if len(late) > 1 else "",
            )

    def _tell_mismatches(self) -> None:
        """Log releases that did not match their offer, once for each request."""
        for mismatch in self._ledger.take_mismatches():
            logger.warning(
                "Request %s is held on: %s is through with other tokens or blocks than are offered "
                "under that name, or has another secret. Send the decode engine the very prompt "
                "that was prefilled, and pass kv_transfer_params on unchanged.",
                quote(mismatch.request_id),
                quote(mismatch.notifier),
            )

    def _set_state(self, request_id: RequestId, request: _Request, more: str = "") -> None:
        """Record and log a request's next state."""
        before = self._requests.get(request_id)
        after, blocks_before = "", 0
        if before is not None:
            after_s, blocks_before = request.since_s - before.since_s, before.num_blocks
            after = f", after {after_s:.3f} s as {one_line(before.state.value)}"
        logger.debug(
            "Request %s: %s, with %d blocks%s%s.",
            quote(request_id),
            one_line(request.state.value),
            request.num_blocks,
            one_line(after),
            one_line(more),
        )
        self._held_blocks += request.num_blocks - blocks_before
        self._requests[request_id] = request

    def _end(
        self, request_id: RequestId, state: HeldState, now_s: float, last_reader: str = ""
    ) -> None:
        """Log and trace a request's last state, and forget the request."""
        more = f", last read by {quote(last_reader)}" if last_reader else ""
        request = self._requests.get(request_id) or _Request(state, now_s)
        self._set_state(request_id, replace(request, state=state, since_s=now_s), more)
        del self._requests[request_id]
        self._offered.pop(request_id, None)
        self._held_blocks -= request.num_blocks
        request.end_trace(state, last_reader, now_s)
