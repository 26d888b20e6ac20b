"""Filters -> the episodes of a store, newest first; and the traces that are no episodes, with the reason.

Invariant: at most `limit` rows are listed, and token lists and texts are read for these only. Words are searched for
in the newest episodes first, and no further than it takes to fill the list. Text of the store is returned as it is;
`common.terminal_text` makes it safe to print.
"""

# ruff: noqa: S608 - statements are put together from constants; every value is bound
from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from marft_bridge.common.errors import ConfigError
from marft_bridge.common.terminal_text import print_line, print_table, text_to_line, value_to_json
from marft_bridge.traces.store_reader import open_for_reading
from trace_store import conventions as c
from trace_store.assemble import Incomplete, Malformed, spans_to_trajectory
from trace_store.json_text import read_json
from trace_store.store import TraceStore
from trace_store.threads import EpisodeLink, episodes_to_links

_SHORTEST_ID = 8
_COMPARISON = re.compile(r"(?P<name>.+?)\s*(?P<sign><=|>=|!=|=|<|>)\s*(?P<value>[^<>=!]+)")
_NUMBERS = ("actions", "tokens", "seconds", "spans")
_SHORT_COLUMNS = {"id": 12, "started": 11, "run": 12, "rewards": 20, "input → output": None}  # widths
_IN_IDS = "episode_id IN (SELECT unnest($3::VARCHAR[]))"
MAX_WORDS_LENGTH = 160
_FIRST_WINDOW, _WINDOW_GROWTH = 1000, 4  # episodes that are searched through at once
_MAX_NAMED = 2000
_ID_COLUMNS = ("trace_id", "episode_id")
_CLOCK_MARGIN_NS = 3600 * 10**9
_LONGEST_RUN_NS = 24 * 3600 * 10**9  # words of a call that began later are not found
_SPAN_TEXTS = [
    f"attributes->>'$.\"{name}\"'"
    for name in (c.INPUT_MESSAGES, c.OUTPUT_MESSAGES, c.INPUT, c.OUTPUT, c.TOOL_NAME, c.TOOL_ARGUMENTS, c.TOOL_RESULT)
]
_MAX_DEPTH = 6
_TELLING_FIELDS = (
    *("messages", "question", "prompt", "input", "query", "problem", "text", "content", "data"),
    *("answer", "output", "result"),
)
_FIELDS_WITHOUT_WORDS = ("id", "type", "role", "additional_kwargs", "response_metadata")


@dataclass(frozen=True, slots=True)
class Filters:
    """The properties that listed episodes share; None for any."""

    run_id: str | None = None
    split: str | None = None
    variant: str | None = None
    task: str | None = None
    node: str | None = None  # with adapter and version: of one and the same call
    adapter: str | None = None  # node@version, as a call names it
    version: int | None = None
    outcome: str | None = None
    thread: str | None = None
    user: str | None = None
    tag: str | None = None
    reward: tuple[str, str, float] | None = None  # name, comparison sign, number
    round: int | None = None
    reward_conditions: tuple[tuple[str, str, float], ...] = ()  # further comparisons of rewards
    words: tuple[str, ...] = ()  # each stands somewhere in the episode's texts, in letters of either case
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
    fork_of: str | None  # the episode that it leaves at one of its calls; None: no fork
    thread_id: str | None
    user_id: str | None
    tags: dict[str, str]
    rewards: dict[str, float]  # the latest team reward of each name
    link: EpisodeLink
    nodes: dict[str, int | None]  # who acted, in order -> its adapter's version; None without one
    input: str | None  # the first words of what it was given, and of what came out
    output: str | None


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
    keys = filters_to_keys(store, filters, limit)
    if not keys:
        return []
    ids, lowest, highest = [key[1] for key in keys], keys[-1][0], keys[0][0]
    # The bounds are constants of the statements, so that DuckDB skips the row groups beside them.
    rows = store.sql(
        f"""
        WITH chosen AS (SELECT * FROM episodes WHERE started_ns BETWEEN $1 AND $2 AND {_IN_IDS}),
        counted AS (
            SELECT episode_id, count(*) AS actions, count(*) FILTER (WHERE trainable) AS trainable,
                   sum(coalesce(prompt_tokens, len(prompt_ids))) AS prompt_tokens,
                   sum(coalesce(sampled_tokens, len(sampled_ids))) AS sampled_tokens,
                   list((node, adapter_version) ORDER BY "index") AS calls, arg_max(completion, "index") AS completion
            FROM actions WHERE episode_started_ns BETWEEN $1 AND $2 AND {_IN_IDS} GROUP BY episode_id
        )
        SELECT c.episode_id, run_id, task_id, split, sample, "round", variant, outcome, reason, started_ns,
               (ended_ns - started_ns) / 1e9, coalesce(actions, 0), coalesce(trainable, 0),
               prompt_tokens::BIGINT, sampled_tokens::BIGINT,
               if(fork_action IS NULL, NULL, parent_episode), thread_id, user_id, tags, calls, task, completion
        FROM chosen c LEFT JOIN counted USING (episode_id) ORDER BY started_ns DESC, episode_id DESC
        """,
        (lowest, highest, ids),
    )
    length = _length_of_short_ids(store, ids)
    rewards: dict[str, dict[str, float]] = {}
    reward_rows = store.sql(
        "SELECT episode_id, name, first(value ORDER BY created_ns DESC, source) FROM rewards"
        " WHERE scope = 'episode' AND episode_id IN (SELECT unnest($1::VARCHAR[])) GROUP BY episode_id, name"
        " ORDER BY name",
        (ids,),
    )
    for episode_id, name, value in reward_rows:
        rewards.setdefault(episode_id, {})[name] = value
    links, ends = episodes_to_links(store, ids), _ids_to_ends(store, ids, (lowest, highest))
    listed = []
    for *columns, tags, calls, task, completion in rows:
        given, gave = ends.get(columns[0], (None, None))
        values = (
            *(columns[0], columns[0][:length], *columns[1:], json.loads(tags)),
            *(rewards.get(columns[0], {}), links[columns[0]]),
            {call[0]: call[1] for call in map(tuple, calls or ())},
            *(first_words(given, _read_json(task)), first_words(what_was_added(gave, given or task), completion)),
        )
        listed.append(ListedEpisode(*values))
    return listed


def filters_to_keys(
    store: TraceStore, filters: Filters, limit: int, newest_first: bool = True
) -> list[tuple[int, str]]:
    """Start (ns) and id of at most `limit` episodes that pass all filters; from the cursor upwards if not the newest
    first."""
    if not filters.words:
        return _filters_to_candidates(store, filters, limit, newest_first=newest_first)
    keys: list[tuple[int, str]] = []
    window = _FIRST_WINDOW
    while len(keys) < limit:
        candidates = _filters_to_candidates(store, filters, window, newest_first=newest_first)
        hits = _candidates_with_words(store, candidates, filters.words)
        keys += [key for key in candidates if key[1] in hits]
        if len(candidates) < window:
            break
        filters, window = replace(filters, cursor=candidates[-1]), window * _WINDOW_GROWTH
    return keys[:limit]


def _filters_to_candidates(
    store: TraceStore, filters: Filters, limit: int, newest_first: bool
) -> list[tuple[int, str]]:
    """`filters_to_keys` without the words."""
    condition, values = _conditions(filters, newest_first)
    order = "DESC" if newest_first else "ASC"
    rows = store.sql(
        f"SELECT started_ns, episode_id FROM episodes e WHERE {condition}"
        f" ORDER BY started_ns {order}, episode_id {order} LIMIT ?",
        (*values, limit),
    )
    return [(row[0], row[1]) for row in rows]


def _candidates_with_words(store: TraceStore, candidates: Sequence[tuple[int, str]], words: Sequence[str]) -> set[str]:
    """The ids of those whose task or spans hold every word."""
    if not candidates:
        return set()
    starts = [start for start, _ in candidates]
    ids = {key[1] for key in candidates}
    spellings = [_word_to_spellings(word) for word in words]
    # A span's own times are of the machine that wrote it, whose clock may differ.
    values: list[Any] = [min(starts) - _CLOCK_MARGIN_NS, max(starts) + _CLOCK_MARGIN_NS]
    tests = []  # of each word: the placeholders of its spellings
    for word in spellings:
        tests.append([f"${len(values) + place}" for place in range(1, len(word) + 1)])
        values += word
    # Few are named to DuckDB; of many, whatever lies between them in time is looked at, and left out here.
    span_ids = episode_ids = "true"
    if len(ids) <= _MAX_NAMED:
        values.append(list(ids))
        span_ids, episode_ids = (f"{column} IN (SELECT unnest(${len(values)}::VARCHAR[]))" for column in _ID_COLUMNS)
    # The whole JSON is looked at first, which is fast; what it names, but does not say, is told apart in what is left.
    any_word = " OR ".join(f"contains(lower(attributes::VARCHAR), {n})" for word in tests for n in word)
    has_word = [" OR ".join(f"contains(text, {n})" for n in word) for word in tests]
    rows = store.sql(
        f"""
        SELECT id FROM (
            SELECT trace_id AS id, lower(concat_ws(chr(10), {", ".join(_SPAN_TEXTS)})) AS text FROM spans
            WHERE start_ns >= $1 AND start_ns <= $2 + {_LONGEST_RUN_NS} AND operation <> '{c.INVOKE_AGENT}'
              AND ({any_word}) AND {span_ids}
            UNION ALL
            SELECT episode_id, lower(concat_ws(chr(10), episode_id, task_id, task::VARCHAR)) FROM episodes
            WHERE started_ns BETWEEN $1 AND $2 AND {episode_ids}
        ) GROUP BY id HAVING {" AND ".join(f"bool_or({test})" for test in has_word)}
        """,
        tuple(values),
    )
    return ids & {row[0] for row in rows}


def _word_to_spellings(word: str) -> list[str]:
    """A word in small letters, as it stands in a text and in JSON, where letters beyond ASCII may be escaped."""
    cases = (word, word.lower(), word.upper(), word.capitalize())
    escaped = [json.dumps(case)[1:-1] for case in cases]
    twice = [json.dumps(text)[1:-1] for text in escaped]
    return list(dict.fromkeys(text.lower() for text in (word, *escaped, *twice)))


def _ids_to_ends(store: TraceStore, ids: list[str], bounds: tuple[int, int]) -> dict[str, tuple[Any, Any]]:
    """Episode id -> what a live run was given and gave back, as its root says."""
    rows = store.sql(
        f"SELECT trace_id, attributes->>'$.\"{c.INPUT}\"', attributes->>'$.\"{c.OUTPUT}\"' FROM spans"
        " WHERE start_ns BETWEEN $1 AND $2 AND parent_span_id IS NULL AND trace_id IN (SELECT unnest($3::VARCHAR[]))",
        (*bounds, ids),
    )
    return {row[0]: (row[1], row[2]) for row in rows}


def first_words(recorded: Any, otherwise: Any = None) -> str | None:
    """The words that a person would look for in a state, a task, or messages: at most MAX_WORDS_LENGTH letters of them.

    Those of the last message, else of the field that is named like a question or an answer, else of the first text.
    `otherwise` is looked at where there are none; None where there are none in it either.
    """
    text = _value_to_words(_read_json(recorded))
    if text is None:
        return None if otherwise is None else first_words(otherwise)
    line = " ".join(text.split())
    return line if len(line) <= MAX_WORDS_LENGTH else line[: MAX_WORDS_LENGTH - 1] + "…"


def what_was_added(gave: Any, given: Any) -> Any:
    """The fields of a final state that differ from those that the run was given; all of it where it is no state."""
    gave, given = _read_json(gave), _read_json(given)
    if not isinstance(gave, dict) or not isinstance(given, dict):
        return gave
    return {name: value for name, value in gave.items() if name not in given or given[name] != value}


def _read_json(recorded: Any) -> Any:
    """What a text says as JSON; the text where it is none, and whatever else is given as it is."""
    if not isinstance(recorded, str):
        return recorded
    try:
        return read_json(recorded)
    except ValueError:
        return recorded


def _value_to_words(value: Any, depth: int = 0) -> str | None:
    if value is None or depth > _MAX_DEPTH:
        return None
    if isinstance(value, str):
        return value if value.strip() else None
    if isinstance(value, dict):
        names = [*(name for name in _TELLING_FIELDS if value.get(name) not in (None, "", [])), *value]
        texts = (_value_to_words(value[name], depth + 1) for name in names if name not in _FIELDS_WITHOUT_WORDS)
        return next((text for text in texts if text is not None), None)
    if isinstance(value, list):
        return next((text for item in reversed(value) if (text := _value_to_words(item, depth + 1)) is not None), None)
    return str(value)


def _conditions(filters: Filters, newest_first: bool) -> tuple[str, list[Any]]:
    """The filters but for the words as a WHERE condition, and the values of its placeholders."""
    clauses: list[str] = ["true"]
    values: list[Any] = []
    for column, value in (
        ("run_id", filters.run_id),
        ("split", filters.split),
        ("variant", filters.variant),
        ("task_id", filters.task),
        ("outcome", filters.outcome),
        ("thread_id", filters.thread),
        ("user_id", filters.user),
        ('"round"', filters.round),
    ):
        if value is not None:
            clauses.append(f"{column} = ?")
            values.append(value)
    of_call = {"node": filters.node, "adapter": filters.adapter, "adapter_version": filters.version}
    if call_values := {column: value for column, value in of_call.items() if value is not None}:
        same_call = " AND ".join(f"a.{column} = ?" for column in call_values)
        clauses.append(f"EXISTS (SELECT 1 FROM actions a WHERE a.episode_id = e.episode_id AND {same_call})")
        values += call_values.values()
    if filters.tag is not None:
        clauses.append("list_contains(json_keys(tags), ?)")
        values.append(filters.tag)
    if filters.cursor is not None:
        # The first comparison follows from the second; DuckDB skips whole row groups by it.
        sign = "<" if newest_first else ">"
        clauses.append(f"started_ns {sign}= ? AND (started_ns, episode_id) {sign} (?, ?)")
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
            "SELECT count(*) FROM episodes WHERE left(episode_id, ?) IN (SELECT unnest(?::VARCHAR[]))",
            (length, list(prefixes)),
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
    """Prints the episodes of a store: a line each on a terminal, all columns with tabs or JSON elsewhere."""
    with open_for_reading(path) as store:
        episodes = filters_to_episodes(store, filters, limit)
        episode_count = store.sql("SELECT count(*) FROM episodes")[0][0]
    if as_json:
        print_line(console, value_to_json([asdict(episode) for episode in episodes]))
        return
    has_threads = any(episode.thread_id is not None for episode in episodes)
    has_forks = any(episode.fork_of is not None for episode in episodes)
    columns = ("id", "started", "run", "task", *(("thread",) if has_threads else ()))
    columns += (*(("fork of",) if has_forks else ()), "outcome", "actions", "tokens")
    columns += ("seconds", "rewards")
    rows = [
        (
            episode.short_id,
            time_to_text(episode.started_ns),
            episode.run_id if episode.round is None else f"{episode.run_id} round {episode.round}",
            episode.task_id,
            *((thread_to_text(episode.thread_id, episode.link),) if has_threads else ()),
            *((episode.fork_of,) if has_forks else ()),
            episode.outcome if episode.reason is None else f"{episode.outcome}: {episode.reason}",
            episode.actions,
            tokens_to_text(episode.prompt_tokens, episode.sampled_tokens),
            f"{episode.seconds:.2f}",
            ", ".join(f"{name} {value:.3g}" for name, value in episode.rewards.items()),
        )
        for episode in episodes
    ]
    if not console.is_terminal:
        print_table(console, columns, rows, numbers=_NUMBERS)
    else:
        _print_short(console, episodes)
        hint = "; --limit shows more" if len(episodes) == limit < episode_count else ""
        print_line(console, f"{len(episodes)} of {episode_count} episodes{hint}")


def _print_short(console: Console, episodes: Sequence[ListedEpisode]) -> None:
    """One line an episode, cut at the width of the terminal: what tells it from others first, then its words."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold", expand=True)
    for name, width in _SHORT_COLUMNS.items():
        table.add_column(Text(name), no_wrap=True, overflow="ellipsis", max_width=width, ratio=None if width else 1)
    for episode in episodes:
        round_text = "" if episode.round is None else f" {episode.round}"
        ended = "" if episode.outcome == "terminated" else f"{episode.outcome}! "
        rewards = " ".join(f"{name} {value:.3g}" for name, value in episode.rewards.items())
        words = " → ".join(text for text in (episode.input, episode.output) if text is not None)
        fork_mark = "" if episode.fork_of is None else f"fork of {episode.fork_of[: len(episode.short_id)]}: "
        cells = (
            *(episode.short_id, time_to_text(episode.started_ns)[5:], episode.run_id + round_text, ended + rewards),
            fork_mark + (words or episode.task_id),
        )
        table.add_row(*(Text(text_to_line(cell)) for cell in cells))
    console.print(table)


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
