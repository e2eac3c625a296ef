# SPDX-License-Identifier: Apache-2.0
"""A prefill engine whose offers are announced by turns, so that what that gains can be measured.

An engine that has this directory on PYTHONPATH, and OFFERS_BY_TURNS names a directory, announces
nothing beside its steps while there is a file `withhold` in there: the next step tells of an offer
then, as it always does. Of each announcement a byte is added to the file `told`, or to `withheld`.
OFFERS_OF is the connector's module that announces, which has another name in the plugin.
"""

from __future__ import annotations

import importlib
import os
from functools import wraps
from pathlib import Path
from typing import Any

DIRECTORY, MODULE = "OFFERS_BY_TURNS", "OFFERS_OF"


def register() -> None:
    """Stand between the scheduler and its announcements, where the environment asks for it."""
    directory = os.environ.get(DIRECTORY)
    if not directory:
        return
    book = importlib.import_module(os.environ[MODULE]).OfferBook
    announce, place = book.announce, Path(directory)
    if hasattr(announce, "__wrapped__"):
        return

    @wraps(announce)
    def announce_by_turns(self: Any, announcement: Any) -> None:
        # Where steps are not scheduled ahead, nothing is announced in the first place.
        if self._announcer is None:
            return
        is_withheld = (place / "withhold").exists()
        with (place / ("withheld" if is_withheld else "told")).open("ab") as count:
            count.write(b".")
        if not is_withheld:
            announce(self, announcement)

    book.announce = announce_by_turns
