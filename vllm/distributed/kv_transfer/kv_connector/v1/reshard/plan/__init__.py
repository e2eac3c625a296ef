# SPDX-License-Identifier: Apache-2.0
"""Floor 1: which rank holds what, and which reads what from which. Values in, values out.

mesh, shards    which rank holds what
reshard         which rank reads what from which, and releases which
text            how it is told in a log or a table
"""
