# SPDX-License-Identifier: Apache-2.0
"""Requests with LoRA adapters, through vLLM's scheduler and real workers."""

from __future__ import annotations

import shutil

import pytest
from vllm.lora.request import LoRARequest

from tests.v1.kv_connector.unit.reshard.serving import PROMPT_TOKENS, from_prefill, until


@pytest.fixture
def folders(tmp_path):
    """Where two engines keep one adapter."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    (here / "adapter_config.json").write_text('{"r": 8}')
    (here / "adapter_model.safetensors").write_bytes(bytes(1000))
    shutil.copytree(here, there)
    return here, there


def change(folder) -> None:
    """Put another training there."""
    (folder / "adapter_model.safetensors").write_bytes(bytes(999) + b"1")


def tell(params) -> str | None:
    """What an engine said of its adapter."""
    return params["remote_adapter"]


@pytest.mark.parametrize("equal", [True, False])
def test_adapter_of_the_other_engine(wholes, folders, caplog_vllm, equal):
    """Of one name at both, it must be the same one; else the request fails and is told why."""
    here, there = folders
    if not equal:
        change(there)
    p, d = wholes("prefill", {}), wholes("decode", {})
    p.serving.add("p", {"do_remote_decode": True}, adapter=LoRARequest("sql", 1, str(here)))
    until(lambda: "p" in p.serving.finished, p)
    handed_over = p.serving.handed_over["p"]
    d.serving.add("d", handed_over, max_tokens=2, adapter=LoRARequest("sql", 7, str(there)))
    until(lambda: "d" in d.serving.finished, p, d)
    assert str(d.serving.finished["d"]) == ("length" if equal else "error")
    told = f"its adapter sql is {tell(handed_over)} there and "
    assert equal or told in caplog_vllm.text


@pytest.mark.parametrize("theirs", [{}, {"remote_adapter": "ours"}], ids=["dropped", "changed"])
def test_what_the_other_engine_said_is_bound(wholes, folders, theirs):
    """A client that changes or drops what was said of the adapter does not get its KV."""
    here, there = folders
    change(there)
    p, d = wholes("prefill", {}), wholes("decode", {})
    p.serving.add("p", {"do_remote_decode": True}, adapter=LoRARequest("sql", 1, str(here)))
    until(lambda: "p" in p.serving.finished, p)
    handed_over = p.serving.handed_over["p"] | theirs
    if not theirs:
        del handed_over["remote_adapter"]
    d.serving.add("d", handed_over, adapter=LoRARequest("sql", 7, str(there)))
    until(lambda: "d" in d.serving.finished, p, d)
    assert str(d.serving.finished["d"]) == "error"


def test_engine_that_does_not_tell(serving, folders, caplog_vllm):
    """An older build's blocks are bound to the adapter's name, as before, and a line says so."""
    d, (here, _) = serving(), folders
    d.add("d", from_prefill(), adapter=LoRARequest("old", 1, str(here)))
    d.step()
    (receive,) = d.told.receive.values()
    assert receive.fault is None and receive.local_tokens == PROMPT_TOKENS
    assert "Adapter old is known by its name alone" in caplog_vllm.text


@pytest.mark.parametrize("why", ["changed", "unknown"])
def test_nothing_is_read_where_it_cannot_be_told(serving, folders, why):
    """Neither from the other engine nor from this one's prefix cache, and the blocks are freed."""
    d, (here, _) = serving(), folders
    adapter = LoRARequest("sql", 1, str(here) if why == "changed" else "nobody/nothing")
    d.add("before", num_tokens=49, adapter=adapter)
    d.step()
    change(here)
    adapter.load_inplace = True
    d.add("d", from_prefill(remote_adapter="theirs"), num_tokens=49, adapter=adapter)
    assert d.step()["d"] == 49
    (receive,) = d.told.receive.values()
    assert not any(receive.local_block_ids)


def test_adapter_that_changes_while_it_computes(serving, folders):
    """Nobody else's adapter is both."""
    p, (here, _) = serving(), folders
    adapter = LoRARequest("sql", 1, str(here), load_inplace=True)
    p.add("p", {"do_remote_decode": True}, adapter=adapter)
    change(here)
    p.step()
    assert " or " in tell(p.handed_over["p"])
