# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter for engines on CPU: what stands for its backend is in `modules`."""

from __future__ import annotations

from pathlib import Path

MODULE_DIR = Path(__file__).with_name("modules") / "triton_on_cpu"

ENV = (("TRITON_INTERPRET", "1"),)
"""More of the environment of an engine that finds that directory."""

SECOND_RUNNER = (*ENV, ("VLLM_USE_V2_MODEL_RUNNER", "1"))
"""The same with vLLM's second model runner, whose kernels are Triton's."""
