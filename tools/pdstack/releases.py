# SPDX-License-Identifier: Apache-2.0
"""What pairs of engines of two releases have come to, kept in a file from one sweep to the next."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from .errors import UsageError
from .family import Side
from .installation import release_here
from .sweep import Result


@dataclass(frozen=True)
class Row:
    """A pair of two releases.

    Attributes:
        family: its name in a sweep, without the releases.
        model: what both served.
        prefill: release and layout of the prefill engine.
        decode: those of the decode engine.
        exact: whether all answers have to be equal.
        requests: how many there were.
        equal: how many had one engine's answer.
        tied: how many more part from it where two tokens were as likely.
        agreement: share of tokens before the first one that differs.
        bytes_moved: what was read.
        fault: why it has not passed; empty where it has.
    """

    family: str
    model: str
    prefill: tuple[str, str]
    decode: tuple[str, str]
    exact: bool
    requests: int
    equal: int
    tied: int
    agreement: float
    bytes_moved: int
    fault: str

    @property
    def key(self) -> tuple[str, str, str]:
        """What a later row takes the place of."""
        return self.family, self.prefill[0], self.decode[0]


def row_of(result: Result, here: str) -> Row:
    """Return what is kept of a result.

    Args:
        here: the release of engines that run this process's installation.
    """

    def end(side: Side) -> tuple[str, str]:
        return (side.installation.release if side.installation else here, str(side.layout))

    family, found = result.family, result.accuracy
    prefill, decode = end(family.prefill), end(family.decode)
    return Row(
        family.name.removesuffix(f", {prefill[0]} to {decode[0]}"),
        family.model,
        prefill,
        decode,
        family.exact,
        found.requests if found else 0,
        found.equal if found else 0,
        found.tied if found else 0,
        round(found.agreement, 4) if found else 0.0,
        result.bytes_moved,
        result.fault or "",
    )


def read(path: Path) -> list[Row]:
    """Return the rows of a file; none where there is no such file.

    Raises:
        UsageError: it is not what `store` has written.
    """
    if not path.exists():
        return []
    try:
        return [_row(each) for each in json.loads(path.read_text(encoding="utf-8"))]
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{path} is not what a sweep has written: {error!r}") from error


def store(path: Path, results: Iterable[Result]) -> None:
    """Take results into a file; those of the same pair take the place of earlier ones.

    Raises:
        UsageError: the file is another one.
    """
    here = release_here()
    rows = {row.key: row for row in read(path)}
    rows.update({row.key: row for row in (row_of(result, here) for result in results)})
    path.parent.mkdir(parents=True, exist_ok=True)
    written = json.dumps([asdict(row) for row in rows.values()], indent=1)
    path.write_text(f"{written}\n", encoding="utf-8")


def _row(told: Mapping[str, object]) -> Row:
    fields = {**told, "prefill": tuple(told["prefill"]), "decode": tuple(told["decode"])}  # type: ignore[arg-type]
    return Row(**fields)  # type: ignore[arg-type]
