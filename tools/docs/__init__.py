# SPDX-License-Identifier: Apache-2.0
"""Writes what pages of docs/ have from code and stored results: `python -m tools.docs`.

A page has tables between markers, `<!-- written: NAME -->` and `<!-- /written -->` for what the
code says, `<!-- results: NAME -->` and `<!-- /results -->` for what was measured. Those of
`make bench` stand between `<!-- bench: NAME -->` and `<!-- /bench -->`, and are made by
`benchmarks.docs_performance`. What a page shows of `kv-plan` is a block of `console` that begins
with the command. `pages` puts all of them together, `blocks` finds tables; each other module has
one source.

Metrics of upstream's connector are those of the vLLM that is installed: pages have those of the
default base for CPU.
"""

import sys
from pathlib import Path

# The tools that read bases/ are part of the checkout and are not installed.
sys.path.append(str(Path(__file__).parents[2] / "build_backend"))
