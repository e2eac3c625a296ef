# SPDX-License-Identifier: Apache-2.0
"""Which base the tests run on, and what is tested on some bases only."""

from __future__ import annotations

import pytest

import vllm

RELEASE = vllm.__version__.partition("+")[0]
"""vLLM release that the running build is made from."""


def requires_base(*releases: str, reason: str) -> pytest.MarkDecorator:
    """Marks a test, a class or a module of tests that holds on some bases only.

    Args:
        releases: The bases that it holds on.
        reason: Why it does not hold on the others.
    """
    return pytest.mark.skipif(RELEASE not in releases, reason=f"not on {RELEASE}: {reason}")


def skip_module_unless_base(*releases: str, reason: str) -> None:
    """Skip the module of tests that is being imported: for one that imports what others lack.

    Args:
        releases: The bases that it holds on.
        reason: Why it does not hold on the others.
    """
    if RELEASE not in releases:
        pytest.skip(f"not on {RELEASE}: {reason}", allow_module_level=True)
