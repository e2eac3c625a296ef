# SPDX-License-Identifier: Apache-2.0
"""How many workers must report before a transfer is finished."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.worker import kv_connector_model_runner_mixin
from vllm.v1.worker.gpu import kv_connector as kv_connector_v2
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from tests.bases import requires_base


def connector(finished_count: int | None) -> SimpleNamespace:
    """A connector that asks for the given number of completions."""
    return SimpleNamespace(get_finished_count=lambda: finished_count)


def worker_output(
    *, sent: set[str] | None = None, received: set[str] | None = None, count: int = 0
) -> ModelRunnerOutput:
    """What one worker returns from a step."""
    return ModelRunnerOutput(
        req_ids=[],
        req_id_to_index={},
        kv_connector_output=KVConnectorOutput(
            finished_sending=sent, finished_recving=received, expected_finished_count=count
        ),
    )


def finished_after(aggregator: KVOutputAggregator, steps: list[list[ModelRunnerOutput]]):
    """The requests that are finished sending, step by step."""
    return [aggregator.aggregate(outputs).kv_connector_output.finished_sending for outputs in steps]


def test_none_means_the_world_size():
    """Without a count of its own a connector waits for every worker."""
    aggregator = KVOutputAggregator.from_connector(connector(None), world_size=4)
    steps = [[worker_output(sent={"a"})] * 3, [worker_output(sent={"a"})]]
    assert finished_after(aggregator, steps) == [None, {"a"}]


def test_two_of_four_workers_report():
    """A prefill engine with TP4 that two decode workers release waits for two completions."""
    aggregator = KVOutputAggregator.from_connector(connector(2), world_size=4)
    steps = [
        [worker_output(sent={"a"}), worker_output(), worker_output(), worker_output()],
        [worker_output(), worker_output(), worker_output(sent={"a"}), worker_output()],
    ]
    assert finished_after(aggregator, steps) == [None, {"a"}]


@given(
    count=st.integers(1, 8),
    reports=st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=8, max_size=8),
)
def test_finished_exactly_once_at_the_expected_report(count, reports):
    """However reports spread over steps, the last expected one finishes the request, once."""
    aggregator = KVOutputAggregator(count)
    steps: list[list[ModelRunnerOutput]] = [[]]
    for new_steps, _ in reports[:count]:
        steps.extend([] for _ in range(new_steps))
        steps[-1].append(worker_output(sent={"a"}))
    steps = [outputs or [worker_output()] for outputs in steps]
    finished = finished_after(aggregator, steps)
    assert finished == [None] * (len(steps) - 1) + [{"a"}]


@pytest.mark.parametrize("announcer", [0, 1])
def test_count_announced_in_a_step_applies_to_the_whole_step(announcer):
    """A new count holds for the step's completions, whichever worker announces it."""
    aggregator = KVOutputAggregator(4)
    outputs = [worker_output(sent={"a"}, count=2 * (rank == announcer)) for rank in range(2)]
    assert finished_after(aggregator, [outputs + [worker_output()] * 2]) == [{"a"}]


def test_count_can_change_again():
    """A second remote engine with another layout changes the count for what comes next."""
    aggregator = KVOutputAggregator(4)
    steps = [
        [worker_output(sent={"a"}, count=2)] * 2 + [worker_output()] * 2,
        [worker_output(sent={"b"}, count=4)] * 3 + [worker_output()],
        [worker_output(sent={"b"})],
    ]
    assert finished_after(aggregator, steps) == [{"a"}, None, {"b"}]


def test_workers_outputs_are_not_written_to():
    """The empty output that idle workers share does not collect what others report."""
    before = copy.deepcopy(EMPTY_MODEL_RUNNER_OUTPUT)
    outputs = [EMPTY_MODEL_RUNNER_OUTPUT, worker_output(received={"a"})]
    output = KVOutputAggregator(1).aggregate(outputs)
    assert output.kv_connector_output.finished_recving == {"a"}
    assert before == EMPTY_MODEL_RUNNER_OUTPUT


def test_first_output_is_returned_itself():
    """What the output rank returned is what the engine gets, with what all workers reported."""
    outputs = [worker_output(), worker_output(received={"a"})]
    output = KVOutputAggregator(1).aggregate(outputs)
    assert output is outputs[0]
    assert output.kv_connector_output.finished_recving == {"a"}


def test_step_without_output_is_passed_on():
    """None from the output rank asks the engine for another call, and counts nothing."""
    aggregator = KVOutputAggregator(1)
    assert aggregator.aggregate([None, None], output_rank=1) is None


EXECUTORS = [MultiprocExecutor, RayExecutorV2]


@pytest.mark.parametrize("executor_class", EXECUTORS)
@pytest.mark.parametrize(("finished_count", "expected"), [(None, 4), (2, 2)])
def test_every_executor_uses_the_connectors_count(executor_class, finished_count, expected):
    """Multiprocess and Ray executors wait for the same number of completions."""
    executor = MagicMock(spec=executor_class)
    executor.parallel_config = SimpleNamespace(world_size=4)
    executor_class.init_kv_output_aggregator(executor, connector(finished_count))
    reports = [[worker_output(sent={"a"})] for _ in range(expected)]
    finished = finished_after(executor.kv_output_aggregator, reports)
    assert finished == [None] * (expected - 1) + [{"a"}]


@pytest.mark.parametrize("executor_class", EXECUTORS)
@pytest.mark.parametrize("method", ["execute_model", "sample_tokens"])
def test_message_queue_executors_hand_over_their_aggregator(executor_class, method):
    """Both calls of a step collect the answers of all workers, through the same aggregator."""
    executor = MagicMock(spec=executor_class)
    executor.output_rank = 2
    executor.ec_output_aggregator = None
    executor.kv_output_aggregator = KVOutputAggregator(2)
    getattr(executor_class, method)(executor, None)
    keywords = executor.collective_rpc.call_args.kwargs
    assert keywords["kv_output_aggregator"] is executor.kv_output_aggregator
    assert keywords["unique_reply_rank"] == 2


@requires_base("0.22.1", "0.32.0", reason="its Ray executor has no compiled graphs")
@pytest.mark.parametrize("non_block", [False, True])
def test_compiled_graph_executor_aggregates(monkeypatch, non_block):
    """The Ray executor of compiled graphs counts with the connector's count, too."""
    from vllm.v1.executor import ray_executor, ray_utils

    fake_ray = SimpleNamespace(get=lambda refs, timeout=None: refs)
    monkeypatch.setattr(ray_executor, "ray", fake_ray)
    monkeypatch.setattr(ray_utils, "ray", fake_ray)
    executor_class = ray_executor.RayDistributedExecutor
    executor = MagicMock(spec=executor_class)
    executor.parallel_config = SimpleNamespace(world_size=4)
    executor_class.init_kv_output_aggregator(executor, connector(2))
    executor.has_connector = True
    executor.forward_dag = MagicMock()
    executor.forward_dag.execute.return_value = [
        worker_output(sent={"a"}),
        worker_output(),
        worker_output(sent={"a", "b"}),
        worker_output(),
    ]
    output = executor_class._execute_dag(executor, None, None, non_block)
    output = output.result() if non_block else output
    assert output.kv_connector_output.finished_sending == {"a"}


@pytest.mark.parametrize("count", [0, 1, 4])
def test_announcement_makes_an_output_worth_sending(count):
    """Runners drop empty outputs: one that announces a count is none of them."""
    assert KVConnectorOutput(expected_finished_count=count).is_empty() == (count == 0)


def finishes(worker_connector: MagicMock, sent: set[str] | None) -> None:
    """What a worker's connector has finished sending, by the call of each base's runners."""
    worker_connector.get_finished.return_value = (sent, None)
    worker_connector.get_transfer_results.return_value = SimpleNamespace(
        finished_sending=sent, finished_recving=None, failed_recving=set()
    )


class TestAnnouncement:
    """Worker connectors announce their count through both model runners."""

    SCHEDULED = SimpleNamespace(
        kv_connector_metadata=object(),
        finished_req_ids=set(),
        total_num_scheduled_tokens=0,
        has_sync_kv_loads=False,
    )

    @pytest.fixture(params=[(None, 0), (2, 2)])
    def worker_connector(self, request):
        """A worker connector with a finished request, and the count that it should announce."""
        finished_count, announced = request.param
        mock = MagicMock()
        mock.get_finished_count.return_value = finished_count
        finishes(mock, {"a"})
        mock.get_block_ids_with_load_errors.return_value = set()
        mock.get_kv_connector_stats.return_value = None
        mock.get_kv_connector_kv_cache_events.return_value = None
        mock.build_connector_worker_meta.return_value = None
        return mock, announced

    @pytest.fixture
    def step_v1(self, monkeypatch, worker_connector):
        """One step without a forward pass of the v1 runner."""
        module = kv_connector_model_runner_mixin
        monkeypatch.setattr(module, "get_kv_transfer_group", lambda: worker_connector[0])
        monkeypatch.setattr(module, "KVConnectorBase", MagicMock)
        monkeypatch.setattr(module, "set_forward_context", MagicMock())
        monkeypatch.setattr(module, "get_forward_context", lambda: None)
        return lambda: KVConnectorModelRunnerMixin.kv_connector_no_forward(self.SCHEDULED, None)

    @pytest.fixture
    def step_v2(self, monkeypatch, worker_connector):
        """One step without a forward pass of the v2 runner."""
        module = kv_connector_v2
        monkeypatch.setattr(module, "get_kv_transfer_group", lambda: worker_connector[0])
        monkeypatch.setattr(module, "is_forward_context_available", lambda: True)
        monkeypatch.setattr(module, "get_forward_context", lambda: None)
        return lambda: ActiveKVConnector(None, {}).no_forward(self.SCHEDULED)

    @pytest.fixture(params=["step_v1", "step_v2"])
    def step(self, request):
        """One step without a forward pass, of either runner."""
        return request.getfixturevalue(request.param)

    def test_count_travels_with_completions(self, step, worker_connector):
        """The runner copies the count into its output, beside what is finished."""
        output = step().kv_connector_output
        assert output.finished_sending == {"a"}
        assert output.expected_finished_count == worker_connector[1]

    def test_count_travels_alone(self, step, worker_connector):
        """A count that is announced in a step without other news still arrives."""
        mock, announced = worker_connector
        finishes(mock, None)
        output = step()
        if announced:
            assert output.kv_connector_output.expected_finished_count == announced
        else:
            assert output is EMPTY_MODEL_RUNNER_OUTPUT
