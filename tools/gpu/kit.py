# SPDX-License-Identifier: Apache-2.0
"""What is run on a machine with a GPU, one after the other, and the report of it.

A step that fails keeps no other from being run. All of them together have a deadline.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.pdstack.process import ChildProcess, describe_exit

from . import alone

ROOT = Path(__file__).parents[2]
LIMIT_S = 600.0
"""Of all steps together."""

_POLL_S = 0.1
_REPORTED_LINES = 80
_DEVICE_TESTS = str(ROOT / "tests/v1/kv_connector/unit/reshard/transport/test_conformance.py")
_FOR_ENGINES = ("httpx", "openai", "rich", "prometheus_client", "platformdirs", "vllm_router")
_DISTRIBUTIONS = ("vllm", "vllm-kv-reshard", "torch", "nixl", "nixl-cu12", "nixl-cu13", "numpy")


@dataclass(frozen=True)
class Step:
    """Something to run.

    Attributes:
        name: In a word, also of its log.
        shows: What it shows where it ends well.
        command: Program and arguments.
        limit_s: How long it may take.
        needs: Modules that have to be installed for it.
        needs_fork: Whether the plugin is not enough.
    """

    name: str
    shows: str
    command: Sequence[str]
    limit_s: float
    needs: Sequence[str] = ()
    needs_fork: bool = False


@dataclass(frozen=True)
class Outcome:
    """What became of a step.

    Attributes:
        fault: Why it did not end well; empty where it did.
        was_run: Whether it was begun.
        lacked_time: Whether the time of all steps was over before it, or before its own limit.
        took_s: How long it took.
        log: What it has printed, line by line; the end of it.
    """

    step: Step
    fault: str = ""
    was_run: bool = True
    lacked_time: bool = False
    took_s: float = 0.0
    log: Sequence[str] = ()

    def __str__(self) -> str:
        state = "ok" if not self.fault else self.fault
        return f"{self.step.name:9} {self.took_s:5.0f} s  {state}"


def steps(directory: Path) -> list[Step]:
    """Return what is run.

    Args:
        directory: Where files of steps go.
    """
    python = sys.executable
    demo = "-m tools.pdstack demo --prefill tp1pp1 --decode tp1pp1 --engine-args=--async-scheduling"
    bench = "-m benchmarks --quick --only transfer --strategy direct --strategy staged --output"
    return [
        Step(
            "lane",
            "bytes between two processes on this GPU, by floors that need no vLLM",
            [python, "-m", "tools.gpu", "lane", "--output", str(directory / "lane.json")],
            120.0,
            alone.NEEDED,
        ),
        Step(
            "tests",
            "the tests that need device memory",
            [python, "-m", "pytest", "-q", "-k", "device", "--rootdir", str(ROOT), _DEVICE_TESTS],
            120.0,
            ("pytest", "hypothesis"),
            needs_fork=True,
        ),
        Step(
            "pair",
            "two engines on one GPU, scheduled asynchronously, answer as one",
            [python, *demo.split()],
            300.0,
            _FOR_ENGINES,
        ),
        Step(
            "transfer",
            "this connector, direct and staged, and upstream's, over device memory",
            [python, *bench.split(), str(directory)],
            240.0,
            (*_FOR_ENGINES, "matplotlib"),
            needs_fork=True,
        ),
        Step(
            "announced",
            "what a prefill engine gains that tells of offers before its next step",
            [
                *(python, "-m", "tools.gpu", "announced"),
                *("--output", str(directory / "announced.json")),
            ],
            240.0,
            _FOR_ENGINES,
        ),
    ]


def why_not() -> str:
    """Return what of a machine with a GPU and this connector is missing; empty where nothing is."""
    return alone.why_not() or alone.why_no_gpu() or _why_no_connector()


def _why_no_connector() -> str:
    version = _version("vllm")
    if version is None:
        return (
            f"{sys.executable} has no vLLM: install the fork or the plugin (README.md), or run "
            "python -m tools.gpu lane, which needs none"
        )
    if "cpu" in version:
        return f"vllm {version} is built for CPU: install the wheel for CUDA (README.md)"
    if not is_fork(version) and _version("vllm-kv-reshard") is None:
        return f"vllm {version} is not this fork, and has no plugin: install one (README.md)"
    return ""


def is_fork(version: str | None) -> bool:
    """Whether a version of vLLM is this fork's."""
    return version is not None and "reshard." in version


def run_all(
    planned: Sequence[Step], directory: Path, limit_s: float = LIMIT_S
) -> Iterator[Outcome]:
    """Run steps, one after the other.

    Args:
        directory: Where logs go.
        limit_s: For all of them; what is under way then is ended, and what is left is not run.
    """
    due_s = time.monotonic() + limit_s
    over = f"the time of all steps, {limit_s:.0f} s, is over"
    for step in planned:
        reason = _why_left_out(step)
        left_s = due_s - time.monotonic()
        if reason or left_s <= 0:
            yield Outcome(step, f"not run: {reason or over}", was_run=False, lacked_time=not reason)
            continue
        if left_s < step.limit_s:
            yield _run(step, directory, left_s, f"cut short after {left_s:.0f} s: {over}")
        else:
            yield _run(step, directory, step.limit_s)


def _why_left_out(step: Step) -> str:
    missing = [name for name in step.needs if importlib.util.find_spec(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed"
    if step.needs_fork and not is_fork(_version("vllm")):
        return "needs the fork"
    return ""


def environment() -> dict[str, str]:
    """Return what steps have as their environment: this checkout's modules, and no network."""
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "NO_COLOR": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _run(step: Step, directory: Path, limit_s: float, cut_short: str = "") -> Outcome:
    """Run a step.

    Args:
        limit_s: For so long at most.
        cut_short: What is said where that is less than the step's own limit, and is over.
    """
    child = ChildProcess(step.name, step.command, environment(), directory)
    try:
        due_s = child.started_at + limit_s
        while (status := child.exit_status) is None and time.monotonic() < due_s:
            time.sleep(_POLL_S)
    finally:
        child.stop()
    fault = ""
    if status is None:
        fault = cut_short or f"not over after {limit_s:.0f} s"
    elif status:
        fault = describe_exit(status)
    return Outcome(
        step,
        fault,
        lacked_time=status is None and bool(cut_short),
        took_s=time.monotonic() - child.started_at,
        log=child.log_tail(_REPORTED_LINES),
    )


def facts() -> dict[str, str]:
    """Return what all of it was run on."""
    found = {name: version for name in _DISTRIBUTIONS if (version := _version(name))}
    found["python"] = sys.version.split()[0]
    query = "--query-gpu=name,driver_version,memory.total,pstate --format=csv,noheader"
    for name, command in (
        ("gpu", ["nvidia-smi", *query.split()]),
        ("topology", ["nvidia-smi", "topo", "-m"]),
        ("commit", ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]),
    ):
        found[name] = _said_by(command)
    ucx = {name: value for name, value in os.environ.items() if name.startswith("UCX_")}
    found["UCX"] = " ".join(f"{name}={value}" for name, value in sorted(ucx.items())) or "as it is"
    return found


def write_report(path: Path, found: dict[str, str], outcomes: Sequence[Outcome]) -> None:
    """Write one file with all there is to say."""
    text = ["# Run on a GPU", ""]
    for name, value in found.items():
        text += [f"- {name}: {value}"] if "\n" not in value else [f"- {name}:", *_quoted(value)]
    text += ["", "| step | shows | result | s |", "| --- | --- | --- | --- |"]
    for each in outcomes:
        step = each.step
        text.append(f"| {step.name} | {step.shows} | {each.fault or 'ok'} | {each.took_s:.0f} |")
    if told := _without_time(outcomes):
        text += ["", told]
    for each in outcomes:
        if each.was_run:
            text += ["", f"## {each.step.name}", "", *_quoted("\n".join(each.log))]
    path.write_text("\n".join(text) + "\n")


def run_kit(planned: Sequence[Step], path: Path, say: Callable[[str], None] = print) -> int:
    """Run steps, tell of each, and write the report.

    Args:
        path: Of the report. Logs lie beside it.

    Returns:
        The exit status: 1 where a step has failed, and else 3 where one had no time left.
    """
    outcomes = []
    for outcome in run_all(planned, path.parent):
        say(str(outcome))
        outcomes.append(outcome)
        # What was found is worth something also where it ends here.
        write_report(path, facts(), outcomes)
    told = _without_time(outcomes)
    if told:
        say(told)
    say(f"Wrote {path}: attach it to an issue.")
    if any(each.fault and each.was_run and not each.lacked_time for each in outcomes):
        return 1
    return 3 if told else 0


def _without_time(outcomes: Sequence[Outcome]) -> str:
    """The line on steps that the time of all did not suffice for; empty where there are none."""
    names = ", ".join(each.step.name for each in outcomes if each.lacked_time)
    return f"No time was left for {names}, which show nothing." if names else ""


def _quoted(text: str) -> list[str]:
    return [f"    {line}" for line in text.splitlines()]


def _said_by(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown ({error})"
    return done.stdout.strip() or "unknown"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
