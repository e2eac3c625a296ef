# SPDX-License-Identifier: Apache-2.0
"""What NIXL and the copy out of the arena take on this machine, measured when a worker starts.

A second agent in this process stands in for a peer on the same machine. Of a peer behind a network
this knows nothing; but there, too, a descriptor costs more than the bytes of a small one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import numpy as np
import torch
from vllm.logger import init_logger

from ..errors import TransferError
from ..memory.lowering import Indices
from ..memory.staging import Scatter
from ..memory.strategy import DEFAULT_COSTS, CostModel, fit_line
from .agent import NixlAgent, Prepared, TransferState
from .scatter import Scatterer

logger = init_logger(__name__)

LEAST_SCRATCH_BYTES, MOST_SCRATCH_BYTES = 4 << 20, 64 << 20
"""What measuring needs of the arena, and once more at the stand-in. With the most, nothing is read
or copied twice: a KV cache is larger than what a processor has at hand, and half as fast."""

_PIECE_BYTES = 2048
_FEW, _MANY = 64, 2048
_SMALL_BYTES, _LARGE_BYTES = 256 << 10, 2 << 20
_ROUNDS = 7
_SEEING_S = 0.5e-3
"""What a stop takes beside its copy: what has landed is seen in one turn of the thread that reads,
and that it was copied in another. That of requests of 4 MiB, which took 0.8 ms longer."""

_DEADLINE_S = 2.0
_LEAST_S = 1e-12

MakeAgents = Callable[[], tuple[NixlAgent, NixlAgent]]


def measure_costs(
    make_agents: MakeAgents,
    arena: torch.Tensor,
    make_scatterer: Callable[[torch.Tensor], Scatterer],
) -> CostModel:
    """Measure with the real thing; what fails is told, and replaced by what is usual.

    Args:
        make_agents: Makes an agent that reads and one that is read from, with nothing registered.
            Both are closed at the end, so that nothing writes to the arena any more, however this
            ends.
        arena: The arena; its first `MOST_SCRATCH_BYTES`, or all of it, are written to.
        make_scatterer: Makes what copies from the arena to a tensor.
    """
    if arena.nbytes < LEAST_SCRATCH_BYTES:
        return DEFAULT_COSTS
    try:
        return _measure(make_agents, arena, make_scatterer)
    except Exception as error:
        # Whatever it is that NIXL, torch or the system have not got: an engine serves without.
        logger.warning("What reads cost could not be measured, and is guessed: %s", error)
        return DEFAULT_COSTS


def _measure(
    make_agents: MakeAgents,
    arena: torch.Tensor,
    make_scatterer: Callable[[torch.Tensor], Scatterer],
) -> CostModel:
    with ExitStack() as acquired:
        size_bytes: int = min(arena.nbytes, MOST_SCRATCH_BYTES)
        scratch = torch.empty_like(arena[:size_bytes])
        device_id = max(arena.get_device(), 0)
        scatterer = make_scatterer(scratch)
        acquired.callback(scatterer.close)
        agent, stand_in = make_agents()
        acquired.callback(stand_in.close)
        # The one that reads ends first.
        acquired.callback(agent.close)
        stand_in.register([(scratch.data_ptr(), scratch.nbytes, device_id)])
        agent.register([(arena.data_ptr(), arena.nbytes, device_id)])
        # The system backs memory when it is first written.
        scratch.zero_()
        arena[:size_bytes].zero_()
        peer = agent.connect(stand_in.metadata())

        def num_pieces(piece_bytes: int) -> int:
            # Two pieces never adjoin, so that none are merged.
            return size_bytes // (2 * piece_bytes)

        def prepare(memory: torch.Tensor, piece_bytes: int, whose: str | None) -> Prepared:
            count = num_pieces(piece_bytes)
            row = [memory.data_ptr(), piece_bytes, device_id, 2 * piece_bytes, count]
            return agent.prepare(np.array([row], dtype=np.uint64), whose)

        def read_s(piece_bytes: int, count: int) -> float:
            local = prepare(arena, piece_bytes, None)
            remote = prepare(scratch, piece_bytes, peer)
            read = partial(_read, agent, local, remote)
            return _least_s(read, count, num_pieces(piece_bytes))

        counts = _FEW, min(_MANY, num_pieces(_PIECE_BYTES))
        few, many = ((count, read_s(_PIECE_BYTES, count)) for count in counts)
        small, large = ((size, read_s(size, 1)) for size in (_SMALL_BYTES, _LARGE_BYTES))
        _, byte_s = fit_line(small, large, least=_LEAST_S)
        _, piece_s = fit_line(few, many, least=_LEAST_S)

        def copy_s(count: int) -> float:
            copy = partial(_copy, scatterer, scratch)
            return _least_s(copy, count, num_pieces(_PIECE_BYTES))

        few, many = ((count, copy_s(count)) for count in counts)
        stop_s, copied_piece_s = fit_line(few, many, least=_LEAST_S)
    # Of a chunk's cost, half is taken for that of its bytes.
    return CostModel(
        descriptor_s=max(piece_s - _PIECE_BYTES * byte_s, _LEAST_S),
        byte_s=byte_s,
        chunk_s=copied_piece_s / 2,
        copied_byte_s=copied_piece_s / 2 / _PIECE_BYTES,
        stop_s=stop_s + _SEEING_S,
    )


def _least_s(move: Callable[[Indices], None], count: int, num_pieces: int) -> float:
    """How long pieces take to be moved when nobody is in the way; a first time does not count.

    Args:
        move: Called with the pieces to move: others each time, while there are some.
        count: How many at a time.
        num_pieces: How many there are.
    """
    times = []
    for first in range(0, (_ROUNDS + 1) * count, count):
        pieces: Indices = np.arange(first, first + count, dtype=np.int32)
        pieces %= num_pieces
        began = time.perf_counter()
        move(pieces)
        times.append(time.perf_counter() - began)
    return min(times[1:])


def _read(agent: NixlAgent, local: Prepared, remote: Prepared, indices: Indices) -> None:
    """Read, and wait for it."""
    transfer = agent.read(local, indices, remote, indices)
    deadline = time.monotonic() + _DEADLINE_S
    state = agent.poll(transfer)
    while state is TransferState.IN_FLIGHT and time.monotonic() < deadline:
        state = agent.poll(transfer)
    if state is not TransferState.DONE:
        raise TransferError(f"a read on this machine is {state.value} after {_DEADLINE_S} s")
    agent.release(transfer)


def _copy(scatterer: Scatterer, scratch: torch.Tensor, pieces: Indices) -> None:
    """Copy pieces, side by side in the arena, to where every other one is left out."""
    offsets = pieces.astype(np.int64) * _PIECE_BYTES
    copy = scatterer.submit(
        Scatter(
            src_offsets=offsets,
            dst_addresses=scratch.data_ptr() + 2 * offsets,
            num_heads=1,
            num_tokens=1,
            slot_bytes=_PIECE_BYTES,
            src_strides_bytes=(0, 0),
            dst_strides_bytes=(0, 0),
        )
    )
    if (fault := copy.fault()) is not None:
        raise TransferError(f"a copy on this machine has failed: {fault}")
