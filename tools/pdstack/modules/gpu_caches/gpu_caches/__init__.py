# SPDX-License-Identifier: Apache-2.0
"""Engines on CPU whose caches are filled as backends for GPUs fill theirs.

What a connector sees of a GPU's cache is strides, and what lies where in a block. Attention in
torch takes the place of vLLM's for CPU, through vLLM's own registry: it writes and reads every byte
where a backend for GPUs has it, and computes at float32, so that answers can be compared token by
token. An engine that has this directory on PYTHONPATH takes the format that GPU_CACHES names.
`VLLM_KV_CACHE_LAYOUT` and `--block-size` are vLLM's own, and say the rest; with
GPU_CACHES_KERNEL_BLOCK a backend takes blocks of so many tokens, several of vLLM's one.

The connector knows a format by two things that it asks of a backend: its name, and the module that
it stands in. It has to be the connector's own table that decides here, too, without a word in it of
what is here. So each backend says for which of the release's it stands, and has the name and the
module that the release's registry has for that one. This is a claim, which tests hold against the
release: `test_gpu_caches` compares what is written with what the release's own writers write, byte
for byte, and what is computed with its kernels for CPU. Where CUDA alone has a writer, places are
those of the release's views. Backends that stand for nobody keep the module that they are in. To
the connector they are not known, and what is in their blocks is no business of its own.
"""

from __future__ import annotations

import os

VARIABLE = "GPU_CACHES"


def register() -> None:
    """Take the places of vLLM's backends for CPU, where the environment asks for it."""
    chosen = os.environ.get(VARIABLE)
    if not chosen:
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if chosen == "Planes":
        # Of 0.22.1, which has none of what the others are made of.
        register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.planes.{chosen}")
        return
    from . import shared_tokens
    from .platform import leave_block_size, shuffle

    heads, latents = f"{__name__}.heads.{chosen}", f"{__name__}.latents.{chosen}"
    register_backend(AttentionBackendEnum.CPU_ATTN, heads)
    # Of the two for MLA, a CPU with AMX has the other.
    for place in (AttentionBackendEnum.CPU_MLA, AttentionBackendEnum.AMX_MLA):
        register_backend(place, latents)
    leave_block_size()
    if chosen == "Shuffled":
        shuffle()
    shared_tokens.install()
