# SPDX-License-Identifier: Apache-2.0
"""Choosing the target and the base wheel."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.tags import Tag
from reshard_build.errors import PlatformError, TargetError
from reshard_build.target import nvidia_driver_answers, select_target, select_wheel


@pytest.mark.parametrize("value", ["cpu", "cuda", " CPU "])
def test_variable_decides(source_tree: Any, value: str) -> None:
    """The variable wins over what the machine has."""
    target = select_target(source_tree.base, {"VLLM_TARGET_DEVICE": value}, lambda: 1 / 0)
    assert target.name == value.strip().lower()


@pytest.mark.parametrize(("answers", "name"), [(True, "cuda"), (False, "cpu")])
@pytest.mark.parametrize("environ", [{}, {"VLLM_TARGET_DEVICE": ""}])
def test_driver_decides_otherwise(
    source_tree: Any, answers: bool, name: str, environ: dict[str, str]
) -> None:
    """Without the variable an answering driver means CUDA."""
    assert select_target(source_tree.base, environ, lambda: answers).name == name


def test_unknown_target_is_named_with_the_known_ones(source_tree: Any) -> None:
    """The message tells what was asked for, what there is and what to do."""
    with pytest.raises(TargetError, match=r"VLLM_TARGET_DEVICE=rocm .* cpu and cuda; set"):
        select_target(source_tree.base, {"VLLM_TARGET_DEVICE": "rocm"})


def _driver(init_status: int, device_count: int) -> Any:
    def count_devices(count: Any) -> int:
        ctypes.cast(count, ctypes.POINTER(ctypes.c_int))[0] = device_count
        return 0

    return lambda name: SimpleNamespace(
        cuInit=lambda flags: init_status, cuDeviceGetCount=count_devices
    )


@pytest.mark.parametrize(
    ("init_status", "device_count", "answer"), [(0, 2, True), (0, 0, False), (100, 2, False)]
)
def test_driver_needs_a_device(init_status: int, device_count: int, answer: bool) -> None:
    """A library that loads is not enough: it must start and have a device."""
    assert nvidia_driver_answers(_driver(init_status, device_count)) is answer


def test_no_driver_library_is_no_driver() -> None:
    """Where the library cannot be loaded, there is no driver."""

    def fail(name: str) -> ctypes.CDLL:
        raise OSError(name)

    assert nvidia_driver_answers(fail) is False


@pytest.mark.parametrize(("machine", "system"), [("riscv64", "Linux"), ("x86_64", "Darwin")])
def test_other_machines_are_refused(source_tree: Any, machine: str, system: str) -> None:
    """The message names the machine and what there are wheels for."""
    target = source_tree.base.targets["cpu"]
    with pytest.raises(PlatformError, match=rf"{system} on {machine}, only for Linux on x86_64"):
        select_wheel(target, machine=machine, system=system)


def test_old_c_library_is_refused(source_tree: Any) -> None:
    """An interpreter that does not accept the wheel's tag is told so before the download."""
    tags = [Tag("cp38", "abi3", "manylinux_2_17_x86_64")]
    with pytest.raises(PlatformError, match="does not accept wheels tagged cp38-abi3"):
        select_wheel(
            source_tree.base.targets["cpu"], machine="x86_64", system="Linux", supported_tags=tags
        )
