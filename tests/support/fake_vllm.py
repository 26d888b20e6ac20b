"""A stand-in for the vLLM HTTP interface, as measured on vLLM 0.32: routes, codes, error wording and wire shapes.

Its tokenizer is one id per UTF-8 byte, and END_OF_TURN after them; the log-prob of a token follows from its id.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from marft_bridge.serving.key_guard import SLEEP_PATH, WAKE_PATH

LOGITS = {" cat": 3.0, " dog": 1.0, " owl": 0.5}
END_OF_TURN = 256
Answer = str | list[tuple[str, dict[str, Any]]]
"""Text, or tool calls as (name, arguments)."""


def text_to_ids(text: str) -> list[int]:
    """The tokens that an answer of `text` is sampled as."""
    return [*text.encode(), END_OF_TURN]


def id_to_logprob(token_id: int) -> float:
    """Different for neighbouring ids, and exact in binary."""
    return -(1 + token_id % 8) / 16


def calls_to_text(calls: list[tuple[str, dict[str, Any]]]) -> str:
    """What the model writes to call tools."""
    return json.dumps([{"name": name, "parameters": arguments} for name, arguments in calls])


class FakeVllm(ThreadingHTTPServer):
    """Serves `base`, and keeps what it was asked to load. `processed`: log-probs after the temperature."""

    request_queue_size = 128  # a busy machine accepts late: with the library's 5, connections are refused

    def __init__(self, key: str | None = None, *, processed: bool = True, lora_routes: bool = True) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.key, self.processed, self.lora_routes = key, processed, lora_routes
        self.adapters: dict[str, str] = {}
        self.refuse_with: str | None = None
        self.answer: Callable[[dict[str, Any]], Answer] = lambda body: f"{body['model']} speaks"
        self.prompt_to_ids: Callable[[dict[str, Any]], list[int]] = lambda body: [
            *json.dumps(body["messages"]).encode()
        ]
        self.asked: list[dict[str, Any]] = []  # bodies of the chat requests
        self.auto_tools = False  # --enable-auto-tool-choice --tool-call-parser
        self.sleeps = False  # our route of vLLM's server (`key_guard`): it answers nothing until it is woken
        self.fail_next = 0  # so many chat requests end with 500
        self.spoil: Callable[[dict[str, Any]], bytes | None] = lambda _: None  # whole answer -> what is sent instead
        self.samples: Callable[[], object] = lambda: None  # called before a completion is answered

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
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        if not self._key_is_right():
            return
        if self.path in (SLEEP_PATH, WAKE_PATH):
            self.server.sleeps = self.path == SLEEP_PATH
            self._answer(200, {})
        elif self.server.sleeps:
            self._answer(503, {"error": {"message": "asleep"}})
        elif self.path == "/v1/completions":
            self.server.samples()
            scale = body["temperature"] if self.server.processed else 1.0
            total = math.log(sum(math.exp(logit / scale) for logit in LOGITS.values()))
            top = {token: logit / scale - total for token, logit in LOGITS.items()}
            self._answer(200, {"choices": [{"logprobs": {"top_logprobs": [top]}}]})
        elif self.path == "/v1/chat/completions":
            self._chat(body)
        elif not self.server.lora_routes:
            self._answer(404, {"detail": "Not Found"})
        elif self.path == "/v1/load_lora_adapter":
            self._load(body["lora_name"], body["lora_path"])
        elif self.server.adapters.pop(body["lora_name"], None) is None:
            self._answer(404, {"error": {"message": f"The lora adapter '{body['lora_name']}' cannot be found."}})
        else:
            self._answer(200, {})

    def _chat(self, body: dict[str, Any]) -> None:
        self.server.asked.append(body)
        if self.server.fail_next:
            self.server.fail_next -= 1
            self._answer(500, {"error": {"message": "engine error", "type": "InternalServerError", "code": 500}})
        elif body["model"] != "base" and body["model"] not in self.server.adapters:
            self._answer(404, {"error": {"message": f"The model `{body['model']}` does not exist.", "code": 404}})
        elif body.get("tools") and body.get("tool_choice", "auto") == "auto" and not self.server.auto_tools:
            message = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
            self._answer(400, {"error": {"message": message, "type": "BadRequestError", "code": 400}})
        elif body.get("stream"):
            self._stream(body)
        else:
            prompt, choices = self._sample(body)
            for choice in choices:
                choice["message"] = {"role": "assistant", "refusal": None, **choice.pop("delta")}
            whole = _frame(body, "chat.completion") | prompt | {"choices": choices, "usage": _usage(choices)}
            self._send(200, self.server.spoil(whole) or json.dumps(whole).encode())

    def _sample(self, body: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        prompt = self.server.prompt_to_ids(body)
        choices = [_choice(body, self.server.answer(body), index) for index in range(body.get("n") or 1)]
        for choice in choices:
            choice["prompt_tokens"] = len(prompt)
        return ({"prompt_token_ids": prompt} if body.get("return_token_ids") else {}), choices

    def _stream(self, body: dict[str, Any]) -> None:
        prompt, choices = self._sample(body)
        frame = _frame(body, "chat.completion.chunk")
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for choice in choices:
            role = {"index": choice["index"], "delta": {"role": "assistant", "content": ""}, "logprobs": None}
            self._event(frame | prompt | {"choices": [role | {"finish_reason": None}]})
            prompt = {}  # on the first chunk ever
        for choice in choices:
            for part in _parts(choice):
                self._event(frame | {"choices": [part]})
        if (body.get("stream_options") or {}).get("include_usage"):
            self._event(frame | {"choices": [], "usage": _usage(choices)})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, body: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(body)}\n\n".encode())

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
        self._send(code, json.dumps(body).encode())

    def _send(self, code: int, sent: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)


def _frame(body: dict[str, Any], kind: str) -> dict[str, Any]:
    return {"id": "chatcmpl-1", "object": kind, "created": 1, "model": body["model"]}


def _choice(body: dict[str, Any], answer: Answer, index: int) -> dict[str, Any]:
    """One sampled answer, cut at the limit and at stop strings as vLLM does: the ids keep what the text loses."""
    text, stop_reason = answer if isinstance(answer, str) else calls_to_text(answer), None
    ids, finish = text_to_ids(text), "stop"
    for stop in [body["stop"]] if isinstance(body.get("stop"), str) else body.get("stop") or []:
        if stop in text:
            before = text.partition(stop)[0]
            ids, text, stop_reason = list((before + stop).encode()), before, stop
    limit = body.get("max_tokens") or 1024
    if len(ids) > limit:
        ids, text, finish = ids[:limit], bytes(ids[:limit]).decode(), "length"
    delta: dict[str, Any] = {"content": text}
    if not isinstance(answer, str):
        calls = [
            {"id": f"call-{n}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for n, (name, arguments) in enumerate(answer)
        ]
        delta, finish = {"content": None, "tool_calls": calls}, "tool_calls"
    choice = {"index": index, "delta": delta, "finish_reason": finish, "stop_reason": stop_reason, "logprobs": None}
    if body.get("logprobs"):
        choice["logprobs"] = {"content": [_entry(token) for token in ids]}
    return choice | {"token_ids": ids if body.get("return_token_ids") else None, "sampled": len(ids)}


def _entry(token_id: int) -> dict[str, Any]:
    return {"token": f"t{token_id}", "logprob": id_to_logprob(token_id), "bytes": None, "top_logprobs": []}


def _usage(choices: list[dict[str, Any]]) -> dict[str, Any]:
    prompt, sampled = choices[0]["prompt_tokens"], sum(choice["sampled"] for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _parts(choice: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A choice as streamed: some tokens a chunk, tool calls with an index, tokens without text as an empty delta."""
    ids, content = choice["token_ids"], (choice["logprobs"] or {}).get("content")
    text, calls = choice["delta"].get("content"), choice["delta"].get("tool_calls") or []
    for at in range(0, choice["sampled"], 5):
        last = at + 5 >= choice["sampled"]
        delta: dict[str, Any] = {"content": text[at : at + 5]} if text is not None else {}
        if calls and last:
            delta["tool_calls"] = [{"index": n, **call} for n, call in enumerate(calls)]
        yield {
            "index": choice["index"],
            "delta": delta,
            "logprobs": {"content": content[at : at + 5]} if content is not None else None,
            "finish_reason": choice["finish_reason"] if last else None,
            "stop_reason": choice["stop_reason"] if last else None,
            "token_ids": ids[at : at + 5] if ids is not None else None,
        }


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
