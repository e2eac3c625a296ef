# SPDX-License-Identifier: Apache-2.0
"""Floor 2: where bytes lie, and how reads become descriptors and indices. Knows numpy.

cache           a rank's planes: addresses, strides, blocks
lowering        reads -> legs: lists of descriptors at both ends
leg, overlap    requests -> indices of their descriptors
staging         direct, staged or packed; where staged reads stop over, how they are cut and copied
packing         what a holder gathers, and how
"""
