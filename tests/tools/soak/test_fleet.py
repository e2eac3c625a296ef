# SPDX-License-Identifier: Apache-2.0
"""Engines have four layouts and small pools, and their metrics are read as they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.pdstack.engine import Device, ServedModel, engine_command, engine_env
from tools.pdstack.errors import PDStackError
from tools.soak.faults import Role
from tools.soak.fleet import FleetSettings, choose_worker, engine_spec, read_pool
from tools.soak.schedule import SEATS

PAGE = """\
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0"} 0.25
# TYPE vllm:nixl_held_blocks gauge
vllm:nixl_held_blocks{engine="0"} 4.0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 2.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0"} 3.0
# TYPE vllm:nixl_prefill_wait_seconds histogram
vllm:nixl_prefill_wait_seconds_count{engine="0"} 9.0
vllm:nixl_prefill_wait_seconds_sum{engine="0"} 1.5
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{engine="0"} 7.0
# TYPE vllm:nixl_prefetched_bytes counter
vllm:nixl_prefetched_bytes_total{engine="0"} 512.0
"""


@pytest.mark.parametrize("seat", SEATS, ids=lambda seat: seat.name)
def test_engine_is_started_as_its_seat_says(seat):
    """Its layout, its transports, its policy and its lease are on the command line or beside it."""
    settings = FleetSettings(ucx_tls="tcp", lease_s=9.0)
    spec = engine_spec(
        seat, 3, seat.placement, settings, port=1, side_channel_port=2, recompute=True
    )
    command = engine_command(spec, ServedModel(Path("m"), "m"), Device.CPU, 1, "vllm")
    env = engine_env(spec, Device.CPU, {}, side_channel_port=2, cores=[0])
    assert spec.name == f"{seat.name}.3"
    assert env["UCX_TLS"] == "tcp"
    # Or the engine grows by hundreds of MiB, of which none is leaked.
    assert int(env["ONEDNN_PRIMITIVE_CACHE_CAPACITY"]) < 100
    stages = ",".join(map(str, seat.placement.stage_layers))
    assert env.get("VLLM_PP_LAYER_PARTITION", "") == stages
    config = json.loads(command[command.index("--kv-transfer-config") + 1])
    assert config["kv_load_failure_policy"] == "recompute"
    if seat.offloads:
        config, beside = config["kv_connector_extra_config"]["connectors"]
        assert beside["kv_connector"] == "OffloadingConnector"
        assert config["kv_load_failure_policy"] == "recompute"
    assert config["kv_connector_extra_config"]["seed_first_token"] is seat.seeded
    assert config["kv_connector_extra_config"]["kv_lease_duration"] == 9.0
    assert config["kv_connector_extra_config"]["early_dispatch"] is seat.early
    # So that prompts are preempted in the middle, and read in chunks.
    in_chunks = seat.role is Role.PREFILL
    assert ("--no-scheduler-reserve-full-isl" in command) is in_chunks
    assert ("--long-prefill-token-threshold" in command) is in_chunks


def test_pool_is_read_from_metrics():
    """A metric that an engine does not have is 0."""
    reading = read_pool(PAGE, "decode-1", 2, 30.0)
    assert (reading.usage, reading.held_blocks, reading.unfinished) == (0.25, 4.0, 5.0)
    assert (reading.running, reading.waiting) == (2.0, 3.0)
    assert (reading.blocks_in_doubt, reading.preemptions, reading.early) == (0.0, 7.0, 9.0)
    assert reading.prefetched_bytes == 512.0
    assert not reading.is_whole
    assert read_pool("", "decode-1", 2, 30.0).is_whole


@pytest.mark.parametrize(
    "line",
    [
        "vllm:kv_cache_usage_perc 0.01",
        "vllm:nixl_held_blocks 1",
        "vllm:nixl_kv_blocks_in_doubt 1",
        "vllm:num_requests_running 1",
        "vllm:num_requests_waiting 1",
    ],
)
def test_any_block_or_request_keeps_a_pool_from_being_whole(line):
    """Also those that are kept because a read may still write into them."""
    assert not read_pool(f"{line}\n", "decode-1", 1, 0.0).is_whole


class Process:
    """A process with a title."""

    def __init__(self, title: str) -> None:
        self.title = title

    def cmdline(self) -> list[str]:
        """The title, as a process that gives itself one has it."""
        return [self.title]


def test_workers_are_those_that_compute():
    """They are counted by their ranks, round and round; others are left alone."""
    titles = ["vllm serve", "VLLM::EngineCore", "VLLM::Worker_TP1", "VLLM::Worker_TP0"]
    processes = [Process(title) for title in titles]
    chosen = [choose_worker(processes, number).title for number in range(3)]
    assert chosen == ["VLLM::Worker_TP0", "VLLM::Worker_TP1", "VLLM::Worker_TP0"]


def test_core_computes_where_there_is_no_worker():
    """An engine with one rank may have it in its core's process."""
    processes = [Process("vllm serve"), Process("VLLM::EngineCore")]
    assert choose_worker(processes, 3).title == "VLLM::EngineCore"
    with pytest.raises(PDStackError, match="no worker among vllm serve"):
        choose_worker(processes[:1], 0)
