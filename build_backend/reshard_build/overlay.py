# SPDX-License-Identifier: Apache-2.0
"""The overlay: whole modules that this fork owns, at paths that upstream does not have.

There is one for all bases, and for a base that needs modules of its own a second one beside it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path, PurePosixPath

from .errors import OverlayError
from .project import Project


def overlay_files(overlay_dir: Path) -> dict[str, Path]:
    """List the files of the overlay.

    Args:
        overlay_dir: The directory `vllm/` of the source tree.

    Returns:
        File by its path in the product, sorted. Caches and hidden files are left out.
    """
    found: dict[str, Path] = {}
    for directory, subdirectories, names in os.walk(overlay_dir):
        subdirectories[:] = [d for d in subdirectories if d != "__pycache__" and d[0] != "."]
        for name in names:
            if name[0] != "." and not name.endswith((".pyc", ".pyo", "~")):
                path = Path(directory, name)
                found[path.relative_to(overlay_dir.parent).as_posix()] = path
    return dict(sorted(found.items()))


def base_overlay(project: Project, release: str) -> dict[str, Path]:
    """List the overlay of a base: the modules for all bases, and those that it alone needs.

    Args:
        project: Source tree.
        release: Names the base.

    Returns:
        File by its path in the product, sorted.

    Raises:
        OverlayError: A file stands in both.
    """
    shared = overlay_files(project.overlay_dir)
    own = overlay_files(project.base_overlay_dir(release))
    require_no_clash(own, shared, f"the overlay of all bases, beside that of {release},")
    return dict(sorted({**shared, **own}.items()))


def clashes(overlay: Iterable[str], upstream: Iterable[str]) -> list[str]:
    """Return the overlay paths that upstream has too, as a file or as a directory.

    Args:
        overlay: Paths of overlay files.
        upstream: Paths of upstream's files.
    """
    files = set(upstream)
    directories = parents(files)
    return [
        path
        for path in overlay
        if path in files or path in directories or not files.isdisjoint(parents([path]))
    ]


def require_no_clash(overlay: Iterable[str], upstream: Iterable[str], where: str) -> None:
    """Refuse an overlay that would hide a file of upstream.

    Args:
        overlay: Paths of overlay files.
        upstream: Paths of upstream's files.
        where: Whose files those are, for the message.

    Raises:
        OverlayError: At least one path exists on both sides.
    """
    if found := clashes(overlay, upstream):
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise OverlayError(
            f"overlay file {found[0]}{more} stands where {where} has one",
            "move it to a path of its own, or turn the change into a patch",
        )


def parents(paths: Iterable[str]) -> set[str]:
    """Return all directories that hold the given paths, without the root."""
    found: set[str] = set()
    for path in paths:
        for parent in PurePosixPath(path).parents:
            if str(parent) == "." or str(parent) in found:
                break
            found.add(str(parent))
    return found


def topmost_links(overlay: Mapping[str, Path], upstream: Collection[str]) -> dict[str, Path]:
    """Return what has to be linked so that the overlay lies over upstream's tree.

    A directory that is wholly the overlay's, and stands in one place, becomes one link, so that
    files added to it later are there too.

    Args:
        overlay: Files of the overlay, by path in the product.
        upstream: Paths of upstream's files; none of them clashes with the overlay.

    Returns:
        What each link points to, by path in the product.
    """
    sources: dict[str, set[Path]] = {}
    for path, source in overlay.items():
        for directory, place in _places(path, source):
            sources.setdefault(directory, set()).add(place)
    directories = parents(upstream)
    links: dict[str, Path] = {}
    for path, source in overlay.items():
        for directory, place in _places(path, source):
            if directory not in directories and len(sources[directory]) == 1:
                links[directory] = place
                break
        else:
            links[path] = source
    return links


def _places(path: str, source: Path) -> list[tuple[str, Path]]:
    """Return the directories above a file, from the top: in the product, and in the sources."""
    above = list(PurePosixPath(path).parents)[:-1]
    return [(str(directory), source.parents[depth]) for depth, directory in enumerate(above)][::-1]
