# SPDX-License-Identifier: Apache-2.0
"""An engine whose processes are forked, and import nothing again.

vLLM starts them afresh on CPU, and each imports for ten seconds what its parent has imported.
"""

from __future__ import annotations

import os
from typing import Any

from vllm.platforms import current_platform

_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


def register() -> None:
    """Have the platform, which chooses how processes are started, choose to fork them."""
    platform: Any = type(current_platform)
    chosen = platform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        chosen(cls, vllm_config)
        os.environ[_METHOD] = "fork"

    platform.check_and_update_config = classmethod(check_and_update_config)
