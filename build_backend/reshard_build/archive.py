# SPDX-License-Identifier: Apache-2.0
"""Reads base wheels and writes product wheels, on top of the `wheel` library.

Every byte that is read is checked against the wheel's own RECORD.
"""

from __future__ import annotations

import calendar
import csv
import os
import stat
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from zipfile import ZIP_DEFLATED, BadZipFile, ZipInfo

from wheel.wheelfile import WheelError, WheelFile

from .errors import BaseWheelError, ProductError, SettingError

PACKAGE_PREFIX = "vllm/"
COMPILED_SUFFIX = ".so"
REGULAR_FILE_MODE = stat.S_IFREG | 0o644
EXECUTABLE_FILE_MODE = stat.S_IFREG | 0o755
COMPRESSION = ZIP_DEFLATED
"""How files lie in wheels that are written."""
EPOCH_VARIABLE = "SOURCE_DATE_EPOCH"
_LATEST_S = (1 << 32) - 1
"""What gzip's header can hold; zip archives end a year later."""

DateTime = tuple[int, int, int, int, int, int]


class BaseWheel:
    """An open wheel of vLLM.

    Use `open_base` or `open_product`; all that is read is verified.

    Args:
        path: The wheel.
        archive: The same, open.
        compiled: Another one, whose compiled files take the place of this one's.
    """

    def __init__(self, path: Path, archive: WheelFile, compiled: BaseWheel | None = None) -> None:
        self.path = path
        self._compiled = compiled
        self._archive = archive
        self._dist_info: str = archive.dist_info_path
        self._infos: dict[str, ZipInfo] = {}
        self._record_time: DateTime = (1980, 1, 1, 0, 0, 0)
        for info in archive.infolist():
            if info.filename == archive.record_path:
                self._record_time = info.date_time
            elif not info.is_dir():
                self._infos[info.filename] = info
        #: Files of the package, in the order of the archive.
        self.names: tuple[str, ...] = tuple(n for n in self._infos if n.startswith(PACKAGE_PREFIX))
        if compiled is not None:
            own = (n for n in self.names if not n.endswith(COMPILED_SUFFIX))
            self.names = (*own, *compiled.compiled_names)
        #: Files of the metadata directory, relative to it and without RECORD.
        self.dist_info_names: tuple[str, ...] = tuple(
            n.removeprefix(f"{self._dist_info}/")
            for n in self._infos
            if n.startswith(f"{self._dist_info}/")
        )
        self._name_set = frozenset(self.names)

    def refuse_strays(self) -> None:
        """Refuse files that a product made from this wheel would lack.

        Raises:
            BaseWheelError: A file is neither the package's nor metadata.
        """
        if stray := {
            name
            for name in self._infos
            if not name.startswith((PACKAGE_PREFIX, f"{self._dist_info}/"))
        }:
            raise BaseWheelError(
                f"base wheel {self.path.name} holds {min(stray)}, neither in vllm/ nor metadata",
                "teach the build where it goes",
            )

    def __contains__(self, name: object) -> bool:
        return name in self._name_set

    @property
    def compiled_names(self) -> tuple[str, ...]:
        """Compiled files of the package, in the order of the archive."""
        return tuple(name for name in self.names if name.endswith(COMPILED_SUFFIX))

    def _borrowed(self, name: str) -> BaseWheel | None:
        """The wheel that a compiled file comes from, where that is another one."""
        return self._compiled if name.endswith(COMPILED_SUFFIX) else None

    @property
    def record_time(self) -> DateTime:
        """When the base wheel was finished; given to files that the build adds."""
        return self._record_time

    def mode(self, name: str) -> int:
        """Return the Unix mode of a file, with the bits of its type."""
        if other := self._borrowed(name):
            return other.mode(name)
        return (self._infos[name].external_attr >> 16) or REGULAR_FILE_MODE

    def date_time(self, name: str) -> DateTime:
        """Return the time stamp of a file."""
        if other := self._borrowed(name):
            return other.date_time(name)
        return self._infos[name].date_time

    def read(self, name: str) -> bytes:
        """Read a file of the package and check it against RECORD.

        Raises:
            BaseWheelError: The content is damaged or not in RECORD.
        """
        if other := self._borrowed(name):
            return other.read(name)
        try:
            content: bytes = self._archive.read(name)
        except (WheelError, BadZipFile, zlib.error, EOFError, OSError) as error:
            raise _damaged(self.path, str(error)) from None
        return content

    def read_dist_info(self, name: str) -> bytes:
        """Read a file of the metadata directory and check it against RECORD.

        Args:
            name: Path relative to the metadata directory.

        Raises:
            BaseWheelError: The file is missing, damaged or not in RECORD.
        """
        if name not in self.dist_info_names:
            raise _damaged(self.path, f"it has no {name}")
        return self.read(f"{self._dist_info}/{name}")


@contextmanager
def open_base(path: Path, compiled: BaseWheel | None = None) -> Iterator[BaseWheel]:
    """Open a base wheel.

    Args:
        path: The wheel.
        compiled: An open one whose compiled files take the place of its own.

    Raises:
        BaseWheelError: It is not a wheel, has no valid RECORD, or holds what the build would lose.
    """
    with _open(path, compiled) as wheel:
        wheel.refuse_strays()
        yield wheel


@contextmanager
def open_product(path: Path) -> Iterator[BaseWheel]:
    """Open a wheel that was built here, which has commands beside the package.

    Args:
        path: The wheel.

    Raises:
        BaseWheelError: It is not a wheel, or has no valid RECORD.
    """
    with _open(path, None) as wheel:
        yield wheel


@contextmanager
def _open(path: Path, compiled: BaseWheel | None) -> Iterator[BaseWheel]:
    try:
        archive = WheelFile(path)
    except (WheelError, BadZipFile, zlib.error, EOFError, OSError, ValueError) as error:
        raise _damaged(path, str(error)) from None
    with archive:
        yield BaseWheel(path, archive, compiled)


def _damaged(path: Path, reason: str) -> BaseWheelError:
    return BaseWheelError(
        f"base wheel {path.name} is damaged: {reason}", f"delete {path} to have it fetched again"
    )


class WheelWriter:
    """Writes one wheel; RECORD is added when `create_wheel` closes it."""

    def __init__(self, archive: WheelFile, date_time: DateTime) -> None:
        self._archive = archive
        self._date_time = date_time
        #: Name of the metadata directory.
        self.dist_info: str = archive.dist_info_path
        #: Name of the directory of files that an installer puts elsewhere than on `sys.path`.
        self.data: str = f"{self.dist_info.removesuffix('.dist-info')}.data"

    def add(
        self,
        name: str,
        content: bytes,
        *,
        mode: int = REGULAR_FILE_MODE,
        date_time: DateTime | None = None,
    ) -> None:
        """Add a file.

        Args:
            name: Path inside the wheel.
            content: All of the file's bytes.
            mode: Unix mode with the bits of the type.
            date_time: Time stamp; that of the wheel by default.
        """
        info = ZipInfo(name, date_time or self._date_time)
        info.compress_type = COMPRESSION
        info.external_attr = mode << 16
        info.create_system = 3  # Unix, whose modes these are.
        self._archive.writestr(info, content)


@contextmanager
def create_wheel(path: Path, date_time: DateTime) -> Iterator[WheelWriter]:
    """Create a wheel with a RECORD; the same content gives the same bytes.

    Args:
        path: Where to write; the name is that of a wheel.
        date_time: Time stamp of files without one of their own, unless `SOURCE_DATE_EPOCH` is set.

    Raises:
        SettingError: `SOURCE_DATE_EPOCH` is no time.
    """
    with _source_date_epoch(date_time) as stamp, WheelFile(path, "w") as archive:
        yield WheelWriter(archive, stamp)


@contextmanager
def _source_date_epoch(default: DateTime) -> Iterator[DateTime]:
    """Fix the time stamp that the `wheel` library gives to the RECORD that it writes."""
    if (chosen_s := source_date_epoch()) is not None:
        # The earliest time that a zip archive can hold is 1980-01-01.
        year, month, day, hour, minute, second = time.gmtime(max(chosen_s, 315_532_800))[:6]
        yield (year, month, day, hour, minute, second)
        return
    os.environ[EPOCH_VARIABLE] = str(calendar.timegm(default))
    try:
        yield default
    finally:
        del os.environ[EPOCH_VARIABLE]


def source_date_epoch() -> int | None:
    """Return the time stamp that `SOURCE_DATE_EPOCH` asks for, in seconds, if it is set.

    Raises:
        SettingError: It is no time that archives can hold.
    """
    text = os.environ.get(EPOCH_VARIABLE)
    if text is None:
        return None
    # Ten digits are as many as the largest has.
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and int(text) <= _LATEST_S):
        raise SettingError(
            f"{EPOCH_VARIABLE} is {text!r} but must be a number of seconds from 0 to {_LATEST_S}",
            f"set it to one, as `date +%s` prints, or unset {EPOCH_VARIABLE}",
        )
    return int(text)


def verify_wheel(path: Path) -> None:
    """Check that RECORD covers every file of a wheel with the right hash, and nothing else.

    Raises:
        ProductError: It does not.
    """
    try:
        with WheelFile(path) as archive:
            names = [info.filename for info in archive.infolist()]
            for name in names:
                with archive.open(name) as file:
                    while file.read(1 << 20):
                        pass
            record = archive.read(archive.record_path).decode("utf-8")
    except (WheelError, BadZipFile, zlib.error, EOFError, OSError, ValueError) as error:
        raise ProductError(f"{path.name} is not a valid wheel: {error}", "build it again") from None
    recorded = [row[0] for row in csv.reader(record.splitlines())]
    odd = Counter(recorded)
    odd.subtract(names)
    if wrong := sorted(name for name, surplus in odd.items() if surplus):
        raise ProductError(f"RECORD of {path.name} disagrees about {wrong[0]}", "build it again")
    if doubled := sorted(name for name, count in Counter(names).items() if count > 1):
        raise ProductError(f"{path.name} holds {doubled[0]} twice", "build it again")
