# SPDX-License-Identifier: Apache-2.0
"""Stages beside a connector that does not tell them apart, within `MultiConnector`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.layouts import ONE, STAGES
from tests.e2e.pairs import BLOCK_TOKENS, REPORT_LIMIT_S
from tests.e2e.turns import Turns, prompt_of
from tests.tools.pdstack.helpers import wait_until
from tools.pdstack.engine import EngineSpec, KVTransfer
from tools.pdstack.stack import PDStack
from tools.pdstack.tiny_models import write_tiny_llama

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

ANSWER_TOKENS = 8
CHILDREN = (
    {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"},
    {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "OffloadsNothing",
            "spec_module_path": "offloads_nothing",
            "cpu_bytes_to_use": 1,
        },
    },
)


@pytest.fixture(scope="module", params=[1, -1], ids=["first", "last"])
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """Start a prefill engine of two stages that offloads as well, in either order."""
    both = KVTransfer("MultiConnector", extra_config={"connectors": CHILDREN[:: request.param]})
    model = write_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama")
    few = ("--num-gpu-blocks-override", "64")
    with PDStack(model, tmp_path_factory.mktemp("run")) as pdstack:
        prefill, decode = pdstack.start_engines(
            EngineSpec(
                "prefill",
                STAGES,
                both,
                few,
                max_model_len=1024,
                module_dirs=(Path(__file__).parent / "modules",),
            ),
            EngineSpec("decode", ONE, KVTransfer(), few, max_model_len=1024),
        )
        yield Turns(pdstack, prefill, decode, ANSWER_TOKENS)


def test_stages_are_read_beside_a_connector_that_offloads(stack: Turns) -> None:
    """The engine starts, and the decode engine reads every stage's part of each prompt."""
    before = stack.decode.nixl_counters()
    for label in range(4):
        prompt = prompt_of(label, (label + 1) * BLOCK_TOKENS + 16)
        right = stack.unaided(prompt)
        answer = stack.ask(stack.decode, prompt, kv_transfer_params=stack.prefilled(prompt))
        assert answer.tokens == right
    wait_until(
        lambda: (stack.decode.nixl_counters() - before).transfers >= 8,
        "the reads from both stages",
        REPORT_LIMIT_S,
    )
    stack.assert_nothing_failed()
