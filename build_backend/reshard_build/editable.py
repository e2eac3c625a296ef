# SPDX-License-Identifier: Apache-2.0
"""The tree behind an editable installation: the base unpacked, patches applied, overlay linked.

Overlay edits are live through the links. After an edit of the series, or a new overlay file in a
directory that upstream has too, `refresh` brings the tree up to date without unpacking it again.

A stamp beside the package says what the tree was made from. It is written before files change, with
all files that may differ from the base, and again afterwards: a run that was killed is caught up.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from .archive import BaseWheel
from .errors import EditableError
from .overlay import topmost_links
from .product import Product
from .staging import staging_folder, turn_at

STAMP = "reshard-stamp.json"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stamp:
    """What a tree was made from.

    Attributes:
        base_sha256: Checksum of the base wheel, or of both.
        version: Version of the product.
        changed: Files that differ from the base, or may if an update was cut short.
        links: Links to the overlay.
    """

    base_sha256: str
    version: str
    changed: list[str]
    links: list[str]


def refresh(product: Product, tree: Path) -> bool:
    """Bring a tree up to date, or write it where there is none for this base.

    Others that do the same wait for their turn.

    Args:
        product: What the tree is to hold.
        tree: Directory that is on `sys.path`; it holds the package and the stamp.

    Returns:
        Whether the whole tree was written.

    Raises:
        BaseWheelError: The base wheel is damaged.
        EditableError: The tree cannot be written.
    """
    try:
        with turn_at(tree):
            stamp = read_stamp(tree)
            if stamp is None or stamp.base_sha256 != product.pin.contents_sha256:
                _write_whole(product, tree)
                return True
            _update(product, tree, stamp)
            return False
    except OSError as error:
        raise EditableError(
            f"cannot write the tree {tree}: {error}",
            f"make {tree.parent} writable, with space, or build a wheel",
        ) from None


def read_stamp(tree: Path) -> Stamp | None:
    """Return the stamp of a tree; `None` where there is no usable one."""
    try:
        return Stamp(**json.loads((tree / STAMP).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def unpack(base: BaseWheel, names: Iterable[str], directory: Path) -> None:
    """Write files of a base wheel as they are.

    Args:
        base: The open base wheel.
        names: Paths in it.
        directory: Where the package goes.
    """
    for name in names:
        _write(directory / name, base.read(name), base.mode(name))


def _write_whole(product: Product, tree: Path) -> None:
    log.info("unpacking the %s base into %s", product.target.name, tree)
    with staging_folder(f".{tree.name}-", tree.parent) as staging:
        new = staging / "new"
        new.mkdir()
        new.chmod(0o755)
        unpack(product.base, (n for n in product.base.names if n not in product.changed), new)
        _write_changed(product, new, product.changed)
        # Links are relative, and hold at the final place.
        links = _links(product, tree)
        _link(links, new)
        _write_stamp(product, new, product.changed, links)
        if tree.exists():
            tree.rename(staging / "old")
        new.rename(tree)


def _update(product: Product, tree: Path, stamp: Stamp) -> None:
    wanted = _links(product, tree)
    _write_stamp(product, tree, {*stamp.changed, *product.changed}, {*stamp.links, *wanted})
    # Stale links go first: a file that a patch adds behind one would land in the sources.
    for name in stamp.links:
        path = tree / name
        if path.is_symlink() and str(path.readlink()) != wanted.get(name):
            path.unlink()
    for name in sorted(set(stamp.changed) - product.changed.keys()):
        if name in product.base:
            unpack(product.base, [name], tree)
        else:
            (tree / name).unlink(missing_ok=True)
    _write_changed(product, tree, product.changed)
    _link(wanted, tree)
    _write_stamp(product, tree, product.changed, wanted)


def _write_changed(product: Product, tree: Path, changed: Mapping[str, bytes | None]) -> None:
    for name, content in changed.items():
        path = tree / name
        if content is None:
            path.unlink(missing_ok=True)
        elif not path.is_file() or path.read_bytes() != content:
            _write(path, content, product.base.mode(name) if name in product.base else 0o644)


def _links(product: Product, tree: Path) -> dict[str, str]:
    """Return the text of each link to the overlay, relative to where the link stands."""
    return {
        name: os.path.relpath(source.resolve(), (tree.resolve() / name).parent)
        for name, source in topmost_links(product.overlay, product.upstream_paths).items()
    }


def _link(links: Mapping[str, str], tree: Path) -> None:
    for name, text in links.items():
        path = tree / name
        if path.is_symlink():
            continue
        if path.is_dir():
            # Upstream has no such directory: it is what a dropped patch left behind.
            shutil.rmtree(path)
        # Also where a link to a whole directory stood that now comes from two places.
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(text)


def _write_stamp(
    product: Product, tree: Path, changed: Iterable[str], links: Iterable[str]
) -> None:
    stamp = Stamp(
        base_sha256=product.pin.contents_sha256,
        version=product.target.version,
        changed=sorted(changed),
        links=sorted(links),
    )
    _write(tree / STAMP, (json.dumps(asdict(stamp), indent=1) + "\n").encode(), 0o644)


def _write(path: Path, content: bytes, mode: int) -> None:
    """Write a file in one step, so that a reader sees the old content or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.new")
    staged.write_bytes(content)
    staged.chmod(mode & 0o777)
    staged.replace(path)
