# SPDX-License-Identifier: Apache-2.0
"""NIXL counters in the text of a metrics page."""

from __future__ import annotations

from tools.pdstack.metrics import NixlCounters, parse_nixl_counters, settled

PAGE = """\
# HELP vllm:nixl_bytes_transferred Histogram of bytes transferred per NIXL KV Cache transfers.
# TYPE vllm:nixl_bytes_transferred histogram
vllm:nixl_bytes_transferred_bucket{engine="0",le="2048.0",model_name="m"} 0.0
vllm:nixl_bytes_transferred_bucket{engine="0",le="+Inf",model_name="m"} 2.0
vllm:nixl_bytes_transferred_count{engine="0",model_name="m"} 2.0
vllm:nixl_bytes_transferred_sum{engine="0",model_name="m"} 3.538944e+07
vllm:nixl_bytes_transferred_bucket{engine="1",le="+Inf",model_name="m"} 1.0
vllm:nixl_bytes_transferred_count{engine="1",model_name="m"} 1.0
vllm:nixl_bytes_transferred_sum{engine="1",model_name="m"} 60.0
# HELP vllm:nixl_read_failures_total Requests whose blocks could not be read.
# TYPE vllm:nixl_read_failures_total counter
vllm:nixl_read_failures_total{engine="0",model_name="m",reason="lease"} 1.0
vllm:nixl_read_failures_total{engine="0",model_name="m",reason="transfer"} 3.0
# HELP vllm:nixl_num_kv_expired_reqs_total Number of requests that had their KV expire.
# TYPE vllm:nixl_num_kv_expired_reqs_total counter
vllm:nixl_num_kv_expired_reqs_total{engine="0",model_name="m"} 5.0
# HELP vllm:nixl_prefill_wait_seconds Histogram of the time requests wait for their prefill.
# TYPE vllm:nixl_prefill_wait_seconds histogram
vllm:nixl_prefill_wait_seconds_bucket{engine="0",le="+Inf",model_name="m"} 6.0
vllm:nixl_prefill_wait_seconds_count{engine="0",model_name="m"} 6.0
vllm:nixl_prefill_wait_seconds_sum{engine="0",model_name="m"} 0.75
# HELP vllm:nixl_prefetched_bytes_total Bytes read of requests that were still being computed.
# TYPE vllm:nixl_prefetched_bytes_total counter
vllm:nixl_prefetched_bytes_total{engine="0",model_name="m"} 8.0
# HELP vllm:nixl_first_tokens_seeded_total Answers that begin with the prefill engine's token.
# TYPE vllm:nixl_first_tokens_seeded_total counter
vllm:nixl_first_tokens_seeded_total{engine="0",model_name="m"} 7.0
# HELP vllm:nixl_read_bytes_total Bytes read from other engines.
# TYPE vllm:nixl_read_bytes_total counter
vllm:nixl_read_bytes_total{engine="0",model_name="m",strategy="direct"} 90.0
vllm:nixl_read_bytes_total{engine="0",model_name="m",strategy="staged"} 9.0
# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="m"} 99.0
"""


def test_counters_are_summed_over_engines() -> None:
    """Each counter is the sum over the label sets, and other metrics do not count."""
    assert parse_nixl_counters(PAGE) == NixlCounters(
        bytes_moved=35389500,
        transfers=3,
        failed_reads=4,
        expired_requests=5,
        prefill_waits=6,
        prefetched_bytes=8,
        first_tokens=7,
        staged_bytes=9,
    )


def test_a_page_without_nixl_is_all_zero() -> None:
    """An engine without a connector has moved nothing."""
    assert parse_nixl_counters("") == NixlCounters()


def test_counters_add_and_subtract() -> None:
    """A difference between two readings says what happened in between."""
    before, after = NixlCounters(10, 1, 0, 0, 2), NixlCounters(30, 2, 1, 0, 2)
    assert after - before == NixlCounters(20, 1, 1, 0, 0)
    assert before + (after - before) == after


def test_settled_waits_for_the_counters_to_move() -> None:
    """A reading that still equals the old one is repeated."""
    readings = iter([NixlCounters(1), NixlCounters(1), NixlCounters(7)])
    assert settled(lambda: next(readings), NixlCounters(1), limit_s=30) == NixlCounters(7)


def test_settled_gives_up() -> None:
    """Counters that never move are returned as they are when the time is over."""
    assert settled(lambda: NixlCounters(1), NixlCounters(1), limit_s=0) == NixlCounters(1)
