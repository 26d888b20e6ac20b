"""A run folder or store, and the query of an address -> pages of HTML.

Invariants: every text of the store is escaped by the templates and its control characters are made visible, so that
it is never markup and never reverses the direction of the text after it; a page has no script but the files of
STATIC_FILES, and names no other host; an unknown number reads "n/a". A query that makes no sense is refused with a
reason.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import jinja2
from starlette.datastructures import QueryParams

from marft_bridge.common.errors import USER_ERRORS
from marft_bridge.comparison import wording
from marft_bridge.comparison.curve import learning_curve
from marft_bridge.comparison.numbers import counted, number, signed, signed_interval
from marft_bridge.comparison.page import report_style
from marft_bridge.comparison.records import Report
from marft_bridge.runs.imitation_lines import updates_to_imitation_lines
from marft_bridge.runs.learning_curve import LearningPoint
from marft_bridge.runs.run_folder import TRAIN, RunFolder, read_metrics
from marft_bridge.traces.forks import worth_to_text
from marft_bridge.traces.listing import (
    filters_to_episodes,
    filters_to_keys,
    thread_to_text,
    time_to_text,
    tokens_to_text,
)
from marft_bridge.traces.store_reader import open_for_reading
from marft_bridge.view.curves import lines_to_charts
from marft_bridge.view.episode import ACTIONS_PER_PAGE, store_to_episode_page
from marft_bridge.view.forks import episode_to_fork_section
from marft_bridge.view.graph_drawing import STYLE
from marft_bridge.view.pair import pages_to_pair
from marft_bridge.view.query import (
    FILTER_KEYS,
    optional_int,
    query_to_address,
    query_to_filters,
    query_to_list,
    required,
)
from marft_bridge.view.query_cache import QueryCache
from marft_bridge.view.source import ViewSource
from marft_bridge.view.sparkline import sparkline
from marft_bridge.view.store_queries import (
    RunSummary,
    episode_to_mates,
    run_to_curve,
    run_to_duels,
    store_to_credits,
    store_to_filter_choices,
    store_to_runs,
    variants_to_run,
)
from marft_bridge.view.token_texts import TextsByNode
from trace_store.errors import StoreBusyError
from trace_store.journal import is_recorded, journal_segments
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
MAX_OVERLAID = 6  # runs beside the one that is shown
STATIC_FILES = {
    "app.js": "text/javascript",
    "vendor/uPlot.iife.min.js": "text/javascript",
    "vendor/idiomorph.min.js": "text/javascript",
    "vendor/uPlot.min.css": "text/css",
}
"""What pages load beside the style sheet, with its media type."""
_TEMPLATES, _STATIC = (Path(__file__).parent / name for name in ("templates", "static"))
_REPORT_ID = re.compile(rb"<code>([0-9a-f]{32})</code>")
_MAX_REPORT_BYTES = 64 << 20


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
            for f in (
                counted,
                metric_to_text,
                number,
                signed,
                signed_interval,
                thread_to_text,
                time_to_text,
                tokens_to_text,
                worth_to_text,
            )
        }
        self._environment.filters.update(filters, address=query_to_address)
        self._environment.globals["source"] = source

    def refuse_unreadable_store(self) -> None:
        """Raises StoreError for a store that no page could show; one that another process holds is shown later."""
        with suppress(StoreBusyError), open_for_reading(self.source.store, self._unread):
            pass

    def close(self) -> None:
        """Forget what was read of the journal."""
        self._unread.close()

    def style(self) -> str:
        """The style sheet of every page."""
        return "\n".join([report_style(), (_TEMPLATES / "style.css").read_text(encoding="utf-8"), STYLE])

    def file(self, name: str) -> bytes:
        """One of STATIC_FILES."""
        return (_STATIC / name).read_bytes()

    def stamp(self) -> str:
        """What changes whenever a page would show something new."""
        store, run = self.source.store, self.source.run
        paths = [store, *journal_segments(store)]
        if run is not None:
            paths += [run.metrics, run.path / "report.json", run.path / "bridge.json"]
        return hashlib.sha256(repr([_path_to_stamp(path) for path in paths]).encode()).hexdigest()[:16]

    def runs(self) -> str:
        """Every run of the store."""
        with open_for_reading(self.source.store, self._unread) as store:
            runs = self._cache.get(("runs",), lambda: store_to_runs(store))
            refused = store.sql("SELECT count(*) FROM refusals")[0][0]
        return self._render("runs", runs=runs, refused=refused, sparkline=sparkline)

    def episodes(self, query: QueryParams) -> str:
        """The episodes of all runs, or of one, that pass the filters."""
        return self._list(query, query.get("run") or None, "episodes")

    def run(self, query: QueryParams) -> str:
        """One run, and its episodes that pass the filters."""
        return self._list(query, required(query, "id"), "run")

    def _list(self, query: QueryParams, run_id: str | None, template: str) -> str:
        filters = query_to_filters(query, run_id)
        with open_for_reading(self.source.store, self._unread) as store:
            run = None
            if run_id is not None:
                run = self._cache.get(("run", run_id), lambda: _read_run(store, run_id))
            choices = self._cache.get(("choices", run_id), lambda: store_to_filter_choices(store, run_id))
            episodes = filters_to_episodes(store, filters, EPISODES_PER_PAGE + 1)  # one more shows that there are more
        has_more = len(episodes) > EPISODES_PER_PAGE
        episodes = episodes[:EPISODES_PER_PAGE]
        return self._render(
            template,
            run=run,
            run_id=run_id,
            choices=choices,
            query=query,
            list_query=query_to_list(query, run_id),
            is_filtered=any(query.get(key) for key in FILTER_KEYS if key != "reward"),
            reward=self._main_reward(choices.rewards),
            sparkline=sparkline,
            has_training=run_id == TRAIN and bool(self.source.metrics()),
            episodes=episodes,
            next={**query, "before": f"{episodes[-1].started_ns}.{episodes[-1].episode_id}"} if has_more else None,
        )

    def episode(self, query: QueryParams) -> str:
        """One episode: what was said, D, rewards, actions with their tokens; the ones before and after it."""
        episode_id, first = required(query, "id"), optional_int(query, "at") or 0
        filters = query_to_filters(query, query.get("run") or None)
        with open_for_reading(self.source.store, self._unread) as store:
            first = first // ACTIONS_PER_PAGE * ACTIONS_PER_PAGE
            page = store_to_episode_page(store, self.source, self.token_texts, episode_id=episode_id, first=first)
            if page is None:
                raise NotFoundError(f"the store has no episode {episode_id!r:.100}")
            here = (page.episode.started_ns, episode_id)
            if filters.run_id is None and not query.get("q"):
                filters = replace(filters, run_id=page.episode.run_id)
            newer, older = (
                filters_to_keys(store, replace(filters, cursor=here), 1, newest_first=order) for order in (False, True)
            )
            main_reward = self._main_reward([reward.name for reward in page.rewards if reward.scope == "episode"])
            mates = episode_to_mates(store, page.episode, main_reward)
            forks = episode_to_fork_section(store, page.episode)
        return self._render(
            "episode",
            page=page,
            per_page=ACTIONS_PER_PAGE,
            list_query=query_to_list(query, query.get("run") or page.episode.run_id),
            newer=newer[0][1] if newer else None,
            older=older[0][1] if older else None,
            mates=mates,
            forks=forks,
            main_reward=main_reward,
        )

    def pair(self, query: QueryParams) -> str:
        """Two episodes side by side."""
        ids = [required(query, key) for key in ("a", "b")]
        sides = []
        with open_for_reading(self.source.store, self._unread) as store:
            for episode_id in ids:
                page = store_to_episode_page(store, self.source, self.token_texts, episode_id=episode_id, first=0)
                if page is None:
                    raise NotFoundError(f"the store has no episode {episode_id!r:.100}")
                sides.append(page)
        return self._render("pair", pair=pages_to_pair(*sides), per_page=ACTIONS_PER_PAGE)

    def training(self, query: QueryParams) -> str:
        """The training of the run folder: forecast, imitation, learning curve, every metric as a curve, credit."""
        with open_for_reading(self.source.store, self._unread) as store:
            curve, reward = self._cache.get(("curve",), lambda: self._read_curve(store))
            agent_credits = self._cache.get(("credits",), lambda: store_to_credits(store))
        lines = self.source.metrics()
        neighbours = sorted(self.source.neighbours())
        return self._render(
            "training",
            forecast=self.source.forecast(),
            imitation=updates_to_imitation_lines(lines),
            curve={width: learning_curve(curve, width=width, name=f"curve{width}") for width in (1060, 340)}
            if curve
            else None,
            reward=reward,
            neighbours=neighbours,
            chosen=[name for name in query.getlist("with") if name in neighbours],
            data_query=urlencode([("with", name) for name in query.getlist("with")]),
            metrics=lines[-MAX_METRICS_LINES:],
            hidden_lines=max(0, len(lines) - MAX_METRICS_LINES),
            metric_names=[
                name
                for name in AGENT_METRICS
                if any(name in agent for line in lines for agent in _line_to_agents(line).values())
            ],
            agents_of=_line_to_agents,
            agent_credits=agent_credits,
        )

    def training_data(self, query: QueryParams) -> dict[str, Any]:
        """The curves of the training, as JSON: of this run folder and those beside it that the query names."""
        neighbours = self.source.neighbours()
        names = [name for name in dict.fromkeys(query.getlist("with")) if name in neighbours][:MAX_OVERLAID]
        with open_for_reading(self.source.store, self._unread) as store:
            points, reward = self._cache.get(("curve",), lambda: self._read_curve(store))
        own_name = self.source.run.path.resolve().name if self.source.run is not None else self.source.name
        lines = {own_name: self.source.metrics(), **{name: read_metrics(neighbours[name].metrics) for name in names}}
        rewards = {own_name: {p.round: p.reward_mean for p in points if p.reward_mean is not None}}
        for name in names:
            rewards[name] = _run_to_rewards(neighbours[name], reward)
        charts = lines_to_charts({name: part for name, part in lines.items() if part}, rewards)
        return {"charts": [asdict(chart) for chart in charts]}

    def comparison(self) -> str:
        """The result of the run folder's comparison with its episodes, or the reason why there is none."""
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
        run_id, duels = None, {}
        if report is not None:
            with open_for_reading(self.source.store, self._unread) as store:
                run_id = variants_to_run(store, [variant.name for variant in report.variants])
                if run_id is not None:
                    for candidate in report.candidates:
                        duels[candidate.name] = run_to_duels(
                            store, run_id, (report.base, candidate.name), reward=report.metric
                        )
        return self._render("comparison", report=report, reason=reason, wording=wording, run_id=run_id, duels=duels)

    def has_report(self) -> bool:
        """Whether the run folder holds report.html, the page that `marft-bridge compare` writes."""
        return self.source.run is not None and (self.source.run.path / "report.html").is_file()

    def report(self) -> bytes:
        """report.html of the run folder, its ids as links to their episodes.

        Raises NotFoundError where there is none, or it is too large.
        """
        if self.source.run is None or not self.has_report():
            raise NotFoundError("the run folder has no report.html; `marft-bridge compare` writes it")
        path = self.source.run.path / "report.html"
        if path.stat().st_size > _MAX_REPORT_BYTES:
            raise NotFoundError(f"{path} is too large to show")
        # Names and texts of models are escaped in the page, so that nothing but an id of ours looks like this.
        return _REPORT_ID.sub(rb'<a href="/episode?id=\1"><code>\1</code></a>', path.read_bytes())

    def problem(self, title: str, reason: str) -> str:
        """A page with a reason, in place of the page that was requested."""
        return self._render("problem", title=title, reason=reason)

    def _read_curve(self, store: TraceStore) -> tuple[Sequence[LearningPoint], str | None]:
        """The learning curve of the training on its main reward, and the reward's name."""
        choices = store_to_filter_choices(store, TRAIN)
        reward = self._main_reward(choices.rewards)
        return ([] if reward is None else run_to_curve(store, TRAIN, reward)), reward

    def _main_reward(self, names: list[str]) -> str | None:
        """The reward that the run was trained on; where no command noted it, the first of `names`."""
        reward = self.source.setting("train", "trainer", "reward")
        return reward if reward in names else next(iter(names), None)

    def _render(self, name: str, **values: Any) -> str:
        values.setdefault("stamp", None if name == "problem" else self.stamp())
        return self._environment.get_template(f"{name}.html.j2").render(has_report=self.has_report(), **values)


def metric_to_text(value: float) -> str:
    """A number of metrics.jsonl; one that counts has no decimals."""
    return f"{value:,}" if isinstance(value, int) else number(value)


def _line_to_agents(line: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """A line of metrics.jsonl -> the metrics of each agent in it, those of a replay where it has no others."""
    agents = line.get("agents") or (line.get("replay") or {}).get("agents") or {}
    return {node: agent for node, agent in agents.items() if isinstance(agent, dict)}


def _read_run(store: TraceStore, run_id: str) -> RunSummary:
    summaries = store_to_runs(store, run_id)
    if not summaries:
        raise NotFoundError(f"the store has no episode of a run {run_id!r:.100}")
    return summaries[0]


def _run_to_rewards(run: RunFolder, reward: str | None) -> dict[int, float]:
    """Round -> mean team reward of another run folder's training; empty where its store cannot be read now."""
    if reward is None or not is_recorded(run.store):
        return {}
    with suppress(*USER_ERRORS), open_for_reading(run.store) as store:
        points = run_to_curve(store, TRAIN, reward)
        return {point.round: point.reward_mean for point in points if point.reward_mean is not None}
    return {}


def _path_to_stamp(path: Path) -> tuple[str, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return path.name, status.st_mtime_ns, status.st_size
