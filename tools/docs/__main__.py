# SPDX-License-Identifier: Apache-2.0
"""Writes all pages and drawings anew, and names those that have changed."""

from .blocks import ROOT
from .pages import outdated, written

if __name__ == "__main__":
    pages = written()
    for path in outdated(pages):
        path.write_text(pages[path], encoding="utf-8")
        print(path.relative_to(ROOT))
