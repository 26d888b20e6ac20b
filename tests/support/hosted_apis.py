"""Stand-ins for OpenAI's responses and Anthropic's messages as they look on the wire, each written out by hand.

Both say "one two three four", or, where tools are offered, call `look_up` for an owl.
"""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TEXT_PARTS = ("one t", "wo th", "ree f", "our")
TEXT = "".join(TEXT_PARTS)
JSON_TEXT = '{"grade": 4, "why": "clear"}'


class HostedApis(ThreadingHTTPServer):
    """Serves /v1/responses and /v1/messages, and keeps the bodies of the requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[dict[str, Any]] = []
        self.fail_next = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: HostedApis

    def log_message(self, *args: Any) -> None:
        """Quiet."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        is_anthropic = self.path.startswith("/v1/messages")
        if self.server.fail_next:
            self.server.fail_next -= 1
            error = {"type": "api_error", "message": "engine error"}
            self._send(500, "application/json", json.dumps({"type": "error", "error": error}).encode())
        elif not body.get("stream"):
            whole = message_to(body) if is_anthropic else response_to(body)
            self._send(200, "application/json", json.dumps(whole).encode())
        else:
            events = message_events(body) if is_anthropic else response_events(body)
            frames = [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events]
            self._send(200, "text/event-stream", "".join(frames).encode())

    def _send(self, code: int, kind: str, sent: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)


# -- OpenAI's responses


def _output(body: dict[str, Any]) -> list[dict[str, Any]]:
    if body.get("tools"):
        arguments = '{"word": "owl"}'
        call = {"id": "fc_1", "type": "function_call", "status": "completed", "call_id": "call_1", "name": "look_up"}
        return [call | {"arguments": arguments}]
    text = JSON_TEXT if (body.get("text") or {}).get("format") else TEXT
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return [{"id": "msg_1", "type": "message", "status": "completed", "role": "assistant", "content": [part]}]


def response_to(body: dict[str, Any]) -> dict[str, Any]:
    usage = {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 12,
    }
    return {
        "id": "resp_1",
        "object": "response",
        "created_at": 1.0,
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "metadata": {},
        "model": body["model"],
        "output": _output(body),
        "parallel_tool_calls": True,
        "temperature": 1.0,
        "tool_choice": "auto",
        "tools": body.get("tools") or [],
        "top_p": 1.0,
        "usage": usage,
    }


def response_events(body: dict[str, Any]) -> list[dict[str, Any]]:
    whole = response_to(body)
    begun = whole | {"status": "in_progress", "output": [], "usage": None}
    (item,) = whole["output"]
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
    ]
    at = {"item_id": item["id"], "output_index": 0}
    if item["type"] == "function_call":
        added = item | {"arguments": "", "status": "in_progress"}
        events += [
            {"type": "response.output_item.added", "output_index": 0, "item": added},
            {"type": "response.function_call_arguments.delta", **at, "delta": item["arguments"]},
            {
                "type": "response.function_call_arguments.done",
                **at,
                "arguments": item["arguments"],
                "name": "look_up",
            },
        ]
    else:
        (part,) = item["content"]
        at["content_index"] = 0
        added = item | {"content": [], "status": "in_progress"}
        events += [
            {"type": "response.output_item.added", "output_index": 0, "item": added},
            {"type": "response.content_part.added", **at, "part": part | {"text": ""}},
            *(
                {"type": "response.output_text.delta", **at, "delta": delta, "logprobs": []}
                for delta in (TEXT_PARTS if part["text"] == TEXT else [part["text"]])
            ),
            {"type": "response.output_text.done", **at, "text": part["text"], "logprobs": []},
            {"type": "response.content_part.done", **at, "part": part},
        ]
    events += [
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": whole},
    ]
    return [event | {"sequence_number": number} for number, event in enumerate(events)]


# -- Anthropic's messages


def message_to(body: dict[str, Any]) -> dict[str, Any]:
    text = JSON_TEXT if body.get("output_config") else TEXT
    content: list[dict[str, Any]] = [{"type": "text", "text": text}]
    if body.get("tools"):
        content = [{"type": "tool_use", "id": "toolu_1", "name": "look_up", "input": {"word": "owl"}}]
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": body["model"],
        "content": content,
        "stop_reason": "tool_use" if body.get("tools") else "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 7, "output_tokens": 5},
    }


def message_events(body: dict[str, Any]) -> list[dict[str, Any]]:
    whole = message_to(body)
    begun = whole | {"content": [], "stop_reason": None, "usage": {"input_tokens": 7, "output_tokens": 1}}
    (block,) = whole["content"]
    if block["type"] == "text":
        opened, parts = block | {"text": ""}, TEXT_PARTS if block["text"] == TEXT else (block["text"],)
        deltas = [{"type": "text_delta", "text": part} for part in parts]
    else:
        opened = block | {"input": {}}
        deltas = [{"type": "input_json_delta", "partial_json": part} for part in ('{"word": "owl"}',)]
    return [
        {"type": "message_start", "message": begun},
        {"type": "content_block_start", "index": 0, "content_block": opened},
        *({"type": "content_block_delta", "index": 0, "delta": delta} for delta in deltas),
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": whole["stop_reason"], "stop_sequence": None},
            "usage": {"output_tokens": 5},
        },
        {"type": "message_stop"},
    ]
