# SPDX-License-Identifier: Apache-2.0
"""Which backends' caches are read: those that are known to store in a known way."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from vllm.v1.attention import backends
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.flex_attention import FlexAttentionBackend
from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend

from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine import attention_backends
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.attention_backends import (
    packs_tokens,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import LocalLayoutError

KNOWN = {**attention_backends._PLAIN, **attention_backends._PACKED}
ROOT = Path(backends.__path__[0])


def made_in(module: str, name: str, *bases: type) -> type:
    """A backend of that name, which a module of vLLM's would define."""
    methods = {"get_name": staticmethod(lambda: name), "get_impl_cls": staticmethod(lambda: None)}
    return type("Backend", bases, {"__module__": f"vllm.v1.attention.backends.{module}", **methods})


@pytest.mark.parametrize(
    ("backend", "packed"),
    [(FlexAttentionBackend, False), (TritonMLABackend, False), (CPUAttentionBackend, True)],
)
def test_known_backends_are_served(backend, packed):
    """Plain strides, or whole heads that only the backend can look into."""
    assert packs_tokens("layer", backend) is packed


def test_subclass_that_only_builds_other_metadata_is_the_same():
    """VLLM makes such for chunks, cross attention and layers that share a cache."""
    chunked = type("Chunked", (FlexAttentionBackend,), {"get_builder_cls": lambda: None})
    assert packs_tokens("layer", chunked) is False


@pytest.mark.parametrize(
    ("module", "name"),
    [
        # Has the shape of a plain cache, and packs tokens for its kernels.
        ("rocm_attn", "ROCM_ATTN"),
        # Is called as another one is.
        ("rocm_aiter_fa", "FLASH_ATTN"),
        ("b12x", "B12X"),
        ("turboquant_attn", "TURBOQUANT"),
        ("mla.indexer", "DEEPSEEK_V32_INDEXER"),
    ],
)
def test_others_are_refused_by_name(module, name):
    """The message names the layer, the backend, where it comes from and those that are served."""
    with pytest.raises(LocalLayoutError) as caught:
        packs_tokens("model.layers.3", made_in(module, name))
    message = str(caught.value)
    assert f"layer model.layers.3 uses attention backend {name} of vllm" in message
    assert module in message
    assert "use --attention-backend with one of AMX_MLA, CPU_ATTN, CPU_MLA" in message


def test_implementation_of_its_own_makes_another_backend():
    """A model's backend may keep the name of the one that it stores differently from."""
    methods = {"__module__": "vllm.models.some", "get_impl_cls": staticmethod(lambda: None)}
    own = type("Own", (FlexAttentionBackend,), methods)
    with pytest.raises(LocalLayoutError, match=r"FLEX_ATTENTION of vllm\.models\.some and vllm"):
        packs_tokens("layer", own)


def test_every_name_is_that_of_a_backend_of_its_module():
    """Modules are read, not imported: some need what only GPUs have. Some are not in all bases."""
    found = set()
    for name, module in KNOWN.items():
        path = ROOT / (module.replace(".", "/") + ".py")
        if not path.exists():
            continue
        tree = ast.parse(path.read_text())
        functions = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and node.name == "get_name"
        ]
        names = {
            statement.value.value
            for function in functions
            for statement in function.body
            if isinstance(statement, ast.Return) and isinstance(statement.value, ast.Constant)
        }
        assert name in names, path
        found.add(name)
    later = {"AMX_MLA", "CPU_MLA", "TRITON_ATTN_DIFFKV"}
    assert found >= KNOWN.keys() - later
