# SPDX-License-Identifier: Apache-2.0
"""Which target is built, and whether this machine can run it."""

from __future__ import annotations

import ctypes
import logging
import platform
from collections.abc import Callable, Iterable, Mapping

from packaging.tags import Tag, sys_tags

from .base import Base, Target, WheelPin
from .errors import PlatformError, TargetError

VARIABLE = "VLLM_TARGET_DEVICE"

log = logging.getLogger(__name__)


def nvidia_driver_answers(load_library: Callable[[str], ctypes.CDLL] = ctypes.CDLL) -> bool:
    """Tell whether the NVIDIA driver is loaded and has at least one device.

    Args:
        load_library: Opens a shared library by its name, or raises `OSError`.
    """
    try:
        driver = load_library("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return (
        driver.cuInit(0) == 0
        and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
        and count.value > 0
    )


def wanted_target(
    environ: Mapping[str, str],
    driver_answers: Callable[[], bool] = nvidia_driver_answers,
) -> str:
    """Return the name of the target: `VLLM_TARGET_DEVICE`, else what this machine has.

    Args:
        environ: Environment variables.
        driver_answers: Whether there is a usable NVIDIA device.
    """
    if wanted := environ.get(VARIABLE, "").strip().lower():
        return wanted
    return "cuda" if driver_answers() else "cpu"


def select_target(
    base: Base,
    environ: Mapping[str, str],
    driver_answers: Callable[[], bool] = nvidia_driver_answers,
) -> Target:
    """Choose the target of a base that is wanted.

    Args:
        base: The chosen base.
        environ: Environment variables.
        driver_answers: Whether there is a usable NVIDIA device.

    Raises:
        TargetError: What is wanted is no target of the base.
    """
    wanted = wanted_target(environ, driver_answers)
    if not environ.get(VARIABLE, "").strip():
        log.info("%s is not set: building for %s", VARIABLE, wanted)
    if wanted not in base.targets:
        raise TargetError(
            f"{VARIABLE}={wanted} is not a target of base {base.version}, which has "
            + " and ".join(sorted(base.targets)),
            f"set {VARIABLE} to {' or '.join(sorted(base.targets))}, or choose another base",
        )
    return base.targets[wanted]


def select_wheel(
    target: Target,
    *,
    machine: str | None = None,
    system: str | None = None,
    supported_tags: Iterable[Tag] | None = None,
) -> WheelPin:
    """Choose the base wheel of a target for this machine.

    Args:
        target: What to build for.
        machine: Machine name; the running one's by default.
        system: Name of the operating system; the running one's by default.
        supported_tags: Wheel tags that the interpreter accepts; the running one's by default.

    Raises:
        PlatformError: There is no base wheel that would run here.
    """
    machine = machine or platform.machine()
    system = system or platform.system()
    pin = target.wheels.get(machine)
    if system != "Linux" or pin is None:
        raise PlatformError(
            f"there is no {target.name} base wheel for {system} on {machine}, only for Linux on "
            + " and ".join(sorted(target.wheels)),
            "build on such a machine or in a container of one",
        )
    tags = sys_tags() if supported_tags is None else supported_tags
    if pin.tags.isdisjoint(tags):
        raise PlatformError(
            f"{platform.python_implementation()} {platform.python_version()} with "
            f"{'-'.join(part for part in platform.libc_ver() if part) or 'its C library'} does not "
            f"accept wheels tagged {pin.compressed_tag}",
            "use CPython on a distribution with a C library that is new enough",
        )
    return pin
