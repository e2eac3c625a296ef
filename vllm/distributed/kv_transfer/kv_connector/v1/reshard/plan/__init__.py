# SPDX-License-Identifier: Apache-2.0
"""Floor 1: who holds what, and who reads what from whom. Values in, values out.

mesh, shards    who holds what
reshard         who reads what from whom, and who releases whom
verify          a check of that by other means
text            how it is told in a log or a table
"""
