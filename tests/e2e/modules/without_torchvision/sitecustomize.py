# SPDX-License-Identifier: Apache-2.0
"""LLaVA where torchvision is not installed: bases for CPU leave it out.

vLLM's module of LLaVA imports that of Pixtral, which takes a function from the processor of
images that needs torchvision. The one that needs Pillow has the same function.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

_NEEDS_TORCHVISION = "transformers.models.pixtral.image_processing_pixtral"
_NEEDS_PILLOW = "transformers.models.pixtral.image_processing_pil_pixtral"


class _Other(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the one in place of the other."""

    def find_spec(self, fullname: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if fullname != _NEEDS_TORCHVISION:
            return None
        return importlib.machinery.ModuleSpec(fullname, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        found = vars(importlib.import_module(_NEEDS_PILLOW))
        module.__dict__.update({name: found[name] for name in found if not name.startswith("__")})


sys.meta_path.insert(0, _Other())
