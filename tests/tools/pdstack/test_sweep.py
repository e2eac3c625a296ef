# SPDX-License-Identifier: Apache-2.0
"""Which families there are, what they start, and when they have passed."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from unittest.mock import Mock, create_autospec

import pytest
from rich.console import Console

from tools.pdstack import accuracy, caches, cli, families
from tools.pdstack.accuracy import Accuracy, Completion
from tools.pdstack.caches import Caches
from tools.pdstack.engine import Device, KVTransfer, Speculation
from tools.pdstack.errors import ProcessDiedError, UsageError
from tools.pdstack.families import (
    FAMILIES,
    MODELS,
    SUBSETS,
    choose,
    split_by_vllm,
    subsets_of,
)
from tools.pdstack.family import Family, Side
from tools.pdstack.layout import Layout, check_layout, read_model_shape
from tools.pdstack.metrics import NixlCounters
from tools.pdstack.stack import PDStack
from tools.pdstack.sweep import (
    MAX_WORKERS,
    Result,
    Sweep,
    _Group,
    _numbered,
    _spec,
    judge,
    result_table,
)
from tools.pdstack.tiny_models import write_tiny_llama

CI_LIMIT_S = 15 * 60
# The longest that an engine took to start, and a family with its engines up, on two cores.
ENGINE_START_S, FAMILY_S = 100, 25

GOOD = Accuracy(64, 64, 0, 1.0, 1e-5, 0.3, 0.2)
MOVED = NixlCounters(bytes_moved=1 << 20, transfers=4)
FAMILY = Family("any", next(iter(MODELS)), Side(Layout(1, 2)), Side())


def test_every_family_can_run(tmp_path):
    """Each model can be split as its families ask, and no family wants too many workers."""
    shapes = {
        name: read_model_shape(make(tmp_path / name).directory) for name, make in MODELS.items()
    }
    for family in FAMILIES:
        for side in (family.prefill, family.decode):
            check_layout(side.layout, shapes[family.model])
        workers = sum(
            side.count * side.layout.world_size for side in (family.prefill, family.decode)
        )
        assert workers + 1 <= MAX_WORKERS
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)


def test_engines_of_a_sweep_have_names_of_their_own():
    """Two engines that differ in anything write different logs."""
    specs = {
        (replace(side, count=1), family.args, first): _spec(
            replace(side, count=1), family.args, first, 128
        ).name
        for family in FAMILIES
        for side, first in _numbered(family)
    }
    assert len(set(specs.values())) == len(specs)
    assert all("/" not in name and " " not in name for name in specs.values())


def test_equal_sides_are_two_engines():
    """A pair of one layout does not read from itself."""
    alike = replace(FAMILY, prefill=Side(count=2), decode=Side(count=2))
    assert [first for _, first in _numbered(alike)] == [0, 2]
    assert [first for _, first in _numbered(FAMILY)] == [0, 0]


def test_multi_connector_has_ours_as_its_child():
    """The engine is told of MultiConnector with NixlConnector in it."""
    spec = _spec(Side(connector="MultiConnector"), (), 0, 128)
    config = spec.kv_transfer.to_json(Device.CPU)
    assert '"kv_connector": "MultiConnector"' in config
    assert '"connectors": [{"kv_connector": "NixlConnector"' in config


def test_a_side_drafts_and_sets_options():
    """Both reach the engine, beside what all engines are told."""
    speculation = Speculation("ngram", 2)
    side = Side(speculation=speculation, options=(("missing_draft_layers", "compute"),))
    spec = _spec(side, (), 0, 128)
    assert spec.speculation == speculation
    assert spec.kv_transfer.extra_config == {
        **KVTransfer().extra_config,
        "missing_draft_layers": "compute",
    }
    assert str(side) == "tp1pp1, ngram"


def test_engines_that_do_not_start_cost_their_family_only(tmp_path):
    """The fault names the engine, and what is left of it is stopped."""
    stopped = []
    stack = create_autospec(PDStack, instance=True)
    stack.model = MODELS[FAMILY.model](tmp_path)
    stack.start_engines.side_effect = ProcessDiedError("p", "ended", "no memory", [])
    stack.stop_all.side_effect = lambda: stopped.append(True)
    result = _Group(stack, 4).run(FAMILY)
    assert result.accuracy is None and "p ended" in str(result.fault)
    assert stopped


@pytest.mark.parametrize(
    ("answer", "later", "fault"),
    [("a", None, None), ("a", "too few", "too few"), ("b", "too few", "4 answers differ")],
)
def test_what_comes_after_needs_right_answers(tmp_path, monkeypatch, answer, later, fault):
    """Only a router with right answers is handed on, while it is up, and what follows counts."""
    replies = {"reference": "a", FAMILY.name: answer}

    def complete_all(url, model, prompts, *, salt, logprobs=True):
        return [Completion((replies[salt],), (-1.0,), 0.1)] * len(prompts)

    monkeypatch.setattr(accuracy, "complete_all", complete_all)
    events = []
    stack = create_autospec(PDStack, instance=True)
    stack.model = MODELS[FAMILY.model](tmp_path)
    stack.start_engines.side_effect = lambda *specs: [
        Mock(nixl_counters=Mock(side_effect=[NixlCounters(), MOVED])) for _ in specs
    ]
    stack.stop.side_effect = lambda server: events.append("stopped")

    def after(given, router):
        assert (given, router) == (stack, stack.start_router.return_value)
        events.append("after")
        return later

    assert _Group(stack, 4, after).run(FAMILY).fault == fault
    assert events == (["after", "stopped"] if answer == "a" else ["stopped"])


@pytest.mark.parametrize(
    ("found", "counters", "exact", "fault"),
    [
        (GOOD, MOVED, True, None),
        (replace(GOOD, equal=63), MOVED, True, "1 answers differ"),
        (replace(GOOD, equal=63, tied=1), MOVED, True, None),
        (replace(GOOD, logprob_gap=0.1), MOVED, True, "log-probabilities differ by 0.1"),
        (replace(GOOD, equal=40, agreement=0.8, logprob_gap=0.1), MOVED, False, None),
        (replace(GOOD, logprob_gap=0.5), MOVED, False, "log-probabilities differ by 0.5"),
        (replace(GOOD, equal=0, agreement=0.2), MOVED, False, "only 20% of the tokens agree"),
        (GOOD, NixlCounters(), True, "nothing was moved over NIXL"),
        (GOOD, replace(MOVED, failed_reads=2), True, "2 reads failed"),
    ],
)
def test_what_passes(found, counters, exact, fault):
    """Right answers count only if the KV cache was moved, and all of it arrived."""
    assert judge(replace(FAMILY, exact=exact), found, counters) == fault


def test_early_pair_has_to_have_been_early():
    """Its answers show nothing where all requests came after their prompts."""
    early = [each for each in FAMILIES if each.name.startswith("early")]
    assert early
    for family in early:
        assert judge(family, GOOD, replace(MOVED, first_tokens=1)) is not None
        found = replace(MOVED, first_tokens=1, prefill_waits=1)
        assert (judge(family, GOOD, found) is None) == ("chunks" not in family.name)
        assert judge(family, GOOD, replace(found, prefetched_bytes=1)) is None
        config = _spec(family.decode, family.args, 0, 128).kv_transfer
        assert config is not None and config.extra_config["early_dispatch"] is True


def test_seeded_pair_has_to_have_been_seeded():
    """Its answers show nothing where the decode engine has computed all of them."""
    seeded = [each for each in FAMILIES if "seeded" in each.name]
    assert seeded
    for family in seeded:
        found = replace(MOVED, prefill_waits=1, prefetched_bytes=1)
        assert judge(family, GOOD, found) is not None
        assert judge(family, GOOD, replace(found, first_tokens=1)) is None
        assert "seeded" in str(family.decode)


def test_staged_pair_has_to_have_been_staged():
    """Its answers show nothing of the staging arena where reads went direct."""
    (staged,) = (each for each in FAMILIES if each.name.startswith("staged"))
    assert judge(staged, GOOD, MOVED) is not None
    assert judge(staged, GOOD, replace(MOVED, staged_bytes=1)) is None
    assert str(staged.decode).endswith(", staged")


def test_caches_are_as_large_whatever_their_blocks(tmp_path):
    """An engine of a model with small blocks has more of them."""
    told = [_spec(Side(), (), 0, block_tokens).extra_args for block_tokens in (128, 16)]
    blocks = [int(args[args.index("--num-gpu-blocks-override") + 1]) for args in told]
    assert blocks == [128, 1024]


@pytest.mark.parametrize("why", ["", "vLLM 1 has no MLA on CPU"])
def test_families_that_vllm_cannot_serve_are_left_out(monkeypatch, why):
    """Those of MLA are, with the reason, where it cannot; all others stay in any case."""
    for model in families.WHY_NOT:
        monkeypatch.setitem(families.WHY_NOT, model, lambda: "")
    monkeypatch.setitem(families.WHY_NOT, "deepseek 2, MLA", lambda: why)
    for ask in ("why_no_caches", "why_no_second_runner", "why_no_first_tokens"):
        monkeypatch.setattr(families, ask, lambda *_: "")
    served, left_out = split_by_vllm(FAMILIES)
    names = [family.name for family in FAMILIES if family.name.startswith("MLA ")]
    assert {"MLA TP down", "MLA PP on P", "MLA TP up"} < {*names}
    assert left_out == ({name: why for name in names} if why else {})
    assert [*served] == [family for family in FAMILIES if family.name not in left_out]


def test_families_whose_caches_vllm_has_not_are_left_out(monkeypatch):
    """Those on either side that are filled as on GPUs; nobody asks where there are none."""
    monkeypatch.setattr(families, "why_no_caches", lambda _: "there are none")
    with_caches = replace(FAMILY, name="with", decode=Side(caches=Caches("NHD", 16)))
    served, left_out = split_by_vllm([FAMILY, with_caches])
    assert (served, left_out) == ([FAMILY], {"with": "there are none"})
    monkeypatch.setattr(families, "why_no_caches", Mock(side_effect=AssertionError))
    assert split_by_vllm([FAMILY]) == ([FAMILY], {})


def test_families_whose_first_tokens_vllm_does_not_ask_for_are_left_out(monkeypatch):
    """As on a base without the hook, and on a vLLM as released."""
    monkeypatch.setattr(families, "why_no_first_tokens", lambda: "there is no hook")
    seeded = replace(FAMILY, name="with", decode=Side(options=(("seed_first_token", True),)))
    assert split_by_vllm([FAMILY, seeded]) == ([FAMILY], {"with": "there is no hook"})


@pytest.mark.parametrize(
    ("version", "formats", "words"),
    [
        ("0.22.1+reshard.1.cpu", {"Planes"}, ""),
        ("0.22.1+reshard.1.cpu", {"Slots"}, "has no caches that are views"),
        ("0.22.1+reshard.1.cpu", (), "has no caches that are views"),
        ("0.33.0+reshard.1", {"Planes"}, "has no keys and values apart in planes"),
        ("0.33.0+reshard.1", {"Slots", "Sides"}, ""),
    ],
)
def test_each_release_fills_its_own_caches(monkeypatch, version, formats, words):
    """Two planes of 0.22.1, views since."""
    monkeypatch.setattr(caches, "installed_device", lambda: Device.CPU)
    monkeypatch.setattr(caches.importlib.metadata, "version", lambda _: version)
    reason = caches.why_no_caches(formats)
    assert words in reason and bool(words) == bool(reason)


def test_caches_of_a_side_reach_its_engine():
    """Its blocks, its environment and the plugin; what the side itself says comes last."""
    caches = Caches("NHD", 64, "Scaled")
    spec = _spec(Side(caches=caches, args=("--more",), env=(("A", "b"),)), (), 0, 128)
    assert spec.extra_args == ("--num-gpu-blocks-override", "256", *caches.args, "--more")
    assert spec.env == {"GPU_CACHES": "Scaled", "VLLM_KV_CACHE_LAYOUT": "NHD", "A": "b"}
    (module_dir,) = spec.module_dirs
    assert (module_dir / "gpu_caches-1.dist-info/entry_points.txt").is_file()
    assert str(Side(caches=caches)) == "tp1pp1, Scaled NHD 64"


def test_second_runner_of_a_side_reaches_its_engine():
    """The environment chooses it; the interpreter is found beside the plugin of caches."""
    spec = _spec(Side(caches=Caches("NHD", 64), second_runner=True), (), 0, 128)
    assert spec.env["VLLM_USE_V2_MODEL_RUNNER"] == spec.env["TRITON_INTERPRET"] == "1"
    assert spec.env["GPU_CACHES"] == "Slots"
    assert [(each / "sitecustomize.py").is_file() for each in spec.module_dirs] == [False, True]
    assert str(Side(second_runner=True)) == "tp1pp1, second runner"
    first, second = (_spec(Side(second_runner=each), (), 0, 128) for each in (False, True))
    assert first.name != second.name and not first.env


def test_engines_with_prefill_context_parallelism_are_read_from_alone():
    """They would be refused in any other role; no other engine is given one."""
    for pcp_size, role in ((1, "kv_both"), (2, "kv_producer")):
        spec = _spec(Side(Layout(pcp_size=pcp_size)), (), 0, 128)
        assert spec.kv_transfer is not None and spec.kv_transfer.role == role
    replicas = [family for family in FAMILIES if family.prefill.layout.pcp_size > 1]
    assert replicas and not any(map(subsets_of, replicas))
    assert all(family.prefill.second_runner for family in replicas)
    assert all(family.decode.layout.pcp_size == 1 for family in FAMILIES)


def test_a_family_with_the_second_runner_needs_one(monkeypatch):
    """Where there is none, it is left out with the reason; first runners are not asked about."""
    monkeypatch.setattr(families, "why_no_second_runner", lambda: "there is none")
    second = replace(FAMILY, name="second", decode=Side(second_runner=True))
    assert split_by_vllm([FAMILY, second]) == ([FAMILY], {"second": "there is none"})
    monkeypatch.setattr(families, "why_no_second_runner", Mock(side_effect=AssertionError))
    assert split_by_vllm([FAMILY]) == ([FAMILY], {})


def test_answers_of_few_bits_are_those_of_an_engine_with_as_many():
    """All others are compared with vLLM's own attention for CPU, token by token."""
    for family in FAMILIES:
        sides = family.prefill, family.decode
        if not any(side.caches for side in sides):
            assert family.one == Side()
        elif any(side.caches.has_few_bits for side in sides):
            assert family.one.caches == family.decode.caches and not family.exact
        else:
            assert family.one == Side() and family.exact


def test_a_family_that_cannot_run_is_refused_by_name(monkeypatch, capsys):
    """Who asks for it is told why; nothing is started."""
    monkeypatch.setitem(families.WHY_NOT, "deepseek 2, MLA", lambda: "there is none")
    assert cli.main(["sweep", "--only", "MLA TP up"]) == 2
    assert "family 'MLA TP up' cannot run here: there is none" in capsys.readouterr().err


def test_families_are_chosen_by_name():
    """Names are matched whatever their case; unknown ones are told apart."""
    assert [family.name for family in choose(["pp ON p"])] == ["PP on P"]
    assert choose([]) == list(FAMILIES)
    with pytest.raises(UsageError, match="no family 'nope'; there are 'pp on p'"):
        choose(["nope"])


def test_what_ci_runs_fits_its_time(tmp_path, monkeypatch):
    """The families in CI's subset start few enough engines, those of the answers included."""
    monkeypatch.setattr(accuracy, "complete_all", lambda *_, **__: [])
    chosen, started = choose(SUBSETS["ci"]), []
    for name in dict.fromkeys(family.model for family in chosen):
        stack = create_autospec(PDStack, instance=True)
        stack.model = MODELS[name](tmp_path / str(len(started)))
        stack.start_engines.side_effect = lambda *specs: (
            started.extend(specs) or [Mock(spec_set=["url"]) for _ in specs]
        )
        group = _Group(stack, 4)
        for family in chosen:
            if family.model == name:
                group._start(family)
                group._reference(family, [])
    assert started
    assert len(started) * ENGINE_START_S + len(chosen) * FAMILY_S <= CI_LIMIT_S


def test_engine_of_the_right_answers_starts_with_the_first_pair(tmp_path, monkeypatch):
    """One that is alone on two cores leaves one of them idle; later pairs do not need it."""
    monkeypatch.setattr(accuracy, "complete_all", lambda *_, **__: [])
    stack = create_autospec(PDStack, instance=True)
    stack.model = write_tiny_llama(tmp_path)
    stack.start_engines.side_effect = lambda *specs: [Mock(spec_set=["url"]) for _ in specs]
    group, family = _Group(stack, 4), replace(FAMILY, decode=Side(Layout(2, 1)))
    for each in (family, replace(family, prefill=Side(Layout(3, 1)))):
        group._start(each)
        group._reference(each, [])
    started = [[spec.layout for spec in call.args] for call in stack.start_engines.mock_calls]
    assert started == [[Layout(1, 2), Layout(2, 1), Layout(1, 1)], [Layout(3, 1)]]


def test_engines_that_are_right_are_each_kinds_own(tmp_path, monkeypatch):
    """Two families of one command line, whose right answers are two engines', start both."""
    monkeypatch.setattr(accuracy, "complete_all", lambda *_, **__: [])
    stack = create_autospec(PDStack, instance=True)
    stack.model = write_tiny_llama(tmp_path)
    stack.start_engines.side_effect = lambda *specs: [Mock(spec_set=["url"]) for _ in specs]
    group = _Group(stack, 4)
    for one in (Side(), Side(caches=Caches("NHD", 16))):
        family = replace(FAMILY, decode=Side(Layout(2, 1)), one=one)
        group._start(family)
        group._reference(family, [])
    started = [spec.name for call in stack.start_engines.mock_calls for spec in call.args]
    assert started[2:] == ["tp1pp1-NixlConnector-0", "tp1pp1-NixlConnector-NHD-16-0"]


def test_subsets_name_families():
    """What a subset holds exists, and each family knows which subsets it is in."""
    for subset, names in SUBSETS.items():
        assert [subset in subsets_of(family) for family in choose(names)] == [True] * len(names)
    assert subsets_of(FAMILIES[1]) == []


def test_the_table_tells_what_did_not_pass():
    """A family without answers has a row, too."""
    stream = StringIO()
    results = [Result(FAMILY, GOOD, 1 << 20, None), Result(FAMILY, None, 0, "it died")]
    Console(file=stream, width=160).print(result_table(results))
    text = stream.getvalue()
    assert "1.00 MiB" in text
    assert "NO" in text


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (
            Result(FAMILY, GOOD, 1 << 20, None),
            "  passed: 64 of 64 equal, gap 1.0e-05, 1.00 MiB moved",
        ),
        (Result(FAMILY, None, 0, "it died"), "  it died"),
    ],
)
def test_what_a_family_gave_is_said_and_kept_at_once(tmp_path, monkeypatch, result, said):
    """A sweep that is ended early has no table."""
    lines, kept = [], []
    monkeypatch.setattr(_Group, "run", lambda _, family: result)
    sweep = Sweep(
        tmp_path,
        num_requests=4,
        startup_timeout_s=1.0,
        on_wait=Mock(),
        say=lines.append,
        keep=kept.append,
    )
    assert sweep.run([FAMILY]) == [result] == kept
    assert lines[-1] == said


def test_the_list_needs_no_engine(capsys):
    """`sweep --list` names every family and ends well."""
    assert cli.main(["sweep", "--list"]) == 0
    printed = capsys.readouterr().out
    assert all(family.name in printed for family in FAMILIES)


def test_the_list_shows_what_ci_runs(capsys):
    """`sweep --list` marks the families of a subset, and with `--subset` names no other."""
    marked = set(SUBSETS["ci"])
    assert cli.main(["sweep", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split(":")[0] for line in lines if "[ci]" in line} == marked
    assert cli.main(["sweep", "--list", "--subset", "ci"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split(":")[0] for line in lines} == marked


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--only", "PP on P", "--subset", "ci"], "--subset: not allowed with argument --only"),
        (["--subset", "nightly"], "invalid choice: 'nightly' (choose from"),
    ],
)
def test_a_subset_that_cannot_be_is_refused(args, message, capsys):
    """A subset beside names, or one that is none, is a usage error."""
    with pytest.raises(SystemExit) as refusal:
        cli.main(["sweep", *args])
    assert refusal.value.code == 2
    assert message in capsys.readouterr().err


def test_a_layout_that_cannot_be_is_refused_before_anything_starts(capsys):
    """`accuracy` checks its layouts first."""
    assert cli.main(["accuracy", "--prefill", "tp0pp1"]) == 2
    assert "tp0pp1" in capsys.readouterr().err
