# SPDX-License-Identifier: Apache-2.0
"""The right answers, from one engine without a connector that has every prompt to itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from tools.pdstack.accuracy import CLEAR_MARGIN
from tools.pdstack.errors import PDStackError

from .workload import Conversation, Turn, messages_before

_AT_ONCE = 4
_LIMIT_S = 300.0


def answer_all(url: str, model: str, planned: Sequence[Conversation]) -> tuple[Turn, ...]:
    """Let an engine answer all conversations, and return the turns whose answers are clear.

    Args:
        url: base URL of the engine, without a path.

    Raises:
        PDStackError: no answer is clear.
        httpx.HTTPError: the engine failed, or was silent for too long.
    """
    with httpx.Client(timeout=_LIMIT_S, trust_env=False) as client:

        def answer(conversation: Conversation) -> list[Turn]:
            return _answer(client, url, model, conversation)

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            turns = [turn for each in pool.map(answer, planned) for turn in each]
    if len(turns) < 2:
        raise PDStackError(
            f"{len(turns)} of the answers of {model} are clear by {CLEAR_MARGIN}: choose another "
            "seed, or ask for more conversations"
        )
    return tuple(turns)


def margin_of(choice: Mapping[str, Any]) -> float:
    """Return how clear the least clear token of an answer is: the gap to the second likeliest."""
    margins: list[float] = []
    for token in choice["logprobs"]["content"]:
        likeliest = sorted((each["logprob"] for each in token["top_logprobs"]), reverse=True)
        margins.append(likeliest[0] - likeliest[1])
    return min(margins)


def _answer(client: httpx.Client, url: str, model: str, conversation: Conversation) -> list[Turn]:
    answers: list[str] = []
    clear = []
    for question in conversation.questions:
        messages = messages_before(conversation, answers)
        request = {
            "model": model,
            "messages": [{"role": role, "content": content} for role, content in messages],
            "max_tokens": question.answer_tokens,
            "temperature": 0.0,
            "logprobs": True,
            "top_logprobs": 2,
        }
        reply = client.post(f"{url}/v1/chat/completions", json=request)
        reply.raise_for_status()
        choice = reply.json()["choices"][0]
        answers.append(choice["message"]["content"])
        if margin_of(choice) >= CLEAR_MARGIN:
            clear.append(Turn(messages, question.answer_tokens, answers[-1]))
    return clear
