# SPDX-License-Identifier: Apache-2.0
"""Which tests of a module are going to run: what only others need, need not be started."""

from __future__ import annotations

from typing import Any

import pytest


def chosen(request: pytest.FixtureRequest, parameter: str) -> list[Any]:
    """Return the values that a parameter has in the tests of a module that are going to run.

    Args:
        request: of a fixture that the module uses.
        parameter: its name; values are told apart by what they equal.
    """
    tests = [each for each in request.session.items if each.path == request.path]
    values = [each.callspec.params for each in tests if hasattr(each, "callspec")]
    return list(dict.fromkeys(each[parameter] for each in values if parameter in each))
