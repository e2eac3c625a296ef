# SPDX-License-Identifier: Apache-2.0
"""Clients that ask, stream, leave and vanish, in a thread of their own; all is noted down.

The thread runs an event loop, which owns every connection. Who stands outside hands in requests and
gets futures.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import httpx

from .history import Recorder, Request
from .replies import Reply
from .schedule import LONGEST_HOLD_S
from .workload import Ask, Turn, asks, body

_SLACK_S = 30.0
_FOR_A_REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}
_SHOWN_CHARACTERS = 300

Params = dict[str, Any]
T = TypeVar("T")


class PrefillError(Exception):
    """An engine was asked to compute a prompt for another one, and did not."""


@dataclass(frozen=True)
class Server:
    """Who is asked.

    Attributes:
        name: what it is called in the history.
        url: its base URL, without a path.
    """

    name: str
    url: str


@dataclass(frozen=True)
class Terms:
    """What is expected of a request.

    Attributes:
        deadline_s: how long it may take.
        strict: stopped engines are no excuse.
        must_answer: only an answer is right.
        label: what else is to be told of it.
    """

    deadline_s: float
    strict: bool = False
    must_answer: bool = False
    label: str = ""

    @property
    def patience_s(self) -> float:
        """How long a client waits: for as long as a request can be allowed to take."""
        return self.deadline_s if self.strict else self.deadline_s + LONGEST_HOLD_S + _SLACK_S


class Clients:
    """All clients of a soak.

    Args:
        model: what the servers call what they serve.
        turns: what can be asked.
        recorder: where it is noted down.
        deadline_s: how long a request of the load may take.
    """

    def __init__(
        self, model: str, turns: tuple[Turn, ...], recorder: Recorder, deadline_s: float
    ) -> None:
        self._model = model
        self._turns = turns
        self._recorder = recorder
        self._terms = Terms(deadline_s)
        self._must_answer = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="clients", daemon=True)
        self._gate = asyncio.Event()
        self._in_flight = 0
        self._load: list[Future[None]] = []
        # Connections are not kept: an engine that was killed leaves dead ones behind.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._http = httpx.AsyncClient(timeout=None, trust_env=False, limits=limits)
        self._thread.start()

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start_load(self, server: Callable[[], Server], seed: int, count: int) -> None:
        """Let clients ask one thing after the other, from when the load is resumed.

        Args:
            server: says who is asked.
            seed: other requests for another number.
            count: how many clients there are.
        """
        self._load += [
            self._submit(self._keep_asking(server, seed, number)) for number in range(count)
        ]

    def resume(self) -> None:
        """Let the load go on."""
        self._loop.call_soon_threadsafe(self._gate.set)

    def pause(self) -> None:
        """Let no request of the load begin any more.

        Raises:
            Exception: a client of the load has ended, which none ever should.
        """
        self._loop.call_soon_threadsafe(self._gate.clear)
        for client in self._load:
            if client.done():
                client.result()

    @contextmanager
    def demanding(self) -> Iterator[None]:
        """Within this block every request of the load that is sent has to be answered."""
        self._must_answer = True
        try:
            yield
        finally:
            self._must_answer = False

    @property
    def in_flight(self) -> int:
        """How many requests have not ended."""
        return self._in_flight

    def ask(
        self, server: Server, ask: Ask, terms: Terms, params: Params | None = None
    ) -> Future[Request]:
        """Ask something outside of the load.

        Args:
            params: the request's kv_transfer_params.
        """
        return self._submit(self._ask(server, ask, terms, params))

    def prefill(self, server: Server, ask: Ask, limit_s: float) -> Params:
        """Let an engine compute a prompt, as a router does, and return where its blocks are.

        Raises:
            PrefillError: it failed, was silent for too long, or did not say where they are.
        """
        fields = body(ask, self._turns[ask.turn], self._model)
        fields |= {"max_tokens": 1, "kv_transfer_params": _FOR_A_REMOTE_DECODE}
        url = f"{server.url}/v1/chat/completions"
        try:
            reply = httpx.post(url, json=fields, timeout=limit_s, trust_env=False)
            reply.raise_for_status()
            params: Params | None = reply.json()["kv_transfer_params"]
        except (httpx.HTTPError, ValueError, KeyError) as error:
            raise PrefillError(f"{server.name} did not prefill: {error!r}") from error
        if not params:
            raise PrefillError(f"{server.name} did not say where the blocks of a prompt are")
        return params

    def close(self) -> None:
        """Break off what is in flight, and end the thread."""
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _run(self) -> None:
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._end())
        finally:
            self._loop.close()

    async def _end(self) -> None:
        """Break off all requests, and close their connections."""
        pending = asyncio.all_tasks() - {asyncio.current_task()}
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        await self._http.aclose()

    async def _keep_asking(self, server: Callable[[], Server], seed: int, number: int) -> None:
        for ask in asks(seed, number, len(self._turns)):
            await asyncio.sleep(ask.rest_s)
            await self._gate.wait()
            # Who goes away does not hear of it.
            must_answer = self._must_answer and not ask.leaves
            await self._ask(server(), ask, replace(self._terms, must_answer=must_answer), None)

    async def _ask(self, server: Server, ask: Ask, terms: Terms, params: Params | None) -> Request:
        """Ask, note down what came of it, and return that."""
        fields = body(ask, self._turns[ask.turn], self._model)
        if params is not None:
            fields["kv_transfer_params"] = params
        leaves_after_s = ask.leaves_after_s
        limit_s = terms.patience_s if leaves_after_s is None else leaves_after_s
        exchange = _Exchange(ask)
        began, round_number = self._recorder.now_s(), self._recorder.round
        gave_up = False
        error = ""
        self._in_flight += 1
        try:
            url = f"{server.url}/v1/chat/completions"
            await asyncio.wait_for(exchange.run(self._http, url, fields), limit_s)
        except asyncio.TimeoutError:
            exchange.left = leaves_after_s is not None
            gave_up = not exchange.left
        except httpx.HTTPError as failure:
            error = f"{type(failure).__name__}: {failure}"
        finally:
            self._in_flight -= 1
        request = Request(
            round=round_number,
            manner=ask.manner,
            asked=server.name,
            turn=ask.turn,
            num_answers=ask.num_answers,
            sent_s=began,
            ended_s=self._recorder.now_s(),
            deadline_s=terms.deadline_s,
            status=exchange.status,
            answers=exchange.reply.answers,
            complete=exchange.reply.complete,
            left=exchange.left,
            gave_up=gave_up,
            error=error or exchange.error or exchange.reply.error,
            strict=terms.strict,
            must_answer=terms.must_answer,
            label=terms.label,
        )
        self._recorder.history.requests.append(request)
        return request


class _Exchange:
    """One request on its way; what is known of it stays when it is broken off."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self.reply = Reply(ask.num_answers)
        self.status: int | None = None
        self.left = False
        self.error = ""

    async def run(self, http: httpx.AsyncClient, url: str, fields: dict[str, Any]) -> None:
        async with http.stream("POST", url, json=fields) as response:
            self.status = response.status_code
            if response.is_error:
                content = await response.aread()
                self.error = content.decode(errors="replace")[:_SHOWN_CHARACTERS]
            elif self._ask.stream:
                await self._read_stream(response)
            else:
                self.reply.take(await response.aread())

    async def _read_stream(self, response: httpx.Response) -> None:
        leaves_after = self._ask.leaves_after_tokens
        async for line in response.aiter_lines():
            if leaves_after is not None and self.reply.num_pieces >= leaves_after:
                self.left = True
                return
            self.reply.take_line(line)
