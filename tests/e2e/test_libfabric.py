# SPDX-License-Identifier: Apache-2.0
"""Engines that read with NIXL's LIBFABRIC, where it loads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.layouts import ONE, STAGES, Case, Engines, assert_read_and_right, running
from tests.e2e.pairs import BLOCK_TOKENS, Pair, text_of
from tests.selection import chosen
from tests.v1.kv_connector.unit.reshard.transport.backends import available
from tools.pdstack.engine import KVTransfer
from tools.pdstack.tiny_models import write_tiny_llama

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.parametrize("case", [Case(STAGES, ONE, reads=2)], ids=str, scope="module"),
]


@pytest.fixture(scope="module")
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    """One with two stages, and one of one rank."""
    backend = available("LIBFABRIC")
    model = write_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama")
    transfer = KVTransfer(extra_config={"kv_lease_duration": 120, "backends": [backend]})
    cases, run = chosen(request, "case"), tmp_path_factory.mktemp("run")
    with running(model, run, cases, kv_transfer=transfer) as engines:
        yield engines


@pytest.mark.parametrize("tokens", [12, BLOCK_TOKENS, 3 * BLOCK_TOKENS + 16])
def test_an_answer_equals_one_engines(
    engines: Engines, case: Case, pair: Pair, tokens: int
) -> None:
    """All of its blocks are read, with a read for each stage."""
    assert_read_and_right(engines, case, pair, text_of(f"{tokens} {case}", tokens), tokens)


def test_all_blocks_come_back(pair: Pair) -> None:
    """Notifications arrive: nothing is held any more, and no lease ran out."""
    pair.assert_nothing_is_left()
