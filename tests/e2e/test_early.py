# SPDX-License-Identifier: Apache-2.0
"""Requests that the unchanged router sends to both engines at once, against one engine alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.e2e.layouts import ONE, STAGES, Case, Engines, running
from tests.e2e.pairs import BLOCK_TOKENS, REQUEST_LIMIT_S, Pair, ask_unaided, metric, text_of
from tools.pdstack.engine import KVTransfer
from tools.pdstack.stack import Server
from tools.pdstack.tiny_models import write_tiny_llama

KV_TRANSFER = KVTransfer(extra_config={"kv_lease_duration": 120, "early_dispatch": True})
WAITS = "vllm:nixl_prefill_wait_seconds_count"
KNOWN_WITHIN_S = 10.0
LONG_TOKENS = 7 * BLOCK_TOKENS

pytestmark = [
    pytest.mark.e2e,
    # Schedulers and workers of `test_early_dispatch` decide; here are the router and processes.
    pytest.mark.parametrize("case", [Case(STAGES, ONE, reads=2)], ids=str, scope="module"),
]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Start one of each layout, with the option on."""
    model = write_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama")
    case, run = Case(STAGES, ONE, reads=2), tmp_path_factory.mktemp("run")
    with running(model, run, [case], kv_transfer=KV_TRANSFER) as engines:
        yield engines


def test_answers_of_both_engines_at_once_equal_one_engines(pair: Pair) -> None:
    """After one answer of the prefill engine's, all others are sent to both engines at once."""
    texts = [text_of(f"early {number}", BLOCK_TOKENS * number + 9) for number in range(1, 5)]
    right = [ask_unaided(pair.prefill, pair.model, text) for text in texts]
    assert pair.ask(texts[0]) == right[0]
    waits = metric(pair.decode, WAITS)
    assert pair.ask_at_once(texts[1:]) == right[1:]
    # Some were at the decode engine before their prompts were computed.
    assert metric(pair.decode, WAITS) > waits
    pair.assert_nothing_is_left()


def test_prompts_of_one_request_are_paired(pair: Pair) -> None:
    """Each with its like, by their places."""
    pair.ask("first")
    body = {
        "model": pair.model,
        "prompt": [text_of(f"child {number}", 150) for number in range(2)],
        "temperature": 0.0,
        "max_tokens": 8,
    }
    answers = []
    for server in (pair.prefill, pair.router):
        said = {**body, "cache_salt": "unaided"} if server is pair.prefill else body
        reply = httpx.post(
            f"{server.url}/v1/completions", json=said, timeout=REQUEST_LIMIT_S, trust_env=False
        )
        reply.raise_for_status()
        answers.append([choice["text"] for choice in reply.json()["choices"]])
    assert answers[0] == answers[1]
    pair.assert_nothing_is_left()


OF_NOBODY_YET = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
}
IDENTITY = ("remote_engine_id", "remote_host", "remote_port", "tp_size", "pp_size", "transfer_mode")


def router_id(text: str) -> str:
    """Return what a router calls the request of a text."""
    return text[:15].strip()


def complete(
    server: Server, model: str, params: dict[str, Any], text: str = "nobody's", **fields: Any
) -> httpx.Response:
    """Return what an engine says to a prompt with such parameters, whatever it is."""
    body = {
        "model": model,
        "prompt": text,
        "temperature": 0.0,
        "max_tokens": 1,
        "kv_transfer_params": params,
        **fields,
    }
    url, headers = f"{server.url}/v1/completions", {"X-Request-Id": router_id(text)}
    return httpx.post(url, json=body, headers=headers, timeout=REQUEST_LIMIT_S, trust_env=False)


@pytest.mark.parametrize("way", ["serial", "at once", "again", "peer to peer"])
def test_routing_sidecar_of_llm_d_is_answered(pair: Pair, way: str) -> None:
    """By what llm-d-router's sidecar sends with its connectors `nixlv2` and `offloading`.

    At once it sends what it keeps of an answer that pushes, with a `transfer_id` for both engines;
    and again, with the new answer's parameters, if that answer is another engine's.
    """

    def prefill(text: str, params: dict[str, Any]) -> dict[str, Any]:
        reply = complete(pair.prefill, pair.model, params, text)
        told: dict[str, Any] = reply.json()["kv_transfer_params"]
        return told

    def decode(text: str, params: dict[str, Any]) -> str:
        reply = complete(pair.decode, pair.model, params, text, max_tokens=8)
        answer: str = reply.raise_for_status().json()["choices"][0]["text"]
        return answer

    text, key = text_of(f"sidecar {way}", 2 * BLOCK_TOKENS + 9), f"xfer-{way}"
    known = prefill("another", OF_NOBODY_YET)
    decode("another", known)
    before = pair.decode.nixl_counters()
    if way == "peer to peer":
        prefill(text, {"remote_decoder": {"kv_request_id": key}})
        place = {name: known[name] for name in ("remote_host", "remote_port")}
        answer = decode(text, {"remote_prefiller": {"kv_request_id": key, **place}})
    elif way == "at once":
        params = {
            **{name: known[name] for name in IDENTITY},
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_request_id": router_id(text),
            "transfer_id": key,
        }
        with ThreadPoolExecutor(1) as pool:
            prefilled = pool.submit(prefill, text, {**OF_NOBODY_YET, "transfer_id": key})
            answer = decode(text, params)
            assert prefilled.result()["transfer_mode"] == "push"
    else:
        more = {"transfer_id": key} if way == "again" else {}
        answer = decode(text, {**prefill(text, {**OF_NOBODY_YET, **more}), **more})
    pair.read_since(before, transfers=2)
    unaided = complete(pair.prefill, pair.model, {}, text, max_tokens=8, cache_salt="unaided")
    assert answer == unaided.json()["choices"][0]["text"]
    pair.assert_nothing_is_left()


def test_request_that_only_the_decode_engine_has_ends_with_an_error(pair: Pair) -> None:
    """After ten seconds: nobody computes it."""
    said = complete(pair.prefill, pair.model, {"do_remote_decode": True})
    whole = said.json()["kv_transfer_params"]
    assert complete(pair.decode, pair.model, whole).status_code == 200
    names = ("do_remote_prefill", "remote_engine_id", "remote_host", "remote_port", "tp_size")
    began_s = time.monotonic()
    reply = complete(pair.decode, pair.model, {name: whole[name] for name in names})
    assert reply.status_code == 500
    assert time.monotonic() - began_s >= KNOWN_WITHIN_S


def test_client_that_leaves_costs_no_other(pair: Pair) -> None:
    """Its blocks are back on both engines, and whoever comes next is answered right."""
    pair.ask("first")
    with ThreadPoolExecutor(1) as pool, httpx.Client(trust_env=False) as client:
        body = {"model": pair.model, "prompt": text_of("leaves", LONG_TOKENS), "max_tokens": 200}
        leaving = pool.submit(
            client.post, f"{pair.router.url}/v1/completions", json=body, timeout=0.3
        )
        with pytest.raises(httpx.TimeoutException):
            leaving.result()
    text = text_of("stays", 300)
    assert pair.ask(text) == ask_unaided(pair.prefill, pair.model, text)
    pair.wait_until_free()
    assert pair.prefill.nixl_counters().expired_requests == 0
