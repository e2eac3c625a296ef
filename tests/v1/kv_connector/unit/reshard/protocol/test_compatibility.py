# SPDX-License-Identifier: Apache-2.0
"""Two engines' factors are compared, and what peers wrote is quoted."""

from __future__ import annotations

import pytest

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import RemoteIncompatibleError
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.compatibility import (
    check_compatibility,
    quote,
)


def test_factor_that_one_side_does_not_know():
    """A factor that only one engine names is a difference, on either side."""
    with pytest.raises(RemoteIncompatibleError, match="colour is unset there and red here"):
        check_compatibility({"colour": "red"}, {})
    with pytest.raises(RemoteIncompatibleError, match="colour is red there and unset here"):
        check_compatibility({}, {"colour": "red"})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "unset"),
        ("plain", "plain"),
        ("two\nlines", r"'two\nlines'"),
        ("\x1b[31m", r"'\x1b[31m'"),
        ("x" * 300, "x" * 200 + "..."),
    ],
)
def test_quoted_text_is_one_short_printable_line(text, expected):
    """What a peer wrote can neither break lines of a log nor flood it."""
    assert quote(text) == expected
