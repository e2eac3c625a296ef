# SPDX-License-Identifier: Apache-2.0
"""What engines on CPU run in place of kernels of Triton's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interpreted import assert_passes
from tools.pdstack.engine import why_no_deepseek4

WHY_NOT = why_no_deepseek4()


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_it_does_what_kernels_do():
    """Compared with Triton's interpreter."""
    assert_passes(Path(__file__).with_name("interpreted_kernels.py"))
