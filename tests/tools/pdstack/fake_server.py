# SPDX-License-Identifier: Apache-2.0
"""Stands in for ``vllm serve`` and ``vllm-router``: quick, and it fails on request.

Run as ``fake_server.py serve MODEL --port N ...`` or ``fake_server.py --port N --decode URL ...``.
``FAKE_<NAME>`` in the environment, where NAME is ENGINE, SINGLE or ROUTER, holds words:

* ``crash``: log an exception and end at the start;
* ``fail``: log as vLLM does that the engine could not start, and end;
* ``stuck``: do not end after that, nor because of SIGTERM;
* ``slow``: never become ready;
* ``stubborn``: leave a grandchild in a session of its own that ignores SIGTERM;
* ``clash``: the first start ends as if another server had taken the port;
* ``die``: end in the middle of an answer, with an exception in the log;
* ``hang``: stop in the middle of an answer;
* ``lie``: answer something else;
* ``lazy``: move nothing over NIXL;
* ``serial``: have no request wait for its prompt to be computed elsewhere.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("positional", nargs="*")
parser.add_argument("--host")
parser.add_argument("--port", type=int)
parser.add_argument("--decode")
parser.add_argument("--kv-transfer-config")
args, _ = parser.parse_known_args()
ENGINE_KIND = "ENGINE" if args.kv_transfer_config else "SINGLE"
KIND = "ROUTER" if args.decode else ENGINE_KIND
BEHAVIOUR = os.environ.get(f"FAKE_{KIND}", "").split()
METRICS = """\
# TYPE vllm:nixl_bytes_transferred histogram
vllm:nixl_bytes_transferred_sum{{engine="0"}} {bytes}
vllm:nixl_bytes_transferred_count{{engine="0"}} 1.0
# TYPE vllm:nixl_prefill_wait_seconds histogram
vllm:nixl_prefill_wait_seconds_sum{{engine="0"}} 0.25
vllm:nixl_prefill_wait_seconds_count{{engine="0"}} {waits}
"""
FAILURE = """\
(EngineCore pid=11) ERROR 11-21 09:34:10 [core.py:10] EngineCore failed to start.
(EngineCore pid=11) ERROR 11-21 09:34:10 [core.py:10] Traceback (most recent call last):
(EngineCore pid=11) ERROR 11-21 09:34:10 [core.py:10] {cause}
(APIServer pid=10) RuntimeError: Engine core initialization failed. See root cause above.
"""
moved_bytes = 0.0


def fail(cause: str) -> None:
    """Say that the engine could not start, as vLLM does, and end, unless that hangs."""
    print(FAILURE.format(cause=cause), flush=True)
    if "stuck" in BEHAVIOUR:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        threading.Event().wait()
    sys.exit(1)


class Handler(BaseHTTPRequestHandler):
    """Answers what the launcher and its clients ask."""

    def log_message(self, format: str, *values: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        """Serve health and metrics; ``/move`` stands for a transfer."""
        global moved_bytes
        if self.path == "/move":
            moved_bytes += 1024.0
        is_early = "early_dispatch" in (args.kv_transfer_config or "")
        waits = float(is_early and "serial" not in BEHAVIOUR)
        body = METRICS.format(bytes=moved_bytes, waits=waits) if self.path == "/metrics" else "ok"
        self.send_response(503 if "slow" in BEHAVIOUR else 200)
        self.end_headers()
        self.wfile.write(body.encode())

    def do_POST(self) -> None:
        """Stream an answer of three words."""
        self.rfile.read(int(self.headers["Content-Length"]))
        if KIND == "ROUTER" and "lazy" not in BEHAVIOUR:
            urllib.request.urlopen(f"{args.decode}/move").read()
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for word in ("all", " is", " lost" if "lie" in BEHAVIOUR else " well"):
            self._send(choices=[{"index": 0, "delta": {"content": word}, "finish_reason": None}])
            if "hang" in BEHAVIOUR:
                print("hanging now", flush=True)
                threading.Event().wait()
            if "die" in BEHAVIOUR:
                print("MemoryError: the fake server had enough", flush=True)
                os._exit(3)
        self._send(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
        usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
        self._send(choices=[], usage=usage)
        self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, **fields: object) -> None:
        chunk = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "m", **fields}
        self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.flush()


if __name__ == "__main__":
    print(f"fake {KIND} with {BEHAVIOUR}", flush=True)
    if "crash" in BEHAVIOUR:
        print("ValueError: the fake server was told to fail\nRuntimeError: See root cause above")
        sys.exit(1)
    marker = Path(f"clashed-{KIND}")
    if "clash" in BEHAVIOUR and not marker.exists():
        marker.touch()
        fail("OSError: [Errno 98] Address already in use")
    if "fail" in BEHAVIOUR:
        fail("NotImplementedError: the CPU cannot do what the fake engine was asked for")
    if "stubborn" in BEHAVIOUR:
        code = (
            "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
            "print('grandchild is up', flush=True); time.sleep(600)"
        )
        subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    time.sleep(0.1)
    ThreadingHTTPServer((args.host, args.port), Handler).serve_forever()
