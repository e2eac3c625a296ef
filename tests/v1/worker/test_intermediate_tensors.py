# SPDX-License-Identifier: Apache-2.0
"""Where a stage puts what the stage before it sends, when no dummy run came first."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.sequence import IntermediateTensors
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from tests.bases import requires_base

pytestmark = requires_base(
    "0.32.0", "0.33.0", reason="on CPU a dummy run comes first in eager mode, too"
)

MAX_TOKENS, HIDDEN_SIZE = 8, 4


def make_empty(batch_size: int, dtype: torch.dtype, device: torch.device) -> IntermediateTensors:
    """As a model does: a buffer for each tensor that stages exchange."""
    return IntermediateTensors(
        {"hidden_states": torch.zeros(batch_size, HIDDEN_SIZE, dtype=dtype, device=device)}
    )


@pytest.fixture
def runner():
    """A v1 runner on a later stage, whose model is loaded and has not run."""
    runner = object.__new__(GPUModelRunner)
    runner.intermediate_tensors = None
    runner.model = SimpleNamespace(make_empty_intermediate_tensors=make_empty)
    runner.max_num_tokens = MAX_TOKENS
    runner.model_config = SimpleNamespace(dtype=torch.float32)
    runner.device = torch.device("cpu")
    return runner


def test_first_step_makes_the_buffer(runner):
    """The first step reads what was sent, out of a buffer for the largest one."""
    sent = IntermediateTensors({"hidden_states": torch.arange(12.0).reshape(3, HIDDEN_SIZE)})
    received = runner.sync_and_gather_intermediate_tensors(3, sent, True)
    assert torch.equal(received["hidden_states"], sent["hidden_states"])
    assert runner.intermediate_tensors["hidden_states"].shape == (MAX_TOKENS, HIDDEN_SIZE)


def test_later_steps_use_it_again(runner):
    """Captured graphs and compiled models read at one address: the buffer stays where it is."""
    one = IntermediateTensors({"hidden_states": torch.ones(1, HIDDEN_SIZE)})
    first = runner.sync_and_gather_intermediate_tensors(1, one, True)
    second = runner.sync_and_gather_intermediate_tensors(MAX_TOKENS, None, False)
    assert second["hidden_states"].data_ptr() == first["hidden_states"].data_ptr()
