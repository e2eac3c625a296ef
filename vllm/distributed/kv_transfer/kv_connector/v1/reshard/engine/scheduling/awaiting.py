# SPDX-License-Identifier: Apache-2.0
"""Requests that another engine holds blocks for, until they are received or have ended.

Meanwhile workers renew the leases of these blocks. They begin with the step that tells them of the
request.
"""

from __future__ import annotations

from ...protocol.ids import RequestId
from ...protocol.messages import RemoteRequest
from ..metadata import ReshardConnectorMetadata


class AwaitedRequests:
    """The requests whose leases workers renew. Belongs to the scheduler's thread."""

    def __init__(self) -> None:
        self._awaited: set[RequestId] = set()
        # Those that workers have not received yet.
        self._untold: dict[RequestId, RemoteRequest] = {}
        # Those that workers still take for awaited.
        self._ended: set[RequestId] = set()

    def begin(self, request_id: RequestId, remote: RemoteRequest) -> None:
        """Have a request's lease renewed."""
        self._awaited.add(request_id)
        self._untold[request_id] = remote

    def end(self, request_id: RequestId) -> None:
        """Stop renewing a request's lease; may be called repeatedly, and for any request."""
        if request_id in self._awaited:
            self._awaited.remove(request_id)
            if self._untold.pop(request_id, None) is None:
                self._ended.add(request_id)

    @property
    def has_untold(self) -> bool:
        """Whether the workers have to be told of a request, without which no lease is renewed."""
        return bool(self._untold)

    def write_to(self, metadata: ReshardConnectorMetadata) -> None:
        """Move what has changed since the last step into a step's metadata."""
        metadata.awaited, self._untold = self._untold, {}
        metadata.ended, self._ended = self._ended, set()
