# SPDX-License-Identifier: Apache-2.0
"""The lane that needs no vLLM, over host memory: for real, and what it says where it cannot run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tools.gpu import alone
from tools.gpu.ranks import Layout, Model, Rank

ROOT = Path(__file__).parents[3]
LIMIT_S = 300.0
BLOCKED = ("zmq", "transformers", "pydantic", "fastapi", "prometheus_client", "ray", "vllm_router")
"""What comes with vLLM and with nothing that the lane names."""


def run_lane(*args: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run it in a process of its own, with modules of a directory before all others."""
    env = {**os.environ, "PYTHONPATH": str(path)} if path is not None else None
    return subprocess.run(
        [sys.executable, "-m", "tools.gpu", "lane", *args],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def test_all_pairs_are_read_without_vllm(tmp_path):
    """Every byte of each, direct and staged, by processes that could not import vLLM."""
    blocked = "".join(f"sys.modules[{name!r}] = None\n" for name in BLOCKED)
    (tmp_path / "sitecustomize.py").write_text(f"import sys\n{blocked}")
    output = tmp_path / "lane.json"
    run = run_lane("--small", "--device", "cpu", "--output", str(output), path=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = json.loads(output.read_text())["lane"]
    pairs = {(row["prefill"], row["decode"]) for row in rows}
    assert len(pairs) == 6 and ("tp1pp2 HND 16", "tp2pp1 HND 16") in pairs
    assert sorted(row["way"] for row in rows) == 6 * ["direct"] + 6 * ["staged"]
    assert all(row["fault"] == "" and row["seconds"] > 0 for row in rows)
    assert run.stdout.count(" ok\n") == len(rows)


@pytest.mark.parametrize("token_major", [False, True])
def test_one_wrong_word_is_found(token_major):
    """Wherever it is, and whether it was written wrongly or should not have been written."""
    model = Model(num_layers=2, num_heads=2, head_bytes=16, num_tokens=21)
    layout = Layout(tp_size=2, block_tokens=4, token_major=token_major)
    _, shard = layout.shards(model)
    rank = Rank(model, layout, shard, "cpu")
    assert "words are wrong" in rank.difference()
    rank.fill()
    assert rank.difference() == ""
    words = rank.tensor.view(-1)
    for position in torch.randint(len(words), (40,)).tolist():
        kept = words[position].item()
        words[position] = kept + 1
        assert rank.difference().startswith("1 words are wrong")
        words[position] = kept
    rank.clear()
    assert (rank.tensor == -1).all()


def test_words_name_what_they_are():
    """No two words of a model are the same, whichever worker holds them."""
    model = Model(num_layers=2, num_heads=4, head_bytes=8, num_tokens=8)
    layout = Layout(pp_size=2, tp_size=2, block_tokens=4)
    written = []
    for shard in layout.shards(model):
        rank = Rank(model, layout, shard, "cpu")
        rank.fill()
        written += [word for word in rank.tensor.flatten().tolist() if word != -1]
    assert len(set(written)) == len(written) == model.kv_bytes // 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_machine_without_gpu_is_told_at_once():
    """In one line, with what to do."""
    run = run_lane()
    assert run.returncode == 2 and run.stdout == ""
    (line,) = run.stderr.splitlines()
    assert line.startswith("error: torch ") and "finds no GPU" in line and "--device cpu" in line


def test_what_is_not_installed_is_named(monkeypatch):
    """All of it at once."""
    assert alone.why_not() == ""
    for name in ("msgspec", "psutil"):
        monkeypatch.setitem(sys.modules, name, None)
    assert alone.why_not().startswith("cannot import msgspec (")
    assert ", psutil (" in alone.why_not()
