# SPDX-License-Identifier: Apache-2.0
"""gsm8k through a router, answered and scored by the ``lm_eval`` command line.

lm-evaluation-harness is no requirement of this repository. It runs as a process of its own, from
wherever it is installed, and reads the data set from the Hugging Face hub or from its cache.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import logs
from .engine import ServedModel, server_env
from .errors import PDStackError, UsageError
from .process import ChildProcess, describe_exit, uninterrupted

TASK = "gsm8k"
METRIC = "exact_match,strict-match"
TOLERANCE = 0.03
"""How far the score may lie from what is expected, either way; an absolute share of questions."""

CONCURRENCY = 16
"""Requests at once: as many sequences as an engine of the stack runs in one batch."""

ENGINE_ARGS = ("--max-model-len", "2048")
"""For engines that are asked: five worked examples, a question and its answer have to fit."""

_SCRIPT = "lm_eval"
_OUTPUT = "gsm8k"
_POLL_S = 0.2
_CHECK_LIMIT_S = 600.0
_REMEDY = (
    "it reads openai/gsm8k from the Hugging Face hub, or from its cache in HF_HOME: give it one of "
    "them, or leave out --gsm8k"
)


@dataclass(frozen=True)
class Gsm8k:
    """What is asked for.

    Attributes:
        expected: share of questions that have to be answered exactly, up to `TOLERANCE`.
        limit: ask so many questions only; ``None`` for all.
    """

    expected: float
    limit: int | None = None


@dataclass(frozen=True)
class Score:
    """What came of it.

    Attributes:
        measured: share of questions that were answered exactly.
        questions: how many were asked; ``None`` where the results do not say.
        asked_for: what it was asked for with.
    """

    measured: float
    questions: int | None
    asked_for: Gsm8k

    def __str__(self) -> str:
        number = "" if self.questions is None else f" on {self.questions} questions"
        return (
            f"{TASK} through the router: {self.measured:.3f} {METRIC}{number}, expected "
            f"{self.asked_for.expected:.3f} within {TOLERANCE}"
        )

    @property
    def fault(self) -> str | None:
        """Why it does not pass; ``None`` where it does."""
        # Rounded: shares such as 0.53 and 0.5 are no exact binary fractions.
        if round(abs(self.measured - self.asked_for.expected), 9) <= TOLERANCE:
            return None
        return str(self)


def find_lm_eval() -> str:
    """Return the path of the ``lm_eval`` script: on the PATH, or beside this interpreter.

    Raises:
        UsageError: it is in neither.
    """
    places = [os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)]
    found = shutil.which(_SCRIPT, path=os.pathsep.join(places))
    if found is None:
        raise UsageError(
            f"--gsm8k needs {_SCRIPT}, which is neither on the PATH nor beside {sys.executable}; "
            "install it with `pip install 'lm-eval[api]'`, also into an environment of its own, or "
            "leave out --gsm8k"
        )
    return found


def check_model(model: ServedModel) -> None:
    """See that a model can be named in lm_eval's arguments.

    Raises:
        UsageError: its name or its path has a character that separates them.
    """
    for text in (model.name, str(model.directory)):
        if any(separator in text for separator in ",="):
            raise UsageError(
                f"--gsm8k cannot tell lm_eval of {text!r}: commas and equal signs separate its "
                "arguments; serve the model from a directory without them"
            )


def check_command(script: str) -> list[str]:
    """Return a command that loads the data set, and has nobody answer its first question."""
    return [script, "--model", "dummy", "--tasks", TASK, "--limit", "1"]


def command(script: str, asked_for: Gsm8k, model: ServedModel, url: str) -> list[str]:
    """Return the command that asks a server.

    Args:
        script: path of ``lm_eval``.
        model: what is served; its directory has the tokenizer.
        url: base URL of the server, without a path.
    """
    model_args = {
        "model": model.name,
        "base_url": f"{url}/v1/completions",
        "num_concurrent": CONCURRENCY,
        "tokenized_requests": False,
        "tokenizer": model.directory,
    }
    given = ",".join(f"{name}={value}" for name, value in model_args.items())
    # The output is relative to the working directory, which is that of the logs: lm_eval splits
    # this path at commas, too.
    words = [script, "--model", "local-completions", "--tasks", TASK]
    words += ["--model_args", given, "--output_path", _OUTPUT]
    return words + ([] if asked_for.limit is None else ["--limit", str(asked_for.limit)])


def parse_results(text: str, asked_for: Gsm8k) -> Score:
    """Read the score from what ``lm_eval`` writes as JSON.

    Raises:
        PDStackError: there is none in it.
    """
    try:
        document = json.loads(text)
        measured = float(document["results"][TASK][METRIC])
        counts = document.get("n-samples", {}).get(TASK, {})
        questions = counts.get("effective")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PDStackError(
            f"the results of lm_eval have no {METRIC!r} of {TASK} ({type(error).__name__}: "
            f"{error}); use a release of lm-eval from 0.4.3 on"
        ) from error
    return Score(measured, questions, asked_for)


def check_data(script: str, run_dir: Path) -> None:
    """See that ``lm_eval`` can load the data set, before anything else is started.

    Raises:
        PDStackError: it cannot.
    """
    child = ChildProcess("lm_eval-check", check_command(script), server_env(os.environ), run_dir)
    try:
        _wait(child, lambda: None, limit_s=_CHECK_LIMIT_S)
        if child.exit_status:
            cause = logs.find_cause(child.log_path) or describe_exit(child.exit_status)
            raise PDStackError(f"lm_eval cannot load {TASK} ({cause}); {_REMEDY}")
    finally:
        with uninterrupted():
            child.stop()


def evaluate(
    script: str,
    asked_for: Gsm8k,
    model: ServedModel,
    url: str,
    run_dir: Path,
    check: Callable[[], None] = lambda: None,
) -> Score:
    """Ask a server all questions, and return the score.

    Args:
        script: path of ``lm_eval``.
        model: what is served.
        url: base URL of the server, without a path.
        run_dir: where the log and the results go.
        check: called several times a second; raises where a server has died.

    Raises:
        ProcessDiedError: ``lm_eval`` failed.
        PDStackError: its results have no score.
    """
    child = ChildProcess(
        "lm_eval", command(script, asked_for, model, url), server_env(os.environ), run_dir
    )
    try:
        _wait(child, check)
        if child.exit_status:
            child.check()
    finally:
        with uninterrupted():
            child.stop()
    found = sorted((run_dir / _OUTPUT).rglob("results*.json"), key=lambda path: path.name)
    if not found:
        raise PDStackError(
            f"lm_eval ended well but wrote no results into {run_dir / _OUTPUT}; see "
            f"{child.log_path.name} beside it"
        )
    return parse_results(found[-1].read_text(encoding="utf-8"), asked_for)


def _wait(child: ChildProcess, check: Callable[[], None], limit_s: float | None = None) -> None:
    """Wait until a child has ended."""
    while child.exit_status is None:
        check()
        if limit_s is not None and time.monotonic() - child.started_at > limit_s:
            raise PDStackError(f"lm_eval has not loaded {TASK} in {limit_s:.0f} s; {_REMEDY}")
        time.sleep(_POLL_S)
