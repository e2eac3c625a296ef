# SPDX-License-Identifier: Apache-2.0
"""What is asked in which way, and what is made of the times."""

from __future__ import annotations

import asyncio
import json
from unittest.mock import Mock, create_autospec

import httpx
import pytest

from tools.pdstack import handover_cli
from tools.pdstack.cli import build_parser
from tools.pdstack.errors import PDStackError, UsageError
from tools.pdstack.handover import WAYS, Pair, Row, Sample, Way, rows
from tools.pdstack.handover_cli import HandoverSettings, handover_table, measure
from tools.pdstack.layout import Layout
from tools.pdstack.metrics import NixlCounters
from tools.pdstack.stack import PDStack

PREFILL, DECODE = "http://prefill:1", "http://decode:1"
PARAMS = {
    "do_remote_prefill": True,
    "remote_engine_id": "p",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "remote_block_ids": [[1]],
}
COORDINATES = {name: PARAMS[name] for name in [*PARAMS][:4]}


class Engines:
    """Answers as both engines do, and keeps what they were asked."""

    def __init__(self, tokens: bool = True) -> None:
        self.asked: list[tuple[str, dict, str]] = []
        self._tokens = tokens

    def __call__(self, request: httpx.Request) -> httpx.Response:
        """Answer."""
        body = json.loads(request.content)
        self.asked.append((request.url.host, body, request.headers["X-Request-Id"]))
        if request.url.host == "prefill":
            usage = {"prompt_tokens": 500}
            return httpx.Response(200, json={"kv_transfer_params": PARAMS, "usage": usage})
        text = "a" if self._tokens else ""
        chunk = json.dumps({"choices": [{"text": text}]})
        return httpx.Response(200, text=f"data: {chunk}\n\ndata: [DONE]\n\n")

    def measure(self, clients: int, rounds: int) -> list[Sample]:
        """Measure with these in the engines' place."""

        async def run() -> list[Sample]:
            async with httpx.AsyncClient(transport=httpx.MockTransport(self)) as client:
                pair = Pair(PREFILL, DECODE, "m", 100, client)
                return await pair.measure(clients, rounds)

        return asyncio.run(run())


def test_each_way_is_asked_as_it_is_called():
    """Early ones name an address, and no blocks; others what the prefill engine has answered."""
    engines = Engines()
    samples = engines.measure(clients=2, rounds=4)
    assert len(samples) == 4 * 2 * len(WAYS)
    for way in WAYS:
        assert sum(each.way == way for each in samples) == 4 * 2
    asked = [(body, name) for host, body, name in engines.asked if host == "decode"]
    kinds = set()
    for body, name in asked:
        params = body["kv_transfer_params"]
        is_early = "remote_block_ids" not in params
        assert params == ({**COORDINATES, "remote_request_id": name} if is_early else PARAMS)
        kinds.add((is_early, "vllm_xargs" not in body))
    assert kinds == {(way.is_early, way.is_seeded) for way in WAYS}


def test_both_engines_are_sent_one_prompt_under_one_name():
    """No prompt is sent twice, and routers ask prefill engines for a single token."""
    engines = Engines()
    engines.measure(clients=1, rounds=1)
    by_name: dict[str, dict[str, dict]] = {}
    for host, body, name in engines.asked:
        by_name.setdefault(name, {})[host] = body
    prompts = [each["prefill"]["prompt"] for each in by_name.values()]
    assert len({*prompts}) == len(prompts)
    for each in by_name.values():
        assert each["decode"]["prompt"] == each["prefill"]["prompt"]
        assert (each["prefill"]["max_tokens"], each["prefill"]["min_tokens"]) == (1, 1)


def test_answer_without_a_token_is_none():
    """Its time would be that of something else."""
    with pytest.raises(PDStackError, match="without a token"):
        Engines(tokens=False).measure(clients=1, rounds=1)


def test_rows_are_medians_and_shares_of_serial():
    """Of the requests of as many clients."""
    samples = [
        Sample(way, clients, 1.0, 1.0 + clients * handover_s + more, 500)
        for clients in (1, 4)
        for way, handover_s in zip(WAYS, (0.4, 0.3, 0.2, 0.1), strict=True)
        for more in (-0.05, 0.0, 3.0)
    ]
    found = rows(samples)
    assert [row.of_serial for row in found] == pytest.approx([1, 0.75, 0.5, 0.25] * 2)
    assert [row.way for row in found[:4]] == ["serial", "serial, seeded", "early", "early, seeded"]
    assert found[-1].ttft_s == pytest.approx(1.4)
    assert found[-1].ttft_of_serial == pytest.approx(1.4 / 2.6)
    assert found[0].requests == 3
    assert handover_table(found).row_count == len(found)


def test_ways_that_the_engines_did_not_go_are_no_measurement(monkeypatch):
    """As where the option is taken and does nothing."""
    stack = create_autospec(PDStack, instance=True)
    stack.model = Mock()
    stack.model.name = "m"
    decode = Mock(url=DECODE, nixl_counters=lambda: NixlCounters(prefill_waits=3))
    stack.start_engines.return_value = [Mock(url=PREFILL), decode]
    transport = httpx.MockTransport(Engines())
    client = httpx.AsyncClient
    monkeypatch.setattr(handover_cli.httpx, "AsyncClient", lambda **_: client(transport=transport))
    settings = HandoverSettings(Layout(1, 1), Layout(1, 1), [1], 1, 100)
    with pytest.raises(PDStackError, match="0 began with the prefill engine's token"):
        measure(stack, settings)


def test_arguments_are_understood():
    """Numbers of clients add up, and those that cannot be are refused."""
    asked = build_parser().parse_args(["handover", "--clients", "2", "--prefill", "tp1pp2"])
    settings = HandoverSettings.of(asked)
    assert (settings.clients, settings.prefill) == ([2], Layout(1, 2))
    asked.rounds = 0
    with pytest.raises(UsageError, match="positive"):
        HandoverSettings.of(asked)


def test_row_is_plain():
    """It is written as it is."""
    assert Row("serial", 1, 1, 1.0, 1.0, 2.0, 1.0, 1.0).way == str(Way())
