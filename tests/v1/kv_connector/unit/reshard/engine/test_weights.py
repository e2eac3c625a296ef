# SPDX-License-Identifier: Apache-2.0
"""What identifies weights, wherever they lie."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm.lora.request import LoRARequest

from tests.v1.kv_connector.unit.reshard.engine.configs import config
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.caches.factors import (
    compared_factors,
    compatibility_factors,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.compat import (
    BLOCK_HASHES_KNOW_ADAPTERS_PATHS,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.settings import Settings
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.engine.weights import (
    Adapters,
    files_digest,
    weights_factors,
)
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import RemoteIncompatibleError
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.protocol.compatibility import (
    check_compatibility,
)


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint of two files, of which each byte is sampled."""
    folder = tmp_path / "here"
    folder.mkdir()
    for number in range(2):
        (folder / f"model-{number}.safetensors").write_bytes(bytes(range(256)) * 1024)
    (folder / "config.json").write_text("{}")
    return folder


def weights_at(place, **changes) -> dict[str, str]:
    """The factors of an engine that loads from a place."""
    return weights_factors(config(model=str(place), **changes))


def test_a_copy_has_the_same_weights(checkpoint, tmp_path):
    """Another folder, other times, and other files beside the weights do not count."""
    copy = tmp_path / "there"
    shutil.copytree(checkpoint, copy)
    (copy / "README.md").write_text("Moved.")
    (copy / "consolidated.safetensors").write_bytes(b"all of it")
    for path in copy.iterdir():
        os.utime(path, (1, 1))
    assert weights_at(copy) == weights_at(checkpoint)
    assert weights_at(copy, load_format="fastsafetensors") == weights_at(checkpoint)


@pytest.mark.parametrize("offset", [0, 100_000, 262_143])
def test_other_weights_are_refused_by_name(checkpoint, tmp_path, offset):
    """Another training of one architecture has files of the same names and sizes."""
    copy = tmp_path / "there"
    shutil.copytree(checkpoint, copy)
    data = bytearray((copy / "model-1.safetensors").read_bytes())
    data[offset] ^= 1
    (copy / "model-1.safetensors").write_bytes(data)
    here, there = (compatibility_factors(config(model=str(each))) for each in (checkpoint, copy))
    required = compared_factors(here, Settings())
    assert required is not None
    with pytest.raises(RemoteIncompatibleError, match=r"weights is .* there.*allow_other_weights"):
        check_compatibility(required, there)
    allowed = compared_factors(here, Settings(allow_other_weights=True))
    assert allowed is not None
    check_compatibility(allowed, there)


def test_quantized_while_loading(checkpoint):
    """The files are equal and the weights are not; a quantized checkpoint is known by its files."""
    full = weights_at(checkpoint)["weights"]
    assert weights_at(checkpoint, quantization="fp8") == {"weights": full + ", quantized to fp8"}
    quantized = SimpleNamespace(quantization_config={"quant_method": "gptq"})
    for kernels in ("gptq", "gptq_marlin"):
        told = weights_at(checkpoint, quantization=kernels, hf_config=quantized)
        assert told == {"weights": full}


@pytest.mark.parametrize("loader", ["dummy", "sharded_state", "tensorizer"])
def test_what_is_not_compared(checkpoint, loader):
    """Weights that are no files of the checkpoint are read from as before."""
    here, there = weights_at(checkpoint), weights_at(checkpoint, load_format=loader)
    assert there == {}
    check_compatibility(here, there)
    check_compatibility(there, here)


def test_commit_where_there_are_no_files(checkpoint):
    """What a remote loader has loaded is known by its commit, which no digest is compared with."""
    hub = SimpleNamespace(_commit_hash="abc")
    told = weights_at("nobody/nothing", hf_config=hub)
    assert told == weights_at(checkpoint, load_format="tensorizer", hf_config=hub)
    assert told == {"weights_commit": "abc"}
    check_compatibility(told, weights_at(checkpoint))
    with pytest.raises(RemoteIncompatibleError, match="weights_commit is abd there and abc here"):
        check_compatibility(told, {"weights_commit": "abd"})


def test_a_snapshot_of_the_hub_is_found(checkpoint, tmp_path):
    """The files in its cache count, as those of a folder do."""
    cache = tmp_path / "cache"
    commit = "0" * 40
    repo = cache / "models--who--what"
    shutil.copytree(checkpoint, repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    hub = config(model="who/what")
    hub.load_config.download_dir = str(cache)
    assert weights_factors(hub) == weights_at(checkpoint)


def test_cost_is_bounded(tmp_path):
    """A checkpoint of 700 GB takes well under a second; its holes cost no disk."""
    paths = [tmp_path / f"model-{number:05}.safetensors" for number in range(163)]
    for path in paths:
        with path.open("wb") as file:
            file.truncate(700 * 10**9 // len(paths))
    read = []

    class Counting:
        def __init__(self, path: Path) -> None:
            self._file = path.open("rb", buffering=0)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self._file.close()

        def seek(self, at):
            self._file.seek(at)

        def read(self, size):
            read.append(size)
            return self._file.read(size)

    class Counted(type(paths[0])):
        def open(self, *_, **__):
            return Counting(Path(self))

    began_s = time.thread_time()
    assert files_digest(map(Counted, paths)) is not None
    assert time.thread_time() - began_s < 1
    assert len(read) == 2 * len(paths) and sum(read) < 12 << 20


def test_a_file_that_cannot_be_read_tells_nothing(tmp_path):
    """It is as if the loader did not tell."""
    assert files_digest([tmp_path / "gone.safetensors"]) is None
    assert files_digest([]) is None


class TestAdapters:
    """LoRA adapters, which vLLM knows by name, number and path."""

    def test_one_adapter_in_two_places(self, checkpoint, tmp_path):
        """It is one and the same, whatever it is called."""
        (checkpoint / "adapter_config.json").write_text('{"r": 8}')
        shutil.copytree(checkpoint, tmp_path / "there")
        here = Adapters().identify(LoRARequest("sql", 1, str(checkpoint)))
        there = Adapters().identify(LoRARequest("other", 2, str(tmp_path / "there")))
        assert here == there and here.digest is not None and here.is_cached_anew
        (tmp_path / "there" / "adapter_config.json").write_text('{"r": 9}')
        other = Adapters().identify(LoRARequest("other", 2, str(tmp_path / "there")))
        assert other.digest != here.digest

    @pytest.mark.parametrize("again", ["in place", "under a new id", "not at all"])
    def test_files_that_change(self, checkpoint, again):
        """What vLLM has loaded may be known; that its prefix cache has other KV is not seen."""
        (checkpoint / "adapter_config.json").write_text('{"r": 8}')
        path, adapters = str(checkpoint), Adapters()
        first = adapters.identify(LoRARequest("sql", 1, path))
        (checkpoint / "adapter_config.json").write_text('{"r": 16}')
        request = LoRARequest("sql", 1 + (again == "under a new id"), path)
        request.load_inplace = again == "in place"
        now = Adapters().identify(request).digest
        assert now != first.digest
        wanted = f"{first.digest} or {now}" if again == "not at all" else now
        assert adapters.identify(request) == (wanted, False)
        (checkpoint / "adapter_config.json").write_text('{"r": 8}')
        assert adapters.identify(LoRARequest("sql", 1, path)) == (first.digest, False)

    def test_a_name_at_another_path(self, checkpoint, tmp_path):
        """Block hashes take the path in, but for 0.22.1's."""
        (checkpoint / "adapter_config.json").write_text('{"r": 8}')
        shutil.copytree(checkpoint, tmp_path / "there")
        (tmp_path / "there" / "adapter_config.json").write_text('{"r": 16}')
        adapters = Adapters()
        assert adapters.identify(LoRARequest("sql", 1, str(checkpoint))).is_cached_anew
        moved = adapters.identify(LoRARequest("sql", 1, str(tmp_path / "there")))
        assert moved.is_cached_anew == BLOCK_HASHES_KNOW_ADAPTERS_PATHS

    def test_what_is_no_folder(self):
        """What another loader makes of a name is not known."""
        assert Adapters().identify(LoRARequest("sql", 1, "nobody/nothing")) == (None, True)
