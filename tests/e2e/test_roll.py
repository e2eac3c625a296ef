# SPDX-License-Identifier: Apache-2.0
"""Engines are replaced in turn, by the next release where it is here, and nobody notices."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bases import requires_base
from tools.pdstack.engine import ServedModel
from tools.pdstack.layout import Layout
from tools.pdstack.load import Sample
from tools.pdstack.registry import Role
from tools.pdstack.roll import Address, Fleet
from tools.pdstack.roll_cli import RollSettings, roll_under_load
from tools.pdstack.stack import PDStack
from tools.pdstack.tiny_models import write_tiny_llama

NEXT = "0.33.0"
SCRIPTS = Path(__file__).parents[2] / f".venv-{NEXT}" / "bin"
CALM_S = 15.0
# What takes a place is there before the one whose place it was has gone.
FLEET = Fleet([Layout(1, 2)], [Layout(2, 1)], settle_s=5.0)

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.release,
    requires_base("0.32.0", reason="the engines that go are of the base before"),
    pytest.mark.skipif(
        not (SCRIPTS / "vllm").exists(),
        reason=f"make setup BASE={NEXT} makes the engines that come",
    ),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    """What all engines serve."""
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama")


def _wrong(samples: list[Sample]) -> list[Sample]:
    return [each for each in samples if each.failure or each.differs]


def test_no_request_fails_while_a_fleet_is_upgraded(model: ServedModel, tmp_path: Path) -> None:
    """With the policy that fails what it cannot read, and with answers of one engine."""
    settings = RollSettings(FLEET, None, Address.OTHER, SCRIPTS, clients=4, calm_s=CALM_S)
    with PDStack(model, tmp_path) as stack:
        rolled = roll_under_load(stack, settings)
    assert _wrong(list(rolled.samples)) == []
    assert rolled.passed
    assert [each.name for each in rolled.replacements] == [
        f"{role.name.lower()}-1" for role in (Role.PREFILL, Role.DECODE)
    ]
    assert {each.after.partition("+")[0] for each in rolled.replacements} == {NEXT}
    assert {each.before.partition("+")[0] for each in rolled.replacements} == {"0.32.0"}
