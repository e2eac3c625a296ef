# SPDX-License-Identifier: Apache-2.0
"""What releases of vLLM do not have in common: the only module that tells them apart.

Each name says what differs; it goes when the last base that needs it goes.
"""

from __future__ import annotations

from packaging.version import Version

from vllm import __version__ as _vllm_version

_IS_0_22 = Version(_vllm_version).release < (0, 32)
"""The base is 0.22.1; nothing between it and 0.32.0 is one."""

CONTEXT_PARALLELISM_IS_UPSTREAMS = not _IS_0_22
"""Whether upstream's connector reads caches whose tokens are spread over ranks, as that of 0.22.1
does not."""

UPSTREAM_COUNTS_ALL_FAILURES = not _IS_0_22
"""Whether upstream's statistics count handshakes that failed and notifications that came late,
which those of 0.22.1 have no name for."""

STEPS_IN_FLIGHT_KEEP_BLOCKS = not _IS_0_22
"""Whether the scheduler keeps blocks from others while a step that may write them is in flight. That
of 0.22.1 gives them back at once."""
