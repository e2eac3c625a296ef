# SPDX-License-Identifier: Apache-2.0
"""PEP 517 and PEP 660 build backend: pinned base wheel + patches + overlay -> a `vllm` wheel.

The Python version is checked before anything else is imported, so that an old interpreter ends in
a sentence and not in a syntax error.
"""

import sys

from .errors import readable_exit, require_python

with readable_exit():
    require_python(sys.version_info[:3])

from .hooks import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]
