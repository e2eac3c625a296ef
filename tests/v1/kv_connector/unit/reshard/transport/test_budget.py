# SPDX-License-Identifier: Apache-2.0
"""What fits a turn."""

from __future__ import annotations

import math

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport.budget import UNLIMITED, Budget


def test_budget_is_spent_after_its_time():
    """From when it was made, whatever is done meanwhile."""
    now_s = 7.0
    budget = Budget(0.5, lambda: now_s)
    assert not budget.is_spent
    now_s = 7.4
    assert not budget.is_spent
    now_s = 7.5
    assert budget.is_spent


def test_unlimited_budget_is_never_spent():
    """For those who share the interpreter with nobody."""
    assert not UNLIMITED.is_spent
    assert not Budget(math.inf, lambda: 1e300).is_spent
