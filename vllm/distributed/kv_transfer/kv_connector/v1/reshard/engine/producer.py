# SPDX-License-Identifier: Apache-2.0
"""What a worker holds for other engines to read, until they were heard or have lost their lease.

All of this belongs to the connector's thread.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm.logger import init_logger

from ..errors import ReshardError
from ..protocol.board import Board, BoardUpdate
from ..protocol.ids import RequestId
from ..protocol.leases import LeaseTable, LeaseTableAddress
from ..protocol.ledgers import Notice, ProducerLedger, Receipt
from ..protocol.messages import Announcement, Done, GaveUp, Renew, decode_notification
from ..protocol.quoting import one_line, quote
from ..protocol.states import HeldState
from ..transport.agent import NixlAgent
from .metadata import ReshardConnectorMetadata
from .stats import ReshardStats
from .traces import PREFIX, Trace, trace_of_offer

logger = init_logger(__name__)


@dataclass(slots=True)
class _TracedOffer:
    """An offer that is traced, and since when it is held."""

    trace: Trace
    since_s: float


class ProducerSide:
    """The requests whose blocks a worker holds.

    Args:
        agent: This worker's agent; the table of leases is registered with it.
        renewal_s: For how long a heartbeat renews a lease.
        stats: Where to count.
        name: The worker's, for traces.
        board: Where readers see how far it is with requests; None where it does not say.
    """

    def __init__(
        self,
        agent: NixlAgent,
        renewal_s: float,
        stats: ReshardStats,
        name: str = "",
        board: Board | None = None,
    ) -> None:
        self._name = name
        self._agent = agent
        self._renewal_s = renewal_s
        self._stats = stats
        self._ledger = ProducerLedger()
        self._table = LeaseTable()
        address = self._table.address
        agent.register([(address.address, address.size_bytes, 0)], "DRAM")
        self._board = board
        if board is not None:
            agent.register([(board.address, board.size_bytes, 0)], "DRAM")
        self._num_blocks: dict[RequestId, int] = {}
        self._held_blocks = 0
        self._counted_blocks = 0
        self._num_offers = 0
        self._traces: dict[RequestId, _TracedOffer] = {}
        # Where requests are, and since when.
        self._states: dict[RequestId, tuple[HeldState, float]] = {}
        # What is held no more, and was not told of, each with the reader that was the last; empty
        # where there was none, or before it was offered.
        self._gone: dict[RequestId, str] = {}

    def __len__(self) -> int:
        """Requests that are, or may be, held."""
        return len(self._ledger)

    @property
    def table_address(self) -> LeaseTableAddress:
        """Where readers see what is held."""
        return self._table.address

    @property
    def board_address(self) -> int:
        """Where readers see how far it is with requests; 0 where it does not say."""
        return 0 if self._board is None else self._board.address

    def apply_metadata(self, metadata: ReshardConnectorMetadata, now_s: float) -> None:
        """Do what the scheduler asks for in a step."""
        # First what has ended: a name may be used again in the same step.
        self._ledger.withdraw(metadata.withdrawn)
        for request_id in metadata.withdrawn:
            self._table.remove(request_id)
            self._hold(request_id, 0)
            self._enter(request_id, HeldState.WITHDRAWN, now_s)
        self._ledger.admit(metadata.admitted)
        for request_id in metadata.admitted:
            self._enter(request_id, HeldState.ADMITTED, now_s)
            if not self._table.add(request_id):
                logger.warning(
                    "Request %s will not be read: too many requests are held for other engines.",
                    quote(request_id),
                )
        self._num_offers = metadata.num_offers
        for request_id, lease_s in metadata.offered.items():
            fingerprint = metadata.fingerprints[request_id]
            self._table.publish(request_id, fingerprint)
            secret = metadata.secrets.get(request_id)
            num_blocks = metadata.offered_blocks.get(request_id, 0)
            is_held = self._ledger.offer(request_id, now_s + lease_s, fingerprint, secret)
            if is_held:
                self._hold(request_id, num_blocks)
                self._enter(request_id, HeldState.OFFERED, now_s, f", for {lease_s:g} s")
            if headers := metadata.trace_headers.get(request_id):
                trace = trace_of_offer(self._name, headers, num_blocks)
                self._traces[request_id] = _TracedOffer(trace, now_s)
                if not is_held:
                    # Its readers were faster.
                    self._end_trace(request_id, HeldState.RELEASED, "", now_s)
        if self._board is not None:
            # Last: a reader that sees there that a request is offered finds its lease.
            self._board.tell(metadata.board_updates)

    def apply_announcement(self, announcement: Announcement | BoardUpdate) -> None:
        """Show readers what is offered, before the step that says so.

        That step does the rest: until then no reader can be through with it, and no lease runs.
        When it has been taken up, the name may be another request's.
        """
        if isinstance(announcement, BoardUpdate):
            if self._board is not None:
                self._board.announce(announcement)
        elif announcement.number > self._num_offers:
            self._table.publish(announcement.request_id, announcement.fingerprint)

    def stood_still(self, for_s: float) -> None:
        """No reader could be heard for so many seconds."""
        self._ledger.extend(for_s)

    def collect_released(self, now_s: float) -> set[RequestId]:
        """Requests whose blocks may be used for something else, and are held no more."""
        self._hear(now_s)
        self._gone |= dict.fromkeys(self._ledger.take_released(), "")
        for request_id, reader in self._gone.items():
            more = f", last read by {quote(reader)}" if reader else ""
            self._enter(request_id, HeldState.RELEASED, now_s, more)
            self._end_trace(request_id, HeldState.RELEASED, reader, now_s)
        expiries = self._ledger.expire(now_s)
        self._gone |= {expiry.request_id: "" for expiry in expiries}
        for expiry in expiries:
            self._stats.record_kv_expired_req()
            logger.warning(
                "Freeing the blocks of request %s: its lease ran out after %d of %s readers were "
                "through. Give readers longer with kv_lease_duration, if they are alive.",
                quote(expiry.request_id),
                expiry.heard,
                "an unknown number of" if expiry.awaited is None else one_line(expiry.awaited),
            )
            self._enter(expiry.request_id, HeldState.EXPIRED, now_s)
            self._end_trace(expiry.request_id, HeldState.EXPIRED, "", now_s)
        for request_id in self._gone:
            # Before the scheduler learns that the blocks may be used: see `leases`.
            self._table.remove(request_id)
            self._hold(request_id, 0)
            if self._board is not None:
                self._board.release(request_id)
        self._tell_mismatches()
        if self._held_blocks != self._counted_blocks:
            self._counted_blocks = self._held_blocks
            self._stats.record_held_blocks(self._held_blocks)
        gone, self._gone = self._gone, {}
        return set(gone)

    def _hear(self, now_s: float) -> None:
        """Take note of what other engines' workers say, and of the requests they release."""
        for sender, message in self._agent.take_notifications():
            try:
                notification = decode_notification(message)
                if isinstance(notification, Renew):
                    self._ledger.renew(notification.request_ids, now_s + self._renewal_s)
                else:
                    self._count(notification)
            except ReshardError as error:
                logger.warning("From %s: %s", quote(sender), error)
            except Exception:
                # Leases end what it is about.
                logger.exception("What %s says is not taken note of", quote(sender))

    def _count(self, done: Done | GaveUp) -> None:
        """Count a reader for all requests that it is through with.

        However many requests it names, one line of the log tells that it was too late; one that
        has read nothing never is.
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
        """Tell of notifications that were not believed, once for each request."""
        for mismatch in self._ledger.take_mismatches():
            logger.warning(
                "Request %s is held on: %s is through with other tokens or blocks than are offered "
                "under that name, or has another secret. Send the decode engine the very prompt "
                "that was prefilled, and pass kv_transfer_params on unchanged.",
                quote(mismatch.request_id),
                quote(mismatch.notifier),
            )

    def _enter(self, request_id: RequestId, state: HeldState, now_s: float, more: str = "") -> None:
        """Take note of a request's next state, and tell it in the log."""
        after = ""
        if request_id in self._states:
            before, since_s = self._states[request_id]
            after = f", after {now_s - since_s:.3f} s as {one_line(before.value)}"
        logger.debug(
            "Request %s: %s, with %d blocks%s%s.",
            quote(request_id),
            state.value,
            self._num_blocks.get(request_id, 0),
            one_line(after),
            one_line(more),
        )
        if state in (HeldState.ADMITTED, HeldState.OFFERED):
            self._states[request_id] = state, now_s
        else:
            self._states.pop(request_id, None)

    def _end_trace(
        self, request_id: RequestId, state: HeldState, last_reader: str, now_s: float
    ) -> None:
        """Export for how long a request was held, and what has ended that."""
        if (traced := self._traces.pop(request_id, None)) is not None:
            ended = {PREFIX + "end": state.value, PREFIX + "last_reader": last_reader}
            traced.trace.span("offer", traced.since_s, now_s, ended)

    def _hold(self, request_id: RequestId, num_blocks: int) -> None:
        """Take account of the blocks that a request holds from now on."""
        self._held_blocks += num_blocks - self._num_blocks.pop(request_id, 0)
        if num_blocks:
            self._num_blocks[request_id] = num_blocks
