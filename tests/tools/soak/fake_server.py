# SPDX-License-Identifier: Apache-2.0
"""Stands in for ``vllm serve`` and ``vllm-router`` in a soak: quick, right, and wrong on request.

Run as ``fake_server.py serve MODEL --port N ...``, or as a router that is told of its engines with
``fake_server.py --port N --vllm-discovery-address HOST:PORT``. The answer to a prompt is made of
the prompt's digest; the router asks its decode engines in turn.
``FAKE_DECODE`` in the environment holds words:

* ``garble``: a request that says where its blocks are gets another answer;
* ``leak``: blocks stay in use;
* ``hang``: such a request is never answered;
* ``die``: end at the first such request;
* ``serial``: no prompt was waited for, and none prefetched.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import sys
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import zmq

parser = argparse.ArgumentParser()
parser.add_argument("positional", nargs="*")
parser.add_argument("--host")
parser.add_argument("--port", type=int)
parser.add_argument("--vllm-discovery-address")
parser.add_argument("--kv-transfer-config", default="")
args, _ = parser.parse_known_args()
IS_DECODE = "kv_consumer" in args.kv_transfer_config
BEHAVIOUR = os.environ.get("FAKE_DECODE", "").split() if IS_DECODE else []
FORGOTTEN_AFTER_S = 5.0
# Decode engines by their addresses, with when each was told of last.
TOLD: dict[str, float] = {}
TURNS = itertools.count()
SEEN: list[dict[str, Any]] = []
PARAMS = {
    "do_remote_prefill": True,
    "remote_engine_id": "engine",
    "remote_request_id": "request",
    "remote_host": args.host,
    "remote_port": args.port,
    "remote_block_ids": [[1, 2]],
}


def answer_to(asked: dict[str, Any]) -> str:
    """Return as many letters as may be, which depend on every message."""
    said = json.dumps([message["content"] for message in asked["messages"]])
    digest = hashlib.sha256(said.encode()).hexdigest()
    return (digest * 4)[: asked["max_tokens"]]


def hear(address: str) -> None:
    """Listen to who is there, for ever."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.bind(f"tcp://{address}")
        while True:
            *_, content = socket.recv_multipart()
            told = msgspec.msgpack.decode(content)
            if told["type"] == "D":
                TOLD[told["http_address"]] = time.monotonic()


def next_url() -> str:
    """Return the decode engine whose turn it is."""
    oldest = time.monotonic() - FORGOTTEN_AFTER_S
    known = sorted(address for address, at in list(TOLD.items()) if at > oldest)
    if not known:
        raise OSError("no decode engine")
    return f"http://{known[next(TURNS) % len(known)]}"


class Handler(BaseHTTPRequestHandler):
    """Answers what a soak asks."""

    def log_message(self, format: str, *values: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        """Serve health and metrics, and what was asked."""
        if self.path == "/seen":
            self._reply(200, json.dumps(SEEN).encode())
            return
        usage = 0.5 if "leak" in BEHAVIOUR else 0.0
        early = int(IS_DECODE and "serial" not in BEHAVIOUR)
        metrics = {
            "vllm:kv_cache_usage_perc": usage,
            "vllm:nixl_prefill_wait_seconds_count": early,
            "vllm:nixl_prefetched_bytes_total": 1024 * early,
        }
        page = "".join(f"{name} {value}\n" for name, value in metrics.items())
        self._reply(200, page.encode())

    def do_POST(self) -> None:
        """Answer, or pass on to an engine that does."""
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if args.vllm_discovery_address:
            self._pass_on(content)
            return
        asked = json.loads(content)
        answer = answer_to(asked)
        params = asked.get("kv_transfer_params") or {}
        SEEN.append({"request_id": self.headers["X-Request-Id"], "params": params})
        if params.get("remote_block_ids"):
            if "die" in BEHAVIOUR:
                print("MemoryError: the fake engine had enough", flush=True)
                os._exit(3)
            if "hang" in BEHAVIOUR:
                threading.Event().wait()
            if "garble" in BEHAVIOUR:
                answer = answer[::-1] + "!"
        if asked.get("stream"):
            self._stream(answer, asked.get("n", 1))
            return
        returned = PARAMS if params.get("do_remote_decode") else None
        token = {"top_logprobs": [{"logprob": -0.1}, {"logprob": -3.0}]}
        choices = [
            {
                "index": index,
                "message": {"content": answer},
                "finish_reason": "length",
                "logprobs": {"content": [token]},
            }
            for index in range(asked.get("n", 1))
        ]
        self._reply(200, json.dumps({"choices": choices, "kv_transfer_params": returned}).encode())

    def _pass_on(self, content: bytes) -> None:
        """Be a router."""
        try:
            request = urllib.request.Request(
                f"{next_url()}{self.path}",
                data=json.dumps(json.loads(content) | {"kv_transfer_params": PARAMS}).encode(),
                headers={"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request) as reply:
                self._reply(reply.status, reply.read())
        except (urllib.error.URLError, OSError) as error:
            self._reply(503, str(error).encode())

    def _stream(self, answer: str, num_answers: int) -> None:
        self.send_response(200)
        self.end_headers()
        for letter in answer:
            time.sleep(0.002)
            for index in range(num_answers):
                self._send({"index": index, "delta": {"content": letter}, "finish_reason": None})
        for index in range(num_answers):
            self._send({"index": index, "delta": {}, "finish_reason": "length"})
        self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, choice: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
        self.wfile.flush()

    def _reply(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


if __name__ == "__main__":
    print("fake server is up", flush=True)
    if args.vllm_discovery_address:
        threading.Thread(target=hear, args=(args.vllm_discovery_address,), daemon=True).start()
    server = ThreadingHTTPServer((args.host, args.port), Handler)
    # Clients that go away are what a soak is about.
    server.handle_error = lambda *_: None
    sys.exit(server.serve_forever())
