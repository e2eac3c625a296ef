# SPDX-License-Identifier: Apache-2.0
"""Recurrent state: the components of a layer's page, and how tensor parallelism splits them.

A page holds a sequence's state, one component after another:

    family             last inputs of the convolution    recurrent state
    Mamba 2            x | B | C                         heads
    gated delta nets   q | k | v                         heads of values
    Mamba 1            x                                 channels
    short convolution  x
    linear attention                                     heads

Each component is split separately, so the plan treats each as a layer, named after the layer and
the component: `model.layers.0.mixer/B`. A unit is contiguous on a rank and never split: a head with
all its channels, a group, or a single channel where channels are independent. As with KV heads,
groups are replicated if there are fewer groups than ranks.

State that every rank holds whole (`MambaSpec.tp_replicated`) is one unit per component.

The shapes suffice to find the components. The channels that feed the heads number heads times head
size; the other two components have half of the remaining channels each, and as many channels per
unit as the state has columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING

from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

from ...memory.cache import Plane
from ..compat import is_on_every_rank

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

_RECURRENT = "state"


@dataclass(frozen=True, slots=True)
class _Family:
    """The components of a kind of layer.

    Attributes:
        convolved: Components of its convolution, in the order of their channels.
        main: The convolved component that feeds the heads.
        has_recurrent: True if it also has recurrent state.
    """

    convolved: tuple[str, ...] = ()
    main: str = "x"
    has_recurrent: bool = True

    @property
    def num_states(self) -> int:
        """Number of tensors of a layer."""
        return bool(self.convolved) + self.has_recurrent


_FAMILIES: Mapping[str, _Family] = MappingProxyType(
    {
        "MAMBA1": _Family(("x",)),
        "MAMBA2": _Family(("x", "B", "C")),
        "GDN_ATTN": _Family(("q", "k", "v"), main="v"),
        "SHORT_CONV": _Family(("x",), has_recurrent=False),
        "LINEAR": _Family(),
    }
)
"""Families by the name of vLLM's `mamba_type`."""


@dataclass(frozen=True, slots=True)
class StatePlane:
    """The plane of one component of a layer's state.

    Attributes:
        name: Name of the component, without the layer's.
        plane: Its place in memory.
        number_format: Type of its elements, such as `float32`.
    """

    name: str
    plane: Plane
    number_format: str


def is_known_state(spec: MambaSpec) -> bool:
    """Return whether the components of a page are known.

    Args:
        spec: vLLM's specification of the layer.
    """
    family = _FAMILIES.get(spec.mamba_type.name)
    if family is None or len(spec.shapes) != family.num_states:
        return False
    return not family.convolved or bool(_parts(spec, family))


def describe_state(tensor: torch.Tensor, spec: MambaSpec) -> list[StatePlane]:
    """Return the planes of a layer's state, in the order of a page.

    Args:
        tensor: The layer's pages, of any type; its first dimension is the block.
        spec: vLLM's specification of the layer; `is_known_state` holds for it.
    """
    family = _FAMILIES[spec.mamba_type.name]
    block_bytes = tensor.stride(0) * tensor.element_size()
    components = []
    address = tensor.data_ptr()
    for number, (shape, dtype) in enumerate(zip(spec.shapes, spec.dtypes, strict=True)):
        number_format = str(dtype).removeprefix("torch.")
        is_recurrent = number == family.num_states - 1 and family.has_recurrent
        planes = (
            [(_RECURRENT, _recurrent(address, block_bytes, shape, dtype.itemsize))]
            if is_recurrent
            else _convolved(address, block_bytes, spec, family)
        )
        components += [
            StatePlane(
                part,
                replace(plane, heads_per_unit=plane.num_heads) if is_on_every_rank(spec) else plane,
                number_format,
            )
            for part, plane in planes
        ]
        address += prod(shape) * dtype.itemsize
    return components


def _recurrent(address: int, block_bytes: int, shape: tuple[int, ...], item_bytes: int) -> Plane:
    """Return the plane of the recurrent state: all heads, one after another."""
    num_heads, *of_a_head = shape
    head_bytes = prod(of_a_head) * item_bytes
    return Plane(
        address,
        block_stride_bytes=block_bytes,
        head_stride_bytes=head_bytes,
        slot_stride_bytes=head_bytes,
        slot_bytes=head_bytes,
        num_heads=num_heads,
        block_tokens=1,
        per_sequence=True,
    )


def _convolved(
    address: int, block_bytes: int, spec: MambaSpec, family: _Family
) -> Iterator[tuple[str, Plane]]:
    """Yield the name and the plane of each component of the convolution."""
    dim_first = is_conv_state_dim_first()
    num_channels, num_rows = spec.shapes[0] if dim_first else reversed(spec.shapes[0])
    item_bytes = spec.dtypes[0].itemsize
    channel_bytes = num_rows * item_bytes if dim_first else item_bytes
    row_bytes = item_bytes if dim_first else num_channels * item_bytes
    for part, channels, of_a_unit in _parts(spec, family):
        yield (
            part,
            Plane(
                address,
                block_stride_bytes=block_bytes,
                head_stride_bytes=channel_bytes,
                slot_stride_bytes=row_bytes,
                slot_bytes=item_bytes,
                num_heads=channels,
                block_tokens=num_rows,
                heads_per_unit=of_a_unit,
                per_sequence=True,
            ),
        )
        address += channels * channel_bytes


def _parts(spec: MambaSpec, family: _Family) -> list[tuple[str, int, int]]:
    """Return name, channels on this rank and channels per unit of a convolution's components.

    The list is empty if the channels do not match the state's shape.
    """
    num_channels = spec.shapes[0][0 if is_conv_state_dim_first() else -1]
    if len(family.convolved) == 1:
        return [(family.main, num_channels, 1)]
    if len(spec.shapes[-1]) != 3:
        return []
    num_heads, head_size, num_columns = spec.shapes[-1]
    main = num_heads * head_size
    others, odd = divmod(num_channels - main, len(family.convolved) - 1)
    if odd or others < 1 or others % num_columns:
        return []
    return [
        (part, main, head_size) if part == family.main else (part, others, num_columns)
        for part in family.convolved
    ]
