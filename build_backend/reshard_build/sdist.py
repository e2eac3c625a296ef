# SPDX-License-Identifier: Apache-2.0
"""Writes the source distribution: what a build needs, without git and without tests."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

from .archive import source_date_epoch
from .commit import commit_of
from .metadata import sdist_metadata
from .overlay import overlay_files
from .project import Project

_TOP_LEVEL = ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "NOTICE")
# 1980-01-01: any fixed time will do, and wheels cannot hold an earlier one.
_DEFAULT_TIME_S = 315_532_800


def write_sdist(project: Project, version: str, directory: Path) -> str:
    """Write a source distribution; the same sources give the same bytes.

    Args:
        project: Source tree.
        version: Version of the fork without a target's suffix.
        directory: Where to put the archive.

    Returns:
        The archive's file name.

    Raises:
        ConfigError: `pyproject.toml` names a file that does not exist.
        SettingError: `SOURCE_DATE_EPOCH` is no time.
    """
    stem = f"vllm-{version}"
    chosen_s = source_date_epoch()
    mtime_s = _DEFAULT_TIME_S if chosen_s is None else chosen_s
    packed = io.BytesIO()
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=packed, mtime=mtime_s) as stream,
        tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name, content in _contents(project, version):
            info = tarfile.TarInfo(f"{stem}/{name}")
            info.size = len(content)
            info.mtime = mtime_s
            info.mode = 0o644
            archive.addfile(info, io.BytesIO(content))
    (directory / f"{stem}.tar.gz").write_bytes(packed.getvalue())
    return f"{stem}.tar.gz"


def _contents(project: Project, version: str) -> Iterator[tuple[str, bytes]]:
    yield "PKG-INFO", sdist_metadata(project, version)
    for name in _TOP_LEVEL:
        if (project.root / name).is_file():
            yield name, (project.root / name).read_bytes()
    sources: dict[str, Path] = {}
    for directory in (
        project.backend_dir,
        project.bases_dir,
        project.overlay_dir,
        project.plugin_dir,
        project.scripts_dir,
    ):
        # The overlay's rule of what is a source holds for the other directories too.
        sources |= overlay_files(directory)
    for name, path in sources.items():
        yield name, path.read_bytes()
    if commit := commit_of(project):
        yield project.commit_file.relative_to(project.root).as_posix(), commit.encode()
