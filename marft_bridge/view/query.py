"""The query of an address -> the filters of a list of episodes, and back.

Invariant: what makes no sense is refused with a reason; an empty field is no filter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from marft_bridge.traces.listing import Filters

FILTER_KEYS = (
    *("q", "task", "node", "adapter", "version", "variant", "split", "round", "outcome", "thread", "user", "tag"),
    *("reward", "low", "high"),
)


class BadQueryError(Exception):
    """The query of an address makes no sense; the message says why."""


def query_to_address(query: Mapping[str, Any], path: str) -> str:
    """A path with its query; empty values are left out."""
    return f"{path}?{urlencode({key: value for key, value in query.items() if value not in ('', None)})}"


def required(query: Mapping[str, str], key: str) -> str:
    """The value of a key. Raises BadQueryError where it is missing."""
    if not query.get(key):
        raise BadQueryError(f"the address lacks {key}=")
    return query[key]


def optional_int(query: Mapping[str, str], key: str) -> int | None:
    """A whole number; None where the key is missing. Raises BadQueryError."""
    text = query.get(key, "")
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) < 2**63):
        raise BadQueryError(f"{key} is {text!r:.60}, not a whole number")
    return int(text)


def query_to_list(query: Mapping[str, str], run_id: str | None) -> dict[str, str]:
    """What of a query says which list of episodes it is of: for the addresses of these episodes."""
    return {"run": run_id or "", **{key: query[key] for key in FILTER_KEYS if query.get(key)}}


def query_to_filters(query: Mapping[str, str], run_id: str | None) -> Filters:
    """The filters of a list of episodes, of one run or of all. Raises BadQueryError."""
    bounds = []
    for key, sign in (("low", ">="), ("high", "<=")):
        if text := query.get(key, "").strip():
            try:
                value = float(text)
            except ValueError:
                value = math.nan
            if not math.isfinite(value):
                raise BadQueryError(f"{key} is {text!r:.60}, not a number")
            bounds.append((sign, value))
    name = query.get("reward", "")
    if bounds and not name:
        raise BadQueryError("a range of rewards needs the reward's name")
    cursor = None
    if text := query.get("before", ""):
        start, _, episode_id = text.partition(".")
        started_ns = optional_int({"before": start}, "before")
        if started_ns is None or not episode_id:
            raise BadQueryError("before is not the start and the id of an episode")
        cursor = (started_ns, episode_id)
    return Filters(
        run_id=run_id,
        split=query.get("split") or None,
        variant=query.get("variant") or None,
        task=query.get("task") or None,
        node=query.get("node") or None,
        adapter=query.get("adapter") or None,
        version=optional_int(query, "version"),
        outcome=query.get("outcome") or None,
        thread=query.get("thread") or None,
        user=query.get("user") or None,
        tag=query.get("tag") or None,
        round=optional_int(query, "round"),
        reward_conditions=tuple((name, sign, value) for sign, value in bounds),
        words=tuple(query.get("q", "").split()),
        cursor=cursor,
    )
