"""A request -> its identity: the key that decides its team, the graph run that it is part of, the person it is about.

In order: the header `x-marft-session`, the OpenAI fields `user`, `safety_identifier` and `metadata.session_id`, the
header `x-marft-run`, the trace id of W3C `traceparent`. One run is one `x-marft-run` or else one trace id; a session
is none, because every turn of a conversation is another run. Invariant: a field of another type than text is no key,
and nothing is made up where none is sent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trace_store.journal import storable_text

SESSION_HEADER, RUN_HEADER = "x-marft-session", "x-marft-run"
MAX_KEY_CHARACTERS = 512  # of a key; the rest is cut off
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?")


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """What a request tells of its origin; None for what it does not tell."""

    key: str | None
    key_source: str  # the header or field that the key is from; "" without one
    run_key: str | None
    subject: str | None  # the app's name for the person
    session: str | None


def request_to_identity(headers: Mapping[str, str], body: Mapping[str, Any]) -> RequestIdentity:
    """Reads headers (names in lower case, or a mapping that does not mind) and the JSON body."""
    metadata = body.get("metadata")
    user, identifier = _text(body.get("user")), _text(body.get("safety_identifier"))
    session = _text(headers.get(SESSION_HEADER))
    metadata_session = _text(metadata.get("session_id")) if isinstance(metadata, Mapping) else None
    header_run, trace = _text(headers.get(RUN_HEADER)), _trace_id(headers.get("traceparent"))
    sources = {
        SESSION_HEADER: session,
        "user": user,
        "safety_identifier": identifier,
        "metadata.session_id": metadata_session,
        RUN_HEADER: header_run,
        "traceparent": trace,
    }
    source, key = next(((name, value) for name, value in sources.items() if value is not None), ("", None))
    return RequestIdentity(
        key, source, header_run or trace, subject=user or identifier, session=session or metadata_session
    )


def _text(value: Any) -> str | None:
    return storable_text(value[:MAX_KEY_CHARACTERS]) if isinstance(value, str) and value else None


def _trace_id(header: str | None) -> str | None:
    match = _TRACEPARENT.fullmatch((header or "").strip().lower())
    return match[1] if match else None
