# SPDX-License-Identifier: Apache-2.0
"""`TransferTopology` as the registry of a remote engine's pipeline stages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.distributed.kv_transfer.kv_connector.utils import EngineTransferInfo, TransferTopology
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

REMOTE = "prefill-engine"


def topology(
    *, tp_rank: int = 0, tp_size: int = 2, num_kv_heads: int = 4, is_mla: bool = False
) -> TransferTopology:
    """The topology of a local worker."""
    return TransferTopology(
        tp_rank=tp_rank,
        tp_size=tp_size,
        block_size=16,
        engine_id="decode-engine",
        is_mla=is_mla,
        is_mamba=False,
        total_num_kv_heads=num_kv_heads,
        attn_backends=[CPUAttentionBackend],
    )


def stage(
    pp_rank: int, *, tp_size: int = 4, layers: tuple[int, int] = (0, 0)
) -> EngineTransferInfo:
    """What one stage of the remote engine says of itself."""
    return EngineTransferInfo(
        remote_tp_size=tp_size,
        remote_block_len=4096,
        remote_block_size=16,
        remote_physical_blocks_per_logical=1,
        remote_pp_rank=pp_rank,
        start_layer=layers[0],
        end_layer=layers[1],
    )


def test_info_without_stage_describes_the_first_stage():
    """Callers that know nothing of stages describe stage 0 and no layers."""
    info = EngineTransferInfo(
        remote_tp_size=1,
        remote_block_len=1,
        remote_block_size=1,
        remote_physical_blocks_per_logical=1,
    )
    assert (info.remote_pp_rank, info.start_layer, info.end_layer) == (0, 0, 0)


def test_stages_of_one_engine_are_kept_apart():
    """Every stage is found under its own rank, with its own layers."""
    topo = topology()
    stages = [stage(0, layers=(0, 10)), stage(1, layers=(10, 32))]
    for info in stages:
        assert topo.register_remote_engine(REMOTE, info) is info
    assert [topo.get_engine_info(REMOTE, remote_pp_rank=rank) for rank in (0, 1)] == stages
    assert topo.get_engine_info(REMOTE) is stages[0]


def test_first_registration_of_a_stage_stays():
    """A repeated registration returns what was registered first and changes nothing."""
    topo = topology()
    first, second = stage(1, layers=(4, 8)), stage(1, layers=(0, 4))
    topo.register_remote_engine(REMOTE, first)
    assert topo.register_remote_engine(REMOTE, second) is first
    assert topo.get_engine_info(REMOTE, 1) is first


def test_registering_a_later_stage_does_not_register_the_first():
    """Stages are registered one by one: asking for another one fails."""
    topo = topology()
    topo.register_remote_engine(REMOTE, stage(1))
    with pytest.raises(KeyError):
        topo.get_engine_info(REMOTE)
    with pytest.raises(KeyError):
        topo.target_remote_ranks(REMOTE, remote_pp_rank=2)


def test_equal_ranks_of_different_engines_are_kept_apart():
    """The engine id is part of the key."""
    topo = topology()
    one, other = stage(1, layers=(2, 4)), stage(1, layers=(1, 4))
    topo.register_remote_engine("one", one)
    topo.register_remote_engine("other", other)
    assert topo.get_engine_info("one", 1) is one
    assert topo.get_engine_info("other", 1) is other


@given(
    pp_size=st.integers(1, 8),
    tp_sizes=st.lists(st.sampled_from([1, 2, 4, 8, 16]), min_size=8, max_size=8),
    num_kv_heads=st.sampled_from([1, 2, 4, 8]),
    is_mla=st.booleans(),
    tp_rank=st.integers(0, 3),
)
def test_queries_answer_for_the_named_stage(pp_size, tp_sizes, num_kv_heads, is_mla, tp_rank):
    """Each query about a stage equals the query about an engine that is that stage alone."""
    topo = topology(tp_rank=tp_rank, tp_size=4, num_kv_heads=num_kv_heads, is_mla=is_mla)
    for pp_rank in range(pp_size):
        topo.register_remote_engine(REMOTE, stage(pp_rank, tp_size=tp_sizes[pp_rank]))
    for pp_rank in range(pp_size):
        alone = topology(tp_rank=tp_rank, tp_size=4, num_kv_heads=num_kv_heads, is_mla=is_mla)
        alone.register_remote_engine(REMOTE, stage(0, tp_size=tp_sizes[pp_rank]))
        assert topo.is_kv_replicated(REMOTE, pp_rank) == alone.is_kv_replicated(REMOTE)
        assert topo.is_kv_replicated(REMOTE, pp_rank) == (tp_sizes[pp_rank] > num_kv_heads)
        assert topo.replicates_kv_cache(REMOTE, pp_rank) == alone.replicates_kv_cache(REMOTE)
        assert topo.target_remote_ranks(REMOTE, pp_rank) == alone.target_remote_ranks(REMOTE)
        assert topo.handshake_target_ranks(tp_sizes[pp_rank]) == topo.target_remote_ranks(
            REMOTE, pp_rank
        )


def test_target_ranks_without_stage_are_those_of_the_first():
    """Remote TP4 is read by local TP2 in halves, as it always was."""
    for tp_rank, expected in ((0, [0, 1]), (1, [2, 3])):
        topo = topology(tp_rank=tp_rank)
        topo.register_remote_engine(REMOTE, stage(0))
        assert topo.target_remote_ranks(REMOTE) == expected


def test_describe_names_the_stage():
    """The one-line summary says which stage it is about."""
    topo = topology()
    for pp_rank in (0, 1):
        topo.register_remote_engine(REMOTE, stage(pp_rank, tp_size=2**pp_rank))
    assert "remote_tp=1, remote_pp=0" in topo.describe(REMOTE)
    assert "remote_tp=2, remote_pp=1" in topo.describe(REMOTE, remote_pp_rank=1)


def test_local_engine_cannot_be_registered_as_remote():
    """An engine never reads from itself."""
    topo = topology()
    with pytest.raises(AssertionError, match="decode-engine"):
        topo.register_remote_engine("decode-engine", stage(0))
