# SPDX-License-Identifier: Apache-2.0
"""What is shown of a log is what says something."""

from __future__ import annotations

from tools.pdstack.logs import tail

LEAKS = """nanobind: leaked 64 types!
 - leaked type "triton._C.libtriton.ir.block"
 - ... skipped remainder
nanobind: this is likely caused by a reference counting issue in the binding code.
See https://nanobind.readthedocs.io/en/latest/refleaks.html"""


def test_end_of_a_log_is_not_what_triton_leaks(tmp_path):
    """Each process that has loaded it says so in many lines, after what it has died of."""
    log = tmp_path / "log"
    log.write_text(f"the worker\n - a reason\n\nEngineCore is dead\n{LEAKS}\n" + 9 * f"{LEAKS}\n")
    assert tail(log, 2) == [" - a reason", "EngineCore is dead"]
    assert tail(tmp_path / "none") == []
