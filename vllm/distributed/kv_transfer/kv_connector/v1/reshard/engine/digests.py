# SPDX-License-Identifier: Apache-2.0
"""Hashes prompts while they are computed, beside the scheduler's thread.

A prompt that is held for another engine is hashed for its offer, and one that is read for what it
is to be held as. That takes 9 microseconds for a thousand tokens, and there is time for it. The
prompt is known before its first token is computed, and its offer is wanted after the last; and what
is to be read waits for the step that it is scheduled in.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from ..protocol.fingerprint import TokenHash
from ..protocol.ledgers import RequestId

MIN_TOKENS = 2048
"""Shorter prompts are hashed when they are wanted: another thread takes as long to wake up."""


class PromptDigests:
    """The prompts that are being hashed, or were and are not wanted yet.

    Belongs to the scheduler's thread. One other thread hashes; it is given tokens that nobody
    changes any more, and returns a digest through a future.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reshard-digest")
        self._hashed: dict[RequestId, Future[TokenHash]] = {}

    def __len__(self) -> int:
        return len(self._hashed)

    def begin(self, request_id: RequestId, token_ids: Sequence[int], num_tokens: int) -> None:
        """Hash a request's first tokens, unless they are few.

        Args:
            request_id: The request.
            token_ids: Its tokens, to which more may be added while they are hashed.
            num_tokens: How many to hash; no more than there are now.
        """
        num_tokens = min(num_tokens, len(token_ids))
        if num_tokens >= MIN_TOKENS:
            self._hashed[request_id] = self._thread.submit(_hash, token_ids, num_tokens)

    def take(self, request_id: RequestId) -> TokenHash | None:
        """The digest of what was begun with; None if nothing was, or others are to come before it.

        Nobody waits for more than this one. The request is forgotten.
        """
        future = self._hashed.pop(request_id, None)
        if future is None or future.cancel():
            return None
        return future.result()

    def forget(self, request_id: RequestId) -> None:
        """The digest of a request is not wanted any more, if it was."""
        future = self._hashed.pop(request_id, None)
        if future is not None:
            future.cancel()

    def close(self) -> None:
        """End the thread."""
        self._hashed.clear()
        self._thread.shutdown(wait=False, cancel_futures=True)


def _hash(token_ids: Sequence[int], num_tokens: int) -> TokenHash:
    hashed = TokenHash()
    hashed.advance(token_ids, num_tokens)
    return hashed
