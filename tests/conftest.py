# SPDX-License-Identifier: Apache-2.0
"""What holds for all tests."""

from __future__ import annotations

import signal

from hypothesis import settings

# Examples are not timed: other tests, with real engines, may share the machine.
settings.register_profile("project", deadline=None)
settings.load_profile("project")

# A shell without job control has what it runs in the background ignore SIGINT, and whoever is
# started with that cannot be told Ctrl-C: nor could the processes that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
