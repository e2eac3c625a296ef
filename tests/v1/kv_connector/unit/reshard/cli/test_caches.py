# SPDX-License-Identifier: Apache-2.0
"""What kv-plan knows of caches beside heads and latents, and what it says of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.bases import RELEASE
from tests.v1.kv_connector.unit.reshard.cli.families import (
    DEEPSEEK_V4,
    INKLING,
    KIMI_LINEAR,
    LEFT_TO_UPSTREAM,
    MINIMAX_M3,
    MLA,
    WHOLE,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.cli.caches import read_family
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.cli.command import main
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine import compat

LAYOUTS = ("--prefill", "tp=2", "--decode", "tp=1")


@pytest.fixture
def plan(tmp_path, capsys):
    """Plans for a configuration, and returns the document."""

    def run(config, *args: str) -> Any:
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert main([*(args or LAYOUTS), "--model", str(tmp_path), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def notes(plan):
    """What is said of a configuration: verdict, where, and why."""

    def run(config, *args: str) -> list[tuple[str, str, str]]:
        return [tuple(each.values()) for each in plan(config, *args)["notes"]]

    return run


def test_indexers_and_latents_are_rows_and_are_read_together(plan):
    """Each read is told cache by cache, and what it costs is the sum."""
    document = plan(WHOLE["DeepSeek V3.2"], "--prefill", "pp=2", "--decode", "tp=2")
    assert [row["cache"] for row in document["caches"]] == ["latent", "indexer"]
    assert [
        (each["decode_rank"]["tp"], each["prefill_rank"]["pp"], each["cache"], each["layers"])
        for each in document["reads"]
    ] == [
        (tp, pp, cache, [2 * pp, 2 * pp + 1])
        for tp in range(2)
        for pp in range(2)
        for cache in ("latent", "indexer")
    ]


def test_what_a_request_costs_is_what_engines_would_move(tmp_path, capsys):
    """DeepSeek V4's states by groups, windows by their blocks, and the rest by whole blocks."""
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V4))
    assert main([*LAYOUTS, "--model", str(tmp_path), "--prompt-tokens", "1024"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    # Of 1,024 tokens: 4 blocks of 256; 2 of windows; states of 8 in blocks of 4, of 128 in those
    # of 8. Sizes of blocks are those of `get_kv_cache_spec`.
    total = 2 * 4 * 37376 + 2 * 4 * 1168 + 6 * 2 * 37376
    total += 2 * 2 * 32768 + 2 * 16 * 32768 + 2 * 4 * 8448 + 2 * 2 * 8192
    assert f"{total / 1024**2:.4g} MiB" in shown
    assert "window 6: 0-5 whole blocks 64 tokens last 128 tokens 584 B" in shown
    assert "C128 2: 2, 5 whole blocks 256 tokens all, 128 as one 4.562 B" in shown
    assert "blocks of 16 tokens" not in shown


@pytest.mark.parametrize("family", LEFT_TO_UPSTREAM)
def test_what_is_left_to_upstream_is_told_and_not_planned(family, plan, tmp_path, capsys):
    """The layers, what they keep, and that stages are refused."""
    document = plan(LEFT_TO_UPSTREAM[family])
    layers = [1] if family == "DeepSeek V4.1" else [1, 3]
    assert document["caches"][0]["layers"] == layers
    assert "CircularBufferSpec" in document["caches"][0]["moved_as"]
    assert [note["verdict"] for note in document["notes"]] == ["upstream's"]
    assert document["notes"][0]["why"].startswith(f"{family} is left to upstream's NixlConnector")
    assert "reads" not in document
    path = str(tmp_path)
    assert main([*LAYOUTS, "--model", path]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"model {family}, 4 layers" in shown
    assert "Reads" not in shown
    assert main(["--prefill", "pp=2", "--decode", "tp=1", "--model", path]) == 2
    assert "use pp=1 at both engines" in capsys.readouterr().err
    assert main(["--prefill", "tp=3", "--decode", "tp=2", "--model", path]) == 2
    assert "one divides the other, not 3 and 2" in capsys.readouterr().err
    drawing = str(tmp_path / "plan.svg")
    assert main([*LAYOUTS, "--model", path, "--svg", drawing]) == 2
    assert "nothing to draw" in capsys.readouterr().err


def test_blocks_of_each_ranks_own_are_not_cut(plan, notes, tmp_path, capsys):
    """Inkling's convolutions: PP may differ, and TP must be equal."""
    layouts = ("--prefill", "tp=2,pp=2", "--decode", "tp=2")
    assert ("served", "everywhere") in {note[:2] for note in notes(INKLING, *layouts)}
    document = plan(INKLING, *layouts)
    rows = [(row["cache"], row["layers"], row["window_tokens"]) for row in document["caches"]]
    assert rows == [
        ("heads", [0, 1, 2], 512),
        ("heads", [3], None),
        ("conv inputs", [3], 4),
        ("conv inputs with a window", [0, 1, 2], 4),
    ]
    assert all(
        each["prefill_rank"]["tp"] == each["decode_rank"]["tp"] for each in document["reads"]
    )
    for tp in (1, 2):
        other = ("--prefill", f"tp={tp}", "--decode", f"tp={3 - tp}", "--model", str(tmp_path))
        assert main(other) == 2
        said = capsys.readouterr().err
        assert "Inkling keeps conv inputs and conv inputs with a window of each rank" in said
        assert f"use one tp at both engines, not {tp} and {3 - tp}" in said


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, (0, 1, 2, 3)),
        ({"index_topk_freq": 2}, (0, 1, 3)),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 1}, (0, 3)),
        ({"index_topk_pattern": "FSSF"}, (0, 3)),
        (
            {
                "model_type": "hy_v4",
                "layer_types": ["full_attention"] + ["sparse_attention"] * 3,
                "indexer_types": ["full", "full", "shared", "full"],
            },
            (1, 3),
        ),
        ({"model_type": "named by nobody"}, (0, 1, 2, 3)),
    ],
)
def test_layers_with_an_indexer(changes, layers):
    """All of them, or those that do not take over what another one has chosen."""
    config = {**MLA, "model_type": "deepseek_v32", "index_topk": 2048, **changes}
    (indexer,) = read_family(config, "", 4).caches
    assert (indexer.layers, indexer.state_bytes) == (layers, 132)
    assert read_family(MLA, "", 4) is None


def test_drafts_are_told_and_not_counted(notes):
    """They are there only where engines are asked for them, on the last stage."""
    config = WHOLE["DeepSeek V3"]
    assert notes(config) == []
    (one,) = notes({**config, "num_nextn_predict_layers": 1})
    assert one[:2] == ("served", "--speculative-config with method mtp")
    assert one[2].startswith("1 layer more, on the last stage, which is not counted here")
    (_, _, three) = notes({**config, "mtp_num_hidden_layers": 3})[0]
    assert three.startswith("3 layers more, on the last stage, which are not counted here")


def test_what_ranks_keep_of_their_own_needs_one_tp(notes):
    """Heads with AITER's kernels; those of MiniMax M3's sparse layers are slots everywhere else."""
    (refused,) = (note for note in notes(MINIMAX_M3) if note[0] == "refused")
    assert refused[1] == "ROCM_AITER_UNIFIED_ATTN on AMD with VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT"
    assert "one --tensor-parallel-size at both engines, not 2 and 1" in refused[2]
    equal = notes(MINIMAX_M3, "--prefill", "tp=2,pp=2", "--decode", "tp=2")
    assert [note[0] for note in equal] == ["served"]


def test_blocks_that_backends_arrange_must_be_equal(notes):
    """Backends with heads that are not in slots are named with their devices."""
    blocks = ("--prefill-block-size", "32", "--decode-block-size", "16")
    (note,) = notes(WHOLE["Gemma 3"], "--prefill", "tp=2", "--decode", "tp=2", *blocks)
    assert note[0] == "refused"
    assert "CPU_ATTN on CPU, FLASHINFER on NVIDIA with --kv-cache-dtype nvfp4" in note[1]
    assert "one --block-size at both engines, not 32 and 16" in note[2]
    assert notes(WHOLE["DeepSeek V3"], *LAYOUTS, *blocks) == []


def test_glm_5_is_refused_between_kinds_of_gpus(notes):
    """Unless both engines are told in which format to keep their cache."""
    (note,) = (note for note in notes(WHOLE["GLM 5"]) if note[0] == "refused")
    assert note[1] == "NVIDIA Blackwell beside any other"
    assert "--kv-cache-dtype" in note[2]


def test_sizes_that_are_given_take_the_place_of_caches(plan):
    """With numbers instead of the model's, nothing of it is told."""
    document = plan(WHOLE["DeepSeek V3.2"], *LAYOUTS, "--num-layers", "2")
    assert [row["cache"] for row in document["caches"]] == ["latent"]
    assert document["notes"] == []


def test_caches_of_several_kinds_are_not_drawn(tmp_path, capsys):
    """A drawing has one width for all layers."""
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V4))
    drawing = str(tmp_path / "plan.svg")
    assert main([*LAYOUTS, "--model", str(tmp_path), "--svg", drawing]) == 2
    assert "draws models whose layers are alike" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**DEEPSEEK_V4, "compress_ratios": [4]}, "compress_ratios does not tell of 6 layers"),
        ({**DEEPSEEK_V4, "compress_ratios": [4] * 5 + [8]}, "compress_ratios has [8]"),
        ({**DEEPSEEK_V4, "index_head_dim": "many"}, "index_head_dim is 'many'"),
    ],
)
def test_what_a_family_does_not_tell_is_one_line(config, message, tmp_path, capsys):
    """The entry and its value are named."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main([*LAYOUTS, "--model", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_what_one_base_leaves_to_upstream(notes):
    """Recurrent state, and several tokens to a slot, as that base has it."""
    for config, what in ((KIMI_LINEAR, "recurrent state"), (DEEPSEEK_V4, "several tokens as one")):
        (note,) = (note for note in notes(config) if note[0] == "upstream's")
        assert note[1].removeprefix("vLLM ") == "0.22.1"
        assert f"keeps {what} is left to upstream's" in note[2]
    is_that_one = RELEASE == "0.22.1"
    assert (compat.STATE_IS_UPSTREAMS, not compat.CACHES_ARE_VIEWS) == (is_that_one, is_that_one)
