# SPDX-License-Identifier: Apache-2.0
"""Floor 2: where bytes lie, and how reads become descriptors and indices. Knows numpy.

cache           a rank's planes: addresses, strides, blocks
lowering        reads -> legs: lists of descriptors at both ends
leg, overlap    requests -> indices of their descriptors
arena, staging  where staged reads stop over, and how they are cut and copied on
packing         what a holder gathers, and how
strategy        direct, staged or packed, by thresholds
"""
