# SPDX-License-Identifier: Apache-2.0
"""What `kv-plan` prints for its arguments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.cli import main

SIZES = ("--num-layers", "4", "--num-kv-heads", "6")


@pytest.fixture
def kv_plan(capsys):
    """Runs the command; returns its exit status, standard output and standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        status = main(arguments)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_json_describes_the_plan(kv_plan):
    """The object names meshes, sizes, every read with both offsets, and every release."""
    status, out, err = kv_plan("--prefill", "tp=3", "--decode", "pp=1,tp=2", *SIZES, "--json")
    assert (status, err) == (0, "")
    document = json.loads(out)
    reads = document.pop("reads")
    assert {each.pop("cache") for each in reads} == {"heads"}
    assert document == {
        "prefill": {"tp_size": 3, "pp_size": 1},
        "decode": {"tp_size": 2, "pp_size": 1},
        "num_layers": 4,
        "num_kv_heads": 6,
        "mla": False,
        "layers_that_differ": [],
        "caches": [
            {
                "cache": "heads",
                "layers": [0, 1, 2, 3],
                "moved_as": "heads",
                "tokens_per_state": 1,
                "block_tokens": [16, 16],
                "window_tokens": None,
                "token_bytes": None,
            }
        ],
        "notes": [],
        "state_reads": [],
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
        "strategy": None,
    }


def test_json_says_how_each_read_goes(kv_plan):
    """Direct or staged, for the prompt that is given, where sizes in bytes are known."""
    sizes = ("--num-layers", "32", "--num-kv-heads", "2", "--head-size", "64", "--json")

    def strategies(prefill: str, decode: str, *more: str) -> set[str]:
        _, out, _ = kv_plan("--prefill", prefill, "--decode", decode, *sizes, *more)
        return {read["strategy"] for read in json.loads(out)["reads"]}

    assert strategies("tp=2", "tp=1") == {"staged"}
    assert strategies("tp=2", "tp=1", "--prompt-tokens", "16") == {"direct"}
    assert strategies("pp=2", "tp=1") == {"direct"}


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


def rows(text):
    """The lines, with one space between words."""
    return [" ".join(line.split()) for line in text.splitlines()]


def test_text_names_ranks_layers_and_heads(kv_plan):
    """Without --json each read, each decode rank and each prefill rank is a readable line."""
    layouts = ("--prefill", "tp=3,pp=2", "--decode", "tp=2")
    status, out, err = kv_plan(*layouts, *SIZES, "--head-size", "64", "--dtype", "float16")
    assert (status, err) == (0, "")
    assert "pp1tp1 2-3 [3, 4) 1 -> 0 512 B" in rows(out)
    assert "pp1tp1 128 4 KiB 128 128 direct" in rows(out)
    # 6 heads in half, 4 layers, keys and values, 64 elements of 2 bytes.
    assert "pp0tp1 4 4 3 KiB 3 MiB 512 -" in rows(out)
    assert "pp1tp1 2 2 1 KiB direct pp0tp0-1" in rows(out)
    assert "\x1b" not in out


def test_text_counts_descriptors_without_sizes_in_bytes(kv_plan):
    """What can be told without the size of a head is told, and what is missing is named."""
    status, out, _ = kv_plan("--prefill", "tp=2", "--decode", "tp=2", *SIZES)
    assert status == 0
    assert "pp0tp0 pp0tp0 0-3 [0, 3) 0 -> 0 ?" in rows(out)
    assert "pp0tp0 pp0tp0 256 ? 4 4 ?" in rows(out)
    assert "pp0tp0 1 1 ? ? pp0tp0" in rows(out)
    assert "--model DIR, or --head-size" in out


def test_text_names_ranks_that_are_only_notified(kv_plan):
    """Replicas of the MLA latent that nobody reads are told apart, and warned of."""
    layouts = ("--prefill", "tp=4", "--decode", "tp=1")
    _, out, _ = kv_plan(*layouts, "--num-layers", "2", "--mla", "--head-size", "576")
    assert "pp0tp3 0 0 - only notified pp0tp0" in rows(out)
    assert "pp0tp1-3" in out
    assert "Warnings" in out


def test_sizes_of_blocks_may_differ(kv_plan):
    """Each engine's own block size counts before the common one."""
    layouts = ("--prefill", "tp=1", "--decode", "tp=1", *SIZES, "--head-size", "64")
    _, out, _ = kv_plan(*layouts, "--block-size", "32", "--decode-block-size", "64")
    assert "blocks of 32 tokens at prefill and 64 at decode" in " ".join(out.split())


@pytest.fixture
def model(tmp_path):
    """The directory of a model with windows in every other layer."""
    kinds = ["sliding_attention", "full_attention"] * 2
    config = {
        "num_hidden_layers": 4,
        "num_attention_heads": 12,
        "num_key_value_heads": 6,
        "head_dim": 64,
        "dtype": "float32",
        "sliding_window": 128,
        "layer_types": kinds,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def test_model_gives_the_sizes(kv_plan, model):
    """The same plan as with explicit sizes, as JSON and in bytes."""
    layouts = ("--prefill", "tp=3", "--decode", "tp=2")
    of_model = (*layouts, "--model", model, "--disable-hybrid-kv-cache-manager")
    explicit = (*layouts, *SIZES, "--head-size", "64", "--dtype", "float32")
    documents = [json.loads(kv_plan(*args, "--json")[1]) for args in (of_model, explicit)]
    # Of a model it is told what engines would make of it, too.
    assert documents[0].pop("notes") and not documents[1].pop("notes")
    assert documents[0] == documents[1]
    _, out, _ = kv_plan(*of_model)
    _, same, _ = kv_plan(*explicit)
    out = out.partition("What engines make of it")[0].rstrip()
    tables, same_tables = (text[text.index("Reads") :].rstrip() for text in (out, same))
    assert tables == same_tables


def test_explicit_sizes_take_the_place_of_the_models(kv_plan, model):
    """A number that is given counts, and the others are the model's."""
    layouts = ("--prefill", "tp=1", "--decode", "tp=1", "--model", model)
    _, out, _ = kv_plan(*layouts, "--num-layers", "2", "--dtype", "fp8")
    assert "2 layers, 6 KV heads of 64 fp8" in out


WHOLE, WINDOWS = "pp0tp0 1 1 12 KiB 12 MiB 256 -", "pp0tp0 1 1 12 KiB 6.75 MiB 144 -"


@pytest.mark.parametrize(
    ("option", "row", "words"),
    [
        ((), WINDOWS, "no more is read"),
        (("--no-disable-hybrid-kv-cache-manager",), WINDOWS, "no more is read"),
        (("--disable-hybrid-kv-cache-manager",), WHOLE, "read in full without the hybrid KV-"),
    ],
)
def test_windows_are_read_alone_unless_the_manager_is_off(kv_plan, model, option, row, words):
    """Two layers of four are read in 8 blocks of 64 where engines keep windows, as they do."""
    layouts = ("--prefill", "tp=1", "--decode", "tp=1", "--model", model)
    _, out, _ = kv_plan(*layouts, *option)
    assert row in rows(out)
    assert words in " ".join(out.split())


@pytest.mark.parametrize(
    ("option", "row"), [((), WHOLE), (("--no-disable-hybrid-kv-cache-manager",), WINDOWS)]
)
def test_chunks_are_read_in_full_unless_asked_for(kv_plan, model, option, row):
    """VLLM turns its hybrid manager off for chunked attention."""
    path = Path(model) / "config.json"
    config = json.loads(path.read_text())
    kinds = ["chunked_attention", "full_attention"] * 2
    path.write_text(json.dumps({**config, "attention_chunk_size": 128, "layer_types": kinds}))
    _, out, _ = kv_plan("--prefill", "tp=1", "--decode", "tp=1", "--model", model, *option)
    assert row in rows(out)


def test_svg_is_written_beside_the_text(kv_plan, tmp_path):
    """The drawing goes to its file, and the text is the same."""
    layouts = ("--prefill", "tp=3", "--decode", "tp=2", *SIZES)
    path = tmp_path / "plan.svg"
    assert kv_plan(*layouts, "--svg", str(path)) == kv_plan(*layouts)
    assert path.read_text().startswith("<svg")


def test_svg_that_cannot_be_written_is_one_line_and_status_2(kv_plan, tmp_path):
    """A directory that does not exist is named, and nothing else is printed."""
    path = str(tmp_path / "missing" / "plan.svg")
    status, out, err = kv_plan("--prefill", "tp=1", "--decode", "tp=1", *SIZES, "--svg", path)
    assert (status, out) == (2, "")
    assert path in err and "cannot be written" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--head-size", "0"), "--head-size is 0"),
        (("--dtype", "int3"), "dtype 'int3' is not known"),
        (("--block-size", "0"), "--block-size is 0"),
        (("--decode-block-size", "-1"), "--decode-block-size is -1"),
        (("--prompt-tokens", "0"), "--prompt-tokens is 0"),
        (("--prompt-tokens", "9999999"), "--prompt-tokens is 9999999"),
        (("--model", "/missing"), "/missing/config.json cannot be read"),
    ],
)
def test_impossible_options_of_the_text_are_one_line_and_status_2(kv_plan, options, message):
    """What no engine could have is refused with the option and the value."""
    status, out, err = kv_plan("--prefill", "tp=1", "--decode", "tp=1", *SIZES, *options)
    assert (status, out) == (2, "")
    assert err.startswith("kv-plan: error: ") and message in err
    assert err.count("\n") == 1


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
    assert err.startswith("kv-plan: error: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "mesh"),
    [("tp1pp2", (1, 2)), ("TP2PP1", (2, 1)), ("tp=2", (2, 1)), ("pp=2,tp=3", (3, 2))],
)
def test_layouts_are_written_in_two_ways(kv_plan, text, mesh):
    """By axis, or in one word as `make demo` has it."""
    status, out, err = kv_plan("--prefill", text, "--decode", "tp=1", *SIZES, "--json")
    assert (status, err) == (0, "")
    prefill = json.loads(out)["prefill"]
    assert (prefill["tp_size"], prefill["pp_size"]) == mesh


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prefill", "tp=99999999999999999999"), "tp is 99999999999999999999 but must be at"),
        (("--prefill", "tp1pp1025"), "make 1025 ranks, but engines are of at most 1024"),
        (("--prefill", "tp=128"), "tp is 128 but must be at most 64"),
        (("--num-layers", "1000000"), "--num-layers is 1000000 but must be at most 1024"),
        (("--num-kv-heads", str(10**30)), "have 4" + 30 * "0" + " KV heads, or units of state"),
        (("--head-size", str(10**30)), f"--head-size is {10**30} but must be at most"),
        (("--block-size", str(10**30)), f"--block-size is {10**30} but must be at most"),
        (("--decode-block-size", str(10**30)), f"--decode-block-size is {10**30} but must be"),
    ],
)
def test_sizes_are_bounded(kv_plan, arguments, message):
    """A number beyond all models and engines is refused at once, and not computed with."""
    defaults = ("--prefill", "tp=1", "--decode", "tp=1", *SIZES)
    status, out, err = kv_plan(*defaults, *arguments, "--json")
    assert (status, out) == (2, "")
    assert err.startswith("kv-plan: error: ") and message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (("--num-layers", "0", "--num-kv-heads", "6"), "--num-layers is 0"),
        (("--num-layers", "4"), "--num-kv-heads is missing"),
        (("--num-kv-heads", "6"), "--num-layers is missing"),
        (("--num-layers", "4", "--num-kv-heads", "0"), "num_kv_heads is 0"),
    ],
)
def test_impossible_model_is_refused(kv_plan, sizes, message):
    """Sizes that no model has are refused in the same way."""
    status, _, err = kv_plan("--prefill", "tp=1", "--decode", "tp=1", *sizes)
    assert status == 2
    assert message in err


def test_layers_that_differ_are_told_and_planned(kv_plan, tmp_path):
    """Families of layers, with the heads, the sizes and the bytes of each."""
    config = {
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "global_head_dim": 128,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 2,
        "hidden_size": 512,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 1024,
        "num_kv_shared_layers": 1,
        "dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    layouts = ("--prefill", "tp=2", "--decode", "tp=1", "--model", str(tmp_path))
    status, out, err = kv_plan(*layouts)
    assert (status, err) == (0, "")
    text = " ".join(out.split())
    assert "4 layers; layers 0, 2: 4 KV heads of 64 bfloat16; layer 1: 2 KV heads of 128" in text
    assert "layer 3: no KV cache of their own" in text
    _, out, _ = kv_plan(*layouts, "--json")
    document = json.loads(out)
    assert [each["layer"] for each in document["layers_that_differ"]] == [0, 1, 2]
    assert [(read["layers"], read["global_heads"]) for read in document["reads"]] == [
        ([1], [0, 1]),
        ([0, 2], [0, 2]),
        ([1], [1, 2]),
        ([0, 2], [2, 4]),
    ]
    status, _, err = kv_plan(*layouts, "--svg", str(tmp_path / "plan.svg"))
    assert (status, "those of this model differ" in err) == (2, True)


def test_shares_of_tokens_are_planned_and_told(kv_plan):
    """Each of four ranks reads a quarter of a latent, in blocks unless it is said otherwise."""
    layouts = ("--prefill", "tp=4", "--decode", "tp=4,dcp=4", "--mla", "--num-layers", "2")
    status, out, err = kv_plan(*layouts, "--head-size", "576", "--json")
    assert (status, err) == (0, "")
    document = json.loads(out)
    assert document["prefill"] == {"tp_size": 4, "pp_size": 1}
    assert document["decode"] == {"tp_size": 4, "pp_size": 1, "dcp_size": 4, "interleave_size": 16}
    assert [(each["src_tokens"], each["dst_tokens"]) for each in document["reads"]] == [
        (None, {"index": rank, "of": 4, "in_runs_of": 16}) for rank in range(4)
    ]
    status, out, _ = kv_plan(*layouts, "--head-size", "576", "--decode-interleave-size", "1")
    assert status == 0
    assert "PP1 x TP4 x DCP4 in runs of 1 tokens, 4 ranks" in out
    # Of 1,152 bytes for a token of each of two layers, a quarter; piece by piece.
    assert "all -> 3 of 4 by 1    576 B" in out
    assert "1.125 KiB at a time" in " ".join(out.split())
    assert "tokens dealt out in whole blocks" in " ".join(out.split())


def test_replicas_of_prefill_context_parallelism_are_told(kv_plan):
    """One of each group is read from: the reads are those of an engine without."""
    model = ("--decode", "tp=1", "--mla", "--num-layers", "2", "--head-size", "576")
    _, plain, _ = kv_plan("--prefill", "tp=2", *model, "--json")
    status, out, err = kv_plan("--prefill", "tp=2,pcp=2", *model, "--json")
    assert (status, err) == (0, "")
    document = json.loads(out)
    assert document["prefill"] == {"tp_size": 2, "pp_size": 1, "pcp_size": 2}
    assert document["reads"] == json.loads(plain)["reads"]
    _, out, _ = kv_plan("--prefill", "tp=2,pcp=2", *model)
    assert "PP1 x TP2 x PCP2, 4 ranks, the first of each PCP group read from" in out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--prefill", "pcp=0"), "pcp is 0 but must be at least 1"),
        (("--prefill", "pcp=2"), "for MLA only: leave pcp out"),
        (("--prefill", "tp=2,pcp=2,dcp=4"), "write tp=4,dcp=4, whose reads are the same"),
        (("--decode", "pcp=2", "--mla"), "cannot read: leave pcp out"),
    ],
)
def test_impossible_replicas_are_told(kv_plan, arguments, reason):
    """In one line, with what to write instead."""
    status, _, err = kv_plan("--prefill", "tp=2", "--decode", "tp=1", *SIZES, *arguments)
    assert status == 2
    assert reason in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--decode", "tp=2,dcp=0"), "dcp is 0 but must be at least 1"),
        (("--decode", "tp=4,dcp=3"), "does not divide tensor_parallel_size 4"),
        (("--decode", "tp=6,dcp=2"), "choose a size that divides that"),
        (("--decode", "tp=12,dcp=2", "--decode-interleave-size", "5"), "must divide the 16 tokens"),
        (("--decode", "tp=12,dcp=2", "--svg", "plan.svg"), "--svg draws layers and heads"),
    ],
)
def test_impossible_shares_of_tokens_are_told(kv_plan, arguments, reason):
    """In one line, with the value."""
    status, _, err = kv_plan("--prefill", "tp=2", *arguments, *SIZES)
    assert status == 2
    assert reason in err
