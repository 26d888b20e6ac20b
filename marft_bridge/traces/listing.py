"""Filters -> the episodes of a store, newest first; and the traces that are no episodes, with the reason.

Invariant: at most `limit` rows are listed, and token lists are read for these only. Text of the store is returned as
it is; `common.terminal_text` makes it safe to print.
"""

# ruff: noqa: S608 - statements are put together from constants; every value is bound
from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from marft_bridge.common.errors import ConfigError
from marft_bridge.common.terminal_text import print_line, print_table, value_to_json
from marft_bridge.traces.store_reader import open_for_reading
from trace_store.assemble import Incomplete, Malformed, spans_to_trajectory
from trace_store.store import TraceStore
from trace_store.threads import EpisodeLink, episodes_to_links

_SHORTEST_ID = 8
_COMPARISON = re.compile(r"(?P<name>.+?)\s*(?P<sign><=|>=|!=|=|<|>)\s*(?P<value>[^<>=!]+)")
_NUMBERS = ("actions", "tokens", "seconds", "spans")


@dataclass(frozen=True, slots=True)
class Filters:
    """The properties that listed episodes share; None for any."""

    run_id: str | None = None
    split: str | None = None
    task: str | None = None
    node: str | None = None
    outcome: str | None = None
    thread: str | None = None
    user: str | None = None
    tag: str | None = None
    reward: tuple[str, str, float] | None = None  # name, comparison sign, number
    round: int | None = None
    reward_conditions: tuple[tuple[str, str, float], ...] = ()  # further comparisons of rewards
    cursor: tuple[int, str] | None = None  # start (ns) and id of an episode: only those that are listed after it


@dataclass(frozen=True, slots=True)
class ListedEpisode:
    """One episode in a list. Tokens are None when no call of it has ids."""

    episode_id: str
    short_id: str  # its first digits, as many as tell it from every other episode of the store
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
    thread_id: str | None
    user_id: str | None
    tags: dict[str, str]
    rewards: dict[str, float]  # the latest team reward of each name
    link: EpisodeLink


@dataclass(frozen=True, slots=True)
class Unassembled:
    """A trace that is no episode. `why`: the reason."""

    trace_id: str
    spans: int
    started_ns: int | None
    why: str


def text_to_reward_filter(text: str) -> tuple[str, str, float]:
    """`name>0.5` -> (name, sign, number). Signs: < <= > >= = !=. Raises ConfigError."""
    match = _COMPARISON.fullmatch(text.strip())
    try:
        return (match["name"], match["sign"], float(match["value"])) if match else _refuse_reward(text)
    except ValueError:
        return _refuse_reward(text)


def _refuse_reward(text: str) -> tuple[str, str, float]:
    raise ConfigError(f"traces list: --reward {text!r} is not a comparison; write it like 'reward>0.5'")


def filters_to_episodes(store: TraceStore, filters: Filters, limit: int) -> list[ListedEpisode]:
    """At most `limit` episodes that pass all filters, the newest first."""
    condition, values = _conditions(filters)
    rows = store.sql(
        f"""
        WITH chosen AS (
            SELECT * FROM episodes e WHERE {condition} ORDER BY started_ns DESC, episode_id DESC LIMIT ?
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
               prompt_tokens::BIGINT, sampled_tokens::BIGINT, thread_id, user_id, tags
        FROM chosen c LEFT JOIN counted USING (episode_id) ORDER BY started_ns DESC, episode_id DESC
        """,
        (*values, limit),
    )
    ids = [row[0] for row in rows]
    length = _length_of_short_ids(store, ids)
    rewards: dict[str, dict[str, float]] = {}
    reward_rows = store.sql(
        "SELECT episode_id, name, value FROM episode_reward WHERE episode_id = ANY(?) ORDER BY name", (ids,)
    )
    for episode_id, name, value in reward_rows:
        rewards.setdefault(episode_id, {})[name] = value
    links = episodes_to_links(store, ids)
    episode_rows = [
        (row[0], row[0][:length], *row[1:-1], json.loads(row[-1]), rewards.get(row[0], {}), links[row[0]])
        for row in rows
    ]
    return [ListedEpisode(*values) for values in episode_rows]


def _conditions(filters: Filters) -> tuple[str, list[Any]]:
    """The filters as a WHERE condition, and the values of its placeholders."""
    clauses: list[str] = ["true"]
    values: list[Any] = []
    for column, value in (
        ("run_id", filters.run_id),
        ("split", filters.split),
        ("task_id", filters.task),
        ("outcome", filters.outcome),
        ("thread_id", filters.thread),
        ("user_id", filters.user),
        ('"round"', filters.round),
    ):
        if value is not None:
            clauses.append(f"{column} = ?")
            values.append(value)
    if filters.node is not None:
        clauses.append("EXISTS (SELECT 1 FROM actions a WHERE a.episode_id = e.episode_id AND a.node = ?)")
        values.append(filters.node)
    if filters.tag is not None:
        clauses.append("list_contains(json_keys(tags), ?)")
        values.append(filters.tag)
    if filters.cursor is not None:
        # The first comparison follows from the second; DuckDB skips whole row groups by it.
        clauses.append("started_ns <= ? AND (started_ns, episode_id) < (?, ?)")
        values += [filters.cursor[0], *filters.cursor]
    for name, sign, threshold in (
        *((filters.reward,) if filters.reward is not None else ()),
        *filters.reward_conditions,
    ):
        clauses.append(
            "EXISTS (SELECT 1 FROM episode_reward r"
            f" WHERE r.episode_id = e.episode_id AND r.name = ? AND r.value {sign} ?)"
        )
        values += [name, threshold]
    return " AND ".join(clauses), values


def _length_of_short_ids(store: TraceStore, ids: list[str]) -> int:
    """The number of first digits that tell these episodes from all others of the store."""
    longest = max(map(len, ids), default=0)
    for length in range(_SHORTEST_ID, longest, 4):
        prefixes = {episode_id[:length] for episode_id in ids}
        match_count = store.sql(
            "SELECT count(*) FROM episodes WHERE left(episode_id, ?) = ANY(?)", (length, list(prefixes))
        )
        if match_count[0][0] == len(ids) == len(prefixes):
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
    return [Unassembled(trace, spans, started, why=_waiting_reason(store, trace)) for trace, spans, started in rows]


def _waiting_reason(store: TraceStore, trace_id: str) -> str:
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
    """Raises ConfigError for both flags at once, and for filters, which traces that are no episodes cannot pass."""
    if waiting and refused:
        raise ConfigError("traces list: --waiting and --refused are two lists; leave one out")
    given_flags = [f"--{name.replace('_', '-')}" for name, value in filters.items() if value is not None]
    if given_flags:
        list_flag = "--waiting" if waiting else "--refused"
        raise ConfigError(
            f"traces list: {', '.join(given_flags)} with {list_flag}: such a trace has none yet; leave it out"
        )


def list_episodes(path: Path, filters: Filters, limit: int, as_json: bool, console: Console) -> None:
    """Prints the episodes of a store: a table on a terminal, lines with tabs or JSON elsewhere."""
    with open_for_reading(path) as store:
        episodes = filters_to_episodes(store, filters, limit)
        episode_count = store.sql("SELECT count(*) FROM episodes")[0][0]
    if as_json:
        print_line(console, value_to_json([asdict(episode) for episode in episodes]))
        return
    has_threads = any(episode.thread_id is not None for episode in episodes)
    columns = ("id", "started", "run", "task", *(("thread",) if has_threads else ()), "outcome", "actions", "tokens")
    columns += ("seconds", "rewards")
    rows = [
        (
            episode.short_id,
            time_to_text(episode.started_ns),
            episode.run_id if episode.round is None else f"{episode.run_id} round {episode.round}",
            episode.task_id,
            *((thread_to_text(episode.thread_id, episode.link),) if has_threads else ()),
            episode.outcome if episode.reason is None else f"{episode.outcome}: {episode.reason}",
            episode.actions,
            tokens_to_text(episode.prompt_tokens, episode.sampled_tokens),
            f"{episode.seconds:.2f}",
            ", ".join(f"{name} {value:.3g}" for name, value in episode.rewards.items()),
        )
        for episode in episodes
    ]
    print_table(console, columns, rows, numbers=_NUMBERS)
    if console.is_terminal:
        hint = "; --limit shows more" if len(episodes) == limit < episode_count else ""
        print_line(console, f"{len(episodes)} of {episode_count} episodes{hint}")


def list_unassembled(path: Path, state: str, limit: int, as_json: bool, console: Console) -> None:
    """Prints the traces of a store that are `waiting` or `refused`."""
    with open_for_reading(path) as store:
        traces = waiting_traces(store, limit) if state == "waiting" else refused_traces(store, limit)
    if as_json:
        print_line(console, value_to_json([asdict(trace) for trace in traces]))
        return
    rows = [(t.trace_id, None if t.started_ns is None else time_to_text(t.started_ns), t.spans, t.why) for t in traces]
    print_table(console, ("trace", "started", "spans", "why"), rows, numbers=_NUMBERS)


def thread_to_text(thread_id: str | None, link: EpisodeLink) -> str | None:
    """`t-17 turn 2, resume`: a thread and the place of an episode on it; None where there is no thread."""
    if thread_id is None:
        return None
    turn = "" if link.turn is None else f" turn {link.turn}"
    return f"{thread_id}{turn}" + (f", {link.kind}" if link.kind in ("resume", "fork") else "")


def time_to_text(ns: int) -> str:
    """Unix time in nanoseconds -> UTC to the minute."""
    return datetime.fromtimestamp(ns // 10**9, UTC).strftime("%Y-%m-%d %H:%M")


def tokens_to_text(prompt: int | None, sampled: int | None) -> str | None:
    """`383+10`: tokens of prompts and answers; a question mark for an unknown number, None where both are."""
    if prompt is None and sampled is None:
        return None
    return "+".join("?" if number is None else str(number) for number in (prompt, sampled))
