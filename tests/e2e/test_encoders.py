# SPDX-License-Identifier: Apache-2.0
"""Encoder, prefill and decode engines of a tiny LLaVA, against one engine alone.

Images go through vLLM's `ECExampleConnector`, by files, and KV caches through ours.
"""

from __future__ import annotations

import base64
import io
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.e2e.layouts import ONE, STAGES
from tests.e2e.pairs import BLOCK_TOKENS, REPORT_LIMIT_S, post, text_of
from tests.e2e.turns import OFFER
from tests.tools.pdstack.helpers import wait_until
from tools.pdstack.engine import EngineSpec, KVTransfer
from tools.pdstack.stack import Engine, PDStack
from tools.pdstack.tiny_models import write_tiny_llava

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

MODULES = (Path(__file__).parent / "modules" / "without_torchvision",)

Message = list[dict[str, Any]]


@dataclass(frozen=True)
class Encoding:
    """The engines.

    Attributes:
        files: Where the encoder engine writes what images came to.
        prefill: Of two stages.
    """

    model: str
    files: Path
    encoder: Engine
    prefill: Engine
    decode: Engine

    def ask(self, engine: Engine, message: Message, **fields: Any) -> dict[str, Any]:
        """Return an engine's answer to a message with images."""
        reply = post(
            engine,
            self.model,
            message,  # type: ignore[arg-type]
            ignore_eos=True,
            return_token_ids=True,
            **fields,
        )
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        return answer

    def unaided(self, message: Message) -> list[int]:
        """Return what the decode engine answers by itself."""
        return tokens_of(self.ask(self.decode, message, cache_salt="unaided"))

    def encode(self, message: Message) -> list[Path]:
        """Have a message's images encoded, and return the new files."""
        before = set(self.files.glob("*/*"))
        # As proxies for such engines do.
        images = [part for part in message if part["type"] == "image_url"]
        self.ask(self.encoder, images, max_tokens=1)
        return sorted(set(self.files.glob("*/*")) - before)

    def handed_over(self, message: Message) -> list[int]:
        """Return the decode engine's answer to what the prefill engine has computed."""
        prefilled = self.ask(self.prefill, message, max_tokens=1, kv_transfer_params=OFFER)
        params = prefilled["kv_transfer_params"]
        return tokens_of(self.ask(self.decode, message, kv_transfer_params=params))


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Encoding]:
    """Start an encoder engine, a prefill engine of two stages, and a decode engine."""
    model = write_tiny_llava(tmp_path_factory.mktemp("tiny") / "llava")
    files = tmp_path_factory.mktemp("files")
    few = ("--num-gpu-blocks-override", "32", "--limit-mm-per-prompt", '{"image": 3}')
    with PDStack(model, tmp_path_factory.mktemp("run")) as stack:
        encoder, decode, prefill = stack.start_engines(
            EngineSpec(
                "encoder",
                ONE,
                None,
                (*few, "--no-enable-prefix-caching", *encodings(files, "ec_producer")),
                max_model_len=1024,
                module_dirs=MODULES,
            ),
            EngineSpec("decode", ONE, KVTransfer(), few, max_model_len=1024, module_dirs=MODULES),
            EngineSpec(
                "prefill",
                STAGES,
                KVTransfer(),
                (*few, *encodings(files, "ec_consumer")),
                max_model_len=1024,
                module_dirs=MODULES,
            ),
        )
        yield Encoding(model.name, files, encoder, prefill, decode)


def encodings(files: Path, role: str) -> tuple[str, ...]:
    """Return the part of a command line that has an engine pass images on by files."""
    config = {
        "ec_connector": "ECExampleConnector",
        "ec_role": role,
        "ec_connector_extra_config": {"shared_storage_path": str(files)},
    }
    return ("--ec-transfer-config", json.dumps(config))


def tokens_of(answer: dict[str, Any]) -> list[int]:
    """Return an answer's ids."""
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


def message_of(text: str, *images: int) -> Message:
    """Return a message with images of noise, each with a seed."""
    parts: Message = []
    for seed in images:
        file = io.BytesIO()
        noise = np.random.default_rng(seed).integers(0, 256, (40, 48, 3), np.uint8)
        Image.fromarray(noise).save(file, "PNG")
        data = base64.b64encode(file.getvalue()).decode()
        parts.append({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}})
    return [*parts, {"type": "text", "text": text}]


def test_answers_to_images_equal_one_engines(engines: Encoding) -> None:
    """One image, several, the same again with another text, and none."""
    messages = [
        message_of(text_of(f"images {number}", length), *images)
        for number, (length, images) in enumerate(
            [(40, (1,)), (2 * BLOCK_TOKENS, (2, 3)), (300, (1, 2)), (3 * BLOCK_TOKENS, (4, 4, 5))]
        )
    ]
    answers = [engines.unaided(message) for message in messages]
    before = engines.decode.nixl_counters()
    encoded = []
    for message, right in zip(messages, answers, strict=True):
        encoded += engines.encode(message)
        assert engines.handed_over(message) == right
    assert len(encoded) == 5
    text = message_of(text_of("without images", 200))
    assert engines.handed_over(text) == engines.unaided(text)
    wait_until(
        lambda: (engines.decode.nixl_counters() - before).transfers >= 2 * 5,
        "the reads from both workers",
        REPORT_LIMIT_S,
    )
    counters = engines.decode.nixl_counters()
    assert counters.failed_reads == counters.failed_notifications == 0


def test_prefill_engine_computes_with_what_was_encoded(engines: Encoding) -> None:
    """Where that is another image's, so is the answer."""
    text = text_of("swapped", 200)
    one, other = (message_of(text, each) for each in (1000, 1001))
    answers = [engines.unaided(message) for message in (one, other)]
    assert answers[0] != answers[1]
    (of_one,), (of_other,) = engines.encode(one), engines.encode(other)
    shutil.copy(of_other, of_one)
    assert engines.handed_over(one) == answers[1]
