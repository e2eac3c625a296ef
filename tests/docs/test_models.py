# SPDX-License-Identifier: Apache-2.0
"""The table of specifications has all classes of all releases, and says what becomes of each."""

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

from tools.docs_kv_plan import ROOT
from tools.pdstack.families import FAMILIES
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.geometry import unserved_layer

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
    rows = re.findall(
        r"^\| ((?:`\w+Spec\w*`(?:, )?)+) \| ([^|]+) \| [^|]+ \|$",
        (ROOT / "docs/models.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
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


@pytest.mark.parametrize("name", sorted(installed()))
def test_what_is_served_is_what_the_connector_serves(name):
    """The table is the code's."""
    kind = getattr(kv_cache_interface, name)
    needed = {field.name for field in dataclasses.fields(kind)} & VALUES.keys()
    layer = kv_cache_interface.KVCacheGroupSpec(
        ["layer"], kind(**{field: VALUES[field] for field in needed})
    )
    reason = unserved_layer(kv_cache_interface.KVCacheConfig(4, [], [layer]))
    assert (reason is None) is (told()[name] == "served"), reason


def test_rows_are_those_of_the_sweep():
    """What the page names as a row, or as several that begin so, is a family."""
    page = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    named = re.findall(r"`([^`]+) …`", page)
    assert len(named) > 10
    for name in named:
        assert any(family.name.startswith(name) for family in FAMILIES), name


def test_answers_of_engines_were_seen():
    """Each row that stands for a format has figures among the pairs that were run."""
    formats = (ROOT / "docs/models.md").read_text(encoding="utf-8").partition("## Formats")[2]
    pairs = (ROOT / "docs/layouts.md").read_text(encoding="utf-8")
    seen = re.findall(r"`([^`]+) …`", formats.partition("*Bytes*")[0])
    assert len(seen) > 5
    for name in seen:
        assert f"\n| {name}" in pairs, name
