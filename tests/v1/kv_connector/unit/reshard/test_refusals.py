# SPDX-License-Identifier: Apache-2.0
"""All refusals of an engine that starts, and what upstream's connector makes of each.

Nobody is worse off for having this connector: what it cannot serve and upstream's can, with one
pipeline stage, is left to that one. Whoever adds a refusal says here why it is none of these.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from pathlib import Path

import pytest

from tests.v1.kv_connector.unit.reshard.programs import run_program
from vllm.distributed.kv_transfer.kv_connector.v1.reshard.errors import (
    ASK_FOR_UPSTREAMS,
)

UNIT = Path(__file__).parent
ROOT = UNIT.parents[4]
PACKAGE = ROOT / "vllm/distributed/kv_transfer/kv_connector/v1/reshard"
# What is refused on the floors below is so at a handshake, or by `kv-plan`.
STARTS = ("engine", "transport", "protocol")
ERRORS = {"LocalLayoutError", "LocalChannelError"}
# Raised to end up in one of these, or while an engine serves.
OTHERS = {"ValidationError", "ValueError", "RemoteLayoutError"}
OF_START_UP = (
    "connector",
    "geometry",
    "cache_views",
    "recurrent_state",
    "drafts",
    "settings",
    "worker",
    "ownership",
)


class Upstreams(Enum):
    """What upstream's connector makes of it with one stage."""

    GETS_IT = auto()
    """Serves it, and is given it when a connector is constructed: refused with stages only."""

    MAY_BE_ASKED = auto()
    """May serve it. It is known when workers have their caches only, and engines choose one
    connector in all of their processes before: the scheduler's has neither layers nor backends."""

    HAS_IT_NOT = auto()
    """Does not serve it, or knows no such thing."""


GETS_IT, MAY_BE_ASKED, HAS_IT_NOT = Upstreams


@dataclass(frozen=True)
class Refusal:
    """A refusal.

    Attributes:
        where: Module, and function or class of it, where it is made.
        words: Of its message.
        upstreams: What upstream's makes of it.
        because: Why it is that.
        test: What reaches it: a file below this folder, and a function or class of it.
    """

    where: str
    words: str
    upstreams: Upstreams
    because: str
    test: str


_VIEWS, _PROBED = "engine/caches/test_cache_views.py", "engine/caches/test_probed_shapes.py"
_DESCRIBED = "test_what_cannot_be_described_is_refused"
_KEYS, _REPLIES = "transport/test_authentication.py", "protocol/test_metadata.py"
REFUSALS = [
    Refusal(
        "connector.reason_for_upstream",
        "does not support pipeline parallelism",
        GETS_IT,
        "with one stage this line is not reached",
        "test_left_to_upstream.py::test_specifications_that_are_not_known_are_left_to_upstream",
    ),
    Refusal(
        "connector.reason_for_upstream",
        "set kv_connector to NixlConnector",
        GETS_IT,
        "the plugin's other name keeps vLLM from its own checks; with NixlConnector it is served",
        "test_left_to_upstream.py::test_other_name_is_refused_where_upstreams_would_serve",
    ),
    *(
        Refusal(
            "pcp_replica.refuse_pcp_consumers",
            words,
            HAS_IT_NOT,
            "upstream's refuses it, too",
            "engine/test_pcp_replica.py::test_readers_are_refused",
        )
        for words in ("set kv_role to kv_producer", "by which it would read answers back")
    ),
    Refusal(
        "connector.NixlConnector.__init__",
        "which this connector cannot read: use 1",
        HAS_IT_NOT,
        "that of 0.22.1 takes ranks with other tokens for replicas; later ones get it",
        "test_left_to_upstream.py::test_context_parallelism_is_refused_where_layers_do_not_tell",
    ),
    Refusal(
        "connector._refuse_what_upstream_cannot_share",
        "knows --decode-context-parallel-size for models with MLA over all",
        HAS_IT_NOT,
        "it takes tokens of heads, or of some ranks each, for whole blocks",
        "test_left_to_upstream.py::test_upstream_is_not_left_what_it_reads_wrong",
    ),
    Refusal(
        "connector.NixlConnector.__init__",
        "keep a prompt and the last tokens of its answer only",
        HAS_IT_NOT,
        "it offers the null blocks in the middle of an answer for what they replace",
        "test_left_to_upstream.py::test_answers_with_a_gap_are_not_offered_back",
    ),
    Refusal(
        "connector.NixlConnector.__init__",
        "recurrent state of an answer in one of several blocks",
        HAS_IT_NOT,
        "it offers the first block, and not the one that the accepted drafts have left it in",
        "test_connector.py::test_state_of_drafts_is_not_offered_back",
    ),
    Refusal(
        "connector.NixlConnector.__init__",
        "--enable-sleep-mode takes the KV cache's memory away",
        HAS_IT_NOT,
        "those before 0.33 keep registrations of memory that is gone; that of 0.33 gets it",
        "test_left_to_upstream.py::test_sleep_mode_is_refused",
    ),
    *(
        Refusal(
            "limits.require_room",
            words,
            HAS_IT_NOT,
            "NIXL fails over it without a word of the cause, hangs, or ends the process",
            f"transport/test_limits.py::test_no_agent_is_made_without_{what}",
        )
        for what, words in (
            ("files", "files are open, and NIXL needs"),
            ("threads", "more threads can be started, and NIXL needs"),
            ("ports", "free ports, and NIXL needs"),
        )
    ),
    Refusal(
        "side_channel.HandshakeServer.start",
        "the side channel has no thread",
        HAS_IT_NOT,
        "its listener is a thread, too",
        "transport/test_side_channel.py::test_thread_that_does_not_start",
    ),
    Refusal(
        "worker.ReshardWorker.unregister_kv_caches",
        "take the KV cache's memory away while other engines may read it",
        HAS_IT_NOT,
        "0.33 asks this of an engine that serves, and not as it starts",
        "test_operations.py::test_memory_of_a_cache_is_not_taken_away",
    ),
    Refusal(
        "connector.NixlConnector.__init__",
        "--calculate-kv-scales with --kv-cache-dtype",
        HAS_IT_NOT,
        "it moves numbers without the scales, which are each engine's own on 0.22.1",
        "test_connector.py::test_scales_of_an_engines_own_are_refused",
    ),
    Refusal(
        "geometry.layers_of_worker",
        "_not_served(name, spec)",
        GETS_IT,
        "specifications are known when a connector is constructed",
        "test_hybrid.py::test_caches_that_hold_no_slots_for_tokens_are_refused",
    ),
    Refusal(
        "geometry.layers_of_worker",
        "no layer of this worker has a KV cache",
        HAS_IT_NOT,
        "it asks for the shape of the first cache",
        "engine/caches/test_geometry.py::test_worker_without_layers_is_refused",
    ),
    Refusal(
        "geometry._blocks_per_id",
        "which do not divide them",
        MAY_BE_ASKED,
        "blocks are counted in tensors",
        "engine/caches/test_geometry.py::test_blocks_that_the_scheduler_does_not_count_are_refused",
    ),
    Refusal(
        "cache_views.describe_layer",
        "has a KV cache of shape",
        MAY_BE_ASKED,
        "shapes are those of tensors",
        f"{_VIEWS}::{_DESCRIBED}",
    ),
    Refusal(
        "cache_views.describe_layer",
        "spreads a head of a token over memory",
        MAY_BE_ASKED,
        "strides are those of tensors",
        f"{_VIEWS}::{_DESCRIBED}",
    ),
    Refusal(
        "cache_views._not_understood",
        "leave VLLM_KV_CACHE_LAYOUT unset, or, ",
        MAY_BE_ASKED,
        "strides are those of tensors, and which backend writes is known to workers",
        f"{_VIEWS}::{_DESCRIBED}",
    ),
    Refusal(
        "probed_shapes.describe_layer",
        "vLLM 0.22.1 does not tell where these lie",
        MAY_BE_ASKED,
        "which backend writes is known to workers",
        f"{_PROBED}::{_DESCRIBED}",
    ),
    Refusal(
        "probed_shapes.describe_layer",
        "spreads a head of a token over memory",
        MAY_BE_ASKED,
        "strides are those of tensors",
        f"{_PROBED}::{_DESCRIBED}",
    ),
    Refusal(
        "probed_shapes._axes",
        "shapes its KV cache as",
        MAY_BE_ASKED,
        "which backend writes is known to workers",
        f"{_PROBED}::{_DESCRIBED}",
    ),
    Refusal(
        "ownership._holding",
        "heads in its planes, which are not split alike",
        MAY_BE_ASKED,
        "planes are those of tensors",
        "engine/caches/test_ownership.py::test_planes_that_are_not_split_alike_are_refused",
    ),
    Refusal(
        "ownership.refuse_shared_names",
        "so that two layers have one name",
        HAS_IT_NOT,
        "there are several stages",
        "engine/caches/test_ownership.py::test_layers_of_one_name_on_two_stages_are_refused",
    ),
    Refusal(
        "drafts.refuse_impossible_drafts",
        "needs one pipeline stage with this version's model runner",
        HAS_IT_NOT,
        "there are several stages",
        "engine/caches/test_drafts.py::test_drafts_on_stages_without_a_drafter_are_refused",
    ),
    Refusal(
        "settings.read_settings",
        "has a value that cannot be",
        HAS_IT_NOT,
        "it dies of such a value, or reads another one from it",
        "engine/test_settings.py::test_values_that_cannot_be_are_named",
    ),
    Refusal(
        "agent.NixlAgent.__init__",
        "the Python package nixl cannot be imported",
        HAS_IT_NOT,
        "it needs NIXL as well",
        "test_refusals.py::test_nixl_is_asked_for_by_name",
    ),
    Refusal(
        "agent.require_backends",
        "backends names",
        HAS_IT_NOT,
        "it ends with a KeyError",
        "transport/test_agent.py::test_backend_that_nixl_does_not_have_is_refused_by_name",
    ),
    *(
        Refusal(
            "authentication.read_channel_key",
            words,
            HAS_IT_NOT,
            "it has no such option",
            f"{_KEYS}::TestKeyFile",
        )
        for words in (
            "was built here without CURVE",
            "put it where each of this engine's processes runs",
            "which lets every user of this machine use it",
            "holds no key of",
        )
    ),
    Refusal(
        "side_channel.HandshakeServer._listen",
        "the side channel cannot listen at",
        HAS_IT_NOT,
        "it listens at the same address",
        "transport/test_side_channel.py::test_port_that_is_taken",
    ),
    Refusal(
        "arena.StagingArea.rows",
        "more than one transfer list can hold",
        HAS_IT_NOT,
        "it stages nothing",
        "transport/test_arena.py::test_arena_of_more_descriptors_than_nixl_counts_is_refused",
    ),
    *(
        Refusal("metadata.encode_reply", words, HAS_IT_NOT, because, f"{_REPLIES}::{test}")
        for words, because, test in (
            ("no worker has handshake metadata", "it has none to serve, either", "test_no_workers"),
            (
                "start all workers of an engine alike",
                "it gives readers the hash of one worker, and the caches of all",
                "test_missing_factor",
            ),
            (
                "start all workers of an engine with one configuration",
                "workers of several engines are none",
                "test_workers_of_two_engines",
            ),
            (
                "what must be equal at both engines takes",
                "no model's configuration is of 64 KiB; it hashes whatever is there",
                "test_size_of_the_greeting",
            ),
            (
                "the handshake of",
                "one stage has not as many workers, nor layers for so many bytes",
                "test_size",
            ),
        )
    ),
]


def modules() -> Iterator[Path]:
    """What runs while an engine starts, on any base."""
    yield PACKAGE / "connector.py"
    for floor in STARTS:
        yield from sorted((PACKAGE / floor).rglob("*.py"))
    yield from sorted((ROOT / "bases").glob("*/vllm/**/reshard/engine/**/*.py"))


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    """What a module calls by its name, and in which function."""

    def walk(node: ast.AST, place: tuple[str, ...]) -> Iterator[tuple[str, ast.Call]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call):
                yield ".".join(place), child
            is_place = isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            yield from walk(child, (*place, child.name) if is_place else place)

    yield from walk(ast.parse(path.read_text(encoding="utf-8")), (path.stem,))


def text_of(message: ast.expr) -> str:
    """A message, with what is put into it as its source has it."""
    if isinstance(message, ast.Constant):
        return str(message.value)
    if isinstance(message, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else f"{{{ast.unparse(part.value)}}}"
            for part in message.values
        )
    return ast.unparse(message)


@cache
def refusals() -> list[tuple[str, str]]:
    """Where an engine is refused, and the message."""
    return [
        (where, text_of(call.args[0]))
        for path in modules()
        for where, call in calls(path)
        if isinstance(call.func, ast.Name) and call.func.id in ERRORS
    ]


def means(refusal: Refusal, where: str, message: str) -> bool:
    """Whether an entry is of a refusal."""
    return refusal.where == where and refusal.words in message


def test_every_refusal_is_classified_once():
    """Whoever adds one finds this table, and says whether upstream's connector would serve."""
    found = refusals()
    assert len(found) > 30
    for where, message in found:
        named = [each.because for each in REFUSALS if means(each, where, message)]
        assert len(named) == 1, f"{where}: {message}"
    for each in REFUSALS:
        assert any(means(each, *one) for one in found), f"{each.where}: {each.words}"


def test_modules_of_start_up_raise_nothing_else():
    """An error of another type would be a refusal that nobody has classified."""
    for path in modules():
        if path.stem not in OF_START_UP:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call):
                continue
            raised = ast.unparse(node.exc.func).rpartition(".")[2]
            # Functions that make an error are looked into where they make it.
            assert raised in ERRORS | OTHERS or raised.startswith("_"), f"{path.stem}: {raised}"


def test_every_refusal_is_reached_by_a_test():
    """The test that it names is there."""
    for refusal in REFUSALS:
        file, _, name = refusal.test.partition("::")
        text = (UNIT / file).read_text(encoding="utf-8")
        assert f"def {name}(" in text or f"class {name}" in text, refusal
        assert refusal.because, refusal


@pytest.mark.parametrize(
    "refusal",
    [each for each in REFUSALS if each.upstreams is MAY_BE_ASKED],
    ids=lambda each: f"{each.where}: {each.words}",
)
def test_what_is_known_too_late_names_the_other_connector(refusal):
    """The advice can be followed: which backend writes may be the model's choice."""
    (message,) = [text for where, text in refusals() if means(refusal, where, text)]
    assert message.endswith("{ASK_FOR_UPSTREAMS}")
    assert "backend" not in ASK_FOR_UPSTREAMS
    assert "use another attention backend" not in message


_WITHOUT_NIXL = """
import sys

sys.modules["nixl"] = sys.modules["nixl._api"] = None  # As where no such package is installed.
from reshard.transport.agent import NixlAgent

NixlAgent("name")
"""


def test_nixl_is_asked_for_by_name():
    """Without it what uses it can be imported, and says what to install."""
    ended = run_program(_WITHOUT_NIXL)
    assert "LocalLayoutError" in ended.stderr, ended.stderr
    assert "install nixl>=1.5" in ended.stderr.splitlines()[-1]


def test_nobody_imports_nixl_but_by_vllm():
    """So that the connector can be imported without it: vLLM's import may fail."""
    imported = {
        name
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for name in (
            [each.name for each in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert "vllm.distributed.nixl_utils" in imported
    assert not [name for name in imported if name.partition(".")[0] == "nixl"]
