# SPDX-License-Identifier: Apache-2.0
"""Requests whose copies at the two engines ask for different things."""

from __future__ import annotations

import time
from itertools import product

import pytest

from tests.v1.kv_connector.unit.reshard.engine.workers import DEADLINE_S
from tests.v1.kv_connector.unit.reshard.serving import until

WINDOW_TOKENS = 32
ASKED = ({}, {"prompt_logprobs": 1}, {"skip_reading_prefix_cache": True})


@pytest.mark.parametrize("layout", [{}, {"window_tokens": WINDOW_TOKENS}], ids=["full", "windows"])
def test_what_either_engine_is_asked_for(wholes, layout):
    """Prompts around each boundary of block and window are read, unless none of it may be reused.

    The blocks are given back in any case.
    """
    # All of them compute what they have not read.
    layout = {**layout, "seed_first_token": False}
    p, d = (wholes(name, layout, **layout) for name in ("prefill", "decode"))
    serving, deadline_s = d.serving, time.monotonic() + 2 * DEADLINE_S
    for number, (asked_p, asked_d) in enumerate(product(ASKED, ASKED)):
        for num_tokens in (32, 47, 48) if asked_d else range(31, 63):
            prompt = [number * 100 + (num_tokens + place) % 97 for place in range(num_tokens)]
            name = f"{number}-{num_tokens}"
            p.serving.add(f"p{name}", {"do_remote_decode": True}, prompt=prompt, **asked_p)
            until(lambda name=name: f"p{name}" in p.serving.finished, p)
            offered = p.serving.handed_over[f"p{name}"]
            assert offered["remote_num_tokens"] == num_tokens
            serving.add(f"d{name}", offered, prompt=prompt, max_tokens=2, **asked_d)
            num_computed = 0
            while f"d{name}" not in serving.finished:
                p.step()
                num_computed += d.step().get(f"d{name}", 0)
                assert time.monotonic() < deadline_s
            assert str(serving.finished[f"d{name}"]) == "length", name
            assert num_computed == (num_tokens + 1 if asked_d else 2), name
            until(lambda: p.serving.is_through() and serving.is_through(), p, d)
