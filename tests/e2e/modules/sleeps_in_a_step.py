# SPDX-License-Identifier: Apache-2.0
"""The connector, but that one step of a worker can take long.

While the file exists that SLEEP_FILE names, the next step that tells of a request which waits, and
has no blocks yet, sleeps for the seconds in that file, which it removes first.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.reshard import connector


class NixlConnector(connector.NixlConnector):
    """Sleeps within vLLM's `execute_model`, once the connector's thread has the step."""

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Hand the step over, and sleep if it is the one."""
        super().bind_connector_metadata(connector_metadata)
        file = Path(os.environ["SLEEP_FILE"])
        if connector_metadata.awaited.keys() - connector_metadata.receive.keys() and file.exists():
            seconds = float(file.read_text(encoding="utf-8"))
            file.unlink()
            time.sleep(seconds)
