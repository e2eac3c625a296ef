# SPDX-License-Identifier: Apache-2.0
"""Writes all pages and drawings anew, and names those that have changed."""

from .blocks import ROOT
from .pages import written

if __name__ == "__main__":
    for path, text in written().items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(path.relative_to(ROOT))
