# SPDX-License-Identifier: Apache-2.0
"""Limits on the sizes given to `kv-plan`, so that it always answers within seconds."""

from __future__ import annotations

from ..protocol.bounds import MAX_RANKS, MAX_STAGE_RANKS

MAX_LAYERS = 1 << 10
"""Most layers of a model. The deepest models have 130."""

MAX_SIZE = 1 << 20
"""Largest value of any other size, such as elements of a head, or tokens of a window or block."""

MAX_UNITS = 1 << 20
"""Most heads, channels or other units of all layers together, of which arguments describe any
number. Sixty layers of 8,192 channels have half as many."""


def require_size(name: str, value: int, largest: int = MAX_SIZE) -> None:
    """Check that a size is at most `largest`.

    Raises:
        ValueError: It is larger.
    """
    if value > largest:
        raise ValueError(f"{name} is {value} but must be at most {largest}: correct it")


def require_units(num_units: int) -> None:
    """Check that the units of all layers are few enough to be planned in seconds.

    Raises:
        ValueError: There are too many.
    """
    if num_units > MAX_UNITS:
        raise ValueError(
            f"the model's layers have {num_units} KV heads, or units of state, but at most "
            f"{MAX_UNITS} are planned: give fewer layers or heads"
        )


def require_mesh(tp_size: int, pp_size: int) -> None:
    """Check that an engine has no more ranks than another engine would read from.

    Raises:
        ValueError: It has more.
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
