# SPDX-License-Identifier: Apache-2.0
"""What pipeline stages before the last report: an empty output, never None.

The model runners are driven without a model: the methods under test run for real, on an instance
whose collaborators are replaced.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.sequence import IntermediateTensors
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.worker import gpu_model_runner, gpu_worker
from vllm.v1.worker.gpu import model_runner as gpu_model_runner_v2
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from tests.bases import RELEASE, requires_base

FINISHED = KVConnectorOutput(finished_recving={"a"}, invalid_block_ids={7})


@pytest.fixture(autouse=True)
def shared_empty_output_is_untouched():
    """Whatever a test does, the output that all idle workers share stays as it was."""
    before = copy.deepcopy(EMPTY_MODEL_RUNNER_OUTPUT)
    yield
    assert before == EMPTY_MODEL_RUNNER_OUTPUT


def set_stage(monkeypatch, module, *, is_last: bool) -> None:
    """Places the module's code on the last pipeline stage, or on one before it."""
    group = SimpleNamespace(is_last_rank=is_last, is_first_rank=True)
    monkeypatch.setattr(module, "get_pp_group", lambda: group)


def runner_v1(connector_output: KVConnectorOutput | None, *, async_scheduling: bool = False):
    """A v1 runner between `execute_model` and `sample_tokens` with no logits to sample from."""
    runner = object.__new__(GPUModelRunner)
    runner.execute_model_state = None
    runner.kv_connector_output = connector_output
    runner.use_async_scheduling = async_scheduling
    return runner


def assert_is_empty(output: ModelRunnerOutput) -> None:
    """The output says nothing of any request."""
    assert isinstance(output, ModelRunnerOutput)
    assert output.req_ids == []
    assert output.sampled_token_ids == []


class TestModelRunnerV1:
    """`vllm.v1.worker.gpu_model_runner`, which CPU workers use too."""

    @pytest.mark.parametrize("connector_output", [None, KVConnectorOutput()])
    def test_stage_with_nothing_to_report(self, monkeypatch, connector_output):
        """Without news from a connector the output is empty."""
        set_stage(monkeypatch, gpu_model_runner, is_last=False)
        assert_is_empty(runner_v1(connector_output).sample_tokens(None))

    def test_stage_with_connector_output(self, monkeypatch):
        """The connector's news travel in an output of their own, once."""
        set_stage(monkeypatch, gpu_model_runner, is_last=False)
        runner = runner_v1(FINISHED)
        output = runner.sample_tokens(None)
        assert_is_empty(output)
        assert output.kv_connector_output is FINISHED
        assert output is not EMPTY_MODEL_RUNNER_OUTPUT
        assert runner.sample_tokens(None).kv_connector_output is None

    def test_sampled_tokens_are_received_first(self, monkeypatch):
        """Under asynchronous scheduling the stage still takes part in the token broadcast."""
        set_stage(monkeypatch, gpu_model_runner, is_last=False)
        runner = runner_v1(None, async_scheduling=True)
        runner._pp_receive_prev_sampled_token_ids_to_input_batch = MagicMock()
        assert_is_empty(runner.sample_tokens(None))
        runner._pp_receive_prev_sampled_token_ids_to_input_batch.assert_called_once_with()

    @requires_base("0.22.1", reason="upstream answers with the empty output there as well")
    def test_none_on_the_last_stage_still_means_failure(self, monkeypatch):
        """The engine takes None for a failed forward pass: without PP nothing changes."""
        set_stage(monkeypatch, gpu_model_runner, is_last=True)
        assert runner_v1(None).sample_tokens(None) is None


@requires_base("0.22.1", reason="the runner asks its connector when tokens are sampled")
class TestModelRunnerV2:
    """`vllm.v1.worker.gpu.model_runner`, which asks its connector after the forward pass."""

    @pytest.fixture
    def runner(self, monkeypatch):
        """A v2 runner on a stage before the last, around a model that returns hidden states."""
        module = gpu_model_runner_v2
        batch = SimpleNamespace(
            num_reqs=1,
            num_tokens=1,
            num_tokens_after_padding=1,
            input_ids=None,
            positions=None,
            req_ids=["a"],
        )
        description = SimpleNamespace(num_tokens=1, num_reqs=1, cg_mode=None)
        monkeypatch.setattr(module, "dispatch_cg_and_sync_dp", lambda *_, **__: (description, None))
        monkeypatch.setattr(module, "build_slot_mappings_by_layer", lambda *_: {})
        monkeypatch.setattr(module, "set_forward_context", MagicMock())
        monkeypatch.setattr(module, "pp_receive", lambda *_, **__: (None, None, None))
        runner = object.__new__(module.GPUModelRunner)
        for name in [
            "finish_requests",
            "free_states",
            "add_requests",
            "update_requests",
            "block_tables",
            "eplb",
            "model_state",
            "cudagraph_manager",
            "kv_cache_config",
            "attn_groups",
            "req_states",
            "vllm_config",
        ]:
            setattr(runner, name, MagicMock())
        runner.model_state.prepare_inputs.return_value = {}
        runner.prepare_inputs = lambda *_: batch
        runner.prepare_attn = lambda *_: ({}, {})
        runner.postprocess = MagicMock()
        runner.model = lambda **_: IntermediateTensors({})
        runner.kv_connector = MagicMock()
        runner.lora_config = None
        runner.supports_mm_inputs = runner.is_encoder_decoder = False
        runner.is_first_pp_rank, runner.is_last_pp_rank = True, False
        runner.dp_size, runner.dp_rank, runner.num_speculative_steps = 1, 0, 0
        runner.execute_model_state = None
        return runner

    SCHEDULED = SimpleNamespace(
        total_num_scheduled_tokens=1,
        num_scheduled_tokens={"a": 1},
        scheduled_encoder_inputs={},
        finished_req_ids=set(),
    )

    def test_stage_reports_its_connector_output(self, runner):
        """What the connector said after the forward pass comes back from `sample_tokens`."""
        runner.kv_connector.post_forward.return_value = FINISHED
        assert isinstance(runner.execute_model(self.SCHEDULED), IntermediateTensors)
        output = runner.sample_tokens(None)
        assert_is_empty(output)
        assert output.kv_connector_output is FINISHED
        runner.postprocess.assert_called_once()

    @pytest.mark.parametrize("connector_output", [None, KVConnectorOutput()])
    def test_stage_with_nothing_to_report(self, runner, connector_output):
        """Without news from a connector the output is the empty one that all workers share."""
        runner.kv_connector.post_forward.return_value = connector_output
        assert isinstance(runner.execute_model(self.SCHEDULED), IntermediateTensors)
        assert runner.sample_tokens(None) is EMPTY_MODEL_RUNNER_OUTPUT

    def test_failed_forward_pass_is_none(self, runner):
        """Without a forward pass before it, `sample_tokens` reports the failure as None."""
        assert runner.sample_tokens(None) is None


@requires_base("0.32.0", "0.33.0", reason="the runner asks its connector after a forward pass")
class TestModelRunnerV2AtSampling:
    """`vllm.v1.worker.gpu.model_runner`, which asks its connector when tokens are sampled."""

    @pytest.fixture
    def runner(self):
        """A v2 runner on a stage before the last, after its forward pass."""
        runner = object.__new__(gpu_model_runner_v2.GPUModelRunner)
        for name in ["eplb", "kv_connector", "model_state", "pp_handler"]:
            setattr(runner, name, MagicMock())
        runner.postprocess_num_computed_tokens = MagicMock()
        runner.pcp_manager = None
        runner.is_last_pp_rank = False
        runner.execute_model_state = MagicMock(
            ec_connector_output=None, num_spec_tokens_to_schedule=0
        )
        return runner

    def test_stage_reports_its_connector_output(self, runner):
        """What the connector says comes back from `sample_tokens`."""
        runner.kv_connector.post_forward.return_value = FINISHED
        output = runner.sample_tokens(None)
        assert_is_empty(output)
        assert output.kv_connector_output is FINISHED

    @pytest.mark.parametrize("connector_output", [None, KVConnectorOutput()])
    def test_stage_with_nothing_to_report(self, runner, connector_output):
        """Without news from a connector the output is the empty one that all workers share."""
        runner.kv_connector.post_forward.return_value = connector_output
        assert runner.sample_tokens(None) is EMPTY_MODEL_RUNNER_OUTPUT


class TestWorker:
    """`vllm.v1.worker.gpu_worker`, between the model runner and the executor."""

    @pytest.fixture
    def worker(self, monkeypatch):
        """A worker on a stage before the last, and its fake pipeline group."""
        group = MagicMock(is_first_rank=True, is_last_rank=False)
        monkeypatch.setattr(gpu_worker, "get_pp_group", lambda: group)
        monkeypatch.setattr(gpu_worker, "get_tp_group", lambda: None)
        worker = object.__new__(Worker)
        worker._pp_send_work = []
        worker.use_v2_model_runner = False
        worker.annotate_profile = lambda _: torch.no_grad()
        worker.vllm_config = MagicMock()
        worker.vllm_config.parallel_config.pipeline_parallel_size = 2
        worker.vllm_config.compilation_config.pass_config.enable_sp = False
        worker.model_runner = MagicMock()
        if RELEASE == "0.22.1":
            tensors = IntermediateTensors({}, FINISHED)
        else:
            # What the connector said stays with the runner.
            tensors = IntermediateTensors({})
            worker.model_runner.kv_connector_output = FINISHED
        worker.model_runner.execute_model.return_value = tensors
        worker.group = group
        return worker

    def test_pooling_stage_answers_for_its_connector(self, worker):
        """Nobody asks a pooling model for tokens: its stages report at once."""
        worker.model_runner.is_pooling_model = True
        output = worker.execute_model(SimpleNamespace(total_num_scheduled_tokens=1))
        assert_is_empty(output)
        assert output.kv_connector_output is FINISHED
        worker.group.isend_tensor_dict.assert_called_once()

    @requires_base("0.32.0", "0.33.0", reason="the output comes with the tensors")
    def test_pooling_stage_reports_once(self, worker):
        """What the runner kept of a step is not reported again in the next."""
        worker.model_runner.is_pooling_model = True
        worker.execute_model(SimpleNamespace(total_num_scheduled_tokens=1))
        output = worker.execute_model(SimpleNamespace(total_num_scheduled_tokens=1))
        assert output is EMPTY_MODEL_RUNNER_OUTPUT

    def test_generating_stage_waits_for_sample_tokens(self, worker):
        """None from `execute_model` asks the engine to call `sample_tokens`."""
        worker.model_runner.is_pooling_model = False
        assert worker.execute_model(SimpleNamespace(total_num_scheduled_tokens=1)) is None
        worker.group.isend_tensor_dict.assert_called_once()


def test_outputs_of_all_stages_aggregate(monkeypatch):
    """A request that every stage received is finished; one that a single stage lacks is not."""
    aggregator = KVOutputAggregator(expected_finished_count=3)
    last = ModelRunnerOutput(
        req_ids=["b"],
        req_id_to_index={"b": 0},
        kv_connector_output=KVConnectorOutput(finished_recving={"a", "b"}),
    )
    set_stage(monkeypatch, gpu_model_runner, is_last=False)
    stages = [
        runner_v1(KVConnectorOutput(finished_recving={"a"})).sample_tokens(None),
        runner_v1(KVConnectorOutput(finished_recving={"a", "b"})).sample_tokens(None),
        last,
    ]
    output = aggregator.aggregate(stages, output_rank=2)
    assert output.req_ids == ["b"]
    assert output.kv_connector_output.finished_recving == {"a"}
