# SPDX-License-Identifier: Apache-2.0
"""`MultiConnector` and the handshake metadata of pipeline stages."""

from __future__ import annotations

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_cache_interface import KVCacheConfig

ONE_STAGE = {(0, 0): "p0t0", (0, 1): "p0t1"}
TWO_STAGES = {**ONE_STAGE, (1, 0): "p1t0", (1, 1): "p1t1"}


@pytest.fixture
def make_multi(make_config, connectors):
    """Builds a `MultiConnector` of the named children and returns it with them."""

    def make(*names: str):
        children = [{"kv_connector": name, "kv_role": "kv_both"} for name in names]
        config = make_config("MultiConnector", extra_config={"connectors": children})
        multi = KVConnectorFactory.create_connector(
            config, KVConnectorRole.SCHEDULER, KVCacheConfig(0, [], [])
        )
        return multi, list(connectors)

    return make


def test_every_child_gets_the_metadata_of_every_stage(make_multi):
    """Children that tell stages apart all receive the whole dictionary."""
    multi, children = make_multi("StageAwareConnector", "StageAwareConnector")
    multi.set_xfer_handshake_metadata_pp_aware(TWO_STAGES)
    assert [child.by_stage for child in children] == [TWO_STAGES, TWO_STAGES]


def test_one_stage_is_unwrapped_for_older_children(make_multi):
    """A child that knows tp ranks only is served as before when there is one stage."""
    multi, children = make_multi("RecordingConnector", "StageAwareConnector")
    multi.set_xfer_handshake_metadata_pp_aware(ONE_STAGE)
    assert children[0].by_tp_rank == {0: "p0t0", 1: "p0t1"}
    assert children[1].by_stage == ONE_STAGE


def test_a_child_that_cannot_tell_stages_apart_is_named(make_multi):
    """The refusal names the child, not the MultiConnector around it."""
    multi, _ = make_multi("StageAwareConnector", "RecordingConnector")
    with pytest.raises(ValueError, match=r"RecordingConnector .*does not support PP-") as error:
        multi.set_xfer_handshake_metadata_pp_aware(TWO_STAGES)
    assert "MultiConnector" not in str(error.value)


@pytest.mark.parametrize("order", [1, -1])
def test_a_child_without_metadata_is_asked_nothing(make_multi, order):
    """It cannot tell stages apart, and has none to tell: as OffloadingConnector."""
    multi, children = make_multi(*("StageAwareConnector", "PlainConnector")[::order])
    multi.set_xfer_handshake_metadata_pp_aware(TWO_STAGES)
    assert [child.by_stage for child in children][::order] == [TWO_STAGES, None]
    assert (
        OffloadingConnector.set_xfer_handshake_metadata
        is KVConnectorBase_V1.set_xfer_handshake_metadata
    )


def test_metadata_by_tp_rank_still_reaches_every_child(make_multi):
    """Callers of the older method see no change."""
    multi, children = make_multi("RecordingConnector", "RecordingConnector")
    multi.set_xfer_handshake_metadata({0: "t0"})
    assert [child.by_tp_rank for child in children] == [{0: "t0"}, {0: "t0"}]
