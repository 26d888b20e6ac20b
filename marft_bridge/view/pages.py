"""A run folder or store, and the query of an address -> pages of HTML.

Invariants: every text of the store is escaped by the templates and its control characters are made visible, so that
it is never markup and never reverses the direction of the text after it; a page holds no script and names no other
host; an unknown number reads "n/a". A query that makes no sense is refused with a reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import jinja2

from marft_bridge.comparison import wording
from marft_bridge.comparison.curve import learning_curve
from marft_bridge.comparison.numbers import counted, number, signed
from marft_bridge.comparison.page import report_style
from marft_bridge.comparison.records import Report
from marft_bridge.runs.learning_curve import LearningPoint
from marft_bridge.runs.run_folder import TRAIN
from marft_bridge.traces.listing import Filters, filters_to_episodes, thread_to_text, time_to_text, tokens_to_text
from marft_bridge.traces.store_reader import open_for_reading
from marft_bridge.view.episode import ACTIONS_PER_PAGE, store_to_episode_page
from marft_bridge.view.graph_drawing import STYLE
from marft_bridge.view.query_cache import QueryCache
from marft_bridge.view.source import ViewSource
from marft_bridge.view.store_queries import (
    FilterChoices,
    RunSummary,
    run_to_curve,
    run_to_filter_choices,
    store_to_runs,
)
from marft_bridge.view.token_texts import TextsByNode
from trace_store.store import TraceStore
from trace_store.unread import UnreadJournal

EPISODES_PER_PAGE = 50
MAX_METRICS_LINES = 60  # the newest rounds
AGENT_METRICS = (
    "tokens",
    "approx_kl",
    "kl_after",
    "clipfrac",
    "grad_norm",
    "entropy",
    "advantage_mean",
    "advantage_std",
    "adapter_norm",
)
_TEMPLATES = Path(__file__).parent / "templates"
_MAX_REPORT_BYTES = 64 << 20


class BadQueryError(Exception):
    """The query of an address makes no sense; the message says why."""


class NotFoundError(Exception):
    """The run, episode or report of an address does not exist."""


class Pages:
    """The pages of one run folder or store. The store is open while a page is made, and no longer."""

    def __init__(self, source: ViewSource, tokenizer: Path | None = None) -> None:
        """`tokenizer`: the tokenizer.json for the token texts, instead of those of the run's base models."""
        self.source = source
        self.token_texts = TextsByNode(source.tokenizer_paths() if tokenizer is None else {"": tokenizer})
        self._unread = UnreadJournal(source.store)
        self._cache = QueryCache(source.store, self._unread)
        self._environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(_TEMPLATES),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=lambda value: wording.visible(value) if type(value) is str else value,
        )
        filters = {
            f.__name__: f
            for f in (counted, metric_to_text, number, signed, thread_to_text, time_to_text, tokens_to_text)
        }
        self._environment.filters.update(filters, address=_address)
        self._environment.globals["source"] = source

    def close(self) -> None:
        """Forget what was read of the journal."""
        self._unread.close()

    def style(self) -> str:
        """The style sheet of every page."""
        return "\n".join([report_style(), (_TEMPLATES / "style.css").read_text(encoding="utf-8"), STYLE])

    def runs(self) -> str:
        """Every run of the store."""
        with open_for_reading(self.source.store, self._unread) as store:
            runs = self._cache.get(("runs",), lambda: store_to_runs(store))
            refused = store.sql("SELECT count(*) FROM refusals")[0][0]
        return self._render("runs", runs=runs, refused=refused, has_report=self.has_report())

    def run(self, query: Mapping[str, str]) -> str:
        """One run: its learning curve, the metrics of its rounds, its episodes that pass the filters."""
        run_id = _required(query, "id")
        filters = _query_to_filters(run_id, query)
        with open_for_reading(self.source.store, self._unread) as store:
            run, choices, reward, curve = self._cache.get(("run", run_id), lambda: self._read_overview(store, run_id))
            episodes = filters_to_episodes(store, filters, EPISODES_PER_PAGE + 1)  # one more shows that there are more
        lines = self.source.metrics() if run_id == TRAIN else []
        has_more = len(episodes) > EPISODES_PER_PAGE
        episodes = episodes[:EPISODES_PER_PAGE]
        return self._render(
            "run",
            run=run,
            choices=choices,
            query=query,
            reward=reward,
            curve={width: learning_curve(curve, width=width, name=f"curve{width}") for width in (1060, 340)}
            if curve
            else None,
            metrics=lines[-MAX_METRICS_LINES:],
            hidden_lines=max(0, len(lines) - MAX_METRICS_LINES),
            metric_names=[
                name
                for name in AGENT_METRICS
                if any(name in agent for line in lines for agent in _line_to_agents(line).values())
            ],
            agents_of=_line_to_agents,
            episodes=episodes,
            next={**query, "before": f"{episodes[-1].started_ns}.{episodes[-1].episode_id}"} if has_more else None,
        )

    def episode(self, query: Mapping[str, str]) -> str:
        """One episode: D, rewards, actions with their tokens."""
        episode_id, first = _required(query, "id"), _optional_int(query, "at") or 0
        with open_for_reading(self.source.store, self._unread) as store:
            first = first // ACTIONS_PER_PAGE * ACTIONS_PER_PAGE
            page = store_to_episode_page(store, self.source, self.token_texts, episode_id=episode_id, first=first)
        if page is None:
            raise NotFoundError(f"the store has no episode {episode_id!r:.100}")
        return self._render("episode", page=page, per_page=ACTIONS_PER_PAGE)

    def comparison(self) -> str:
        """The result of the run folder's comparison, or the reason why there is none."""
        report, reason = None, "this store was opened without its run folder"
        if self.source.run is not None:
            path = self.source.run.path / "report.json"
            reason = f"there is no {path}; `marft-bridge compare` writes it"
            try:
                if path.stat().st_size <= _MAX_REPORT_BYTES:
                    report = Report.model_validate_json(path.read_bytes())
                else:
                    reason = f"{path} is too large to show"
            except FileNotFoundError:
                pass
            except (OSError, ValueError) as error:
                reason = f"{path} cannot be read: {str(error).splitlines()[0]}"
        return self._render("comparison", report=report, reason=reason, wording=wording, has_report=self.has_report())

    def has_report(self) -> bool:
        """Whether the run folder holds report.html, the page that `marft-bridge compare` writes."""
        return self.source.run is not None and (self.source.run.path / "report.html").is_file()

    def report(self) -> bytes:
        """report.html of the run folder, as it is. Raises NotFoundError where there is none, or it is too large."""
        if self.source.run is None or not self.has_report():
            raise NotFoundError("the run folder has no report.html; `marft-bridge compare` writes it")
        path = self.source.run.path / "report.html"
        if path.stat().st_size > _MAX_REPORT_BYTES:
            raise NotFoundError(f"{path} is too large to show")
        return path.read_bytes()

    def problem(self, title: str, reason: str) -> str:
        """A page with a reason, in place of the page that was requested."""
        return self._render("problem", title=title, reason=reason)

    def _read_overview(
        self, store: TraceStore, run_id: str
    ) -> tuple[RunSummary, FilterChoices, str | None, Sequence[LearningPoint]]:
        """The parts of a run's page besides its episodes: summary, filter choices, main reward, learning curve."""
        summaries = store_to_runs(store, run_id)
        if not summaries:
            raise NotFoundError(f"the store has no episode of a run {run_id!r:.100}")
        choices = run_to_filter_choices(store, run_id)
        reward = self._main_reward(choices.rewards)
        curve = [] if reward is None or summaries[0].rounds is None else run_to_curve(store, run_id, reward)
        return summaries[0], choices, reward, curve

    def _main_reward(self, names: list[str]) -> str | None:
        """The reward that the run was trained on; where no command noted it, the first of `names`."""
        reward = self.source.setting("train", "trainer", "reward")
        return reward if reward in names else next(iter(names), None)

    def _render(self, name: str, **values: Any) -> str:
        return self._environment.get_template(f"{name}.html.j2").render(**values)


def metric_to_text(value: float) -> str:
    """A number of metrics.jsonl; one that counts has no decimals."""
    return f"{value:,}" if isinstance(value, int) else number(value)


def _address(query: Mapping[str, Any], path: str) -> str:
    """A path with its query; empty values are left out."""
    return f"{path}?{urlencode({key: value for key, value in query.items() if value not in ('', None)})}"


def _line_to_agents(line: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """A line of metrics.jsonl -> the metrics of each agent in it, those of a replay where it has no others."""
    agents = line.get("agents") or (line.get("replay") or {}).get("agents") or {}
    return {node: agent for node, agent in agents.items() if isinstance(agent, dict)}


def _required(query: Mapping[str, str], key: str) -> str:
    if not query.get(key):
        raise BadQueryError(f"the address lacks {key}=")
    return query[key]


def _optional_int(query: Mapping[str, str], key: str) -> int | None:
    text = query.get(key, "")
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) < 2**63):
        raise BadQueryError(f"{key} is {text!r:.60}, not a whole number")
    return int(text)


def _query_to_filters(run_id: str, query: Mapping[str, str]) -> Filters:
    """The query of an address -> the filters of a run's episodes. Raises BadQueryError."""
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
        started_ns = _optional_int({"before": start}, "before")
        if started_ns is None or not episode_id:
            raise BadQueryError("before is not the start and the id of an episode")
        cursor = (started_ns, episode_id)
    return Filters(
        run_id=run_id,
        split=query.get("split") or None,
        task=query.get("task") or None,
        outcome=query.get("outcome") or None,
        thread=query.get("thread") or None,
        user=query.get("user") or None,
        tag=query.get("tag") or None,
        round=_optional_int(query, "round"),
        reward_conditions=tuple((name, sign, value) for sign, value in bounds),
        cursor=cursor,
    )
