# SPDX-License-Identifier: Apache-2.0
"""gsm8k through a router, with a script in the place of ``lm_eval``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tools.pdstack import cli, lm_eval, sweep
from tools.pdstack.accuracy import Accuracy
from tools.pdstack.engine import ServedModel
from tools.pdstack.errors import PDStackError, ProcessDiedError, UsageError
from tools.pdstack.lm_eval import Gsm8k, Score

SCRIPT = Path(__file__).parents[3] / "tests/v1/kv_connector/nixl_integration/run_accuracy_test.sh"
URL = "http://127.0.0.1:1234"
FAKE = """\
#!{python}
import json, os, pathlib, sys
word = os.environ.get("FAKE_LM_EVAL", "0.5")
is_check = "dummy" in sys.argv
with open("{calls}", "a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
if word == ("no data" if is_check else "crash"):
    print("Traceback (most recent call last):")
    print("ConnectionError: Couldn't reach 'openai/gsm8k' on the Hub")
    print("the very last line")
    sys.exit(1)
if not is_check and word != "silent":
    folder = pathlib.Path(sys.argv[sys.argv.index("--output_path") + 1]) / "a__model"
    folder.mkdir(parents=True)
    scores = {{"exact_match,strict-match": float(word), "exact_match,flexible-extract": 0.9}}
    counts = {{"gsm8k": {{"original": 1319, "effective": 7}}}}
    document = {{"results": {{"gsm8k": scores}}, "n-samples": counts}}
    (folder / "results_2026-01-01T00-00-00.json").write_text(json.dumps(document))
"""


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    """Where the fake writes the arguments of each of its calls."""
    return tmp_path / "calls"


@pytest.fixture
def script(tmp_path: Path, calls: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The fake, on the PATH."""
    path = tmp_path / "bin" / "lm_eval"
    path.parent.mkdir()
    path.write_text(FAKE.format(python=sys.executable, calls=calls))
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(path.parent))
    return str(path)


@pytest.fixture
def missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without ``lm_eval``."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))


def _option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def test_the_command_is_lm_evals(model):
    """The router's completions are asked, with the tokenizer of the model's directory."""
    words = lm_eval.command("lm_eval", Gsm8k(0.5, 20), model, URL)
    assert words[:5] == ["lm_eval", "--model", "local-completions", "--tasks", "gsm8k"]
    assert dict(pair.split("=") for pair in _option(words, "--model_args").split(",")) == {
        "model": "model",
        "base_url": f"{URL}/v1/completions",
        "num_concurrent": "16",
        "tokenized_requests": "False",
        "tokenizer": str(model.directory),
    }
    assert _option(words, "--limit") == "20"
    assert "--limit" not in lm_eval.command("lm_eval", Gsm8k(0.5), model, URL)


@pytest.mark.parametrize(
    ("measured", "passes"), [(0.53, True), (0.47, True), (0.5304, False), (0.4696, False)]
)
def test_a_score_may_lie_so_far_from_what_is_expected(measured, passes):
    """The share of exact answers counts within 0.03, either way."""
    score = Score(measured, None, Gsm8k(0.5))
    assert (score.fault is None) == passes
    assert passes or "expected 0.500 within 0.03" in score.fault


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"results": {}}',
        '{"results": {"gsm8k": {"exact_match,flexible-extract": 1}}}',
        '{"results": {"gsm8k": {"exact_match,strict-match": "N/A"}}}',
        '{"results": {"gsm8k": {"exact_match,strict-match": 1}}, "n-samples": []}',
    ],
)
def test_results_without_a_score_are_an_error(text):
    """What is no JSON, or has no strict match, is told in one line."""
    with pytest.raises(PDStackError, match="no 'exact_match,strict-match' of gsm8k") as error:
        lm_eval.parse_results(text, Gsm8k(0.5))
    assert "\n" not in str(error.value)


def test_the_score_is_read_from_what_it_writes(script, calls, model, run_dir):
    """The strict match and the number of questions come from the results in the log directory."""
    score = lm_eval.evaluate(script, Gsm8k(0.52, 7), model, URL, run_dir)
    assert score == Score(0.5, 7, Gsm8k(0.52, 7))
    assert "0.500 exact_match,strict-match on 7 questions, expected 0.520" in str(score)
    (words,) = map(json.loads, calls.read_text().splitlines())
    assert words == lm_eval.command(script, Gsm8k(0.52, 7), model, URL)[1:]
    assert (run_dir / "lm_eval.log").is_file()


def test_a_crash_comes_with_its_last_lines(script, model, run_dir, monkeypatch):
    """The cause is in the message, and the end of the log with it."""
    monkeypatch.setenv("FAKE_LM_EVAL", "crash")
    with pytest.raises(ProcessDiedError, match="lm_eval ended with exit status 1: Conn") as error:
        lm_eval.evaluate(script, Gsm8k(0.5), model, URL, run_dir)
    assert error.value.log_tail[-1] == "the very last line"


def test_no_results_are_an_error(script, model, run_dir, monkeypatch):
    """An `lm_eval` that ends well and writes nothing has not passed."""
    monkeypatch.setenv("FAKE_LM_EVAL", "silent")
    with pytest.raises(PDStackError, match="ended well but wrote no results"):
        lm_eval.evaluate(script, Gsm8k(0.5), model, URL, run_dir)


def test_the_death_of_a_server_ends_it(model, run_dir, tmp_path, survivors):
    """While it runs, servers are watched, and it is stopped with the first that dies."""
    script = tmp_path / "lm_eval"
    script.write_text(f"#!{sys.executable}\nimport threading\nthreading.Event().wait()\n")
    script.chmod(0o755)

    def check() -> None:
        raise ProcessDiedError("decode", "was ended", "", [])

    with pytest.raises(ProcessDiedError, match="decode was ended"):
        lm_eval.evaluate(str(script), Gsm8k(0.5), model, URL, run_dir, check)
    assert survivors() == []


def test_a_model_that_cannot_be_named_is_refused(tmp_path):
    """lm_eval would cut a path at a comma."""
    with pytest.raises(UsageError, match="commas and equal signs"):
        lm_eval.check_model(ServedModel(tmp_path / "a,b", "model"))


@pytest.mark.usefixtures("missing")
def test_where_it_is_not_installed_nothing_starts(model, run_dir, capsys):
    """`--gsm8k` without `lm_eval` ends with 2, one line and the remedy, and leaves no logs."""
    given = ["--model", str(model.directory), "--log-dir", str(run_dir)]
    assert cli.main(["accuracy", "--gsm8k", "0.5", *given]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install 'lm-eval[api]'" in line
    assert list(run_dir.iterdir()) == []


@pytest.fixture
def accuracy(model: ServedModel, run_dir: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that runs `accuracy` with a sweep that starts nothing."""
    result = sweep.Result(
        sweep.Family("accuracy", "model", sweep.Side(), sweep.Side()),
        Accuracy(4, 4, 0, 1.0, 1e-5, 0.3, 0.2),
        1 << 20,
        None,
    )
    ran = []

    class Runner:
        def __init__(self, directory: Path, *, after: sweep.After, **_: object) -> None:
            self._group = directory, after

        def run(self, families: list[sweep.Family]) -> list[sweep.Result]:
            ran.extend(families)
            directory, after = self._group
            stack = SimpleNamespace(model=model, run_dir=directory, check=lambda: None)
            try:
                fault = after(stack, SimpleNamespace(url=URL))
            except PDStackError as error:
                fault = str(error)
            return [sweep.Result(result.family, result.accuracy, result.bytes_moved, fault)]

    monkeypatch.setattr(sweep, "Sweep", Runner)

    def run(*args: str) -> tuple[int, list[sweep.Family]]:
        common = ["--model", str(model.directory), "--log-dir", str(run_dir)]
        return cli.main(["accuracy", *args, *common]), ran

    return run


def test_it_is_said_that_it_was_not_run(accuracy, capsys):
    """Without the option, the output ends with what was left out and how to have it."""
    assert accuracy()[0] == 0
    out = capsys.readouterr().out
    assert "lm-eval was NOT run: --gsm8k EXPECTED" in out.splitlines()[-1]


def test_a_good_score_ends_the_output(script, accuracy, calls, capsys):
    """The data set is loaded first, then the router is asked, and engines have room for it."""
    status, families = accuracy("--gsm8k", "0.51", "--gsm8k-limit", "7", "--prefill-args=--x 1")
    assert status == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert "0.500 exact_match,strict-match on 7 questions, expected 0.510 within 0.03" in last
    models = [_option(json.loads(line), "--model") for line in calls.read_text().splitlines()]
    assert models == ["dummy", "local-completions"]
    assert families[0].prefill.args == ("--max-model-len", "2048", "--x", "1")
    spec = sweep._spec(families[0].prefill, (), 0, 128)
    assert "--num-gpu-blocks-override" not in spec.extra_args


def test_a_bad_score_is_failure(script, accuracy, capsys):
    """A score beside what is expected ends with 1, and both are told."""
    assert accuracy("--gsm8k", "0.6")[0] == 1
    assert "0.500 exact_match,strict-match on 7 questions, expected 0.600" in (
        capsys.readouterr().out
    )


def test_a_crash_is_shown(script, accuracy, capsys, monkeypatch):
    """The last lines of its log are printed, and no score is claimed."""
    monkeypatch.setenv("FAKE_LM_EVAL", "crash")
    assert accuracy("--gsm8k", "0.6")[0] == 1
    out, err = capsys.readouterr()
    assert "| the very last line" in err
    assert "lm-eval has no score" in out


def test_a_missing_data_set_is_told_before_engines_start(script, accuracy, capsys, monkeypatch):
    """One line says that it is missing and where it would be found, and no family is run."""
    monkeypatch.setenv("FAKE_LM_EVAL", "no data")
    status, families = accuracy("--gsm8k", "0.6")
    assert (status, families) == (1, [])
    line = capsys.readouterr().err.splitlines()[0]
    assert "cannot load gsm8k (ConnectionError: Couldn't reach" in line
    assert "HF_HOME" in line


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--gsm8k", "60"], "60 is not between 0 and 1"),
        (["--gsm8k", "nan"], "nan is not between 0 and 1"),
        (["--gsm8k", "0.5", "--gsm8k-limit", "0"], "0 is less than 1"),
    ],
)
def test_shares_are_shares(args, message, capsys):
    """A percentage, or no question at all, is a usage error."""
    with pytest.raises(SystemExit, match="2"):
        cli.main(["accuracy", *args])
    assert message in capsys.readouterr().err


def test_a_limit_needs_what_it_limits(accuracy, capsys):
    """`--gsm8k-limit` alone is refused."""
    assert accuracy("--gsm8k-limit", "5") == (2, [])
    assert "--gsm8k-limit needs --gsm8k" in capsys.readouterr().err


def test_the_script_hands_both_on(tmp_path):
    """`GSM8K_EXPECTED` and `GSM8K_LIMIT` become the options, and are left out where unset."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    env = {"PATH": "/usr/bin:/bin", "PYTHON": str(python)}
    set_to = {"GSM8K_EXPECTED": "0.41", "GSM8K_LIMIT": "50"}
    with_it, without = (
        subprocess.run(["bash", SCRIPT], env=each, capture_output=True, text=True, check=True)
        for each in (env | set_to, env)
    )
    assert with_it.stdout.endswith("--gsm8k 0.41 --gsm8k-limit 50\n")
    assert "gsm8k" not in without.stdout
