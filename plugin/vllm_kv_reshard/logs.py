# SPDX-License-Identifier: Apache-2.0
"""Lets what this package logs appear among vLLM's own lines.

vLLM configures the logger `vllm`, and the fork's modules stand below it; a package of another name
does not, and would be heard of from warnings on only.
"""

from __future__ import annotations

import logging

_PACKAGE = __name__.partition(".")[0]
_HOST = "vllm"


class _ToHost(logging.Handler):
    """Hands records to vLLM's logger, with the handlers and the level that it has by then."""

    def emit(self, record: logging.LogRecord) -> None:
        host = logging.getLogger(_HOST)
        if host.isEnabledFor(record.levelno):
            host.handle(record)


def join_host() -> None:
    """Send this package's records to vLLM's logger, unless somebody configured them otherwise."""
    logger = logging.getLogger(_PACKAGE)
    if logger.handlers:
        return
    logger.addHandler(_ToHost())
    # What is too much is dropped by vLLM's level, which may change.
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
