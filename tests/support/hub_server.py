"""As much of the Hugging Face Hub as an upload of `huggingface_hub` needs, on loopback, with Git LFS for weights.

It keeps what it is sent: repositories by name, with their visibility, their files and the titles of their commits.
"""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_of_the_test"


@dataclass
class Repository:
    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    titles: list[str] = field(default_factory=list)


class HubServer(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}
        self.blobs: dict[str, bytes] = {}  # LFS objects by SHA-256
        self.unanswered: list[str] = []  # requests that this server does not know

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self._body()
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._answer({"error": "Invalid credentials in Authorization header"}, 401)
        if self.path == "/api/repos/create":
            return self._create(json.loads(body))
        if self.path == "/api/validate-yaml":
            return self._answer({"errors": [], "warnings": []})
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/main", self.path):
            names = [each["path"] for each in json.loads(body)["files"]]
            modes = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in names}
            return self._answer(
                {"files": [{"path": name, "uploadMode": mode, "shouldIgnore": False} for name, mode in modes.items()]}
            )
        if re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", self.path):
            objects = json.loads(body)["objects"]
            hrefs = {each["oid"]: {"upload": {"href": f"{self.server.url}/blob/{each['oid']}"}} for each in objects}
            return self._answer(
                {"transfer": "basic", "objects": [each | {"actions": hrefs[each["oid"]]} for each in objects]}
            )
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", self.path):
            return self._commit(self.server.repositories[match[1]], body)
        return self._unknown()

    def do_PUT(self) -> None:
        self.server.blobs[self.path.removeprefix("/blob/")] = self._body()
        self._answer({})

    def do_GET(self) -> None:
        name = self.path.partition("?")[0].removeprefix("/api/models/").removesuffix("/revision/main")
        if name not in self.server.repositories:
            return self._unknown()
        return self._answer({"id": name, "sha": "0" * 40, "private": self.server.repositories[name].private})

    def _create(self, asked: dict[str, Any]) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        private = asked.get("private", asked.get("visibility") == "private")
        exists = name in self.server.repositories
        self.server.repositories.setdefault(name, Repository(private))
        self._answer({"url": f"{self.server.url}/{name}"}, 409 if exists else 200)

    def _commit(self, repository: Repository, body: bytes) -> None:
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            match line["key"]:
                case "header":
                    repository.titles.append(value["summary"])
                case "file":
                    repository.files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    repository.files[value["path"]] = self.server.blobs[value["oid"]]
        self._answer({"commitUrl": f"{self.server.url}/x/y/commit/{'0' * 40}", "commitOid": "0" * 40})

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _unknown(self) -> None:
        self.server.unanswered.append(f"{self.command} {self.path}")
        self._answer({"error": "Repository not found"}, 404)

    def _answer(self, content: dict[str, Any], status: int = 200) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


@contextmanager
def running_hub() -> Iterator[HubServer]:
    """The server runs until the block ends."""
    with HubServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
