# SPDX-License-Identifier: Apache-2.0
"""The page of models: a row for each family, and each specification of all releases."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import re
from zipfile import ZipFile

import pytest
import torch
from reshard_build.bases import load_bases
from reshard_build.fetch import cache_dir
from reshard_build.project import Project
from vllm.v1 import kv_cache_interface

from tests.docs.pairs import all_pairs
from tests.v1.kv_connector.unit.reshard.cli.families import LEFT_TO_UPSTREAM, WHOLE
from tools.docs.blocks import ROOT
from tools.pdstack.families import FAMILIES
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.caches.geometry import (
    unserved_layer,
)

PAGE = (ROOT / "docs/models.md").read_text(encoding="utf-8")
INTERFACE = "vllm/v1/kv_cache_interface.py"
STATES = {"served", "upstream's", "vLLM refuses", "no cache"}
# Bases of others, which no layer has.
ABSTRACT = {"KVCacheSpec", "AttentionSpec"}
# The least that any specification can be made of.
VALUES = {
    "block_size": 16,
    "num_kv_heads": 1,
    "head_size": 8,
    "dtype": torch.float16,
    "sliding_window": 32,
    "attention_chunk_size": 32,
    "rswa_window": 32,
    "sink_len": 4,
    "page_size": 1 << 12,
    "blocks_per_request": 1,
    # A convolution of as many channels in either order, and a state that it feeds.
    "shapes": ((24, 24), (4, 4, 4)),
    "dtypes": (torch.float16, torch.float16),
    "kv_cache_specs": {
        "layer": kv_cache_interface.FullAttentionSpec(
            block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float16
        )
    },
}


def told() -> dict[str, str]:
    """What the page says of each specification."""
    rows = re.findall(r"^\| ((?:`\w+Spec\w*`(?:, )?)+) \| ([^|]+) \| [^|]+ \|$", PAGE, re.MULTILINE)
    return {name: state for names, state in rows for name in re.findall(r"`(\w+)`", names)}


def specifications(source: str) -> set[str]:
    """The classes of a release that layers' caches are described by."""
    found = {"KVCacheSpec"}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and {ast.unparse(base) for base in node.bases} & found:
            found.add(node.name)
    return found - ABSTRACT


def installed() -> set[str]:
    """Those of the release that the tests run on."""
    return specifications(inspect.getsource(kv_cache_interface))


def test_every_state_is_one_of_few():
    """None is refused that upstream's connector serves with one stage."""
    assert set(told().values()) == STATES


def test_installed_release_has_no_other_specification():
    """A new one fails this until it has a row."""
    assert len(installed()) > 10
    assert installed() <= told().keys()


def test_pinned_releases_have_these_specifications():
    """All bases, as far as their wheels are on this machine; no row is of none of them."""
    pins = [
        pin
        for base in load_bases(Project(ROOT))
        for target in base.targets.values()
        for pin in target.wheels.values()
    ]
    wheels = [path for pin in pins if (path := cache_dir(os.environ) / pin.file).is_file()]
    if not wheels:
        pytest.skip("no wheel of a base is on this machine: make patches-check fetches them")
    found = set()
    for path in wheels:
        with ZipFile(path) as wheel:
            found |= specifications(wheel.read(INTERFACE).decode())
    assert found <= told().keys()
    if len(wheels) == len(pins):
        assert found == told().keys()


def test_what_is_served_is_what_the_connector_serves():
    """The table is the code's."""
    states = told()
    for name in sorted(installed()):
        kind = getattr(kv_cache_interface, name)
        needed = {field.name for field in dataclasses.fields(kind)} & VALUES.keys()
        layer = kv_cache_interface.KVCacheGroupSpec(
            ["layer"], kind(**{field: VALUES[field] for field in needed})
        )
        reason = unserved_layer(kv_cache_interface.KVCacheConfig(4, [], [layer]))
        assert (reason is None) is (states[name] == "served"), f"{name}: {reason}"


def rows_of_models() -> list[list[str]]:
    """The table of models, cell by cell."""
    table = PAGE.partition("| models | what differs |")[2].partition("\n\n")[0]
    return [line.strip("|").split(" | ") for line in table.splitlines()[2:]]


def test_every_family_that_keeps_more_than_heads_has_a_row():
    """By its name, and for each that is left to upstream's with that word."""
    more = ("DeepSeek V3.2", "GLM 5", "DeepSeek V4", "HY V4", "Inkling", "MiniMax M3")
    assert WHOLE.keys() > set(more[:3])
    for name in (*more, *LEFT_TO_UPSTREAM):
        (row,) = (
            row
            for row in rows_of_models()
            if re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", row[0])
        )
        assert row[2].startswith("yes") is (name in more), name


def test_tests_that_rows_name_are_there():
    """Whoever renames a test finds the row that rests on it."""
    named = re.findall(
        r"`(test_\w+)::(\w+)`", " ".join(" | ".join(row) for row in rows_of_models())
    )
    assert len(named) > 10
    for file, name in named:
        places = (ROOT / "tests/v1/kv_connector/unit/reshard").rglob(f"{file}.py")
        assert any(f"def {name}(" in path.read_text(encoding="utf-8") for path in places), name


def test_rows_are_those_of_the_sweep():
    """What the page names as a row, or as several that begin so, is a family."""
    named = re.findall(r"`([^`]+) …`", PAGE)
    assert len(named) > 10
    for name in named:
        assert any(family.name.startswith(name) for family in FAMILIES), name


def test_answers_of_engines_were_seen():
    """Each format has some, and each row that stands for one is among the pairs that were run."""
    table = PAGE.partition("## Formats")[2].partition("*Answers of engines*")[0]
    _, _, *filled = (line for line in table.splitlines() if line.startswith("| "))
    assert filled and all("| answers of engines" in line for line in filled)
    pairs = [pair["family"] for pair in all_pairs()]
    seen = re.findall(r"`([^`]+) …`", table)
    assert len(seen) > 5
    for name in seen:
        assert any(family.startswith(name) for family in pairs), name
