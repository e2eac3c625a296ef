# SPDX-License-Identifier: Apache-2.0
"""What two engines must have in common: a version of the protocol, and the meaning of KV bytes.

The reader names all versions that it speaks in its request. The other engine answers in the newest
one that both speak, and leaves out what that version lacks. The releases of vLLM and of this
project do not matter.

The factors that must be equal for KV bytes to mean the same at both are named values rather than
one hash, so that an error can say which of them differ and how to make them equal.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..errors import RemoteIncompatibleError, one_line, quote
from ..memory.cache import RankCache

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


DRAFT_FACTORS = (
    "draft_method",
    "draft_model",
    "draft_layers",
    "draft_aux_layers",
    "draft_kv_cache_dtype",
    "draft_lookahead",
    "parallel_drafting",
)
"""Factors of speculative decoding's draft."""

RELEASE_FACTOR = "vllm_version"
"""Name under which an engine sends its vLLM release along with the factors. It may differ."""

WEIGHT_FACTORS = ("weights", "weights_commit")
"""Factors that identify weights. Not every loader allows to tell them: they are compared where both
engines do."""

_OTHER_RELEASE = "install releases of vLLM between which that has not changed"

FACTORS_SINCE: Mapping[str, int] = dict.fromkeys(WEIGHT_FACTORS, 6)
"""Protocol version that added a factor; absent if all supported versions have the factor."""

_REMEDIES = {
    "model": "serve the same model, with the same --hf-overrides",
    **dict.fromkeys(
        WEIGHT_FACTORS,
        "serve the same checkpoint, or, if one is meant to read the other's KV cache, set "
        "allow_other_weights",
    ),
    "num_hidden_layers": "serve the same model",
    "num_kv_heads": "serve the same model",
    "head_size": "serve the same model",
    "mla": "serve the same model, with the same VLLM_MLA_DISABLE",
    "dtype": "give the same --dtype",
    "kv_cache_dtype": "give the same --kv-cache-dtype",
    **dict.fromkeys(DRAFT_FACTORS, "give the same --speculative-config"),
    "multimodal_items_named_by": "give --model the same name or path",
    **dict.fromkeys(("multimodal_items_hashed_as", "values"), _OTHER_RELEASE),
    "release": "install the same release of vLLM",
    # A model may choose its backend by the device and accept no other.
    "written by": "give the same --attention-backend, or, where the model chooses by the device, "
    "use devices of one kind and generation",
    "specification": "serve the same model with the same --tensor-parallel-size",
    "shape and strides": "give the same --tensor-parallel-size, --block-size and "
    "VLLM_KV_CACHE_LAYOUT",
    "numbers": "give the same --dtype and --kv-cache-dtype, on devices of one kind",
    "state": "use devices of one kind",
    "numbers of the state": "give the same --mamba-cache-dtype and --mamba-ssm-cache-dtype",
    "device": "use devices of one kind",
    "instructions": "use machines with the same instruction set",
    **dict.fromkeys(("keys", "kernels"), "use GPUs of one generation"),
    "scales": "use GPUs of one generation, and the same release of vLLM",
    "settings": "give the same environment and options of attention and compilation",
    "hybrid_kv_cache_manager": "give --disable-hybrid-kv-cache-manager on both or on neither",
}

_NAMED_FACTORS = 16
"""Most factors named in one log line; a peer may send any number of them."""

ANY = "any"
"""Local value of a factor that is not to be compared."""


def known_factors(factors: Mapping[str, str], version: int) -> dict[str, str]:
    """Return the factors that exist in a version of the protocol."""
    return {name: value for name, value in factors.items() if FACTORS_SINCE.get(name, 0) <= version}


def check_compatibility(local: Mapping[str, str], remote: Mapping[str, str]) -> None:
    """Compare the factors of two engines.

    Raises:
        RemoteIncompatibleError: Some differ; the message names each, with both values.
    """
    if differences := describe_differences(local, remote):
        raise RemoteIncompatibleError(
            f"the peer's KV cache means something else: {one_line(differences)}"
        )


def describe_differences(local: Mapping[str, str], remote: Mapping[str, str]) -> str:
    """Name what differs, with both values and the remedy; empty if nothing does."""
    names = [*local, *sorted(remote.keys() - local.keys())]
    if not has_both_weights(local, remote):
        names = [name for name in names if name not in WEIGHT_FACTORS]
    differing = [name for name in names if local.get(name) not in (ANY, remote.get(name))]
    if not differing:
        return ""
    values = [
        f"{quote(name)} is {quote(remote.get(name))} there and {quote(local.get(name))} here"
        for name in differing[:_NAMED_FACTORS]
    ]
    if (unnamed := len(differing) - len(values)) > 0:
        values.append(f"and {unnamed} more")
    remedies = ", ".join(dict.fromkeys(map(remedy, differing)))
    return f"{'; '.join(values)}: on both engines, {one_line(remedies)}"


def has_both_weights(local: Mapping[str, str], remote: Mapping[str, str]) -> bool:
    """Return whether two engines tell their weights in the same way, so that they are compared."""
    return any(name in local and name in remote for name in WEIGHT_FACTORS)


def check_meanings(remote: Iterable[RankCache], local: RankCache) -> None:
    """Check that the layers that this worker reads mean the same at the other engine.

    Args:
        remote: Caches of the other engine's workers.
        local: Cache of this worker.

    Raises:
        RemoteIncompatibleError: A layer differs; the message names the first, with both values.
    """
    for cache in remote:
        for layer, theirs in cache.layers.items():
            ours = local.layers.get(layer)
            if ours is None:
                continue
            if differences := describe_differences(ours.meaning, theirs.meaning):
                raise RemoteIncompatibleError(
                    f"the bytes of layer {quote(str(layer))} mean something else: "
                    f"{one_line(differences)}"
                )


def remedy(name: str) -> str:
    """Return how to make a factor equal."""
    return _REMEDIES.get(name, "run the same build")
