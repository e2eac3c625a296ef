# SPDX-License-Identifier: Apache-2.0
"""Parallel layouts as the user writes them (``tp3pp2``), and what a model allows."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from .errors import UsageError

_VOCABULARY_UNIT = 64
"""vLLM pads vocabularies to multiples of it."""
_LAYOUT = re.compile(
    r"tp([1-9][0-9]{0,3})pp([1-9][0-9]{0,3})(?:pcp([1-9][0-9]{0,3}))?", re.IGNORECASE | re.ASCII
)


@dataclass(frozen=True, order=True)
class Layout:
    """Sizes of one engine: tensor-parallel ranks in each stage, pipeline stages.

    With prefill context parallelism, each of these is as many workers.
    """

    tp_size: int = 1
    pp_size: int = 1
    pcp_size: int = 1

    @property
    def world_size(self) -> int:
        """Number of worker processes."""
        return self.tp_size * self.pp_size * self.pcp_size

    def __str__(self) -> str:
        pcp = f"pcp{self.pcp_size}" if self.pcp_size > 1 else ""
        return f"tp{self.tp_size}pp{self.pp_size}{pcp}"


def parse_layout(text: str) -> Layout:
    """Parse ``tp<N>pp<M>``, which ``pcp<K>`` may follow.

    Raises:
        UsageError: the text has another shape, or a size is not in [1, 9999].
    """
    match = _LAYOUT.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"layout {text!r} is not understood; write tp<N>pp<M>, for example tp2pp1")
    return Layout(*(int(size or 1) for size in match.groups()))


@dataclass(frozen=True)
class ModelShape:
    """The sizes that a layout has to divide, and those that give the size of the KV cache.

    Attributes:
        num_planes: vectors that a KV head keeps of a token: its key and its value. MLA has one head
            for all, which keeps one latent.
    """

    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int | None = None
    vocabulary_size: int | None = None
    num_planes: int = 2

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes of the KV cache of one token, over all layers and heads."""
        elements = self.num_planes * self.num_kv_heads * self.head_size
        return self.num_layers * elements * element_bytes


def read_model_shape(directory: Path) -> ModelShape:
    """Read the shape of a model from its ``config.json``.

    Raises:
        UsageError: there is no readable ``config.json``, or it lacks one of the sizes.
    """
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{directory} is not a model directory: {path.name}: {error}") from error
    # Multimodal configs keep the language model's sizes one level down.
    config = config.get("text_config", config)
    try:
        heads = int(config["num_attention_heads"])
        latent = config.get("kv_lora_rank")
        if latent:
            kv_heads, num_planes, head_size = 1, 1, int(latent) + int(config["qk_rope_head_dim"])
        else:
            kv_heads, num_planes = int(config.get("num_key_value_heads") or heads), 2
            head_size = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
        return ModelShape(
            num_layers=int(config["num_hidden_layers"]),
            num_attention_heads=heads,
            num_kv_heads=kv_heads,
            head_size=head_size,
            intermediate_size=config.get("intermediate_size"),
            vocabulary_size=config.get("vocab_size"),
            num_planes=num_planes,
        )
    except KeyError as error:
        raise UsageError(f"{path} has no {error.args[0]}") from error


def check_layout(layout: Layout, shape: ModelShape) -> None:
    """Refuse a layout that vLLM could not run with this model.

    Raises:
        UsageError: with the layout, the size that it does not divide and the values that work.
    """
    fitting = [tp for tp in range(1, shape.num_attention_heads + 1) if _tp_refusal(tp, shape) == ""]
    refusal = _tp_refusal(layout.tp_size, shape)
    if refusal:
        sizes = ", ".join(map(str, fitting))
        raise UsageError(f"layout {layout}: {refusal}; this model runs with TP {sizes}")
    if layout.pp_size > shape.num_layers:
        raise UsageError(
            f"layout {layout}: {layout.pp_size} pipeline stages, but the model has only "
            f"{shape.num_layers} layers; use PP {shape.num_layers} or less"
        )


def _tp_refusal(tp_size: int, shape: ModelShape) -> str:
    """Return why a tensor-parallel size does not fit, or an empty string."""
    if shape.num_attention_heads % tp_size:
        return f"TP {tp_size} does not divide {shape.num_attention_heads} attention heads"
    larger, smaller = max(tp_size, shape.num_kv_heads), min(tp_size, shape.num_kv_heads)
    if larger % smaller:
        return f"TP {tp_size} and {shape.num_kv_heads} KV heads: neither divides the other"
    if shape.intermediate_size is not None and shape.intermediate_size % tp_size:
        return f"TP {tp_size} does not divide the intermediate size {shape.intermediate_size}"
    if shape.vocabulary_size is not None:
        padded = -(-shape.vocabulary_size // _VOCABULARY_UNIT) * _VOCABULARY_UNIT
        if padded % tp_size:
            return f"TP {tp_size} does not divide the vocabulary of {padded} tokens, padded"
    return ""
