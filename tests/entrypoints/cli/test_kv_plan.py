# SPDX-License-Identifier: Apache-2.0
"""`vllm kv-plan`, through its own parser and once through the real command."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from argparse import ArgumentParser

import pytest

from vllm.entrypoints.cli.kv_plan import cmd_init, reserve_stdout

SIZES = ("--num-layers", "4", "--num-kv-heads", "6")


@pytest.fixture
def kv_plan(capsys):
    """Runs the subcommand; returns its exit status, standard output and standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        (command,) = cmd_init()
        parser = ArgumentParser()
        command.subparser_init(parser.add_subparsers()).set_defaults(run=command.cmd)
        status = 0
        try:
            options = parser.parse_args(["kv-plan", *arguments])
            options.run(options)
        except SystemExit as exit_:
            status = exit_.code
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_json_describes_the_plan(kv_plan):
    """The object names meshes, sizes, every read with both offsets, and every release."""
    status, out, err = kv_plan("--prefill", "tp=3", "--decode", "pp=1,tp=2", *SIZES, "--json")
    assert (status, err) == (0, "")
    document = json.loads(out)
    reads = document.pop("reads")
    assert document == {
        "prefill": {"tp_size": 3, "pp_size": 1},
        "decode": {"tp_size": 2, "pp_size": 1},
        "num_layers": 4,
        "num_kv_heads": 6,
        "mla": False,
        "notifiers": [
            {"prefill_rank": {"pp": 0, "tp": 0}, "decode_ranks": [{"pp": 0, "tp": 0}]},
            {
                "prefill_rank": {"pp": 0, "tp": 1},
                "decode_ranks": [{"pp": 0, "tp": 0}, {"pp": 0, "tp": 1}],
            },
            {"prefill_rank": {"pp": 0, "tp": 2}, "decode_ranks": [{"pp": 0, "tp": 1}]},
        ],
    }
    assert len(reads) == 4
    assert reads[1] == {
        "decode_rank": {"pp": 0, "tp": 0},
        "prefill_rank": {"pp": 0, "tp": 1},
        "layers": [0, 1, 2, 3],
        "global_heads": [2, 3],
        "src_head_offset": 0,
        "dst_head_offset": 2,
        "num_heads": 1,
    }


def test_partitions_are_taken_per_side(kv_plan):
    """Uneven stages on either side decide which layers a read covers."""
    status, out, _ = kv_plan(
        *("--prefill", "pp=2", "--prefill-layer-partition", "1,3"),
        *("--decode", "pp=2", "--decode-layer-partition", "2,2"),
        *(*SIZES, "--json"),
    )
    assert status == 0
    reads = [
        (read["decode_rank"]["pp"], read["prefill_rank"]["pp"], read["layers"])
        for read in json.loads(out)["reads"]
    ]
    assert reads == [(0, 0, [0]), (0, 1, [1]), (1, 1, [2, 3])]


def test_mla_needs_no_heads(kv_plan):
    """An MLA model has one latent head: each decode rank reads once."""
    layouts = ("--prefill", "tp=4", "--decode", "tp=2")
    status, out, _ = kv_plan(*layouts, "--num-layers", "2", "--mla", "--json")
    document = json.loads(out)
    assert status == 0
    assert (document["mla"], document["num_kv_heads"]) == (True, 1)
    assert [read["prefill_rank"]["tp"] for read in document["reads"]] == [0, 1]
    assert len(document["notifiers"]) == 4


def test_text_names_ranks_layers_and_heads(kv_plan):
    """Without --json each read and each release is a readable line."""
    status, out, _ = kv_plan("--prefill", "tp=3,pp=2", "--decode", "tp=2", *SIZES)
    assert status == 0
    assert "  decode pp0tp1 <- prefill pp1tp1: layers 2-3, heads [3, 4), offset 1 -> 0" in out
    assert "  prefill pp1tp1: decode pp0tp0, pp0tp1" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prefill", "tp=4", "--decode", "tp=2"), "--prefill tp=4: tensor_parallel_size 4 does"),
        (("--prefill", "tp=2", "--decode", "pp=5"), "--decode pp=5: 4 layers over 5 pipeline"),
        (("--prefill", "tp=0", "--decode", "tp=2"), "tensor_parallel_size is 0"),
        (("--prefill", "tp=x", "--decode", "tp=2"), "'tp=x' is not understood"),
        (("--prefill", "tp=1,tp=2", "--decode", "tp=2"), "'tp=2' is not understood"),
        (
            ("--prefill", "pp=2", "--decode", "tp=2", "--prefill-layer-partition", "1,2"),
            "adds up to 3 layers but the model has 4",
        ),
        (
            ("--prefill", "pp=2", "--decode", "tp=2", "--prefill-layer-partition", "1;3"),
            "--prefill-layer-partition '1;3' is not understood",
        ),
    ],
)
def test_impossible_layout_is_one_line_and_status_2(kv_plan, arguments, message):
    """What vLLM could not run is refused with the side, the values and the remedy."""
    status, out, err = kv_plan(*arguments, *SIZES, "--json")
    assert (status, out) == (2, "")
    assert err.startswith("vllm kv-plan: error: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (("--num-layers", "0", "--num-kv-heads", "6"), "--num-layers is 0"),
        (("--num-layers", "4"), "--num-kv-heads is missing"),
        (("--num-layers", "4", "--num-kv-heads", "0"), "num_kv_heads is 0"),
    ],
)
def test_impossible_model_is_refused(kv_plan, sizes, message):
    """Sizes that no model has are refused in the same way."""
    status, _, err = kv_plan("--prefill", "tp=1", "--decode", "tp=1", *sizes)
    assert status == 2
    assert message in err


@pytest.mark.parametrize(
    ("arguments", "stream"), [(["vllm", "kv-plan"], "stderr"), (["vllm", "serve"], "stdout")]
)
def test_logs_leave_standard_output_to_the_plan_only(monkeypatch, arguments, stream):
    """Other subcommands keep logging where they did."""
    handler = logging.StreamHandler(sys.stdout)
    monkeypatch.setattr(logging.getLogger("vllm"), "handlers", [handler])
    reserve_stdout(arguments)
    assert handler.stream is getattr(sys, stream)


def test_real_command_prints_nothing_but_json():
    """The installed CLI lists the subcommand, and its whole standard output is the object."""
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "kv-plan"]
    layouts = ["--prefill", "tp=2,pp=2", "--decode", "tp=1", *SIZES, "--json"]
    result = subprocess.run(
        [*command, *layouts], capture_output=True, text=True, timeout=120, check=True
    )
    assert json.loads(result.stdout)["prefill"] == {"tp_size": 2, "pp_size": 2}
