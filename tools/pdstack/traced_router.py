# SPDX-License-Identifier: Apache-2.0
"""vLLM's router with traces, which it can export and its command line cannot ask for.

Arguments: where to send them, and then what ``vllm-router`` takes.
"""

from __future__ import annotations

import sys
from functools import partial

from vllm_router import launch_router, router


def main() -> None:
    """Run the router."""
    endpoint = sys.argv.pop(1)
    router._Router = partial(router._Router, enable_trace=True, otlp_traces_endpoint=endpoint)
    launch_router.main()


if __name__ == "__main__":
    main()
