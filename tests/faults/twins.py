# SPDX-License-Identifier: Apache-2.0
"""What decides each change in the place of faults that real engines act out nightly.

A twin is the name of a defect that `simulation/test_mutations.py` plants and finds, or the test
without engines, as `file::function` below the connector's unit tests.
"""

from __future__ import annotations

TWINS = {
    "test_hosts.py::test_slow_link_costs_time_only": (
        "transport/test_transfers.py::test_every_read_is_looked_at_in_turns",
        "requests_are_quiet_once_given_up",
    ),
    "test_hosts.py::test_lossy_link_costs_time_only": (
        "transport/test_transfers.py::test_every_read_is_looked_at_in_turns",
        "requests_are_quiet_once_given_up",
    ),
    "test_hosts.py::test_packets_that_are_lost": (
        "deadlines_are_missed",
        "hung_reads_of_failed_requests_have_no_deadline",
    ),
    "test_hosts.py::test_large_packets_that_are_lost_before_the_first_handshake": (
        "transport/test_side_channel.py::test_peer_that_is_stuck",
    ),
    "test_hosts.py::test_host_that_is_cut_off_during_a_read_that_is_computed": (
        "blocks_are_free_once_nixl_says_failed",
        "connections_drain_for_ever",
    ),
    "test_hung_peers.py::test_hung_prefill_engine_costs_its_requests_in_time": (
        "deadlines_are_missed",
        "connections_are_not_retired",
    ),
    "test_hung_peers.py::test_machine_that_stands_still_costs_nothing": (
        "leases_run_while_a_machine_stands_still",
    ),
    "test_keys.py::test_engines_with_the_same_key_read_from_each_other": (
        "transport/test_authentication.py::test_right_key",
    ),
    "test_keys.py::test_key_that_everybody_can_read_is_refused_at_the_start": (
        "transport/test_authentication.py::test_file_for_everybody",
    ),
    "test_long_steps.py::test_step_of_two_leases_costs_none": (
        "leases_are_renewed_by_steps_alone",
    ),
    "test_lost_peers.py::test_taken_port_is_refused_at_the_start": (
        "transport/test_side_channel.py::test_port_that_is_taken",
    ),
    "test_mismatched_peers.py::test_decode_engine_that_does_not_match_is_refused": (
        "engine/test_worker.py::test_other_dtype_is_refused_at_the_handshake",
        "transport/test_side_channel.py::test_differing_factor",
    ),
    "test_mismatched_peers.py::test_upstreams_connector_cannot_read_from_ours": (
        "transport/test_side_channel.py::test_upstreams_worker_refuses_at_the_handshake",
    ),
    "test_mismatched_peers.py::test_ours_cannot_read_from_upstreams_connector": (
        "transport/test_side_channel.py::test_our_client_at_upstreams_listener",
    ),
}
