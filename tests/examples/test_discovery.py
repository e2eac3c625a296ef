# SPDX-License-Identifier: Apache-2.0
"""The real router, started as the manifests say, finds engines by asking a Kubernetes API for pods.

API and engines are stand-ins on the loopback. The former writes down what it was asked for, which
has to be no more and no less than what the router's role allows.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
import yaml

from tests.examples.manifests import container_of, find, pod_of, read_kustomization
from tests.tools.pdstack.helpers import wait_until
from tools.pdstack.ports import PortAllocator

NAMESPACE = read_kustomization()["namespace"]
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
LIMIT_S = 60.0
# Every address of 127.0.0.0/8 is this machine's: pods may have equal ports.
PREFILL_IP, DECODE_IP, OTHER_IP = "127.0.0.2", "127.0.0.3", "127.0.0.4"


def pod(role: str, address: str, labels: dict[str, str], **metadata: str) -> dict[str, Any]:
    """Return what the API says of a pod that is ready."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{role}-0",
            "namespace": NAMESPACE,
            "uid": role,
            "resourceVersion": "1",
            "labels": labels,
            **metadata,
        },
        "spec": {"containers": []},
        "status": {
            "phase": "Running",
            "podIP": address,
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


class KubernetesAPI:
    """Lists pods and announces changes of them, as a Kubernetes API does.

    Attributes:
        asked: verb and path of each request, in the words of a role.
    """

    def __init__(self, pods: list[dict[str, Any]]) -> None:
        self.asked: set[tuple[str, str]] = set()
        self._pods = pods
        self._events: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self._ended = False

    def announce(self, kind: str, changed: dict[str, Any]) -> None:
        """Tell those who watch that a pod was `ADDED`, `MODIFIED` or `DELETED`."""
        with self._changed:
            self._events.append({"type": kind, "object": changed})
            self._changed.notify_all()

    def end(self) -> None:
        """Let those who watch go."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Answer a request, which may take until the end."""
        path = urlsplit(request.path)
        watch = parse_qs(path.query).get("watch", ["false"])[0] in ("true", "1")
        self.asked.add(("watch" if watch else "list", path.path))
        request.send_response(200)
        request.send_header("Content-Type", "application/json")
        request.end_headers()
        if watch:
            self._stream(request)
            return
        found = {"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}}
        request.wfile.write(json.dumps({**found, "items": self._pods}).encode())

    def _stream(self, request: BaseHTTPRequestHandler) -> None:
        told = 0
        while True:
            with self._changed:
                while not self._ended and len(self._events) == told:
                    self._changed.wait(LIMIT_S)
                if self._ended:
                    return
                news = self._events[told:]
            for event in news:
                request.wfile.write(json.dumps(event).encode() + b"\n")
            request.wfile.flush()
            told += len(news)


class FakeEngine:
    """Answers completions as an engine of its role does, and remembers what it was asked."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.received: list[dict[str, Any]] = []

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Answer one request."""
        reply: dict[str, Any] = {"object": "list", "data": [{"id": "m", "object": "model"}]}
        if request.command == "POST":
            body = json.loads(request.rfile.read(int(request.headers["Content-Length"])))
            self.received.append(body)
            reply = {
                "id": "cmpl-0",
                "object": "text_completion",
                "model": "m",
                "choices": [{"index": 0, "text": self.role, "finish_reason": "length"}],
                "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
                "kv_transfer_params": {"remote_host": PREFILL_IP, "remote_port": 5600},
            }
        request.send_response(200)
        request.send_header("Content-Type", "application/json")
        request.end_headers()
        request.wfile.write(json.dumps(reply).encode())


@contextmanager
def listening(
    host: str, port: int, answer: Callable[[BaseHTTPRequestHandler], None]
) -> Iterator[int]:
    """Serve HTTP in threads; yields the port, which is a free one for 0."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer((host, port), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _write_kubeconfig(path: Path, port: int) -> None:
    context = {"cluster": "c", "user": "u", "namespace": NAMESPACE}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "x",
        "contexts": [{"name": "x", "context": context}],
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
    }
    path.write_text(yaml.safe_dump(config))


def _router_args(port: int, metrics_port: int, engine_port: int) -> list[str]:
    """The manifest's own, on the loopback and other ports."""
    replaced = {
        "--host": "127.0.0.1",
        "--port": port,
        "--prometheus-host": "127.0.0.1",
        "--prometheus-port": metrics_port,
        "--service-discovery-port": engine_port,
    }
    args: list[str] = container_of(find("Deployment", "router"))["args"]
    names = [arg.partition("=")[0] for arg in args]
    assert set(replaced) <= set(names)
    return [
        f"{name}={replaced[name]}" if name in replaced else arg
        for name, arg in zip(names, args, strict=True)
    ]


@pytest.fixture
def labels() -> dict[str, dict[str, str]]:
    """Labels of the pods that the manifests make, by the name of their Deployment."""
    names = ("prefill", "decode", "router")
    return {name: pod_of(find("Deployment", name))["metadata"]["labels"] for name in names}


def test_the_router_finds_the_engines(labels: dict[str, dict[str, str]], tmp_path: Path) -> None:
    """It sends requests through both, passes on what the first answers, and notices one going."""
    ports = PortAllocator()
    port, metrics_port, engine_port = (ports.take() for _ in range(3))
    prefill, decode, other = FakeEngine("prefill"), FakeEngine("decode"), FakeEngine("other")
    # One is there already, another comes later, and the router's own pod is none of them.
    api = KubernetesAPI(
        [
            pod("prefill", PREFILL_IP, labels["prefill"]),
            pod("router", OTHER_IP, labels["router"]),
        ]
    )
    url = f"http://127.0.0.1:{port}"
    log = tmp_path / "router.log"
    with (
        listening("127.0.0.1", 0, api.answer) as api_port,
        listening(PREFILL_IP, engine_port, prefill.answer),
        listening(DECODE_IP, engine_port, decode.answer),
        listening(OTHER_IP, engine_port, other.answer),
        log.open("wb") as output,
        httpx.Client(base_url=url, trust_env=False, timeout=LIMIT_S) as client,
    ):
        _write_kubeconfig(tmp_path / "kubeconfig", api_port)
        router = subprocess.Popen(
            [
                Path(sys.executable).with_name("vllm-router"),
                *_router_args(port, metrics_port, engine_port),
            ],
            env={
                "PATH": str(Path(sys.executable).parent),
                "KUBECONFIG": str(tmp_path / "kubeconfig"),
            },
            stdout=output,
            stderr=subprocess.STDOUT,
        )

        def answered(path: str) -> bool:
            assert router.poll() is None, log.read_text()
            try:
                return client.get(path).is_success
            except httpx.TransportError:
                return False

        def completed() -> bool:
            body = {"model": "m", "prompt": "a", "max_tokens": 4}
            return client.post("/v1/completions", json=body).is_success

        try:
            container = container_of(find("Deployment", "router"))
            live, ready = (
                container[f"{probe}Probe"]["httpGet"]["path"] for probe in ("liveness", "readiness")
            )
            wait_until(lambda: answered(live), f"an answer at {live}", LIMIT_S)
            wait_until(lambda: ("watch", PODS) in api.asked, "the watching of pods", LIMIT_S)
            api.announce("ADDED", pod("decode", DECODE_IP, labels["decode"]))
            wait_until(lambda: answered(ready), f"an answer at {ready}", LIMIT_S)
            wait_until(completed, "a completion", LIMIT_S)
            first, second = prefill.received[-1], decode.received[-1]
            assert (first["max_tokens"], second["max_tokens"]) == (1, 4)
            assert first["kv_transfer_params"]["do_remote_decode"] is True
            assert second["kv_transfer_params"]["remote_host"] == PREFILL_IP
            assert second["kv_transfer_params"]["remote_port"] == 5600
            going = pod(
                "decode",
                DECODE_IP,
                labels["decode"],
                deletionTimestamp="2030-01-01T00:00:00Z",
            )
            api.announce("MODIFIED", going)
            wait_until(lambda: not completed(), "the removal of the decode engine", LIMIT_S)
        finally:
            router.terminate()
            try:
                router.wait(LIMIT_S)
            finally:
                router.kill()
                api.end()
    assert other.received == []
    (rule,) = find("Role", "router")["rules"]
    assert (rule["apiGroups"], rule["resources"]) == ([""], ["pods"])
    assert api.asked == {(verb, PODS) for verb in rule["verbs"]}
