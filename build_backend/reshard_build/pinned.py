# SPDX-License-Identifier: Apache-2.0
"""Opens what a base's files come from: one pinned wheel, or two."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from .archive import BaseWheel, open_base
from .base import WheelPin
from .fetch import fetch


@contextmanager
def open_pinned(pin: WheelPin, environ: Mapping[str, str]) -> Iterator[BaseWheel]:
    """Fetch a base wheel, and the one that its compiled files are taken from, and open them as one.

    Args:
        pin: The base wheel.
        environ: Environment variables, for the cache and for pip.

    Raises:
        BuildError: A wheel cannot be had, or is none.
    """
    with ExitStack() as stack:
        compiled = None
        if pin.compiled is not None:
            compiled = stack.enter_context(open_base(fetch(pin.compiled.pin, environ)))
        yield stack.enter_context(open_base(fetch(pin, environ), compiled))
