# SPDX-License-Identifier: Apache-2.0
"""What holds for all tests."""

from __future__ import annotations

from hypothesis import settings

# Examples are not timed: other tests, with real engines, may share the machine.
settings.register_profile("project", deadline=None)
settings.load_profile("project")
