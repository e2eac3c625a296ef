# SPDX-License-Identifier: Apache-2.0
"""Handshake metadata on its way from the workers through the engine core to the connector."""

from __future__ import annotations

import gc
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch
import vllm.envs as envs
from hypothesis import given
from hypothesis import strategies as st
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker import gpu_worker
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import CompilationTimes

from tests.bases import requires_base


def fake_executor(workers_metadata: list[dict | None]) -> type[Executor]:
    """An executor whose workers hold one attention layer and answer the handshake as given."""

    class FakeExecutor(Executor):
        def _init_executor(self) -> None:
            self.calls: list[str] = []

        def collective_rpc(self, method, timeout=None, args=(), kwargs=None, non_block=False):
            self.calls.append(method)
            answers = {
                "get_kv_cache_spec": [
                    {
                        "model.layers.0.self_attn.attn": FullAttentionSpec(
                            block_size=16, num_kv_heads=2, head_size=16, dtype=torch.float32
                        )
                    }
                ],
                "determine_available_memory": [1 << 20],
                "compile_or_warm_up_model": [CompilationTimes(0.0, 0.0)],
                "get_kv_connector_handshake_metadata": workers_metadata,
                "get_supported_kv_cache_layouts": [["LBNHC"]],
            }
            result = answers.get(method, [None])
            if not non_block:
                return result
            future: Future = Future()
            future.set_result(result)
            return future

        def check_health(self) -> None: ...

    return FakeExecutor


@pytest.fixture
def start_engine(make_config, connectors):
    """Runs the real `EngineCore.__init__`; returns the connector that the scheduler created."""
    engines: list[EngineCore] = []

    def start(kv_connector: str, workers_metadata: list[dict | None]):
        engines.append(
            EngineCore(make_config(kv_connector), fake_executor(workers_metadata), log_stats=False)
        )
        (connector,) = connectors
        return connector

    yield start
    for engine in engines:
        engine.shutdown()
    # An engine core treats its process as its own: it fixes the environment and freezes the heap.
    envs.disable_envs_cache()
    gc.unfreeze()


def test_stages_are_merged_for_a_connector_that_tells_them_apart(start_engine):
    """No worker's metadata is lost where tp ranks repeat over the stages."""
    connector = start_engine(
        "StageAwareConnector",
        [{(0, 0): "p0t0"}, {(0, 1): "p0t1"}, {(1, 0): "p1t0"}, {(1, 1): "p1t1"}],
    )
    assert connector.by_stage == {
        (0, 0): "p0t0",
        (0, 1): "p0t1",
        (1, 0): "p1t0",
        (1, 1): "p1t1",
    }
    assert connector.by_tp_rank is None


def test_workers_without_metadata_are_left_out(start_engine):
    """A worker that answers None adds nothing and hides nobody."""
    connector = start_engine("StageAwareConnector", [None, {(1, 0): "p1t0"}])
    assert connector.by_stage == {(1, 0): "p1t0"}


def test_one_stage_reaches_an_older_connector_by_tp_rank(start_engine):
    """Without pipeline parallelism a connector sees what it always saw."""
    connector = start_engine("RecordingConnector", [{(0, 0): "t0"}, {(0, 1): "t1"}])
    assert connector.by_tp_rank == {0: "t0", 1: "t1"}


def test_an_older_connector_refuses_several_stages_at_start_up(start_engine):
    """The engine does not come up, and the message names the connector in upstream's words."""
    with pytest.raises(ValueError) as error:
        start_engine("RecordingConnector", [{(0, 0): "p0"}, {(1, 0): "p1"}])
    message = str(error.value)
    assert message.startswith("RecordingConnector ")
    assert "does not support PP-disaggregated KV transfer" in message
    assert "\n" not in message


@requires_base("0.22.1", reason="the message is upstream's")
def test_the_refusal_names_stage_and_remedy(start_engine):
    """The message says which stage came as a surprise, and what to do."""
    with pytest.raises(ValueError, match=r"pp_rank 1 .*--pipeline-parallel-size 1"):
        start_engine("RecordingConnector", [{(0, 0): "p0"}, {(1, 0): "p1"}])


@pytest.mark.parametrize("workers_metadata", [[], [None, None]])
def test_no_metadata_is_no_error(start_engine, workers_metadata):
    """Connectors that exchange no handshake metadata start with any layout."""
    connector = start_engine("RecordingConnector", workers_metadata)
    assert not connector.by_tp_rank


@given(
    ranks=st.sets(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=16),
)
def test_default_unwraps_one_stage_and_refuses_more(ranks):
    """The default serves exactly the dictionaries whose every pp_rank is 0."""

    class PlainConnector(KVConnectorBase_V1):
        start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = None
        get_num_new_matched_tokens = update_state_after_alloc = build_connector_meta = None
        received = None

        def set_xfer_handshake_metadata(self, metadata):
            self.received = metadata

    connector = PlainConnector(
        SimpleNamespace(kv_transfer_config=object()), KVConnectorRole.SCHEDULER, None
    )
    metadata = {rank: f"{rank}" for rank in ranks}
    if any(pp_rank > 0 for pp_rank, _ in ranks):
        with pytest.raises(ValueError, match="PlainConnector"):
            connector.set_xfer_handshake_metadata_pp_aware(metadata)
        assert connector.received is None
    else:
        connector.set_xfer_handshake_metadata_pp_aware(metadata)
        assert connector.received == {tp_rank: metadata[0, tp_rank] for _, tp_rank in ranks}


@pytest.mark.parametrize("worker_class", [Worker, CPUWorker])
def test_worker_names_its_stage_and_tp_rank(monkeypatch, worker_class):
    """GPU and CPU workers key their metadata by (pp_rank, tp_rank)."""
    metadata = object()
    connector = SimpleNamespace(get_handshake_metadata=lambda: metadata)
    monkeypatch.setattr(gpu_worker, "has_kv_transfer_group", lambda: True)
    monkeypatch.setattr(gpu_worker, "get_kv_transfer_group", lambda: connector)
    monkeypatch.setattr(gpu_worker, "get_pp_group", lambda: SimpleNamespace(rank_in_group=2))
    monkeypatch.setattr(gpu_worker, "get_tp_group", lambda: SimpleNamespace(rank_in_group=5))
    worker = object.__new__(worker_class)
    worker.vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            prefill_context_parallel_size=1, decode_context_parallel_size=1
        )
    )
    assert worker.get_kv_connector_handshake_metadata() == {(2, 5): metadata}


@pytest.mark.parametrize("has_connector", [False, True])
def test_worker_without_metadata_answers_none(monkeypatch, has_connector):
    """No connector, or one that exchanges nothing, is None and not an empty entry."""
    connector = SimpleNamespace(get_handshake_metadata=lambda: None)
    monkeypatch.setattr(gpu_worker, "has_kv_transfer_group", lambda: has_connector)
    monkeypatch.setattr(gpu_worker, "get_kv_transfer_group", lambda: connector)
    assert object.__new__(Worker).get_kv_connector_handshake_metadata() is None
