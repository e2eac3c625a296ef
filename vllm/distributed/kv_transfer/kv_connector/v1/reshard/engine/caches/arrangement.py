# SPDX-License-Identifier: Apache-2.0
"""How a block may be filled."""

from __future__ import annotations

from enum import Enum


class Arrangement(Enum):
    """What has a place of its own in a block."""

    SLOTS = "slots"
    """Every head of every token, or of every state where one stands for several tokens."""

    HEADS = "packed heads"
    """Every head; its tokens adjoin, arranged by the backend."""

    SIDES = "keys and values apart, in slots"
    """Keys and values, each of them all heads of every token."""

    PACKED_SIDES = "keys and values apart, in packed heads"
    """Keys and values, each of them every head, whose tokens adjoin, arranged by the backend."""

    QUARTERS = "keys, their scales, values, their scales"
    """Each of these four, of every head; its tokens adjoin, arranged by the backend."""

    PAGE = "whole blocks"
    """Nothing."""
