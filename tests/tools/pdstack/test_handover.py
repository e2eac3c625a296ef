# SPDX-License-Identifier: Apache-2.0
"""What is asked in which way, and what is made of the times."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from unittest.mock import Mock, create_autospec

import httpx
import pytest

from tools.pdstack import handover_cli, held_blocks
from tools.pdstack.cli import build_parser
from tools.pdstack.engine import UPSTREAM_PUSH_AT_REST, EngineSpec
from tools.pdstack.errors import PDStackError, UsageError
from tools.pdstack.handover import UNSEEDED_WAYS, WAYS, Pair, Sample, Turn, Way, rows
from tools.pdstack.handover_cli import HandoverSettings, handover_table, measure
from tools.pdstack.held_blocks import HeldBlocks
from tools.pdstack.layout import Layout
from tools.pdstack.metrics import NixlCounters
from tools.pdstack.stack import PDStack

PREFILL, DECODE = "http://prefill:1", "http://decode:1"
PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "p",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "remote_block_ids": [[1]],
}
COORDINATES = {name: value for name, value in PARAMS.items() if name != "remote_block_ids"}


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

    def measure(
        self, clients: int, rounds: int, *, each: int = 1, ways: Sequence[Way] = WAYS
    ) -> list[Turn]:
        """Measure with these in the engines' place."""

        async def run() -> list[Turn]:
            async with httpx.AsyncClient(transport=httpx.MockTransport(self)) as client:
                pair = Pair(PREFILL, DECODE, "m", 100, client, ways=ways)
                return await pair.measure(clients, rounds, each=each)

        return asyncio.run(run())


def test_each_way_is_asked_as_it_is_called():
    """Early ones name an address, and no blocks; others what the prefill engine has answered."""
    engines = Engines()
    turns = engines.measure(clients=2, rounds=4)
    assert len(turns) == 4 * len(WAYS)
    for way in WAYS:
        assert sum(len(turn.samples) for turn in turns if turn.way == way) == 4 * 2
    asked = [(body, name) for host, body, name in engines.asked if host == "decode"]
    kinds = set()
    for body, name in asked:
        params = body["kv_transfer_params"]
        is_early = "remote_block_ids" not in params
        assert params == ({**COORDINATES, "remote_request_id": name} if is_early else PARAMS)
        kinds.add(Way(is_early, "vllm_xargs" not in body, body["temperature"] > 0))
    assert kinds == {*WAYS}


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
        for field in ("prompt", "temperature"):
            assert each["decode"][field] == each["prefill"][field]
        assert (each["prefill"]["max_tokens"], each["prefill"]["min_tokens"]) == (1, 1)


def test_answer_without_a_token_is_none():
    """Its time would be that of something else."""
    with pytest.raises(PDStackError, match="without a token"):
        Engines(tokens=False).measure(clients=1, rounds=1)


def test_clients_send_one_request_after_the_other():
    """As many as they are asked for, and never two at a time."""
    under_way: list[int] = []

    class Counting(Engines):
        def __call__(self, request: httpx.Request) -> httpx.Response:
            if request.url.host == "prefill":
                under_way.append(len({name for _, _, name in self.asked}))
            return super().__call__(request)

    engines = Counting()
    turns = engines.measure(clients=1, rounds=1, each=3, ways=UNSEEDED_WAYS)
    assert [len(turn.samples) for turn in turns] == [3, 3]
    assert {turn.way for turn in turns} == {*UNSEEDED_WAYS}
    # Each is sent when all before it were asked of the decode engine, too.
    assert under_way == sorted({*under_way})
    for turn in turns:
        assert turn.ended_s - turn.began_s >= sum(sample.ttft_s for sample in turn.samples)


def turn(way: Way, clients: int, handover_s: float, more_s: float, **fields) -> Turn:
    """A turn of which each request took a second until the prompt's end, and then so long."""
    ttft_s = 1.0 + clients * handover_s + more_s
    samples = [Sample(1.0, ttft_s, 500)] * clients
    given = {"connector": "ours", "block_s": 10.0 * clients, **fields}
    return Turn(way, clients, samples, began_s=7.0, ended_s=7.0 + ttft_s, **given)


def test_rows_are_medians_and_shares_of_serial():
    """Of the requests of as many clients."""
    found = rows(
        [
            turn(way, clients, handover_s, more_s)
            for clients in (1, 4)
            for way, handover_s in reversed(
                [*zip(WAYS, (0.4, 0.3, 0.3, 0.2, 0.1, 0.1), strict=True)]
            )
            for more_s in (-0.05, 0.0, 3.0)
        ]
    )
    assert [row.of_serial for row in found] == pytest.approx([1, 0.75, 0.75, 0.5, 0.25, 0.25] * 2)
    ways = ["serial", "serial, seeded", "serial, seeded, sampled"]
    ways += [way.replace("serial", "early") for way in ways]
    assert [row.way for row in found[:6]] == ways
    assert found[-1].ttft_s == pytest.approx(1.4)
    assert found[-1].ttft_of_serial == pytest.approx(1.4 / 2.6)
    assert found[-1].requests_s == pytest.approx(4 / 1.4)
    assert found[-1].requests_of_serial == pytest.approx(2.6 / 1.4)
    assert {row.prefill_of_serial for row in found} == {1.0}
    # Of each request.
    assert {row.block_s for row in found} == {10.0}
    assert found[0].requests == 3
    assert handover_table(found).row_count == len(found)


def test_connectors_are_compared_way_by_way():
    """With the last one, whose own shares are 1; serial requests are those of each itself."""
    found = rows(
        [
            turn(way, 1, handover_s, 0.0, connector=connector, block_s=block_s)
            for connector, handovers, block_s in (
                ("ours", (0.4, 0.1), 2.0),
                ("push", (0.5, 0.4), 8),
            )
            for way, handover_s in zip(UNSEEDED_WAYS, handovers, strict=True)
        ]
    )
    assert [(row.connector, row.way) for row in found] == [
        (connector, way) for connector in ("ours", "push") for way in ("serial", "early")
    ]
    assert [row.of_serial for row in found] == pytest.approx([1.0, 0.25, 1.0, 0.8])
    assert [row.of_last for row in found] == pytest.approx([0.8, 0.25, 1.0, 1.0])
    assert [row.blocks_of_last for row in found] == [0.25, 0.25, 1.0, 1.0]
    alone = handover_table([row for row in found if row.connector == "ours"])
    assert len(handover_table(found).columns) == len(alone.columns) + 3


@pytest.fixture
def stack(monkeypatch, tmp_path):
    """A stack whose engines answer here, and have counted what it is told."""
    made = create_autospec(PDStack, instance=True)
    made.model, made.run_dir = Mock(), tmp_path
    made.model.name = "m"
    made.counted = {"prefill": NixlCounters(), "decode": NixlCounters()}

    def start(*specs: EngineSpec) -> list[Mock]:
        made.specs = specs
        return [
            Mock(url=url, nixl_counters=lambda role=role: made.counted[role])
            for role, url in (("prefill", PREFILL), ("decode", DECODE))
        ]

    made.start_engines.side_effect = start
    transport = httpx.MockTransport(Engines())
    client = httpx.AsyncClient
    monkeypatch.setattr(handover_cli.httpx, "AsyncClient", lambda **_: client(transport=transport))
    held = HeldBlocks([(0.0, 3)])
    monkeypatch.setattr(held_blocks, "read", lambda path: held if path.parent == tmp_path else None)
    return made


def settings(*connectors: str) -> HandoverSettings:
    """Of one round for each pair of engines."""
    rounds = len(connectors)
    return HandoverSettings(Layout(1, 1), Layout(1, 1), [1], rounds, 100, connectors=connectors)


def test_ways_that_the_engines_did_not_go_are_no_measurement(stack):
    """As where the option is taken and does nothing."""
    stack.counted["decode"] = NixlCounters(prefill_waits=3)
    with pytest.raises(PDStackError, match="0 began with the prefill engine's token"):
        measure(stack, settings("ours"), "ours")
    with pytest.raises(PDStackError, match="has not written anything"):
        measure(stack, settings("push"), "push")


def test_each_connector_is_started_as_it_is_called(stack):
    """Ours with early dispatch, and with seeding where others need not keep up; push without."""
    stack.counted = {
        "prefill": NixlCounters(transfers=1),
        "decode": NixlCounters(prefill_waits=1, first_tokens=1),
    }
    asked = {}
    for key, connectors in (("alone", ["ours"]), ("ours", ["ours", "push"]), ("push", ["push"])):
        found = measure(stack, settings(*connectors), connectors[0])
        assert {turn.connector for turn in found} == {connectors[0]}
        assert all(turn.block_s > 0 for turn in found)
        assert len(found) == len(settings(*connectors).ways)
        asked[key] = [spec.kv_transfer for spec in stack.specs]
        prefill, decode = stack.specs
        assert "HELD_BLOCKS" in decode.env and "HELD_BLOCKS" not in prefill.env
    options = {
        key: [{*each.extra_config} & {"early_dispatch", "seed_first_token"} for each in transfers]
        for key, transfers in asked.items()
    }
    assert options == {
        "alone": [{"early_dispatch", "seed_first_token"}] * 2,
        "ours": [{"early_dispatch"}] * 2,
        "push": [set()] * 2,
    }
    assert [each.role for each in asked["push"]] == ["kv_producer", "kv_consumer"]
    for transfer in asked["push"]:
        assert transfer.connector == UPSTREAM_PUSH_AT_REST.connector == "NixlPushConnector"
        assert transfer.module_path == UPSTREAM_PUSH_AT_REST.module_path


def test_engine_that_tells_of_no_blocks_is_an_error(stack, monkeypatch):
    """Rather than a share of nothing."""
    stack.counted["prefill"] = NixlCounters(transfers=1)
    monkeypatch.setattr(held_blocks, "read", lambda _: HeldBlocks([]))
    with pytest.raises(PDStackError, match="which blocks it holds"):
        measure(stack, settings("push"), "push")


def test_pairs_of_engines_take_turns():
    """There and back, each with half of the rounds."""
    assert settings("ours").visits == ("ours",)
    assert settings("ours", "push").visits == ("ours", "push", "push", "ours")


def test_arguments_are_understood():
    """Numbers of clients add up, and those that cannot be are refused."""
    asked = build_parser().parse_args(["handover", "--clients", "2", "--prefill", "tp1pp2"])
    settings = HandoverSettings.of(asked)
    assert (settings.clients, settings.prefill) == ([2], Layout(1, 2))
    assert settings.ways == WAYS
    asked.rounds = 0
    with pytest.raises(UsageError, match="positive"):
        HandoverSettings.of(asked)


def test_connectors_are_those_that_the_installed_vllm_has(monkeypatch):
    """Each once; upstream's 0.22.1 has none that writes."""
    asked = build_parser().parse_args(["handover", "--connector", "ours", "--connector", "push"])
    monkeypatch.setattr(handover_cli, "why_no_push", lambda: "")
    found = HandoverSettings.of(asked)
    assert (found.connectors, found.ways) == (["ours", "push"], UNSEEDED_WAYS)
    monkeypatch.setattr(handover_cli, "why_no_push", lambda: "there is none")
    with pytest.raises(UsageError, match="there is none"):
        HandoverSettings.of(asked)
    asked.connector = ["ours", "ours"]
    with pytest.raises(UsageError, match="twice"):
        HandoverSettings.of(asked)
