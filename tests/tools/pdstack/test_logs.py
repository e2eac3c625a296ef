# SPDX-License-Identifier: Apache-2.0
"""What is read from the logs of servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.pdstack import logs

FAILED_ENGINE = """\
INFO 11-21 09:34:02 [importing.py:45] Triton is installed but 0 active driver(s) found
(APIServer pid=10) INFO 11-21 09:34:03 [utils.py:278] non-default args: {}
(EngineCore pid=11) WARNING 11-21 09:34:05 [base.py:1] ImportError is mentioned, not raised
(EngineCore pid=11) ERROR 11-21 09:34:10 [core.py:10] EngineCore failed to start.
(EngineCore pid=11) ERROR 11-21 09:34:10 [core.py:10] Traceback (most recent call last):
(EngineCore pid=11) ERROR 11-21 09:34:10 [core.py:10]   File "a.py", line 1, in run
(EngineCore pid=11) ERROR 11-21 09:34:10 [core.py:10] ValueError: ThatConnector lacks pp_rank 1
(APIServer pid=10) Traceback (most recent call last):
(APIServer pid=10) RuntimeError: Engine core initialization failed. See root cause above.
"""


def test_the_cause_is_the_first_exception_without_its_prefix() -> None:
    """The root exception wins over what follows from it."""
    assert logs.cause_of(FAILED_ENGINE.splitlines()) == "ValueError: ThatConnector lacks pp_rank 1"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("INFO fine\n", ""),
        (
            "vllm: error: unrecognized arguments: --no\n",
            "vllm: error: unrecognized arguments: --no",
        ),
        ("RuntimeError: See root cause above.\n", "RuntimeError: See root cause above."),
        ("torch.cuda.OutOfMemoryError: no room\n", "torch.cuda.OutOfMemoryError: no room"),
        ("AssertionError\n", "AssertionError"),
        (
            "x\nOSError: [Errno 98] Address already in use\n",
            "OSError: [Errno 98] Address already in use",
        ),
    ],
)
def test_other_causes(text: str, cause: str) -> None:
    """Usage errors, bare assertions, qualified names and lone consequences are recognised."""
    assert logs.cause_of(text.splitlines()) == cause


def test_a_failed_start_is_recognised(tmp_path: Path) -> None:
    """The core's last words count, wherever in the log they are; what precedes them does not."""
    path = tmp_path / "server.log"
    said, _, _ = FAILED_ENGINE.partition("failed to start")
    path.write_text(said)
    assert not logs.start_failed(path)
    path.write_text(FAILED_ENGINE)
    assert logs.start_failed(path)
    assert not logs.start_failed(tmp_path / "none.log")


def test_the_tail_is_short_and_skips_empty_lines(tmp_path: Path) -> None:
    """Only the last lines with text are returned, oldest first."""
    path = tmp_path / "server.log"
    path.write_text("\n\n".join(f"line {i}" for i in range(100)) + "\n\n")
    assert logs.tail(path, 3) == ["line 97", "line 98", "line 99"]


def test_a_log_that_is_not_there_is_empty(tmp_path: Path) -> None:
    """A server that never wrote anything has no tail, no cause and the first phase."""
    path = tmp_path / "none.log"
    assert logs.tail(path) == []
    assert logs.find_cause(path) == ""
    assert logs.find_phase(path) == "importing vLLM"


def test_phases_follow_the_log(tmp_path: Path) -> None:
    """The phase is the one of the latest mark, whatever the order of earlier ones."""
    path = tmp_path / "server.log"
    seen = []
    for line in ("non-default args", "Starting to load model x", "Application startup complete"):
        with path.open("a") as log:
            log.write(line + "\n")
        seen.append(logs.find_phase(path))
    assert seen == ["reading the model's config", "loading the model", "ready"]
