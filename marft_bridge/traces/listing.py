"""Filters -> the episodes of a store, newest first; and the traces that are no episodes, with the reason.

Invariant: what is listed is bounded by the limit, and only that much is read of the token lists. Text is not made
safe here: see `plain`.
"""

# ruff: noqa: S608 - statements are put together from constants; every value is bound
from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from marft_bridge.errors import ConfigError
from marft_bridge.traces.opening import store_to_read
from marft_bridge.traces.plain import print_line, print_table, value_to_json
from trace_store.assemble import Incomplete, Malformed, spans_to_trajectory
from trace_store.store import TraceStore

_SHORTEST_ID = 8
_COMPARISON = re.compile(r"(?P<name>.+?)\s*(?P<sign><=|>=|!=|=|<|>)\s*(?P<value>[^<>=!]+)")
_NUMBERS = ("actions", "tokens", "seconds", "spans")


@dataclass(frozen=True, slots=True)
class Filters:
    """What listed episodes have in common; None asks for nothing."""

    run_id: str | None = None
    split: str | None = None
    task: str | None = None
    node: str | None = None
    outcome: str | None = None
    reward: tuple[str, str, float] | None = None  # name, comparison sign, number
    round: int | None = None
    also: tuple[tuple[str, str, float], ...] = ()  # further comparisons of rewards
    before: tuple[int, str] | None = None  # start and id of an episode: only what is listed after it


@dataclass(frozen=True, slots=True)
class ListedEpisode:
    """One episode in a list. Tokens are None when no call of it has ids."""

    episode_id: str
    short_id: str  # as many of its first digits as tell it from every other episode of the store
    run_id: str
    task_id: str
    split: str
    sample: int
    round: int | None
    variant: str | None
    outcome: str
    reason: str | None
    started_ns: int
    seconds: float
    actions: int
    trainable_actions: int
    prompt_tokens: int | None
    sampled_tokens: int | None
    rewards: dict[str, float]  # the latest team reward of each name


@dataclass(frozen=True, slots=True)
class Unassembled:
    """A trace that is no episode. `why` is in words."""

    trace_id: str
    spans: int
    started_ns: int | None
    why: str


def text_to_reward_filter(text: str) -> tuple[str, str, float]:
    """`name>0.5` -> the parts. Signs: < <= > >= = !=. Raises ConfigError."""
    found = _COMPARISON.fullmatch(text.strip())
    try:
        return (found["name"], found["sign"], float(found["value"])) if found else _refuse_reward(text)
    except ValueError:
        return _refuse_reward(text)


def _refuse_reward(text: str) -> tuple[str, str, float]:
    raise ConfigError(f"traces list: --reward {text!r} is not a comparison; write it like 'reward>0.5'")


def filters_to_episodes(store: TraceStore, filters: Filters, limit: int) -> list[ListedEpisode]:
    """At most `limit` episodes that match everything that is asked for, the newest first."""
    where, values = _conditions(filters)
    rows = store.sql(
        f"""
        WITH chosen AS (
            SELECT * FROM episodes e WHERE {where} ORDER BY started_ns DESC, episode_id DESC LIMIT ?
        ), counted AS (
            SELECT episode_id, count(*) AS actions, count(*) FILTER (WHERE trainable) AS trainable,
                   sum(coalesce(prompt_tokens, len(prompt_ids))) AS prompt_tokens,
                   sum(coalesce(sampled_tokens, len(sampled_ids))) AS sampled_tokens
            FROM actions
            WHERE episode_started_ns >= (SELECT min(started_ns) FROM chosen)
              AND episode_id IN (SELECT episode_id FROM chosen)
            GROUP BY episode_id
        )
        SELECT c.episode_id, run_id, task_id, split, sample, "round", variant, outcome, reason, started_ns,
               (ended_ns - started_ns) / 1e9, coalesce(actions, 0), coalesce(trainable, 0),
               prompt_tokens::BIGINT, sampled_tokens::BIGINT
        FROM chosen c LEFT JOIN counted USING (episode_id) ORDER BY started_ns DESC, episode_id DESC
        """,
        (*values, limit),
    )
    ids = [row[0] for row in rows]
    length = _length_of_short_ids(store, ids)
    rewards: dict[str, dict[str, float]] = {}
    found = store.sql(
        "SELECT episode_id, name, value FROM episode_reward WHERE episode_id = ANY(?) ORDER BY name", (ids,)
    )
    for episode_id, name, value in found:
        rewards.setdefault(episode_id, {})[name] = value
    complete = [(row[0], row[0][:length], *row[1:], rewards.get(row[0], {})) for row in rows]
    return [ListedEpisode(*values) for values in complete]


def _conditions(filters: Filters) -> tuple[str, list[Any]]:
    where: list[str] = ["true"]
    values: list[Any] = []
    for column, value in (
        ("run_id", filters.run_id),
        ("split", filters.split),
        ("task_id", filters.task),
        ("outcome", filters.outcome),
        ('"round"', filters.round),
    ):
        if value is not None:
            where.append(f"{column} = ?")
            values.append(value)
    if filters.node is not None:
        where.append("EXISTS (SELECT 1 FROM actions a WHERE a.episode_id = e.episode_id AND a.node = ?)")
        values.append(filters.node)
    if filters.before is not None:
        where.append("started_ns <= ? AND (started_ns, episode_id) < (?, ?)")  # the first, to skip row groups by
        values += [filters.before[0], *filters.before]
    for name, sign, number in (*((filters.reward,) if filters.reward is not None else ()), *filters.also):
        where.append(
            "EXISTS (SELECT 1 FROM episode_reward r"
            f" WHERE r.episode_id = e.episode_id AND r.name = ? AND r.value {sign} ?)"
        )
        values += [name, number]
    return " AND ".join(where), values


def _length_of_short_ids(store: TraceStore, ids: list[str]) -> int:
    """How many digits tell these episodes from all others."""
    longest = max(map(len, ids), default=0)
    for length in range(_SHORTEST_ID, longest, 4):
        prefixes = {episode_id[:length] for episode_id in ids}
        number = store.sql("SELECT count(*) FROM episodes WHERE left(episode_id, ?) = ANY(?)", (length, list(prefixes)))
        if number[0][0] == len(ids) == len(prefixes):
            return length
    return longest


def waiting_traces(store: TraceStore, limit: int) -> list[Unassembled]:
    """Traces whose spans have not all arrived, the newest first, with what is missing."""
    rows = store.sql(
        "SELECT s.trace_id, count(*), min(s.start_ns) FROM spans s"
        " ANTI JOIN episodes e ON e.episode_id = s.trace_id ANTI JOIN refusals f ON f.trace_id = s.trace_id"
        " GROUP BY s.trace_id ORDER BY min(s.start_ns) DESC, s.trace_id LIMIT ?",
        (limit,),
    )
    return [Unassembled(trace, spans, started, _why_waiting(store, trace)) for trace, spans, started in rows]


def _why_waiting(store: TraceStore, trace_id: str) -> str:
    try:
        spans_to_trajectory(store.spans(trace_id))
    except (Incomplete, Malformed) as error:
        return str(error)
    return "all its spans are there, but it was not assembled; `traces doctor` checks the store"


def refused_traces(store: TraceStore, limit: int) -> list[Unassembled]:
    """Whole traces that are no episodes, the newest first, with the reason."""
    rows = store.sql(
        "SELECT f.trace_id, count(s.span_id), min(s.start_ns), f.reason FROM refusals f"
        " LEFT JOIN spans s ON s.trace_id = f.trace_id"
        " GROUP BY f.trace_id, f.reason, f.refused_ns ORDER BY f.refused_ns DESC, f.trace_id LIMIT ?",
        (limit,),
    )
    return [Unassembled(*row) for row in rows]


def refuse_flags(waiting: bool, refused: bool, filters: Mapping[str, str | None]) -> None:
    """Raises ConfigError for flags that say nothing about traces that are no episodes."""
    if waiting and refused:
        raise ConfigError("traces list: --waiting and --refused are two lists; leave one out")
    given = [f"--{name.replace('_', '-')}" for name, value in filters.items() if value is not None]
    if given:
        which = "--waiting" if waiting else "--refused"
        raise ConfigError(f"traces list: {', '.join(given)} with {which}: such a trace has none yet; leave it out")


def list_episodes(path: Path, filters: Filters, limit: int, as_json: bool, console: Console) -> None:
    """Prints the episodes of a store: a table on a terminal, lines with tabs or JSON elsewhere."""
    with store_to_read(path) as store:
        episodes = filters_to_episodes(store, filters, limit)
        number = store.sql("SELECT count(*) FROM episodes")[0][0]
    if as_json:
        print_line(console, value_to_json([asdict(episode) for episode in episodes]))
        return
    columns = ("id", "started", "run", "task", "outcome", "actions", "tokens", "seconds", "rewards")
    rows = [
        (
            episode.short_id,
            time_to_text(episode.started_ns),
            episode.run_id if episode.round is None else f"{episode.run_id} round {episode.round}",
            episode.task_id,
            episode.outcome if episode.reason is None else f"{episode.outcome}: {episode.reason}",
            episode.actions,
            tokens_to_text(episode.prompt_tokens, episode.sampled_tokens),
            f"{episode.seconds:.2f}",
            ", ".join(f"{name} {value:.3g}" for name, value in episode.rewards.items()),
        )
        for episode in episodes
    ]
    print_table(console, columns, rows, _NUMBERS)
    if console.is_terminal:
        more = "; --limit shows more" if len(episodes) == limit < number else ""
        print_line(console, f"{len(episodes)} of {number} episodes{more}")


def list_unassembled(path: Path, which: str, limit: int, as_json: bool, console: Console) -> None:
    """Prints the traces of a store that are `waiting` or `refused`."""
    with store_to_read(path) as store:
        traces = waiting_traces(store, limit) if which == "waiting" else refused_traces(store, limit)
    if as_json:
        print_line(console, value_to_json([asdict(trace) for trace in traces]))
        return
    rows = [(t.trace_id, None if t.started_ns is None else time_to_text(t.started_ns), t.spans, t.why) for t in traces]
    print_table(console, ("trace", "started", "spans", "why"), rows, _NUMBERS)


def time_to_text(ns: int) -> str:
    """Unix time in nanoseconds -> UTC to the minute."""
    return datetime.fromtimestamp(ns // 10**9, UTC).strftime("%Y-%m-%d %H:%M")


def tokens_to_text(prompt: int | None, sampled: int | None) -> str | None:
    """`383+10`: tokens of prompts and answers; a question mark for those that are not known."""
    if prompt is None and sampled is None:
        return None
    return "+".join("?" if number is None else str(number) for number in (prompt, sampled))
