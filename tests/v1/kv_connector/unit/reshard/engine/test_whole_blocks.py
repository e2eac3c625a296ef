# SPDX-License-Identifier: Apache-2.0
"""Engines whose attention backends differ, or are not known, over real NIXL."""

from __future__ import annotations

import re

import pytest

from tests.bases import skip_module_unless_base
from tests.v1.kv_connector.unit.reshard.engine.workers import (
    Progress,
    assert_received,
    every_strategy,
    fill,
    receive,
)
from tests.v1.kv_connector.unit.reshard.forms import backend_of

skip_module_unless_base("0.32.0", "0.33.0", reason="caches are not views")

BACKENDS = "vllm.v1.attention.backends"
HOPPER = backend_of(f"{BACKENDS}.flash_attn", "FLASH_ATTN")
BLACKWELL = backend_of(f"{BACKENDS}.flashinfer", "FLASHINFER")
HOPPER_MLA = backend_of(f"{BACKENDS}.mla.flashattn_mla", "FLASH_ATTN_MLA")
BLACKWELL_MLA = backend_of(f"{BACKENDS}.mla.flashinfer_mla", "FLASHINFER_MLA")
UNKNOWN = backend_of("vllm.models.some", "SECRET")


def transfer(engines, prefill: dict, decode: dict, blocks=(3, 4, 1)) -> tuple[object, object]:
    """Have a request read into some blocks; returns the decode engine and what it is to hold."""
    p, d = engines("prefill", **prefill), engines("decode", **decode)
    address = p.serve()
    whole = fill(p, [5, 2, 9])
    p.offer("p-a")
    d.start(receive={"d-a": receive(address, list(blocks), [5, 2, 9])})
    Progress(p, d).until(d, received="d-a")
    return d, whole


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (dict(backend=HOPPER, tp=2), dict(backend=BLACKWELL)),
        (dict(backend=HOPPER), dict(backend=BLACKWELL, tp=2, token_major=True)),
        (dict(backend=HOPPER, pp=2), dict(backend=BLACKWELL, tp=2, block_tokens=48)),
        (dict(backend=HOPPER_MLA, mla=True, tp=2), dict(backend=BLACKWELL_MLA, mla=True)),
    ],
    ids=["TP2 to TP1", "HND to NHD", "PP2 to TP2 and larger blocks", "MLA"],
)
@every_strategy
def test_backends_of_other_names_are_a_pair(engines, prefill, decode):
    """Prefill on Hopper and decode on Blackwell: the slots of both are plain."""
    blocks = [3] if decode.get("block_tokens") else [3, 4, 1]
    d, whole = transfer(engines, prefill, decode, blocks)
    assert_received(d, blocks, whole)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (dict(mla=True, tp=2), dict(mla=True)),
        (dict(mla=True), dict(mla=True, tp=2)),
        (dict(mla=True, pp=2), dict(mla=True, tp=2)),
        (dict(tp=2, pp=2), dict(tp=2)),
        (dict(tp=2), dict(tp=2, pp=2)),
    ],
    ids=["MLA TP2 to TP1", "MLA TP1 to TP2", "MLA PP2 to TP2", "PP2 to PP1", "PP1 to PP2"],
)
@every_strategy
def test_blocks_that_nobody_looks_into_are_read(engines, prefill, decode):
    """As wholes: those that all ranks keep at any TP, others at an equal one; PP may differ."""
    d, whole = transfer(engines, dict(prefill, backend=UNKNOWN), dict(decode, backend=UNKNOWN))
    assert_received(d, [3, 4, 1], whole)


@pytest.mark.parametrize(
    ("prefill", "decode", "message"),
    [
        (
            dict(tp=2),
            dict(),
            r"layer layers.0 mean something else: specification is .*num_kv_heads=1.* there and "
            r".*num_kv_heads=2.* here.*: on both engines, .*the same --tensor-parallel-size",
        ),
        (
            dict(mla=True),
            dict(mla=True, block_tokens=24),
            r"layer layers.0 mean something else: shape and strides is .*16.* there and .*24",
        ),
        (
            dict(),
            dict(token_major=True),
            r"layer layers.0 mean something else: shape and strides is .* VLLM_KV_CACHE_LAYOUT",
        ),
        (
            dict(),
            dict(backend=backend_of("vllm.models.other", "SECRET")),
            r"written by is vllm.models.some.Backend .* there and vllm.models.other.Backend .* "
            r"here: on both engines, give the same --attention-backend, or, where the model "
            r"chooses by the device, use devices of one kind and generation",
        ),
        (
            dict(),
            dict(backend=HOPPER),
            r"layer layers.0 mean something else: arrangement is whole blocks there and slots here",
        ),
    ],
    ids=["a cut of heads", "other blocks", "another order", "another backend", "a known backend"],
)
def test_blocks_that_would_have_to_be_cut_are_refused(
    engines, caplog_vllm, prefill, decode, message
):
    """At the handshake, by the layer's name, with what differs and what to do."""
    d, _ = transfer(
        engines, dict(backend=UNKNOWN, **prefill), dict(dict(backend=UNKNOWN), **decode)
    )
    (worker,) = d.workers.values()
    assert set(worker.report.take_failed()) == {"d-a"}
    assert re.search(message, caplog_vllm.text)
