# SPDX-License-Identifier: Apache-2.0
"""Writes the product as a wheel: the whole one, or the thin one of an editable installation."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from .archive import (
    EXECUTABLE_FILE_MODE,
    DateTime,
    WheelWriter,
    create_wheel,
    verify_wheel,
)
from .base import Target, WheelPin
from .errors import ProductError
from .product import Product
from .staging import staging_folder

log = logging.getLogger(__name__)


def wheel_name(target: Target, pin: WheelPin) -> str:
    """Return the file name of the product's wheel."""
    return f"vllm-{target.version}-{pin.compressed_tag}.whl"


def dist_info_name(target: Target) -> str:
    """Return the name of the product's metadata directory."""
    return f"vllm-{target.version}.dist-info"


def write_wheel(product: Product, metadata: Mapping[str, bytes], directory: Path) -> str:
    """Write the whole product as a wheel and verify its RECORD.

    Args:
        product: What to write.
        metadata: Files of the metadata directory, without RECORD.
        directory: Where to put the wheel.

    Returns:
        The wheel's file name.

    Raises:
        BaseWheelError: The base wheel is damaged.
        ProductError: What was written is not valid.
    """

    def fill(writer: WheelWriter) -> None:
        for name in product.base.names:
            content = product.changed.get(name, b"")
            if name not in product.changed:
                content = product.base.read(name)
                stamp = product.base.date_time(name)
            elif content is None:
                continue
            else:
                stamp = None
            writer.add(name, content or b"", mode=product.base.mode(name), date_time=stamp)
        for name, content in sorted(product.changed.items()):
            if name not in product.base and content is not None:
                writer.add(name, content)
        for name, source in product.overlay.items():
            writer.add(name, source.read_bytes())

    return _write_product(product, metadata, directory, fill)


def write_editable_wheel(
    product: Product, metadata: Mapping[str, bytes], directory: Path, tree: Path
) -> str:
    """Write the wheel of an editable installation: metadata, scripts and a path to the tree.

    Args:
        product: Names the wheel, and holds the scripts.
        metadata: Files of the metadata directory, without RECORD.
        directory: Where to put the wheel.
        tree: Directory that is to be on `sys.path`.

    Returns:
        The wheel's file name.

    Raises:
        ProductError: What was written is not valid.
    """

    def fill(writer: WheelWriter) -> None:
        writer.add("__editable__.vllm.pth", f"{tree.absolute()}\n".encode())

    return _write_product(product, metadata, directory, fill)


def _write_product(
    product: Product,
    metadata: Mapping[str, bytes],
    directory: Path,
    fill: Callable[[WheelWriter], None],
) -> str:
    def fill_all(writer: WheelWriter) -> None:
        fill(writer)
        for script, source in product.scripts.items():
            # The installer writes the interpreter's path in place of `#!python`.
            path = f"{writer.data}/{script}"
            writer.add(path, source.read_bytes(), mode=EXECUTABLE_FILE_MODE)

    name = wheel_name(product.target, product.pin)
    return assemble(name, product.base.record_time, metadata, directory, fill_all)


def assemble(
    name: str,
    date_time: DateTime,
    metadata: Mapping[str, bytes],
    directory: Path,
    fill: Callable[[WheelWriter], None],
) -> str:
    """Write any wheel and verify its RECORD.

    Args:
        name: File name of the wheel.
        date_time: Time stamp of what has none of its own.
        metadata: Files of the metadata directory, without RECORD.
        directory: Where to put the wheel.
        fill: Adds the files of the package.

    Returns:
        The wheel's file name.

    Raises:
        ProductError: What was written is not valid, or it cannot be written there.
        SettingError: `SOURCE_DATE_EPOCH` is no time.
    """
    started_s = time.monotonic()
    try:
        # The wheel takes its place only when it is whole and verified.
        with staging_folder("wheel-", directory) as staging:
            staged = staging / name
            with create_wheel(staged, date_time) as writer:
                fill(writer)
                for relative, content in sorted(metadata.items()):
                    writer.add(f"{writer.dist_info}/{relative}", content)
            verify_wheel(staged)
            staged.replace(directory / name)
        size_mb = (directory / name).stat().st_size / 1e6
    except OSError as error:
        raise ProductError(
            f"cannot write {name} into {directory}: {error}",
            "name a writable directory with space, and make the sources readable",
        ) from None
    log.info("wrote %s, %.1f MB in %.1f s", name, size_mb, time.monotonic() - started_s)
    return name
