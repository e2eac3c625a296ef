# SPDX-License-Identifier: Apache-2.0
"""Clients that ask, stream, leave and vanish, in a thread of their own; all is noted down.

The thread runs an event loop, which owns every connection. Who stands outside hands in requests and
gets futures.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import httpx

from .history import Recorder, Request
from .replies import Reply
from .schedule import LONGEST_HOLD_S
from .workload import Ask, Turn, asks, body

_SLACK_S = 30.0
_FOR_A_REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}
_COORDINATES = ("do_remote_prefill", "remote_engine_id", "remote_host", "remote_port")
_SHOWN_CHARACTERS = 300
_POKE_LIMIT_S = 5.0
_LONG_ANSWER_TOKENS = 600
"""What an engine writes for seconds, and a prefill engine's pool has room for `MOST_AT_ONCE` of."""

Params = dict[str, Any]
T = TypeVar("T")


def coordinates_of(params: Params) -> Params:
    """Return what a router sends to a decode engine together with the prefill engine's request.

    Args:
        params: what the prefill engine has said of an earlier request.
    """
    return {name: params[name] for name in _COORDINATES}


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


@dataclass(frozen=True)
class EarlyAsk:
    """A request that two engines have at the same time.

    Attributes:
        prefill: whether the prefill engine has answered, once that is known.
        decode: what came of it for the client.
    """

    prefill: Future[bool]
    decode: Future[Request]


class Clients:
    """All clients of a soak.

    Args:
        model: what the servers call what they serve.
        turns: what can be asked.
        recorder: where it is noted down.
        deadline_s: how long a request of the load may take.

    Attributes:
        num_occupying: requests that only keep an engine busy.
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
        self.num_occupying = 0
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
        fields = self._prefill_body(ask)
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

    def ask_early(
        self, prefill: Server, decode: Server, ask: Ask, terms: Terms, coordinates: Params
    ) -> EarlyAsk:
        """Ask a prefill and a decode engine at once, as a router does.

        Args:
            coordinates: of the prefill engine, as `coordinates_of` has them.
        """
        router_id = uuid.uuid4().hex
        headers = {"X-Request-Id": router_id}
        params = {**coordinates, "remote_request_id": router_id}
        return EarlyAsk(
            self._submit(self._prefill_early(prefill, ask, terms, headers)),
            self._submit(self._ask(decode, ask, terms, params, headers)),
        )

    @contextmanager
    def occupied(self, server: Server, count: int) -> Iterator[None]:
        """Within this block an engine writes long answers, which are thrown away.

        Args:
            count: how many at once.
        """
        writing = [self._submit(self._have_written(server)) for _ in range(count)]
        try:
            yield
        finally:
            for each in writing:
                each.cancel()

    def poke(self, server: Server) -> None:
        """Let an engine compute a step: its metrics are those of its last one."""
        with suppress(httpx.HTTPError):
            # Where it does not answer, its metrics or other requests tell.
            url = f"{server.url}/v1/chat/completions"
            fields = _short_chat(self._model) | {"max_tokens": 1}
            httpx.post(url, json=fields, timeout=_POKE_LIMIT_S, trust_env=False)

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

    def _prefill_body(self, ask: Ask) -> dict[str, Any]:
        """What a prefill engine is asked: for a token, and to hold the blocks."""
        fields = body(replace(ask, stream=False), self._turns[ask.turn], self._model)
        return fields | {"max_tokens": 1, "kv_transfer_params": _FOR_A_REMOTE_DECODE}

    async def _prefill_early(
        self, server: Server, ask: Ask, terms: Terms, headers: dict[str, str]
    ) -> bool:
        url = f"{server.url}/v1/chat/completions"
        with suppress(httpx.HTTPError):
            reply = await self._http.post(
                url, json=self._prefill_body(ask), headers=headers, timeout=terms.patience_s
            )
            return reply.is_success
        return False

    async def _have_written(self, server: Server) -> None:
        fields = _short_chat(self._model) | {"max_tokens": _LONG_ANSWER_TOKENS, "ignore_eos": True}
        self.num_occupying += 1
        try:
            with suppress(httpx.HTTPError):
                await self._http.post(f"{server.url}/v1/chat/completions", json=fields)
        finally:
            self.num_occupying -= 1

    async def _ask(
        self,
        server: Server,
        ask: Ask,
        terms: Terms,
        params: Params | None,
        headers: dict[str, str] | None = None,
    ) -> Request:
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
            await asyncio.wait_for(exchange.run(self._http, url, fields, headers), limit_s)
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

    async def run(
        self,
        http: httpx.AsyncClient,
        url: str,
        fields: dict[str, Any],
        headers: dict[str, str] | None,
    ) -> None:
        async with http.stream("POST", url, json=fields, headers=headers) as response:
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


def _short_chat(model: str) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "next"}], "temperature": 0.0}
