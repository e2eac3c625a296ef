# SPDX-License-Identifier: Apache-2.0
"""Floor 1: which rank holds what, and which reads what from which. Values in, values out.

shards          which rank holds what
reshard         which rank reads what from which, and releases which; how that is told
"""
