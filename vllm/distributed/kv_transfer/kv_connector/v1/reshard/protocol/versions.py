# SPDX-License-Identifier: Apache-2.0
"""Versions of the protocol, and how two engines agree on one.

The reader names all versions that it speaks in its request. The other engine answers in the newest
one that both speak, and leaves out what that version lacks. The releases of vLLM and of this
project do not matter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

CONNECTOR_NAME = "reshard"

_VERB = re.compile(rb"reshard/([0-9]{1,6})(?:-([0-9]{1,6}))?")


@dataclass(frozen=True, slots=True)
class VersionRange:
    """A range of consecutive versions of the protocol.

    Attributes:
        oldest: Oldest version.
        newest: Newest version; at least `oldest`.
    """

    oldest: int
    newest: int

    def __str__(self) -> str:
        """Return the range as requests and the log write it: `reshard/5`, or `reshard/5-6`."""
        versions = str(self.oldest)
        if self.newest != self.oldest:
            versions += f"-{self.newest}"
        return f"{CONNECTOR_NAME}/{versions}"

    def __contains__(self, version: int) -> bool:
        """Return whether a version is in the range."""
        return self.oldest <= version <= self.newest

    def agreed(self, other: VersionRange) -> int | None:
        """Return the newest version in both ranges; None if they do not overlap."""
        newest = min(self.newest, other.newest)
        return newest if newest >= max(self.oldest, other.oldest) else None


# Add a version whenever two builds would misunderstand each other: other fields in an answer or in
# a notification, another factor, or another meaning of a field or of a parameter that a router
# passes on. Append what a version adds after the existing fields, so that it can be left out for
# peers that speak only an older one. The tests keep messages of all spoken versions as bytes.
#
#   1  first version
#   2  adjacent keys and values are one plane, requests to the side channel may have two numbers,
#      and entries of the lease table are bound to tokens and blocks
#   3  notifications are bound, too, and one covers many requests of a producer; layers give their
#      heads over the whole model, the blocks per block id, and their attention backend; planes
#      give the heads per unit, and whether they hold state
#   4  each worker's description is a separate frame
#   5  layers describe the meaning of their bytes instead of their attention backend; a slot may
#      stand for several tokens
#   6  engines tell what identifies their weights, and parameters what identifies the adapter, to
#      which entries of the lease table are bound
#   7  workers tell where they pack windows for their readers, which ask for them by notifications
SPOKEN = VersionRange(5, 7)
"""Versions that this build speaks."""


def read_verb(verb: bytes) -> VersionRange | None:
    """Return the versions that a request's verb names; None if the verb is not this protocol's."""
    found = _VERB.fullmatch(verb)
    if found is None:
        return None
    oldest = int(found[1])
    newest = int(found[2] or oldest)
    return VersionRange(oldest, newest) if newest >= oldest else None
