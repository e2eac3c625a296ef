# SPDX-License-Identifier: Apache-2.0
"""Bodies that vLLM's API refuses, or that ask for what nobody reads, through its own front end."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.testclient import TestClient
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from tests.bases import requires_base

try:
    from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
except ImportError:  # 0.22.1
    from vllm.entrypoints.openai.server_utils import exception_handler, validation_exception_handler

    def init_exception_handler(app: FastAPI) -> None:
        """Register both as the release's `build_app` does."""
        app.exception_handler(RequestValidationError)(validation_exception_handler)
        app.exception_handler(Exception)(exception_handler)


PARAMS = {"do_remote_prefill": True, "remote_engine_id": "p"}
PASSED = {"prompt": "a", "kv_transfer_params": PARAMS}
PREPARES = requires_base("0.32.0", "0.33.0", reason="it has no patch for it")
REFUSED = {**PASSED, "stream_options": {"include_usage": True}}


class EngineClient:
    """What the handler needs of vLLM's: the names and parameters that it was told of."""

    def __init__(
        self, *, connector: bool = True, fails: bool = False, extra: dict | None = None
    ) -> None:
        config = SimpleNamespace(kv_connector_extra_config=extra or {})
        self.vllm_config = SimpleNamespace(kv_transfer_config=config if connector else None)
        self.told: list[tuple[str, dict]] = []
        self._fails = fails

    async def notify_kv_transfer_request_rejected(self, request_id: str, params: dict) -> None:
        """Note what is told."""
        if self._fails:
            raise OverflowError("can only serialize ints of 64 bits")
        self.told.append((request_id, params))


def post(client: EngineClient | None, body: object) -> httpx.Response:
    """Send a body to a server that has vLLM's handler, its completions alone, and this client."""
    app = FastAPI()
    app.state.engine_client = client
    app.state.args = SimpleNamespace(log_error_stack=False)
    init_exception_handler(app)

    @app.post("/v1/completions")
    async def complete(request: CompletionRequest) -> dict:
        return {}

    return TestClient(app, raise_server_exceptions=False).post("/v1/completions", json=body)


@pytest.mark.parametrize("refused", [REFUSED, {**PASSED, "max_tokens": "many"}])
def test_connector_is_told_of_a_body_that_is_refused(refused):
    """By vLLM's checks and by types: once, under a name that no client chose, with what came."""
    client = EngineClient()
    for _ in range(2):
        assert post(client, refused).status_code == httpx.codes.BAD_REQUEST
    names, told = zip(*client.told, strict=True)
    assert told == (PARAMS, PARAMS)
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    "body",
    [
        PASSED,
        {**REFUSED, "stream": True},
        {**REFUSED, "kv_transfer_params": {"do_remote_decode": True}},
        {**REFUSED, "kv_transfer_params": [PARAMS]},
        {**REFUSED, "kv_transfer_params": None},
        [REFUSED],
        "text",
        None,
    ],
)
def test_connector_is_told_of_nothing_else(body):
    """Bodies that pass, bodies that were to read nothing, and bodies that are no object."""
    client = EngineClient()
    post(client, body)
    assert client.told == []


@pytest.mark.parametrize("client", [None, EngineClient(connector=False)])
def test_engine_without_a_connector_is_told_nothing(client):
    """The client has its answer all the same."""
    assert post(client, REFUSED).status_code == httpx.codes.BAD_REQUEST
    assert client is None or client.told == []


def serve(client: EngineClient, body: Any) -> list[list[dict]]:
    """Serve a request as vLLM's front end does; returns what was told of before it was served."""
    from vllm.entrypoints.generate.base.serving import GenerateBaseServing

    served: list[list[dict]] = []
    server = SimpleNamespace(has_kv_connector=True, engine_client=client)

    async def answer() -> None:
        served.append([params for _, params in client.told])

    serving = GenerateBaseServing._with_kv_transfer_rejection_cleanup
    asyncio.run(serving(server, answer(), body, None))
    return served


@PREPARES
@pytest.mark.parametrize("search", [True, False])
def test_connector_is_told_of_beam_search(search):
    """Its requests have no parameters; what the body named is given up before they are served."""
    client = EngineClient()
    told = serve(client, CompletionRequest(**PASSED, use_beam_search=search))
    assert told == [[PARAMS] * search]
    assert len(client.told) == search


@PREPARES
@pytest.mark.parametrize(
    ("asked", "left"),
    [
        ({"prompt": "a", "n": 3}, ("a", None)),
        ({"prompt": ["a", "b"]}, (["a"], None)),
        ({"prompt": [7, 8]}, ([7, 8], None)),
        ({"prompt": [[7, 8], [9]], "n": 2}, ([[7, 8]], None)),
        ({"prompt": [], "prompt_embeds": ["YQ==", "Yg=="]}, (None, [b"YQ=="])),
        ({"prompt": "a", "prompt_embeds": "YQ=="}, (None, b"YQ==")),
        ({"prompt": [], "n": 2}, ([], None)),
    ],
)
def test_prefill_makes_the_one_answer_that_it_names(asked, left):
    """The first prompt's: the other answers and prompts would be held for nobody."""
    body = CompletionRequest(**asked, kv_transfer_params={"do_remote_decode": True})
    serve(EngineClient(), body)
    assert (body.prompt, body.prompt_embeds, body.n) == (*left, 1)


@PREPARES
def test_prefill_of_a_chat_makes_one_answer():
    """Chats have no lists of prompts."""
    message = {"role": "user", "content": "a"}
    params = {"do_remote_decode": True}
    body = ChatCompletionRequest(messages=[message], n=3, kv_transfer_params=params)
    serve(EngineClient(), body)
    assert body.n == 1


@PREPARES
@pytest.mark.parametrize(
    ("params", "extra"),
    [
        (PARAMS, {}),
        ({}, {}),
        ({"do_remote_decode": True}, {"early_dispatch": True}),
        (
            {"do_remote_decode": True},
            {"connectors": [{}, {"kv_connector_extra_config": {"early_dispatch": True}}]},
        ),
    ],
)
def test_other_requests_are_served_as_they_are(params, extra):
    """At decode, without parameters, and where answers are found by their place."""
    body = CompletionRequest(prompt=["a", "b"], n=3, kv_transfer_params=params)
    serve(EngineClient(extra=extra), body)
    assert (body.prompt, body.n) == (["a", "b"], 3)


def test_parameters_that_cannot_be_told_cost_no_answer(caplog_vllm):
    """The client reads why its body was refused, the operator that blocks are held."""
    with caplog_vllm.at_level(logging.WARNING):
        reply = post(EngineClient(fails=True), REFUSED)
    assert reply.status_code == httpx.codes.BAD_REQUEST
    assert "until its lease has run out" in caplog_vllm.text
