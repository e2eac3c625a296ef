# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402
"""What kv-plan is told of a model is what the engines' own layers and this connector say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bases import skip_module_unless_base

skip_module_unless_base("0.32.0", "0.33.0", reason="earlier ones cannot be asked")

from tests.v1.kv_connector.unit.reshard.cli.families import LEFT_TO_UPSTREAM, WHOLE
from tests.v1.kv_connector.unit.reshard.cli.whole_models import described, kept_by, one_rank
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.cli import asking, main
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.cli.engines import NoAnswerError
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.cli.layouts import parse_layout

PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text())
"""A `config.json` of each family with the entries that are published, in other sizes."""

FAMILIES = {**PUBLISHED, **WHOLE}


@pytest.fixture(scope="module", autouse=True)
def rank(tmp_path_factory) -> Iterator[None]:
    """An engine of one rank, for the layers that are asked here."""
    with one_rank(tmp_path_factory.mktemp("rank")):
        yield


def sizes(layers) -> dict[str, float]:
    """Bytes of each layer for a token of all heads or, of state, for a request."""
    return {
        str(name): sum(
            each.num_heads
            * each.slot_bytes
            / each.slot_tokens
            * (each.block_tokens if each.per_sequence else 1)
            for each in layer.planes
        )
        for name, layer in layers.items()
    }


def test_hybrids_have_their_state_and_its_numbers(tmp_path, capsys):
    """Of Nemotron-H: five layers of state in float32, one of attention, both in the totals."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Nemotron-H"]))
    layouts = ("--prefill", "tp2", "--decode", "tp1", "--model", str(tmp_path), "--device", "gpu")
    drawing = tmp_path / "plan.svg"
    assert main([*layouts, "--json", "--svg", str(drawing)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["verdict"]["outcome"] == "served"
    rows = {row["kind"]: row for row in document["caches"]}
    assert rows["mixer/state"]["layers"] == [0, 2, 4, 7, 9]
    assert rows["mixer/state"]["kept_as"] == "state, float32"
    assert rows["mixer.attn"]["layers"] == [5]
    # 128 heads of 64 times 128 numbers, and three rows of 128 * 64 + 2 * 8 * 128 channels.
    state = 5 * (128 * 64 * 128 * 4 + 3 * (128 * 64 + 2 * 8 * 128) * 2)
    assert document["request"]["state_bytes"] == state
    # 8 heads of 128, keys and values; 1,024 tokens are in one block of 1,040.
    assert document["request"]["bytes"] == state + 1040 * 8 * 2 * 128 * 2
    assert drawing.read_text().startswith("<svg")


def asked(directory: Path, device: str = "gpu"):
    """The engine that vLLM makes of a model, with one rank."""
    answer = asking.ask(str(directory), [parse_layout("tp1")] * 2, device, [])
    return answer.engines[1]


@pytest.mark.nightly
def test_state_is_as_on_a_gpu(tmp_path):
    """Of Nemotron-H, whose state is another one on CPU."""
    kept = sizes(described(kept_by(tmp_path, PUBLISHED["Nemotron-H"])))
    (of_rank,) = asked(tmp_path).caches
    assert sizes(of_rank.layers) == kept


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_is_as_the_engine_has_it(family, tmp_path):
    """Names, bytes and windows of each layer, and the groups that these are in."""
    kept = kept_by(tmp_path, FAMILIES[family])
    # Sparse attention has no backend on CPU; other state than a GPU's some models have there.
    engine = asked(tmp_path, "cpu" if family in PUBLISHED else "gpu")
    (of_rank,) = engine.caches
    assert sizes(of_rank.layers) == sizes(described(kept))
    windows = {
        str(name).partition("/")[0]: engine.groups[layer.group].window_tokens
        for name, layer in of_rank.layers.items()
    }
    assert windows == {
        name: getattr(spec, "sliding_window", None) or 0 for name, (spec, _) in kept.items()
    }


@pytest.mark.nightly
@pytest.mark.parametrize("family", LEFT_TO_UPSTREAM)
def test_what_vllm_does_not_make_is_said_so(family, tmp_path):
    """A configuration that is none is no plan, and no crash."""
    (tmp_path / "config.json").write_text(json.dumps(LEFT_TO_UPSTREAM[family]))
    with pytest.raises(NoAnswerError, match=r"^vLLM .* here: ") as error:
        asked(tmp_path)
    assert "\n" not in str(error.value)
