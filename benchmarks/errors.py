# SPDX-License-Identifier: Apache-2.0
"""What can go wrong in a benchmark."""

from __future__ import annotations


class BenchmarkError(Exception):
    """A measurement could not be made, or made something wrong."""


class NotEnoughMemoryError(BenchmarkError):
    """A variant needs more memory than there is; the others may be measured without it."""


class ReportError(BenchmarkError):
    """A file does not hold what a benchmark writes, or not what is asked of it."""
