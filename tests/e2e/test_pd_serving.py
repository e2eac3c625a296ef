# SPDX-License-Identifier: Apache-2.0
"""A real prefill engine, a real decode engine and the real router, against one engine alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import pytest

from tools.pdstack import demo, report
from tools.pdstack.chat import Answer, ChatClient
from tools.pdstack.demo import DEMO_PROMPTS, Prompt
from tools.pdstack.engine import ServedModel
from tools.pdstack.layout import Layout, read_model_shape
from tools.pdstack.metrics import NixlCounters, settled
from tools.pdstack.stack import Engine, PDStack, Router

# `make demo`, which decides every change, asks the same of this model, with stages.
pytestmark = pytest.mark.e2e

FLOAT32_BYTES = 4
BLOCK_TOKENS = 128
CONCURRENT_PROMPTS = [Prompt(f"What is {number} plus {number + 1}?", 24) for number in range(2, 8)]


@dataclass
class Served:
    """A running stack, and what the prefill engine has answered by itself."""

    stack: PDStack
    router: Router
    decode: Engine
    references: dict[Prompt, Answer]

    def client(self) -> ChatClient:
        """Return a client of the router."""
        return ChatClient(self.router.url, self.stack.model.name)

    def moved_since(self, before: NixlCounters) -> NixlCounters:
        """Return what the decode engine has read since an earlier reading."""
        return settled(self.decode.nixl_counters, before, limit_s=30.0) - before


@pytest.fixture(scope="module")
def served(model: ServedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Start the stack, one for all tests here, and ask one engine of it everything."""
    prompts = [*DEMO_PROMPTS, *CONCURRENT_PROMPTS]
    with PDStack(model, tmp_path_factory.mktemp("run")) as stack:
        specs = (demo.engine_specs(role, [Layout()])[0] for role in ("prefill", "decode"))
        prefill, decode = stack.start_engines(*specs)
        # Without the router nothing is moved, and the decode engine has seen none of it.
        with ChatClient(prefill.url, model.name) as client:
            answers = {each: client.ask(each.text, each.max_tokens) for each in prompts}
        router = stack.start_router([prefill], [decode])
        yield Served(stack, router, decode, answers)


def _expected_bytes(model: ServedModel, prompt_tokens: int) -> int:
    """Return the size of whole blocks that hold the prompt: what upstream's connector reads."""
    blocks = -(-prompt_tokens // BLOCK_TOKENS)
    per_token = read_model_shape(model.directory).kv_bytes_per_token(FLOAT32_BYTES)
    return blocks * BLOCK_TOKENS * per_token


@pytest.mark.parametrize("prompt", DEMO_PROMPTS, ids=["short", "several-blocks", "sentence"])
def test_an_answer_equals_one_engines(served: Served, model: ServedModel, prompt: Prompt) -> None:
    """The streamed answer is the reference, and its whole KV cache came over NIXL, once."""
    before = served.decode.nixl_counters()
    pieces: list[str] = []
    with served.client() as client:
        answer = client.ask(prompt.text, prompt.max_tokens, pieces.append)
    moved = served.moved_since(before)
    reference = served.references[prompt]
    assert report.Exchange(prompt.text, answer, reference, moved.bytes_moved).equal
    assert answer.text == reference.text
    assert len(pieces) > 1
    assert moved == NixlCounters(
        bytes_moved=_expected_bytes(model, answer.prompt_tokens), transfers=1, first_tokens=1
    )


def test_the_long_prompt_spans_several_blocks(served: Served) -> None:
    """The prompts cover both a part of one block and more than four."""
    tokens = [served.references[prompt].prompt_tokens for prompt in DEMO_PROMPTS]
    assert min(tokens) < BLOCK_TOKENS
    assert max(tokens) > 4 * BLOCK_TOKENS


def test_concurrent_requests_do_not_mix(served: Served, model: ServedModel) -> None:
    """Six requests at once get their own answers, with one transfer each and no failure."""
    before = served.decode.nixl_counters()
    with served.client() as client, ThreadPoolExecutor(len(CONCURRENT_PROMPTS)) as pool:
        answers = list(
            pool.map(lambda each: client.ask(each.text, each.max_tokens), CONCURRENT_PROMPTS)
        )
    references = [served.references[prompt] for prompt in CONCURRENT_PROMPTS]
    assert [each.text for each in answers] == [each.text for each in references]
    assert len({each.text for each in answers}) == len(answers)
    expected = NixlCounters(
        bytes_moved=sum(_expected_bytes(model, each.prompt_tokens) for each in answers),
        transfers=len(answers),
        first_tokens=len(answers),
    )
    assert served.moved_since(before) == expected


def test_the_printed_curl_command_works(served: Served) -> None:
    """What `serve` prints can be pasted into a shell."""
    hint = report.curl_hint(served.router.url, served.stack.model.name)
    reply = subprocess.run(["/bin/sh", "-c", hint], capture_output=True, text=True, timeout=300)
    assert reply.returncode == 0, reply.stderr
    assert "Paris" in json.loads(reply.stdout)["choices"][0]["message"]["content"]


def test_the_printed_program_works(served: Served) -> None:
    """The printed program for the OpenAI client runs as it stands."""
    hint = report.python_hint(served.router.url, served.stack.model.name)
    run = partial(subprocess.run, capture_output=True, text=True, timeout=300)
    reply = run([sys.executable, "-c", hint])
    assert reply.returncode == 0, reply.stderr
    assert "Paris" in reply.stdout
