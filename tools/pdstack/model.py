# SPDX-License-Identifier: Apache-2.0
"""The model that the stack serves: a directory of the user's, or SmolLM2 made once and cached."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import platformdirs

from . import smollm2
from .engine import ServedModel
from .errors import UsageError
from .process import ChildProcess, uninterrupted

CACHE_VARIABLE = "VLLM_RESHARD_CACHE"
_SCRIPT = Path(smollm2.__file__)
_NAME = "SmolLM2-135M-Instruct"
# Raise it whenever the converter writes something else from the same package.
_FORMAT = 1
_POLL_S = 0.2


def cache_dir(env: Mapping[str, str] = os.environ) -> Path:
    """Return where prepared models are kept: ``$VLLM_RESHARD_CACHE`` or the user's cache."""
    chosen = env.get(CACHE_VARIABLE)
    return Path(chosen).expanduser() if chosen else platformdirs.user_cache_path("vllm-reshard")


def given_model(directory: Path) -> ServedModel:
    """Return a model directory of the user's.

    Raises:
        UsageError: it has no ``config.json``.
    """
    if not (directory / "config.json").is_file():
        raise UsageError(f"{directory} is not a model directory: it has no config.json")
    resolved = directory.resolve()
    return ServedModel(resolved, resolved.name)


def default_model_path(cache: Path) -> Path:
    """Return where the default model is, or will be once it is prepared.

    Raises:
        UsageError: the package that it is made from is not installed.
    """
    try:
        version = importlib.metadata.version(smollm2.PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise UsageError(
            f"{smollm2.PACKAGE} is not installed for {sys.executable}; run `make setup`, "
            "or name a model directory with --model"
        ) from None
    return cache / f"{_NAME.lower()}-{version}-{_FORMAT}"


def prepare_default_model(
    cache: Path, run_dir: Path, on_wait: Callable[[ChildProcess], None] = lambda _: None
) -> ServedModel:
    """Return SmolLM2-135M-Instruct, converting it if the cache does not hold it yet.

    It is written aside and renamed when it is complete: what is in the cache is whole, also after
    an interruption, and two launchers may prepare it at the same time.

    Args:
        run_dir: where the converter's log goes.
        on_wait: called a few times a second while the converter runs.

    Raises:
        UsageError: the package is not installed, or the cache cannot be written.
        ProcessDiedError: the conversion failed.
    """
    final = default_model_path(cache)
    if final.is_dir():
        return ServedModel(final, _NAME)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=cache))
    except OSError as error:
        raise UsageError(
            f"cannot write the model cache {cache}: {error}; set {CACHE_VARIABLE}"
        ) from error
    converter: ChildProcess | None = None
    try:
        converter = ChildProcess(
            "model",
            [sys.executable, "-I", str(_SCRIPT), str(aside)],
            {**os.environ, "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"},
            run_dir,
        )
        while converter.exit_status is None:
            on_wait(converter)
            time.sleep(_POLL_S)
        if converter.exit_status != 0:
            converter.check()
        aside.chmod(0o755)
        try:
            aside.rename(final)
        except OSError:
            # Somebody else was faster; theirs is as good.
            if not final.is_dir():
                raise
    finally:
        with uninterrupted():
            if converter is not None:
                converter.stop()
            shutil.rmtree(aside, ignore_errors=True)
    return ServedModel(final, _NAME)
