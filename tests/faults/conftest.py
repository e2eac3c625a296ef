# SPDX-License-Identifier: Apache-2.0
"""The engines that all faults share."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from tests.faults.stage import Stage, spec
from tools.pdstack.ports import PortAllocator
from tools.pdstack.stack import PDStack
from tools.pdstack.tiny_models import write_tiny_llama

ARGS = ("--enable-prompt-embeds",)


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A prefill engine and two decode engines, which outlive the faults or are started anew."""
    model = write_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama", num_layers=2)
    with PDStack(model, tmp_path_factory.mktemp("run")) as stack:
        prefill, decode, recomputing = stack.start_engines(
            # Where one that has restarted is looked for.
            dataclasses.replace(spec("prefill", *ARGS), side_channel_port=PortAllocator().take()),
            spec("decode", *ARGS),
            spec("recomputing", *ARGS, policy="recompute"),
        )
        stage = Stage(stack, prefill, decode, recomputing, stack.start_router([prefill], [decode]))
        stage.assert_serving()
        yield stage
        stage.close()


@pytest.fixture(autouse=True)
def the_others_are_served(stage: Stage) -> Iterator[None]:
    """Whatever a test does, both engines serve after it, and decode engines lose no block."""
    yield
    stage.stack.check()
    stage.assert_serving()
    stage.assert_blocks_are_free(stage.decode, stage.recomputing)
