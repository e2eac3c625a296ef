# SPDX-License-Identifier: Apache-2.0
"""What `kv-plan` prints for its arguments."""

from __future__ import annotations

import json

import pytest

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.cli import command, main

SIZES = ("--num-layers", "4", "--num-kv-heads", "6")


@pytest.fixture
def kv_plan(capsys):
    """Runs the command; returns its exit status, standard output and standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        status = main(arguments)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def rows(text):
    """The lines, with one space between words."""
    return [" ".join(line.split()) for line in text.splitlines()]


def test_json_describes_the_plan(kv_plan):
    """The object names the verdict, engines, totals, every read and every release."""
    status, out, err = kv_plan("--prefill", "tp=3", "--decode", "pp=1,tp=2", *SIZES, "--json")
    assert (status, err) == (0, "")
    document = json.loads(out)
    assert document["verdict"]["outcome"] == "served"
    assert document["verdict"]["against_stock"] == "of TP 2 and 3, neither divides the other"
    assert document["prefill"]["mesh"] == {"pp_size": 1, "tp_size": 3}
    # 4 layers, 6 heads, keys and values, 128 elements of 2 bytes, 1,024 tokens.
    assert document["request"] == {
        "tokens": 1024,
        "bytes": 4 * 6 * 2 * 128 * 2 * 1024,
        "state_bytes": 0,
        "descriptors": 4 * 4 * 64,
    }
    assert document["releases"][1] == {
        "src_rank": {"pp_rank": 0, "tp_rank": 1},
        "notifiers": [{"pp_rank": 0, "tp_rank": 0}, {"pp_rank": 0, "tp_rank": 1}],
    }
    assert len(document["reads"]) == 4
    second = document["reads"][1]
    read = second.pop("read")
    assert read["dst_rank"] == {"pp_rank": 0, "tp_rank": 0}
    assert read["src_rank"] == {"pp_rank": 0, "tp_rank": 1}
    assert read["units"] == {"start": 2, "stop": 3}
    assert (read["src_unit_offset"], read["dst_unit_offset"]) == (0, 2)
    assert second == {
        "kind": "heads",
        "layers": [0, 1, 2, 3],
        "has_state": False,
        "num_bytes": 4 * 2 * 128 * 2 * 1024,
        "descriptors": 256,
        "descriptor_bytes": 16 * 2 * 128 * 2,
        "merged": 256,
        "staged": 256,
        "strategies": "direct",
    }


def test_json_says_how_each_read_goes(kv_plan):
    """Direct or staged, for the prompt that is given."""
    sizes = ("--num-layers", "32", "--num-kv-heads", "2", "--head-size", "64", "--json")

    def strategies(prefill: str, decode: str, *more: str) -> set[str]:
        _, out, _ = kv_plan("--prefill", prefill, "--decode", decode, *sizes, *more)
        return {read["strategies"] for read in json.loads(out)["reads"]}

    assert strategies("tp=2", "tp=1") == {"staged"}
    assert strategies("tp=2", "tp=1", "--prompt-tokens", "16") == {"direct"}
    assert strategies("pp=2", "tp=1") == {"direct"}


def test_partitions_are_taken_per_side(kv_plan):
    """Uneven stages on either side decide which layers a read covers."""
    _, out, _ = kv_plan(
        *("--prefill", "pp=2", "--prefill-layer-partition", "1,3"),
        *("--decode", "pp=2", "--decode-layer-partition", "2,2"),
        *(*SIZES, "--json"),
    )
    reads = [
        (part["read"]["dst_rank"]["pp_rank"], part["read"]["src_rank"]["pp_rank"], part["layers"])
        for part in json.loads(out)["reads"]
    ]
    assert reads == [(0, 0, [0]), (0, 1, [1]), (1, 1, [2, 3])]


def test_text_begins_with_the_verdict_and_names_ranks(kv_plan):
    """Each read, each decode rank and each prefill rank is a readable line."""
    layouts = ("--prefill", "tp=3,pp=2", "--decode", "tp=2")
    status, out, err = kv_plan(*layouts, *SIZES, "--head-size", "64", "--dtype", "float16")
    assert (status, err) == (0, "")
    assert out.startswith("Served by this connector, on any hardware whose attention")
    assert "Stock vLLM's would not: it has no pipeline stages." in " ".join(out.split())
    assert "pp1tp1 heads 2-3 [3, 4) 1 -> 0 512 KiB" in rows(out)
    # 6 heads in half, 4 layers, keys and values, 64 elements of 2 bytes, 1,024 tokens.
    assert "pp0tp1 4 3 MiB 512 -" in rows(out)
    assert "pp1tp1 2 1 MiB pp0tp0-1" in rows(out)
    assert "\x1b" not in out


def test_ranks_that_are_only_notified_are_told(kv_plan):
    """All but one hold copies that nobody reads."""
    layouts = ("--prefill", "tp=4", "--decode", "tp=1")
    _, out, _ = kv_plan(*layouts, "--num-layers", "2", "--mla")
    assert "pp0tp3 only notified - pp0tp0" in rows(out)
    assert " ".join(out.split()).count("only notified") == 3


def test_summary_has_totals_and_no_ranks(kv_plan):
    """As short for a thousand ranks as for two, as text and as JSON."""
    layouts = ("--prefill", "tp=64,pp=4", "--decode", "tp=32,dp=2", "--summary")
    sizes = ("--num-layers", "64", "--num-kv-heads", "8")
    status, out, _ = kv_plan(*layouts, *sizes)
    assert status == 0
    assert len(out.splitlines()) < 30
    assert "in each of 2 replicas" in out
    # As many descriptors for each of 32 ranks as a rank has blocks and layers.
    assert f"1 GiB, in 128 reads of {32 * 64 * 64:,} descriptors" in " ".join(out.split())
    document = json.loads(kv_plan(*layouts, *sizes, "--json")[1])
    assert "reads" not in document and document["request"]["bytes"] == 1 << 30


def test_sizes_of_blocks_may_differ(kv_plan):
    """Each engine's own block size counts before the common one."""
    layouts = ("--prefill", "tp=1", "--decode", "tp=1", *SIZES, "--head-size", "64")
    _, out, _ = kv_plan(*layouts, "--block-size", "32", "--decode-block-size", "64")
    assert "heads 4: 0-3 6 slots 32 to 64 all 256 B a token" in rows(out)


def test_shares_of_tokens_are_planned_and_told(kv_plan):
    """Each of four ranks reads a quarter of a latent, in blocks unless it is said otherwise."""
    layouts = ("--prefill", "tp=4", "--decode", "tp=4,dcp=4", "--mla", "--num-layers", "2")
    document = json.loads(kv_plan(*layouts, "--json")[1])
    assert [each["read"]["dst_tokens"] for each in document["reads"]] == [
        {"index": rank, "num_shares": 4, "run_tokens": 16} for rank in range(4)
    ]
    assert {each["num_bytes"] for each in document["reads"]} == {2 * 1024 * 576 * 2 // 4}
    _, out, _ = kv_plan(*layouts, "--decode-interleave-size", "1")
    assert "1.125 KiB" in " ".join(out.split())


def test_copies_of_prefill_context_parallelism_are_told(kv_plan):
    """One of each group is read from: the reads are those of an engine without."""
    model = ("--decode", "tp=1", "--mla", "--num-layers", "2", "--json")
    plain, copied = (
        json.loads(kv_plan("--prefill", prefill, *model)[1]) for prefill in ("tp=2", "tp=2,pcp=2")
    )
    assert copied["prefill"]["num_copies"] == 2
    assert copied["reads"] == plain["reads"]


def test_svg_is_written_beside_the_text(kv_plan, tmp_path):
    """The drawing goes to its file, and the text is the same."""
    layouts = ("--prefill", "tp=3", "--decode", "tp=2", *SIZES)
    path = tmp_path / "plan.svg"
    assert kv_plan(*layouts, "--svg", str(path)) == kv_plan(*layouts)
    assert path.read_text().startswith("<svg")


LLAMA = {"model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 12}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({**LLAMA, "num_key_value_heads": 6, "head_dim": 64}, "4 layers, 6 KV heads of 64"),
        ({**LLAMA, "hidden_size": 1536}, "4 layers, 12 KV heads of 128"),
        (
            {
                **LLAMA,
                "model_type": "deepseek_v3",
                "kv_lora_rank": 512,
                "qk_rope_head_dim": 64,
            },
            "4 layers, one latent (MLA) of 576",
        ),
        ({**LLAMA, "model_type": "lfm2"}, "what models of type 'lfm2' keep, vLLM knows"),
        ({**LLAMA, "model_type": "mistral", "sliding_window": 8}, "'mistral' with windows keep"),
        ({**LLAMA, "num_attention_heads": None}, "give --num-layers"),
        (LLAMA, "does not give 'hidden_size'"),
        ([], "what models of type None keep"),
    ],
)
def test_without_vllm_only_plain_models_are_understood(
    config, expected, kv_plan, monkeypatch, tmp_path
):
    """Heads or a latent, and nothing else; everything else is refused by its type."""
    monkeypatch.setattr(command, "can_ask", lambda: False)
    (tmp_path / "config.json").write_text(json.dumps(config))
    _, out, err = kv_plan("--prefill", "tp1", "--decode", "tp1", "--model", str(tmp_path))
    assert expected in " ".join((out + err).split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--head-size", "0"), "head_size is 0"),
        (("--head-size", str(10**30)), "must be between 1 and 8192"),
        (("--num-layers", "0"), "num_layers is 0"),
        (("--num-kv-heads", "0"), "num_kv_heads is 0"),
        (("--dtype", "int3"), "dtype 'int3' is not one of"),
        (("--block-size", "0"), "block size is 0"),
        (("--decode-block-size", "-1"), "--decode tp=1: its block size is -1"),
        (("--prompt-tokens", "0"), "--prompt-tokens is 0"),
        (("--prompt-tokens", "9999999"), "--prompt-tokens is 9999999"),
        (("--model", "/missing"), "--model gives all sizes"),
        (("--prefill", "tp=4"), "tensor_parallel_size 4 does"),
        (("--decode", "pp=5"), "4 layers over 5 pipeline"),
        (("--prefill", "pp=2", "--prefill-layer-partition", "1,2"), "adds up to 3 layers"),
        (("--prefill", "pcp=2"), "for MLA only: leave pcp out"),
        (("--decode", "tp=4,dcp=3"), "does not divide tensor_parallel_size 4"),
        (("--decode", "tp=6,dcp=2"), "choose a size that divides that"),
        (("--decode", "tp=12,dcp=2", "--decode-interleave-size", "5"), "must divide the 16 tokens"),
        (("--svg", "/missing/plan.svg"), "--svg /missing/plan.svg cannot be written"),
    ],
)
def test_impossible_arguments_are_one_line_and_status_2(kv_plan, arguments, message):
    """What no engine could have is refused with the value, before anything is printed."""
    status, out, err = kv_plan("--prefill", "tp=1", "--decode", "tp=1", *SIZES, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("kv-plan: error: ") and message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("missing", [0, 2])
def test_sizes_that_are_missing_are_told(kv_plan, missing):
    """Either of the two that no default replaces."""
    given = SIZES[2:] if missing == 0 else SIZES[:2]
    status, _, err = kv_plan("--prefill", "tp=1", "--decode", "tp=1", *given)
    assert status == 2 and f"{SIZES[missing]} is missing" in err
