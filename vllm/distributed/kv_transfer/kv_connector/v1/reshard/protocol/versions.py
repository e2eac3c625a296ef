# SPDX-License-Identifier: Apache-2.0
"""The protocol versions that an engine speaks, and the choice of one between two engines.

A reader's request names all versions that it speaks. The other engine answers in the newest that
both speak, and leaves out what that version lacks. The choice depends neither on the releases of
vLLM nor on those of this project.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

CONNECTOR_NAME = "reshard"

_VERB = re.compile(rb"reshard/([0-9]{1,6})(?:-([0-9]{1,6}))?")


@dataclass(frozen=True, slots=True)
class VersionRange:
    """Consecutive versions of the protocol.

    Attributes:
        oldest: The oldest version.
        newest: The newest version; at least `oldest`.
    """

    oldest: int
    newest: int

    def __str__(self) -> str:
        """Return the form used in requests and in the log: `reshard/5`, or `reshard/5-6`."""
        versions = str(self.oldest)
        if self.newest != self.oldest:
            versions += f"-{self.newest}"
        return f"{CONNECTOR_NAME}/{versions}"

    def __contains__(self, version: int) -> bool:
        """Return whether a version is in the range."""
        return self.oldest <= version <= self.newest

    def agreed(self, other: VersionRange) -> int | None:
        """Return the newest version that both engines speak; None if there is none."""
        newest = min(self.newest, other.newest)
        return newest if newest >= max(self.oldest, other.oldest) else None


# A new version is needed whenever two builds would misunderstand each other: with other fields in
# an answer or in a notification, another factor, or another meaning of a field or of a parameter
# that a router passes on. A version appends its additions, so that they can be left out for peers
# that speak only an older one. The tests keep messages of all spoken versions as bytes.
#
#   1  first version
#   2  adjacent keys and values are one plane, requests to the side channel may have two numbers,
#      and entries of the lease table are bound to tokens and blocks
#   3  notifications are bound, too, and one may cover many of a producer's requests; layers give
#      the model's number of heads, the number of blocks that one id stands for, and their attention
#      backend; planes give the number of heads in a unit, and whether they hold state
#   4  each worker's description is its own frame
#   5  layers give the meaning of their bytes instead of their attention backend; a slot may stand
#      for several tokens; workers that have a board give its address
SPOKEN = VersionRange(5, 5)
"""The versions that this build speaks."""


def read_verb(verb: bytes) -> VersionRange | None:
    """Return the versions that a request's verb names; None if it is not our protocol's."""
    found = _VERB.fullmatch(verb)
    if found is None:
        return None
    oldest = int(found[1])
    newest = int(found[2] or oldest)
    return VersionRange(oldest, newest) if newest >= oldest else None
