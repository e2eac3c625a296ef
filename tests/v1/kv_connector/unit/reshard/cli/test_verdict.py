# SPDX-License-Identifier: Apache-2.0
"""Whether engines would exchange caches, and whether stock vLLM's would."""

from __future__ import annotations

import pytest

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.cli.engines import Answer, Engine
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.cli.layouts import parse_layout
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.cli.verdict import Outcome, judge


def answer(prefill: str = "tp2", decode: str = "tp1", *, has_state: bool = False, **said: str):
    """Two engines of which the second says something."""
    engines = Engine(parse_layout(prefill)), Engine(parse_layout(decode), **said)
    return Answer("a model", "from a test", None, has_state, engines)


@pytest.mark.parametrize(
    ("of", "refusal", "outcome", "words"),
    [
        (answer(), None, Outcome.SERVED, "Stock vLLM's would serve it, too."),
        (answer("tp3", "tp2"), None, Outcome.SERVED, "neither divides the other"),
        (answer("pp2", "tp2"), None, Outcome.SERVED, "would not: it has no pipeline stages"),
        (answer("tp4", "tp4,dcp=2"), None, Outcome.SERVED, "among all ranks or none"),
        (answer(has_state=True), None, Outcome.SERVED, "VLLM_SSM_CONV_STATE_LAYOUT=DS"),
        (answer(left="rings"), None, Outcome.STOCK, "which serves it: rings."),
        (answer("tp3", "tp2", left="rings"), None, Outcome.REFUSED, "stock vLLM's (rings)"),
        (answer(fault="no slots"), None, Outcome.REFUSED, "Refused: no slots."),
        (answer(), "other bytes", Outcome.REFUSED, "Refused: other bytes."),
    ],
)
def test_first_line_says_what_becomes_of_engines(of, refusal, outcome, words):
    """Served, left to stock vLLM's or refused, and what stock vLLM's would do."""
    verdict = judge(of, refusal)
    assert verdict.outcome is outcome
    assert words in str(verdict)
