# SPDX-License-Identifier: Apache-2.0
"""What an engine is configured to do, and what it says of values that cannot be."""

from __future__ import annotations

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from vllm.config import KVTransferConfig

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.settings import (
    Settings,
    read_settings,
    remarks,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import (
    LocalChannelError,
    LocalLayoutError,
)

NAMES = sorted(Settings.__struct_encode_fields__)


def config(extra, **fields) -> KVTransferConfig:
    """A configuration with some extra options."""
    given = {"kv_role": "kv_both", "kv_connector_extra_config": extra} | fields
    return KVTransferConfig(kv_connector="NixlConnector", **given)


def test_defaults_are_upstreams():
    """Nothing has to be configured."""
    assert read_settings(config({})) == Settings()
    assert (Settings().lease_s, Settings().num_threads, Settings().backends) == (30, 4, ("UCX",))


def test_options_are_read():
    """Each under the name that upstream gives it."""
    settings = read_settings(
        config(
            {
                "kv_lease_duration": 12,
                "num_threads": 2,
                "backends": ["UCX", "GDS"],
                "nixl_progress_delay_us": 50,
                "enforce_handshake_compat": False,
                "bidirectional_kv_xfer": True,
                "kv_recompute_threshold": "8",
                "decoder_kv_blocks_ttl": 60.5,
                "enable_cross_layers_blocks": "True",
                "engine_ttl": 90,
            }
        )
    )
    assert settings == Settings(12.0, 2, ("UCX", "GDS"), 50, False, True, 8, 60.5, True, 90.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kv_lease_duration", "30"),
        ("kv_lease_duration", 0),
        ("kv_lease_duration", float("nan")),
        ("engine_ttl", "an hour"),
        ("engine_ttl", float("nan")),
        ("num_threads", 1.5),
        ("num_threads", -1),
        ("backends", "UCX"),
        ("backends", []),
        ("backends", [1]),
        ("nixl_progress_delay_us", "fast"),
        ("enforce_handshake_compat", "no"),
        ("bidirectional_kv_xfer", "False"),
        ("kv_recompute_threshold", "many"),
        ("decoder_kv_blocks_ttl", -1),
        ("enable_cross_layers_blocks", "maybe"),
        ("side_channel_key_file", ""),
        ("side_channel_key_file", 7),
        ("trusted_peers", "10.0.0.0/8"),
        ("trusted_peers", ["10.0.0.1/8"]),
        ("trusted_peers", ["engine.example"]),
        ("trusted_peers", [1]),
    ],
)
def test_values_that_cannot_be_are_named(name, value):
    """The engine does not start, and the error leads to the option."""
    with pytest.raises(LocalLayoutError, match=rf"kv_connector_extra_config.*\$\.{name}.*correct"):
        read_settings(config({name: value}))


@pytest.mark.parametrize(
    ("backends", "on_cpu_us", "elsewhere_us"),
    [(["UCX"], 10_000, 0), (["LIBFABRIC"], 100, 100), (["UCX", "GDS"], 100, 100)],
)
def test_progress_threads_rest(backends, on_cpu_us, elsewhere_us):
    """Unless the options say otherwise; agents that are polled cost nothing while they are idle."""
    settings = read_settings(config({"backends": backends}))
    assert settings.progress_delay_us(on_cpu=True) == on_cpu_us
    assert settings.progress_delay_us(on_cpu=False) == elsewhere_us
    settings = read_settings(config({"backends": backends, "nixl_progress_delay_us": 7}))
    assert settings.progress_delay_us(on_cpu=True) == 7


def test_networks_are_read():
    """None is any; each is held against addresses."""
    assert read_settings(config({})).trusted() is None
    trusted = read_settings(config({"trusted_peers": ["10.0.0.0/8", "fd00::1"]})).trusted()
    assert trusted is not None
    assert trusted.fault("10.1.2.3") is trusted.fault("fd00::1") is None
    assert trusted.fault("192.0.2.1")


def test_key_is_read_from_its_file(tmp_path):
    """At the start of an engine, which then does not start where there is none."""
    assert read_settings(config({})).channel_key() is None
    file = tmp_path / "key"
    settings = read_settings(config({"side_channel_key_file": str(file)}))
    with pytest.raises(LocalChannelError, match=f"side_channel_key_file {file} cannot be read"):
        settings.channel_key()
    file.touch(0o600)
    file.write_bytes(zmq.curve_keypair()[1])
    assert settings.channel_key() is not None


@given(
    extra=st.dictionaries(
        st.sampled_from(NAMES),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
            max_leaves=4,
        ),
    )
)
def test_any_value_is_read_or_refused(extra):
    """Nothing that JSON can say makes an engine fail in another way."""
    try:
        assert read_settings(config(extra)).lease_s > 0
    except LocalLayoutError as error:
        assert "\n" not in str(error)


def remarks_on(transfer: KVTransferConfig, host: str = "10.0.0.1") -> list[str]:
    """What is said of a configuration when it is read."""
    return remarks(transfer, read_settings(transfer), host)


@pytest.mark.parametrize("host", ["", "localhost", "127.0.0.1", "0.0.0.0", "::", "::1", "[::1]"])
def test_host_that_leads_nobody_here_is_said(host):
    """Of an engine that is read from; who only reads is asked by nobody."""
    (remark,) = remarks_on(config({}, kv_role="kv_producer"), host)
    assert f"VLLM_NIXL_SIDE_CHANNEL_HOST is '{host}'" in remark
    assert remarks_on(config({}, kv_role="kv_consumer"), host) == []
    both = {"bidirectional_kv_xfer": True}
    assert remarks_on(config(both, kv_role="kv_consumer", kv_load_failure_policy="recompute"), host)
    for other in ("10.0.0.1", "engine.example", "fd00::1"):
        assert remarks_on(config({}, kv_role="kv_producer"), other) == []


def test_what_does_nothing_is_said():
    """Options that are unknown, or not needed here, get a line each; plain ones get none."""
    extra = {"kv_lease_duratoin": 9, "enable_cross_layers_blocks": True}
    unknown, permute, cross_layers = remarks_on(config(extra, enable_permute_local_kv=True))
    assert "'kv_lease_duratoin', which this connector does not know" in unknown
    assert "enable_permute_local_kv is not needed" in permute
    assert "enable_cross_layers_blocks makes nothing faster" in cross_layers
    assert remarks_on(config({"num_threads": 2})) == []
    (unchecked,) = remarks_on(config({"enforce_handshake_compat": False}))
    assert "are not refused" in unchecked
    (other_weights,) = remarks_on(config({"allow_other_weights": True}))
    assert "computed with other weights are read" in other_weights


@pytest.mark.parametrize(("policy", "told"), [("fail", True), ("recompute", False)])
def test_turns_that_may_fail_are_told_of(policy, told):
    """What the last turn left is used for the same tokens only."""
    found = remarks_on(config({"bidirectional_kv_xfer": True}, kv_load_failure_policy=policy))
    assert [("a turn that does not go on" in remark) for remark in found] == [True] * told
