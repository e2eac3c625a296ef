# SPDX-License-Identifier: Apache-2.0
"""Compares the operators that a release declares with those that compiled files register.

Where a base is the Python of one wheel and the compiled files of another, its Python calls torch's
operators by name and schema, and what was compiled from other sources may lack them. Nothing is
imported: the schemas stand as text in the release's sources, and as text in what was compiled.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .archive import BaseWheel
from .base import CompiledParts, WheelPin
from .errors import ConfigError, OperatorError

SOURCES = "csrc/cpu"
"""Where a release's source tree declares the operators that it has on CPU."""

_LITERAL = r'"(?:[^"\\]|\\.)*"'
_DECLARED = re.compile(rf"\bdef\(\s*((?:{_LITERAL}\s*)+)[,)]")
_COMMENT = re.compile(r"//[^\n]*")
_SCHEMA = re.compile(r"([a-z_]\w*)\(.*\) -> .+")
_ARROW = re.compile(rb"\) *->")
_LONGEST_BYTES = 4096
"""No schema is longer. Compiled files hold hundreds of megabytes without one."""


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Comparison:
    """How compiled files differ from what a release declares.

    Attributes:
        same: How many operators are there as declared.
        missing: Operators that are not there.
        differing: Operators that are there with another schema.
    """

    same: int
    missing: tuple[str, ...]
    differing: tuple[str, ...]


def declared_in_sources(directory: Path) -> dict[str, str]:
    """Return the operators that a release's sources declare for CPU, on any machine.

    Args:
        directory: Source tree of the release.

    Returns:
        Schema by name, evenly spaced.

    Raises:
        ConfigError: There are none.
    """
    found: dict[str, str] = {}
    for path in sorted((directory / SOURCES).glob("*.cpp")):
        source = _COMMENT.sub("", path.read_text(encoding="utf-8"))
        for match in _DECLARED.finditer(source):
            literals = re.findall(_LITERAL, match[1])
            text = "".join(literal[1:-1] for literal in literals).replace('\\"', '"')
            found |= _by_name([text])
    if not found:
        raise ConfigError(
            f"no operator is declared in {directory / SOURCES}",
            "name the unpacked sources of the release",
        )
    return found


def write_operators(operators: Mapping[str, str], path: Path, release: str) -> None:
    """Write the file that `read_operators` reads."""
    head = f"# What vLLM {release} declares in {SOURCES}; written by `make base`.\n"
    path.write_text(head + "".join(f"{operators[name]}\n" for name in sorted(operators)))


def read_operators(path: Path) -> dict[str, str]:
    """Read the operators that a release declares.

    Returns:
        Schema by name, evenly spaced.

    Raises:
        ConfigError: The file is missing, or a line is no schema.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(
            f"cannot read {path.parent.name}/{path.name}: {error.strerror}",
            "write it with `make base SOURCES=...`",
        ) from None
    schemas = [line for line in lines if line and not line.startswith("#")]
    found = _by_name(schemas)
    if len(found) != len(schemas) or not found:
        raise ConfigError(
            f"{path.parent.name}/{path.name} is no list of operators, each once",
            "write it with `make base SOURCES=...`",
        )
    return found


def registered_in(content: bytes) -> dict[str, str]:
    """Return the operators whose schemas stand in a compiled file.

    Args:
        content: All of the file's bytes.

    Returns:
        Schema by name, evenly spaced.
    """
    texts: list[str] = []
    for arrow in _ARROW.finditer(content):
        begin = content.rfind(b"\0", max(0, arrow.start() - _LONGEST_BYTES), arrow.start()) + 1
        end = content.find(b"\0", arrow.end(), arrow.end() + _LONGEST_BYTES)
        if begin and end > 0 and (text := content[begin:end]).isascii():
            texts.append(text.decode())
    return _by_name(texts)


def compare(declared: Mapping[str, str], registered: Mapping[str, str]) -> Comparison:
    """Compare schemas by name; what is registered beside the declared is no matter."""
    missing = sorted(declared.keys() - registered.keys())
    differing = [
        name for name in declared if registered.get(name, declared[name]) != declared[name]
    ]
    return Comparison(
        same=len(declared) - len(missing) - len(differing),
        missing=tuple(missing),
        differing=tuple(sorted(differing)),
    )


def report_operators(pin: WheelPin, base: BaseWheel) -> None:
    """Tell in the build's messages what `require_operators` finds, where there is anything to tell.

    Raises:
        ConfigError: As there.
        OperatorError: As there.
    """
    if pin.compiled is not None:
        log.info("%s", require_operators(pin, base))


def require_operators(pin: WheelPin, base: BaseWheel) -> str:
    """Compare a base's compiled files with what its release declares.

    Args:
        pin: The base wheel.
        base: The same and its compiled files, open.

    Returns:
        What was found, in a line.

    Raises:
        ConfigError: The list of declared operators cannot be read.
        OperatorError: Operators differ that the base does not give a reason for, or no longer
            differ.
    """
    parts = pin.compiled
    if parts is None:
        return "the compiled files are the release's own"
    registered: dict[str, str] = {}
    for name in base.compiled_names:
        registered |= registered_in(base.read(name))
    declared = read_operators(parts.operators)
    found = compare(declared, registered)
    _require_reasons(found, parts, pin)
    told = [f"{name} ({reason})" for name, reason in parts.differing.items()]
    return (
        f"{found.same} of {len(declared)} operators that vllm {pin.version} has on CPU are in "
        f"{_named(parts.pin)} as declared" + (f", but for {', '.join(told)}" if told else "")
    )


def _require_reasons(found: Comparison, parts: CompiledParts, pin: WheelPin) -> None:
    known = parts.differing.keys()
    wrong = [
        f"{verb} {', '.join(names)}"
        for verb, every in (("lacks", found.missing), ("has another schema for", found.differing))
        if (names := [name for name in every if name not in known])
    ]
    if wrong:
        raise OperatorError(
            f"{_named(parts.pin)} {' and '.join(wrong)}, which vllm {pin.version} has on CPU",
            "pin compiled files that have it, or say in base.toml, under `differing`, what does "
            "not work without",
        )
    if stale := sorted(known - {*found.missing, *found.differing}):
        raise OperatorError(
            f"base.toml of {pin.version} says that {', '.join(stale)} differs in "
            f"{_named(parts.pin)}, which it does not",
            "remove it from `differing`",
        )


def _named(pin: WheelPin) -> str:
    return f"{pin.project} {pin.version}"


def _by_name(texts: Iterable[str]) -> dict[str, str]:
    """Return those of some texts that are schemas, evenly spaced, by the operator's name."""
    return {match[1]: match[0] for text in texts if (match := _SCHEMA.fullmatch(_spaced(text)))}


def _spaced(text: str) -> str:
    """Return a schema with the same spaces however it was written."""
    tight = re.sub(r"\s*([(,=]|->)\s*|\s*(\))", r"\1\2", " ".join(text.split()))
    return tight.replace(",", ", ").replace("->", " -> ")
