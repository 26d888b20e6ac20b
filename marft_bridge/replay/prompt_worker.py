"""Jobs of `prompt_ids`, in a process of its own: recorded calls -> where their prompts of today leave the recorded ids.

The library that the model server renders with does it here. Invariants: no weights are read, and torch is not
imported, also where it is installed; prompts alone are rendered, never an answer. Anybody may have written the model's
folder, and the note that names it: no code of it is run, and `worker_main` confines the process that runs its template.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta, timezone
from itertools import product
from typing import Any

from marft_bridge.sandbox.worker_main import answer_jobs

_SHOWN_TOKENS = 16  # of each side
_MEMORY_MB = 4_096  # address space: a large vocabulary takes 1 GiB, the library another
_ZONES = tuple(timezone(timedelta(hours=hours)) for hours in (-12, 0, 14))  # in which all dates of a moment occur
BEHIND = -1
"""In place of a message's number: what the template puts behind all of them."""


def main(memory_mb: int, readable: list[str]) -> None:  # noqa: ARG001 - see below
    """The entry point of the process: answers one line with one line until the input ends."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    # The jobs say which folders it reads, and a wall cannot be opened later: it may read all, and write nothing.
    answer_jobs(_MEMORY_MB, ["/"], _load, job_to_reply=_job_to_reply)


def _load() -> None:
    modules: dict[str, Any] = sys.modules
    modules["torch"] = None  # for transformers it is not installed then, and its tokenizers do not need it
    from transformers import AutoTokenizer

    _ = AutoTokenizer  # which imports them


def _job_to_reply(job: Any) -> dict[str, Any]:
    tokenizer = _load_tokenizer(job["model"], job["stamp"])
    if isinstance(tokenizer, str):
        return {"refused": tokenizer}
    if tokenizer.chat_template is None:
        return {"refused": "it has no chat template"}
    return {"differences": [chat_to_difference(tokenizer, chat) for chat in job["chats"]]}


@functools.lru_cache(maxsize=4)
def _load_tokenizer(model: str, stamp: str) -> Any:  # noqa: ARG001 - other files are another tokenizer
    """The tokenizer of a folder; the reason, as a text, where there is none."""
    from transformers import AutoTokenizer

    try:
        # False: else the library asks, on the pipe of the jobs, whether code of the folder may run
        return AutoTokenizer.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - the library raises whatever it meets in the files
        return f"its tokenizer cannot be loaded: {' '.join(f'{type(error).__name__}: {error}'.split())}"


def chat_to_difference(tokenizer: Any, chat: Mapping[str, Any]) -> dict[str, Any] | None:
    """The first difference of a call's prompt; None where its ids are the recorded ones.

    `refused` says in place of a difference why there is no prompt.
    """
    try:
        here = datetime.fromtimestamp(chat["started_s"], UTC).astimezone()
        chat = {**chat, "dated": here, "date_formats": set()}  # in which the template writes the date
        text = _render(tokenizer, chat["messages"], chat)
    except Exception:  # noqa: BLE001 - a template may raise anything, and may quote the messages
        return {"refused": "the chat template refuses its messages"}
    recorded_ids: list[int] = chat["ids"]
    if _encode(tokenizer, text) == recorded_ids:
        return None
    for dated_chat in (chat, *_at_other_dates(chat)):
        for form in _other_forms(dated_chat):
            with suppress(Exception):
                if _encode(tokenizer, _render(tokenizer, form["messages"], form)) == recorded_ids:
                    return None
    if chat["is_joined"]:
        return {"refused": "a content of several texts, which a server may join otherwise"}
    return _first_difference(tokenizer, chat, text)


def _render(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], chat: Mapping[str, Any], *, is_whole: bool = True
) -> str:
    """The text of these messages; of a part of a prompt without what begins the answer. Raises whatever the template
    does."""

    def strftime_then(form: str) -> str:
        text: str = chat["dated"].strftime(form)
        chat["date_formats"].add(form)
        return text

    rendered: str = tokenizer.apply_chat_template(
        list(messages),
        tools=chat["tools"] or None,
        add_generation_prompt=is_whole,
        tokenize=False,
        # a template that writes the date into its prompts wrote that of the recorded call
        **{"strftime_now": strftime_then, **chat["options"]},
    )
    return rendered


def _encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _at_other_dates(chat: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The same call with the dates that servers in other time zones had, where the template writes them otherwise.

    The zone of the server that counted the ids is not recorded.
    """

    def to_texts(moment: datetime) -> list[str]:
        return [moment.strftime(form) for form in sorted(chat["date_formats"])]

    tried_texts = [to_texts(chat["dated"])]
    for zone in _ZONES:
        moment = chat["dated"].astimezone(zone)
        if (texts := to_texts(moment)) not in tried_texts:
            tried_texts.append(texts)
            yield {**chat, "dated": moment}


def _other_forms(chat: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The same call in the other forms in which a server may give it to a template; which one it was is not recorded.

    A template that reads contents as lists of parts gets those of all but tools so; a message that only calls tools may
    have none; a tool has all fields that a server knows.
    """

    def to_form(message: Mapping[str, Any], *, as_parts: bool, may_lack: bool) -> dict[str, Any]:
        content, parts = message["content"], as_parts and message["role"] != "tool"
        if may_lack and not content and message.get("tool_calls"):
            return {**message, "content": [] if parts else None}
        return {**message, "content": [{"type": "text", "text": content}] if parts else content}

    def to_server_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
        function = tool["function"]
        known_fields = {name: function.get(name) for name in ("name", "description", "parameters")}
        return {"type": "function", "function": {**known_fields, **function}}

    for as_parts, may_lack in product((False, True), repeat=2):
        messages = [to_form(message, as_parts=as_parts, may_lack=may_lack) for message in chat["messages"]]
        yield {**chat, "messages": messages}
        if chat["tools"]:
            yield {**chat, "messages": messages, "tools": [to_server_tool(tool) for tool in chat["tools"]]}


def _first_difference(tokenizer: Any, chat: Mapping[str, Any], text: str) -> dict[str, Any]:
    recorded_ids, ids = chat["ids"], _encode(tokenizer, text)
    pairs = enumerate(zip(recorded_ids, ids, strict=False))
    token = next((n for n, (before, now) in pairs if before != now), min(len(recorded_ids), len(ids)))
    message = _message_at(tokenizer, chat, text, position=len(_decode(tokenizer, ids[:token])))
    return {
        "token": token,
        "message": message,
        "role": chat["messages"][message]["role"] if message is not None and message != BEHIND else None,
        "is_same_text": _decode(tokenizer, recorded_ids) == _decode(tokenizer, ids),
        "recorded": _decode(tokenizer, recorded_ids[token : token + _SHOWN_TOKENS]) or None,
        "now": _decode(tokenizer, ids[token : token + _SHOWN_TOKENS]) or None,
    }


def _message_at(tokenizer: Any, chat: Mapping[str, Any], text: str, position: int) -> int | None:
    """The number of the message that holds a position of the text, with what the template puts around it; BEHIND, or
    None where the template renders a beginning of the messages otherwise."""
    messages = chat["messages"]
    with suppress(Exception):  # a template may refuse a conversation that is not whole
        for count in range(1, len(messages) + 1):
            beginning = _render(tokenizer, messages[:count], chat, is_whole=False)
            if not text.startswith(beginning):
                return None
            if position < len(beginning):
                return count - 1
        return BEHIND
    return None


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text
