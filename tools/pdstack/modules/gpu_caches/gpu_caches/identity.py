# SPDX-License-Identifier: Apache-2.0
"""For which backend another one stands, to all that ask for its name and its module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from vllm.v1.attention.backends.registry import AttentionBackendEnum

_Backend = TypeVar("_Backend", bound=type)

NOBODY = "CUSTOM"
"""What vLLM has for backends that are none of its own."""


def takes_the_place_of(
    name: str | None, attention: type, *, called: str | None = None
) -> Callable[[_Backend], _Backend]:
    """Have a backend fill blocks in its format, and say that they are as another one's are.

    Args:
        name: of that one, in the release's registry; ``None`` where nobody fills blocks so.
        attention: what stores and computes.
        called: what that one calls itself, where the registry has another name for it.
    """

    def decorate(backend: Any) -> Any:
        made = type(attention.__name__, (attention,), {"format": backend.format})
        backend.get_name = staticmethod(lambda: called or name or NOBODY)
        backend.get_impl_cls = staticmethod(lambda: made)
        if name is not None:
            # The registry knows it whether it can be imported on a CPU or not.
            backend.__module__ = AttentionBackendEnum[name].value.rpartition(".")[0]
        return backend

    return decorate
