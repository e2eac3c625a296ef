# SPDX-License-Identifier: Apache-2.0
"""Engines in this process that answer completions at once, and remember what they were asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tools.pdstack.accuracy import ANSWER_TOKENS
from tools.pdstack.ports import HOST

WORDS = tuple(f"w{number}" for number in range(ANSWER_TOKENS))


class FakeEngine:
    """Answers completions, as a stream where that is wanted.

    Attributes:
        url: where it is.
        received: the bodies of all requests.
        words: the tokens of its answers.
        status: what it answers with.
    """

    def __init__(self, url: str, words: Sequence[str]) -> None:
        self.url = url
        self.received: list[dict[str, Any]] = []
        self.words = words
        self.status = 200

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Answer one request."""
        stream = False
        if request.command == "POST":
            body = json.loads(request.rfile.read(int(request.headers["Content-Length"])))
            self.received.append(body)
            stream = body.get("stream", False)
        request.send_response(self.status)
        kind = "text/event-stream" if stream else "application/json"
        request.send_header("Content-Type", kind)
        request.end_headers()
        lines = self._lines() if stream else [json.dumps(self._chunk(self.words[:1]))]
        request.wfile.write("".join(lines).encode())

    def _lines(self) -> list[str]:
        chunks = [json.dumps(self._chunk([word])) for word in self.words]
        return [f"data: {each}\n\n" for each in (*chunks, "[DONE]")]

    @staticmethod
    def _chunk(words: Sequence[str]) -> dict[str, Any]:
        logprobs = {
            "tokens": list(words),
            "token_logprobs": [-1.0] * len(words),
            "top_logprobs": [{word: -1.0} for word in words],
        }
        choice = {"index": 0, "text": "".join(words), "logprobs": logprobs}
        return {
            "id": "x",
            "object": "text_completion",
            "created": 0,
            "model": "m",
            "choices": [{**choice, "finish_reason": "length"}],
            "kv_transfer_params": {"remote_host": HOST, "remote_port": 1},
        }


@contextmanager
def fake_engine(words: Sequence[str] = WORDS) -> Iterator[FakeEngine]:
    """Let a fake engine serve."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            engine.answer(self)

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer((HOST, 0), Handler)
    server.daemon_threads = True
    engine = FakeEngine(f"http://{HOST}:{server.server_port}", words)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield engine
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
