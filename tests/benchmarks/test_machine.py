# SPDX-License-Identifier: Apache-2.0
"""What is told of the machine and of models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.cases import Shape
from benchmarks.machine import machine_facts
from benchmarks.model import write_model
from tools.pdstack.layout import Layout

ROOT = Path(__file__).parents[2]


def test_facts_name_machine_and_versions():
    """Figures come with processor, cores, load and the versions of what was measured."""
    facts = machine_facts()
    assert all(facts.values())
    assert "not installed" not in facts.values() and facts["ucx"] != "unknown"
    assert int(facts["cores"].split()[0]) > 0


PEAK = """
from benchmarks.memory import PeakMemory
before = bytearray(b"x") * (32 << 20)
memory = PeakMemory()
moment = bytearray(b"x") * (64 << 20)
del moment
print(memory.risen_bytes())
"""


def test_peak_is_seen_after_memory_was_given_back():
    """What was resident for a moment counts, what was resident before does not.

    In a process of its own: in this one, others give memory back meanwhile.
    """
    said = subprocess.run([sys.executable, "-c", PEAK], cwd=ROOT, capture_output=True, check=True)
    assert 60 << 20 <= int(said.stdout) <= 80 << 20


@pytest.mark.parametrize(("mla", "heads"), [(False, 4), (True, 1)])
def test_model_has_the_shape(tmp_path, mla, heads):
    """What vLLM reads has the layers, heads and sizes that are measured."""
    shape = Shape(Layout(2, 1), Layout(1, 1), 3, heads, 576 if mla else 64, 16, mla)
    config = json.loads((write_model(shape, tmp_path) / "config.json").read_text())
    assert config["num_hidden_layers"] == 3
    if mla:
        assert config["kv_lora_rank"] + config["qk_rope_head_dim"] == 576
    else:
        assert (config["num_key_value_heads"], config["head_dim"]) == (4, 64)
    assert config["num_attention_heads"] % shape.prefill.tp_size == 0
