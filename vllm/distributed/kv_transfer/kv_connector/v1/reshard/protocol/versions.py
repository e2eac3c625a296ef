# SPDX-License-Identifier: Apache-2.0
"""Which versions of the protocol an engine speaks, and which one two engines speak to each other.

The reader says all versions that it speaks when it asks, and the other one answers in the newest
that both do, without what that version does not have. Neither release of vLLM nor this project's
own has a say in it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

CONNECTOR_NAME = "reshard"

_VERB = re.compile(rb"reshard/([0-9]{1,6})(?:-([0-9]{1,6}))?")


@dataclass(frozen=True, slots=True)
class VersionRange:
    """Versions of the protocol, one after another.

    Attributes:
        oldest: The oldest.
        newest: The newest; no older than that.
    """

    oldest: int
    newest: int

    def __str__(self) -> str:
        """As a request and the log have it: `reshard/5`, or `reshard/5-6`."""
        versions = str(self.oldest)
        if self.newest != self.oldest:
            versions += f"-{self.newest}"
        return f"{CONNECTOR_NAME}/{versions}"

    def __contains__(self, version: int) -> bool:
        """Whether a version is among them."""
        return self.oldest <= version <= self.newest

    def agreed(self, other: VersionRange) -> int | None:
        """The newest version that two engines speak; None where there is none."""
        newest = min(self.newest, other.newest)
        return newest if newest >= max(self.oldest, other.oldest) else None


# A version is new whenever two builds would misunderstand each other: other fields in an answer or
# in a notification, another factor, or another meaning of a field or of a parameter that a router
# passes on. What a version adds stands behind what there was, so that it can be left out for peers
# that speak an older one only; messages of all versions that are spoken lie in the tests as bytes.
#
#   1  first version
#   2  keys and values that lie side by side are one plane, requests to the side channel may have
#      two numbers, and entries of the lease table are bound to tokens and blocks
#   3  notifications are bound, too, and one tells a producer of many requests; layers say how many
#      heads the model has of each, how many blocks an id of theirs stands for, and which attention
#      backend keeps them; planes say how many heads are a unit, and whether they hold state
#   4  each worker's description is a frame of its own
#   5  layers say what their bytes mean, and not which attention backend keeps them; a slot may
#      stand for several tokens; workers that have a board say where
SPOKEN = VersionRange(5, 5)
"""What this build speaks."""


def read_verb(verb: bytes) -> VersionRange | None:
    """Which versions a peer speaks that asks with this verb; None where it is none of ours."""
    found = _VERB.fullmatch(verb)
    if found is None:
        return None
    oldest = int(found[1])
    newest = int(found[2] or oldest)
    return VersionRange(oldest, newest) if newest >= oldest else None
