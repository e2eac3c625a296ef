# SPDX-License-Identifier: Apache-2.0
"""The tables of what bases/ has: the wheels of each base, and its patches."""

from __future__ import annotations

import re

from reshard_build.bases import default_releases, load_bases
from reshard_build.project import Project
from reshard_build.series import load_series

from .blocks import ROOT, code, table

_DEVICES = {"cpu": "CPU", "cuda": "CUDA"}
_PROJECT = Project(ROOT)


def wheel_lines() -> list[str]:
    """A row for each base and target, the newest base first."""
    defaults = default_releases(_PROJECT)
    rows = []
    for base in reversed(load_bases(_PROJECT)):
        for name, target in sorted(base.targets.items(), reverse=True):
            (pin,) = target.wheels.values()
            wheels = code(pin.project)
            if pin.compiled is not None:
                second = pin.compiled.pin
                wheels += f", with compiled files of {code(second.project)} {second.version}"
            is_default = defaults[name] == base.version
            rows.append(
                (
                    f"**{base.version}**" if is_default else base.version,
                    _DEVICES.get(name, name) + ", the default" * is_default,
                    base.status.value if name == "cpu" else "checked",
                    base.python,
                    wheels,
                )
            )
    return table(("base", "target", "status", "oldest Python", "wheel"), rows)


def patch_lines() -> list[str]:
    """A row for each patch, in the order of the series, with a column for each base."""
    patches = {
        base.version: load_series(ROOT / "bases" / base.version) for base in load_bases(_PROJECT)
    }
    names: list[str] = []
    conditions: dict[str, str] = {}
    for series in patches.values():
        place = 0
        for patch in series:
            if patch.name not in names:
                names.insert(place, patch.name)
            place = names.index(patch.name) + 1
            stated = re.search(r"^Drop-when: (.*(?:\n .*)*)", patch.description, re.MULTILINE)
            assert stated, patch.name
            conditions[patch.name] = " ".join(stated[1].split())
    has = {base: {patch.name for patch in series} for base, series in patches.items()}
    rows = (
        (
            code(name),
            conditions[name],
            *("patch" if name in there else "-" for there in has.values()),
        )
        for name in names
    )
    return table(("patch", "it can go when", *has), rows)
