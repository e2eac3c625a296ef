# SPDX-License-Identifier: Apache-2.0
"""What killed builds leave, builds of one tree at once, and places that cannot be written."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reshard_build import assemble, build_editable, build_wheel, editable, fetch, scratch
from reshard_build.__main__ import main
from reshard_build.staging import LOCK, staging_folder, turn_at

DEADLINE_S = 60
FORK = multiprocessing.get_context("fork")


def killed(work: Callable[[], object]) -> None:
    """Do something in a process of its own, which is killed on the way."""
    process = FORK.Process(target=work)
    process.start()
    process.join(DEADLINE_S)
    assert process.exitcode == -signal.SIGKILL


def kill(*_: object, **__: object) -> None:
    """End this process without a chance to clean up."""
    os.kill(os.getpid(), signal.SIGKILL)


def names(directory: Path) -> set[str]:
    """What is in a directory."""
    return {path.name for path in directory.iterdir()}


def test_folder_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    """The next to make one removes it, and leaves those alone that somebody is at work in."""

    def work() -> None:
        with staging_folder("new-", tmp_path) as folder:
            (folder / "half").write_bytes(b"written")
            kill()

    killed(work)
    (left,) = tmp_path.iterdir()
    (tmp_path / "new-of-yours").mkdir()
    with staging_folder("new-", tmp_path) as first, staging_folder("new-", tmp_path) as second:
        assert names(tmp_path) == {first.name, second.name, "new-of-yours"}
        assert left.name not in names(tmp_path)
    assert names(tmp_path) == {"new-of-yours"}


def test_system_without_locks_removes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it cannot be known who lives, a build does its own work all the same."""

    def refuse(*_: object) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr("fcntl.flock", refuse)
    with staging_folder("new-", tmp_path) as folder, turn_at(tmp_path / "tree"):
        assert not (folder / LOCK).exists()
        with staging_folder("new-", tmp_path):
            assert folder.is_dir()
    assert names(tmp_path) == {".tree.lock"}


def _editable(frontend: Any) -> None:
    build_editable(str(frontend.directory / "wheels"))


def _wheel(frontend: Any) -> None:
    build_wheel(str(frontend.directory / "wheels"))


def _tree(frontend: Any) -> None:
    assert main(["--root", str(frontend.root), "tree"]) == 0


@pytest.mark.parametrize(
    ("module", "last", "build", "left"),
    [
        (fetch, "_download", _wheel, "cache/fetch-*"),
        (editable, "_write_stamp", _editable, "source/build/.editable-0.22.1-cpu-*"),
        (assemble, "verify_wheel", _wheel, "wheels/wheel-*"),
        (scratch, "mark_saved", _tree, "source/build/.tree-0.22.1-*"),
    ],
    ids=["fetch", "editable", "wheel", "tree"],
)
def test_what_a_killed_build_left_is_gone_after_the_next(
    frontend: Any,
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    last: str,
    build: Callable[[Any], None],
    left: str,
) -> None:
    """Downloads, trees and wheels that were under way do not pile up."""
    if module is fetch:
        shop = frontend.directory / "shop"
        frontend.cache.rename(shop)
        for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(shop)}.items():
            monkeypatch.setenv(f"PIP_{name}", value)
    with monkeypatch.context() as patch:
        patch.setattr(module, last, kill)
        for _ in range(2):
            killed(lambda: build(frontend))
    assert len(list(frontend.directory.glob(left))) == 1
    build(frontend)
    assert not list(frontend.directory.glob(left))
    # None has gone into what was made.
    assert not list(frontend.directory.rglob(f"{LOCK}*"))


def test_refreshes_of_one_tree_take_turns(
    frontend: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A second one waits, and says so, until the first is through."""
    caplog.set_level(logging.INFO, "reshard_build")
    _editable(frontend)
    at_work: list[int] = []
    most: list[int] = []
    waiting, begun = threading.Event(), threading.Event()
    update = editable._update

    def slow(*arguments: Any) -> None:
        at_work.append(1)
        most.append(len(at_work))
        begun.set()
        assert waiting.wait(DEADLINE_S)
        update(*arguments)
        at_work.pop()

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith("waiting for another build"):
                waiting.set()

    watch = Watch()
    logging.getLogger("reshard_build").addHandler(watch)
    monkeypatch.setattr(editable, "_update", slow)
    threads = [threading.Thread(target=_rebuild, args=(frontend,)) for _ in range(2)]
    try:
        threads[0].start()
        assert begun.wait(DEADLINE_S)
        begun.clear()
        threads[1].start()
        # It does not begin while the first one is at work.
        assert waiting.wait(DEADLINE_S) and not begun.is_set()
    finally:
        waiting.set()
        for thread in threads:
            thread.join()
        logging.getLogger("reshard_build").removeHandler(watch)
    assert most == [1, 1]


def _rebuild(frontend: Any) -> None:
    assert main(["--root", str(frontend.root), "rebuild"]) == 0


@pytest.mark.parametrize(
    ("build", "place", "message"),
    [
        (_editable, "source/build", "cannot write the tree .*; make .* writable"),
        (_wheel, "wheels", "cannot write vllm-.*; name a writable directory"),
    ],
    ids=["tree", "wheel"],
)
def test_place_that_cannot_be_written_is_one_line(
    frontend: Any, build: Callable[[Any], None], place: str, message: str
) -> None:
    """A directory that cannot be made, here because a file is there, is named with the remedy."""
    (frontend.directory / place).write_text("no directory")
    with pytest.raises(SystemExit, match=message) as raised:
        build(frontend)
    assert "\n" not in str(raised.value.code)
