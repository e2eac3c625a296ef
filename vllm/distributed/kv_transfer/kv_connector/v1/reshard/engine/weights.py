# SPDX-License-Identifier: Apache-2.0
"""What identifies the weights under which an engine's KV means something.

Names and paths do not: another checkpoint may lie there under the same one. A digest does that is
taken of the files' names, their sizes, and samples of their bytes, the same on every machine. Its
cost is bounded, whatever the files' size; a change that no sample meets is not seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .compat import BLOCK_HASHES_KNOW_ADAPTERS_PATHS

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest

_HEADER_BYTES = 1 << 16
_SAMPLE_BYTES = 1 << 12
_NUM_SAMPLES = 256
"""Over all files, but at least one of each."""
_SAMPLED_FILES = 1 << 10
"""A checkpoint of 700 GB has some 160."""

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
_OTHER_LOADERS = frozenset({"dummy", "sharded_state", "runai_streamer_sharded", "tensorizer"})
"""Formats whose weights are no files of the checkpoint, or others for each layout."""


def weights_factors(vllm_config: VllmConfig) -> dict[str, str]:
    """Return what identifies this engine's weights; empty if nothing does.

    A digest of the checkpoint's files, or else the commit that the hub gave. The files are equal
    however they have come to a machine; commits of equal weights may differ. Quantization while
    loading makes other weights of the same files.
    """
    load, model = vllm_config.load_config, vllm_config.model_config
    if load.load_format == "dummy":
        return {}
    configs = vars(model.hf_config), vars(model.hf_text_config)
    names = "quantization_config", "compression_config"
    is_in_files = any(config.get(name) for config in configs for name in names)
    made = f", quantized to {model.quantization}" if model.quantization and not is_in_files else ""
    if load.load_format not in _OTHER_LOADERS:
        place = _place(model.model, "config.json", model.revision, load.download_dir)
        if (digest := files_digest(_weight_files(place))) is not None:
            return {"weights": digest + made}
    commit = configs[0].get("_commit_hash")
    return {} if commit is None else {"weights_commit": f"{commit}{made}"}


def files_digest(paths: Iterable[Path]) -> str | None:
    """Return a digest of some files, of bounded cost; None if there are none, or one is unreadable.

    Args:
        paths: The files; the names of their folders do not count.
    """
    ordered = sorted(paths, key=lambda path: path.name)
    if not ordered:
        return None
    digest = sha256()
    num_samples = max(_NUM_SAMPLES // len(ordered), 1)
    try:
        for number, path in enumerate(ordered):
            size = path.stat().st_size
            digest.update(f"{path.name}\0{size}\0".encode())
            if number < _SAMPLED_FILES:
                with path.open("rb", buffering=0) as file:
                    digest.update(file.read(_HEADER_BYTES))
                    for sample in range(1, num_samples + 1):
                        file.seek(max(size - _SAMPLE_BYTES, 0) * sample // num_samples)
                        digest.update(file.read(_SAMPLE_BYTES))
    except OSError:
        return None
    return digest.hexdigest()[:16]


class Adapter(NamedTuple):
    """What a request's LoRA adapter is.

    Attributes:
        digest: Digest of its files; None if they are not known.
        is_cached_anew: False if this engine's prefix cache may hold KV of other files under the
            same name and path.
    """

    digest: str | None
    is_cached_anew: bool


class Adapters:
    """Identifies LoRA adapters by their files. Belongs to the scheduler's thread.

    vLLM reads an adapter's files when it first needs them, and at each use if it was loaded with
    `load_inplace`; its block hashes take in no more than name and path. So files are looked at when
    a request arrives. They are read if their sizes or times have changed, after vLLM has read them.
    """

    def __init__(self) -> None:
        # By path: sizes and times of the files, and their digest.
        self._read: dict[str, tuple[list[tuple[str, int, int]], str | None]] = {}
        # By id and path: the digest when vLLM first needed it.
        self._loaded: dict[tuple[int, str], str | None] = {}
        # By what block hashes take in: the only digest that there has been; "" after others.
        self._only: dict[tuple[str, str], str | None] = {}

    def identify(self, request: LoRARequest) -> Adapter:
        """Return what the adapter of a request that has just arrived is."""
        path = request.lora_path
        digest = now = self._digest(path)
        loaded = self._loaded.setdefault((request.lora_int_id, path), now)
        if loaded != now and not request.load_inplace:
            # It cannot be told whether vLLM has read them anew.
            digest = f"{loaded} or {now}"
        hashed = request.lora_name, path if BLOCK_HASHES_KNOW_ADAPTERS_PATHS else ""
        if self._only.setdefault(hashed, digest) != digest:
            self._only[hashed] = ""
        return Adapter(digest, self._only[hashed] != "")

    def _digest(self, path: str) -> str | None:
        place = _place(str(Path(path).expanduser()), "adapter_config.json", None, None)
        files = [*_weight_files(place), place / "adapter_config.json"]
        try:
            stamps = [(file.name, (at := file.stat()).st_size, at.st_mtime_ns) for file in files]
        except OSError:
            return None
        if self._read.get(path, ([], None))[0] != stamps:
            self._read[path] = stamps, files_digest(files)
        return self._read[path][1]


def _place(model: str, file: str, revision: str | None, download_dir: str | None) -> Path:
    """Return the folder or file with weights, without asking the hub.

    Args:
        model: Its path, or its name on the hub.
        file: File that is there.
        revision: Revision on the hub; None for the main one.
        download_dir: Where the hub's files lie; None for the usual place.
    """
    if (place := Path(model)).exists():
        return place
    from huggingface_hub import try_to_load_from_cache

    try:
        config = try_to_load_from_cache(model, file, download_dir, revision)
    except ValueError:
        # It is no name that the hub has.
        return place
    return Path(config).parent if isinstance(config, str) else place


def _weight_files(place: Path) -> list[Path]:
    """Return the files at a place that hold weights, of the first kind that vLLM looks for."""
    if place.is_file():
        return [place]
    try:
        paths = list(place.iterdir())
    except OSError:
        return []
    for suffix in _WEIGHT_SUFFIXES:
        if found := [path for path in paths if path.suffix == suffix]:
            # Some checkpoints have all weights once more in these, and not every copy of them.
            others = [path for path in found if not path.name.startswith("consolidated")]
            return others or found
    return []
