# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter where vLLM for CPU looks for a backend of Triton's.

The metadata of DeepSeek V4's attention is made by kernels of Triton's on every device. An engine
that has this directory on PYTHONPATH, and TRITON_INTERPRET set, takes Triton for present.
"""

import triton.backends  # type: ignore[import-untyped]


class _Driver:
    @staticmethod
    def is_active() -> bool:
        return True


class _Backend:
    driver = _Driver
    compiler = None


triton.backends.backends["cpu"] = _Backend
