# SPDX-License-Identifier: Apache-2.0
"""The memory of an arena, with huge pages and without."""

from __future__ import annotations

import mmap

import pytest
import torch

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.transport import staging_area


class Refusing(mmap.mmap):
    """Memory of a system that has no huge pages."""

    def madvise(self, *_):
        """Fail, as on a kernel without them."""
        raise OSError("no huge pages today")


@pytest.mark.parametrize("without", ["nothing", "the advice", "huge pages"])
def test_arena_is_there_whatever_pages_there_are(monkeypatch, without):
    """Every byte can be written and read again, and NIXL is told where it lies."""
    if without == "the advice":
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    elif without == "huge pages":
        monkeypatch.setattr(mmap, "mmap", Refusing)
    size_bytes = 3 * mmap.PAGESIZE + 1
    area = staging_area.open_area([torch.zeros(1)], size_bytes)
    assert area is not None
    assert area.region == (area.memory.data_ptr(), size_bytes, 0)
    area.memory.copy_(torch.arange(size_bytes) % 251)
    assert torch.equal(area.memory, (torch.arange(size_bytes) % 251).to(torch.uint8))
    area.scatterer.close()
