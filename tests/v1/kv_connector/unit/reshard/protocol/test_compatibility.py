# SPDX-License-Identifier: Apache-2.0
"""Two engines' factors are compared."""

from __future__ import annotations

import pytest

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import RemoteIncompatibleError
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.compatibility import (
    check_compatibility,
)


def test_factor_that_one_side_does_not_know():
    """A factor that only one engine names is a difference, on either side."""
    with pytest.raises(RemoteIncompatibleError, match="colour is unset there and red here"):
        check_compatibility({"colour": "red"}, {})
    with pytest.raises(RemoteIncompatibleError, match="colour is red there and unset here"):
        check_compatibility({}, {"colour": "red"})


def test_factors_that_a_peer_made_up_do_not_flood_the_log():
    """Some are named, with what makes them equal, and the others are counted."""
    with pytest.raises(RemoteIncompatibleError, match=r"15 is 15 there .*; and 4 more: ") as caught:
        check_compatibility({}, {f"{number:02}": str(number) for number in range(20)})
    assert len(str(caught.value)) < 1000
