# SPDX-License-Identifier: Apache-2.0
"""Chat with an OpenAI-compatible server, token by token."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import openai

T = TypeVar("T")
_POLL_S = 0.2


@dataclass(frozen=True)
class Answer:
    """One complete answer.

    Attributes:
        ttft_s: seconds from sending the request to the first token.
        total_s: seconds from sending the request to the end of the answer.
        finish_reason: as the server says it (``stop``, ``length``).
    """

    text: str
    ttft_s: float
    total_s: float
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str


class ChatClient:
    """Asks one server.

    Args:
        base_url: of the server, without ``/v1``.
        model: name under which the server knows its model.
        timeout_s: how long the server may stay silent.
    """

    def __init__(self, base_url: str, model: str, timeout_s: float = 300.0) -> None:
        self._model = model
        self._client = openai.OpenAI(
            base_url=f"{base_url}/v1",
            api_key="none",
            max_retries=0,
            # The client that openai itself was built on, without proxies: this is the loopback.
            http_client=openai.DefaultHttpxClient(timeout=timeout_s, trust_env=False),
        )

    def ask(
        self, prompt: str, max_tokens: int, on_token: Callable[[str], None] = lambda _: None
    ) -> Answer:
        """Send one user message, greedily decoded, and collect the streamed answer.

        Args:
            on_token: called with each piece of text as it arrives.

        Raises:
            Exception: the request failed or timed out, as openai and its transport tell it.
        """
        sent = time.monotonic()
        first: float | None = None
        pieces: list[str] = []
        prompt_tokens = completion_tokens = 0
        finish_reason = ""
        stream = self._client.chat.completions.create(
            model=self._model,
            messages=[{"role": "user", "content": prompt}],
            temperature=0.0,
            max_tokens=max_tokens,
            stream=True,
            stream_options={"include_usage": True},
        )
        with stream:
            for chunk in stream:
                if chunk.usage is not None:
                    prompt_tokens = chunk.usage.prompt_tokens
                    completion_tokens = chunk.usage.completion_tokens
                for choice in chunk.choices:
                    finish_reason = choice.finish_reason or finish_reason
                    if choice.delta.content:
                        first = first or time.monotonic()
                        pieces.append(choice.delta.content)
                        on_token(choice.delta.content)
        ended = time.monotonic()
        return Answer(
            text="".join(pieces),
            ttft_s=(first or ended) - sent,
            total_s=ended - sent,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            finish_reason=finish_reason,
        )

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def __enter__(self) -> ChatClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class _End(Generic[T]):
    result: T | None
    error: BaseException | None


def while_alive(work: Callable[[Callable[[str], None]], T], check: Callable[[], None]) -> Stream[T]:
    """Run ``work`` in a thread and hand out the pieces that it emits while ``check`` is content.

    A request to a server that has died can hang until its timeout. Here whoever iterates hears of
    the death at once, because ``check`` raises in the iterating thread.
    """
    return Stream(work, check)


class Stream(Generic[T]):
    """Iterate over the pieces; afterwards ``result`` is what the work returned."""

    def __init__(
        self, work: Callable[[Callable[[str], None]], T], check: Callable[[], None]
    ) -> None:
        self._check = check
        self._queue: queue.Queue[str | _End[T]] = queue.Queue()
        self._end: _End[T] | None = None
        # A daemon: a hanging request must not keep the launcher from ending.
        threading.Thread(target=self._run, args=(work,), daemon=True).start()

    def _run(self, work: Callable[[Callable[[str], None]], T]) -> None:
        try:
            end: _End[T] = _End(work(self._queue.put), None)
        except BaseException as error:
            end = _End(None, error)
        self._queue.put(end)

    def __iter__(self) -> Iterator[str]:
        while self._end is None:
            self._check()
            try:
                item = self._queue.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            if isinstance(item, _End):
                self._end = item
                if item.error is not None:
                    raise item.error
            else:
                yield item

    @property
    def result(self) -> T:
        """What the work returned; only after the iteration has ended."""
        assert self._end is not None and self._end.result is not None
        return self._end.result
