# SPDX-License-Identifier: Apache-2.0
"""Upstream's connectors where they leave cores to others, as `kv_connector_module_path` wants it.

As they ship they bind their process to one core on CPU, and let NIXL's threads spin. Where engines
share cores, that keeps them from answering for minutes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import nixl
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.agent import progress_delay
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.cpu import PROGRESS_REST_US


@contextmanager
def at_rest() -> Iterator[None]:
    """Let the threads of a connector that is made within rest as ours do, and bind to no core."""
    cores = os.sched_getaffinity(0)
    with progress_delay(PROGRESS_REST_US):
        yield
    os.sched_setaffinity(0, cores)


class NixlConnector(nixl.NixlConnector):  # type: ignore[misc]
    """Upstream's connector, at rest."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with at_rest():
            super().__init__(*args, **kwargs)


# 0.22.1 has none.
if hasattr(nixl, "NixlPushConnector"):

    class NixlPushConnector(nixl.NixlPushConnector):  # type: ignore[misc]
        """Upstream's connector whose prefill engines write, at rest."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            with at_rest():
                super().__init__(*args, **kwargs)
