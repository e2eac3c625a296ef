# SPDX-License-Identifier: Apache-2.0
"""Folders in which something is made before it takes its place, and turns at what is shared.

A build that is killed cleans nothing up. So each holds a lock while it lives, which the kernel
releases with it, and the next one removes what nobody holds.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

#: The file in a folder that its maker holds a lock on. One without it is none of ours.
LOCK = ".reshard-build-lock"

log = logging.getLogger(__name__)


@contextmanager
def staging_folder(prefix: str, parent: Path) -> Iterator[Path]:
    """Make a folder that is gone afterwards, and remove those of dead processes.

    Args:
        prefix: What the folder's name begins with.
        parent: Where it goes; made where it is missing.
    """
    parent.mkdir(parents=True, exist_ok=True)
    _remove_dead(prefix, parent)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        # Nobody sees the file before it is locked.
        with (folder / f"{LOCK}.new").open("wb") as file:
            if _lock(file, wait=True):
                Path(file.name).rename(folder / LOCK)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def turn_at(path: Path) -> Iterator[None]:
    """Wait until no other process, or thread, is at work on a path.

    Args:
        path: What is worked on. The file that is locked lies beside it, and stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("ab") as file:
        if _lock(file, wait=False) is False:
            log.info("waiting for another build to be through with %s", path)
            _lock(file, wait=True)
        yield


def _remove_dead(prefix: str, parent: Path) -> None:
    for folder in parent.glob(f"{prefix}*"):
        try:
            # For writing, which a lock over NFS takes.
            with (folder / LOCK).open("r+b") as file:
                if _lock(file, wait=False):
                    log.info("removing %s, which a build left that was killed", folder)
                    shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            # Another process's, removed by now, or no folder.
            continue


def _lock(file: IO[bytes], *, wait: bool) -> bool | None:
    """Lock a file until it is closed; return whether it is locked, or another has it.

    Where there are no locks, as on some file systems and other operating systems, it is None: two
    builds may then disturb each other, and killed ones leave their folders.
    """
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return None
    return True
