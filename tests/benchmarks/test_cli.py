# SPDX-License-Identifier: Apache-2.0
"""Command line, without processes."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import cli
from benchmarks.errors import BenchmarkError
from benchmarks.results import Metric, Part, Result


@pytest.fixture
def measured(monkeypatch):
    """Replaces measurements with one result and what is raised after it."""
    pytest.importorskip("matplotlib", reason="installed by `make bench` and `make test-full`")
    monkeypatch.setattr(cli.children, "prepare", lambda *_: None)

    def prepare(variant: str = "ours", error: BaseException | None = None, missing: str = ""):
        result = Result(Part.REQUEST_PATH, "16 in flight", {"requests": 16})
        result.add(variant, dict.fromkeys(Metric, 1.0))
        if missing:
            result.give_up(missing, "it failed")

        def measure(*_):
            yield result
            if error is not None:
                raise error

        monkeypatch.setattr(cli, "_measure", measure)

    return prepare


def run(tmp_path, *args: str) -> tuple[int, dict]:
    """The exit status and what was written."""
    status = cli.main([*args, "--output", str(tmp_path)])
    return status, json.loads((tmp_path / "bench.json").read_text())


@pytest.mark.parametrize(
    ("error", "expected"),
    [(None, 0), (KeyboardInterrupt(), 130), (BenchmarkError("no port"), 1)],
    ids=["done", "Ctrl-C", "error"],
)
def test_what_was_measured_is_written(measured, tmp_path, capsys, error, expected):
    """Whatever ends a run, results until then are kept, and the status tells."""
    measured(error=error)
    status, written = run(tmp_path)
    assert status == expected
    assert written["settings"]["complete"] is (expected == 0)
    assert written["results"][0]["samples"]["ours"]["seconds"] == [1.0]
    assert (tmp_path / "bench.svg").exists()
    assert "end-to-end was not run" in capsys.readouterr().out


@pytest.mark.parametrize(("variant", "expected"), [("ours", 1), ("upstream", 0)])
def test_only_a_failure_of_ours_fails(measured, tmp_path, variant, expected):
    """What upstream's connector cannot do is a result; what ours cannot is not."""
    measured(variant="memcpy", missing=variant)
    assert run(tmp_path)[0] == expected


def test_strategies_are_lanes_of_their_own():
    """Each strategy takes turns with the others; without one, the connector chooses."""
    names = [variant.name for variant in cli.variants(["staged", "direct"])]
    assert names[:3] == ["ours, staged", "ours, direct", "upstream"]
    assert cli.variants(["staged"])[0].strategy == "staged"
    assert cli.variants(None)[0].strategy is None


def test_quick_and_full_exclude_each_other(capsys):
    """A run is one or the other."""
    with pytest.raises(SystemExit):
        cli.main(["--quick", "--full"])
    assert "not allowed with" in capsys.readouterr().err


def test_what_draws_is_asked_for_before_anything_is_measured(monkeypatch, capsys):
    """And not after minutes, when all that was measured would be lost from the page."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit):
        cli.main(["--quick"])
    assert "pip install -r requirements/bench.txt" in capsys.readouterr().err
