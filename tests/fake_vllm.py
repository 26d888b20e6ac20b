"""A stand-in for the vLLM HTTP interface, as measured on vLLM 0.32: routes, codes and error wording."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LOGITS = {" cat": 3.0, " dog": 1.0, " owl": 0.5}


class FakeVllm(ThreadingHTTPServer):
    """Serves `base`, and keeps what it was asked to load. `processed`: log-probs after the temperature."""

    def __init__(self, key: str | None = None, *, processed: bool = True, lora_routes: bool = True) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.key, self.processed, self.lora_routes = key, processed, lora_routes
        self.adapters: dict[str, str] = {}
        self.refuse_with: str | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeVllm

    def log_message(self, *args: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        if self.path == "/health":
            self._answer(200, {})
        elif self._key_is_right() and self.path == "/v1/models":
            cards = [{"id": "base", "root": "/models/base", "parent": None}]
            cards += [{"id": name, "root": path, "parent": "base"} for name, path in self.server.adapters.items()]
            self._answer(200, {"data": cards})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._key_is_right():
            return
        if self.path == "/v1/completions":
            scale = body["temperature"] if self.server.processed else 1.0
            total = math.log(sum(math.exp(logit / scale) for logit in LOGITS.values()))
            top = {token: logit / scale - total for token, logit in LOGITS.items()}
            self._answer(200, {"choices": [{"logprobs": {"top_logprobs": [top]}}]})
        elif not self.server.lora_routes:
            self._answer(404, {"detail": "Not Found"})
        elif self.path == "/v1/load_lora_adapter":
            self._load(body["lora_name"], body["lora_path"])
        elif self.server.adapters.pop(body["lora_name"], None) is None:
            self._answer(404, {"error": {"message": f"The lora adapter '{body['lora_name']}' cannot be found."}})
        else:
            self._answer(200, {})

    def _load(self, name: str, path: str) -> None:
        if not name:
            self._answer(400, {"error": {"message": "Both 'lora_name' and 'lora_path' must be provided."}})
        elif self.server.refuse_with:
            self._answer(500, {"error": {"message": self.server.refuse_with}})
        else:
            self.server.adapters[name] = path
            self._answer(200, {})

    def _key_is_right(self) -> bool:
        right = self.server.key is None or self.headers.get("Authorization") == f"Bearer {self.server.key}"
        if not right:
            self._answer(401, {"error": "Unauthorized"})
        return right

    def _answer(self, code: int, body: dict[str, Any]) -> None:
        sent = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)


@contextmanager
def running(server: FakeVllm) -> Iterator[FakeVllm]:
    """The server, answering in a thread of its own until the block ends."""
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
