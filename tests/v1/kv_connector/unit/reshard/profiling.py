# SPDX-License-Identifier: Apache-2.0
"""What is counted instead of timed."""

from __future__ import annotations

import gc
import sys


def calls(function) -> int:
    """Calls of functions, Python's and others, that it takes."""
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    # A collection may begin at any allocation, and calls what Hypothesis has registered for it.
    gc.disable()
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count
