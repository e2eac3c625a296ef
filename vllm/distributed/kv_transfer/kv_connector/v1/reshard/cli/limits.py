# SPDX-License-Identifier: Apache-2.0
"""How large a number may be that is given to `kv-plan`, so that each is answered within seconds."""

from __future__ import annotations

from ..protocol.bounds import MAX_RANKS, MAX_STAGE_RANKS

MAX_LAYERS = 1 << 10
"""Layers of a model. The deepest ones have 130."""

MAX_SIZE = 1 << 20
"""Any other size of a model, such as elements of a head or tokens of a window, and of a block."""

MAX_UNITS = 1 << 20
"""Heads, channels or other units of all layers together: a plan is verified unit by unit. Sixty
layers of 8,192 channels have half as many."""


def require_size(name: str, value: int, largest: int = MAX_SIZE) -> None:
    """See that a size is no larger than any model's.

    Raises:
        ValueError: It is.
    """
    if value > largest:
        raise ValueError(f"{name} is {value} but must be at most {largest}: correct it")


def require_units(num_units: int) -> None:
    """See that the units of all layers can be verified one by one.

    Raises:
        ValueError: They are too many.
    """
    if num_units > MAX_UNITS:
        raise ValueError(
            f"the model's layers have {num_units} KV heads, or units of state, but at most "
            f"{MAX_UNITS} are planned: give fewer layers or heads"
        )


def require_mesh(tp_size: int, pp_size: int) -> None:
    """See that an engine has no more ranks than another one reads from.

    Raises:
        ValueError: It has.
    """
    if tp_size > MAX_STAGE_RANKS:
        raise ValueError(
            f"tp is {tp_size} but must be at most {MAX_STAGE_RANKS}: engines refuse larger stages"
        )
    if tp_size * pp_size > MAX_RANKS:
        raise ValueError(
            f"tp={tp_size} and pp={pp_size} make {tp_size * pp_size} ranks, but engines are of at "
            f"most {MAX_RANKS}: give fewer"
        )
