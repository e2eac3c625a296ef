# SPDX-License-Identifier: Apache-2.0
"""What it takes to read from an engine for the first time: from the request to the first read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import psutil

from .base import upstream_lists_are_arrays
from .cases import HandshakeCase
from .errors import BenchmarkError, NotEnoughMemoryError
from .results import Metric, Part, Result
from .specs import Variant, Watch
from .turns import Plan, take_turns
from .variants import ConnectorPair, Pair, Tables

NO_STAGES = "upstream's connector does not support pipeline parallelism"
TAKES_MINUTES = "left out, because it takes minutes: --full"

_LIST_BYTES = 170
"""Of each descriptor in a list of tuples; measured."""
_ARRAY_BYTES = 24
"""Of each descriptor in an array: address, length and device, of eight bytes each."""
_HANDLE_BYTES = 40
"""Of each descriptor in NIXL's own lists; measured."""
_MARGIN = 0.85
_MANY_DESCRIPTORS = 5_000_000
"""For more, upstream's connector needs tens of seconds to start and to shake hands."""

_SOURCE, _DESTINATION = 1, 2


def measure_handshakes(
    cases: Sequence[HandshakeCase], plan: Plan, *, thorough: bool = True
) -> Iterator[Result]:
    """Measure handshakes, each with a decode engine that was started for it.

    Args:
        thorough: Measure upstream's at rest also where that takes minutes.
    """
    for case in cases:
        plan.say(f"handshake: {case.name}")
        yield _measure(case, plan, thorough)


def _measure(case: HandshakeCase, plan: Plan, thorough: bool) -> Result:
    shape = case.shape
    result = Result(
        Part.HANDSHAKE,
        case.name,
        {"blocks": case.num_blocks, "planes": shape.num_planes, "layers": shape.num_layers},
    )
    pairs: list[Pair] = []
    try:
        for variant in plan.connectors():
            if variant.at_rest and not thorough and case.descriptors > _MANY_DESCRIPTORS:
                result.give_up(variant.name, TAKES_MINUTES)
                continue
            try:
                pairs.append(_started(variant, case, plan))
            except BenchmarkError as error:
                result.give_up(variant.name, str(error))
        take_turns(pairs, plan.repetitions, result, _first_read)
    finally:
        for pair in pairs:
            pair.end()
    return result


def _started(variant: Variant, case: HandshakeCase, plan: Plan) -> ConnectorPair:
    """Start a pair; its decode engine is started anew for each measurement."""
    refuse_upstream(variant, case, psutil.virtual_memory().available)
    pair = ConnectorPair(variant, case.shape, case.num_blocks, plan.directory)
    try:
        pair.start_prefill()
        pair.call_prefill("touch", [_SOURCE])
        with pair.turn():
            pass
    except BaseException:
        pair.end()
        raise
    return pair


def refuse_upstream(variant: Variant, case: HandshakeCase, available_bytes: int) -> None:
    """Refuse what upstream's connector cannot do, or not with the memory there is.

    Raises:
        NotEnoughMemoryError: Its lists would not fit.
        BenchmarkError: It has no pipeline parallelism.
    """
    if variant.connector != "upstream":
        return
    shape = case.shape
    if max(shape.prefill.pp_size, shape.decode.pp_size) > 1:
        raise BenchmarkError(NO_STAGES)
    needed_bytes = case.descriptors * _upstream_bytes(shape.prefill.tp_size, shape.decode.tp_size)
    if needed_bytes > _MARGIN * available_bytes:
        raise NotEnoughMemoryError(
            f"{case.descriptors / 1e6:.1f} million descriptors a rank take upstream's connector "
            f"about {needed_bytes / 1e9:.0f} GB, and {available_bytes / 1e9:.0f} GB are available"
        )


def _upstream_bytes(sources: int, readers: int) -> int:
    """What upstream's workers need together in a handshake, for each descriptor of a rank.

    Args:
        sources: Ranks that are read from.
        readers: Ranks that read; each from all of them, at worst.
    """
    in_python = _ARRAY_BYTES if upstream_lists_are_arrays() else _LIST_BYTES
    # What every worker keeps, and one more at readers while it is made, once there and once on its
    # way to NIXL.
    lists = in_python * (sources + 2 * readers) + _ARRAY_BYTES * readers
    if sources > readers and upstream_lists_are_arrays():
        # Its own are listed to be cut, the parts for one source after the other: two at a time.
        lists += 3 * _LIST_BYTES * readers
    handles = _HANDLE_BYTES * (sources + (1 + 2 * sources) * readers)
    return lists + handles


def _first_read(pair: Pair, repetition: int) -> Mapping[Metric, float]:
    """Read a block from an engine that is new to the reader."""
    assert isinstance(pair, ConnectorPair)
    pair.start_decode()
    pair.call_decode("touch", [_DESTINATION])
    pair.call_decode("settle")
    tokens = pair.shape.block_tokens
    readings = pair.read([Tables([_SOURCE], [_DESTINATION], tokens)], Watch(memory=True))
    # Another variant may need the memory of this one's lists.
    pair.end_decode()
    began_s = min(reading.began_s for reading in readings)
    return {
        Metric.SECONDS: max(reading.posted_s for reading in readings) - began_s,
        Metric.PEAK_BYTES: max(reading.peak_bytes for reading in readings),
    }
