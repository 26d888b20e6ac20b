"""What a tool gave back -> the JSON text that a replay makes the same output of; None where the result's text says all.

    {"value": ...}                        no text, but a value that JSON has a form for
    {"content": ..., "artifact": ...}     a tool message with blocks or an artifact
    {"error": "..."}                      the tool's error, which the tool turned into an answer
    {"run_again": "Command"}              an object that only the tool itself can make again

Invariant: what is written comes out of JSON as it went in; anything else is to be run again.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from langchain_core.messages import ToolMessage

from marft_bridge.recording.span_messages import to_shown


def output_to_text(output: Any) -> str | None:
    """See above."""
    if isinstance(output, str):
        return None
    if isinstance(output, ToolMessage):
        if output.status == "error":
            parts: dict[str, Any] = {"error": output.content}
        elif isinstance(output.content, str) and output.artifact is None:
            return None
        else:
            parts = {"content": output.content, "artifact": output.artifact}
    else:
        parts = {"value": output}
    with suppress(Exception):  # an app's own objects may raise anything, also when they are compared
        text = json.dumps(parts)
        if json.loads(text) == parts:
            return text
    return json.dumps({"run_again": type(output).__name__})


def output_to_result(output: Any) -> str:
    """The result as text: a message's content, or the value itself. Never raises."""
    try:
        content = getattr(output, "content", output)
    except Exception:  # noqa: BLE001 - as above
        content = output
    return to_shown(content)
