"""A place to look at and what the reader asks for -> pages of HTML.

Invariants: every text of the store is escaped and made visible by the templates, so that it is never markup, and
never turns the direction of what follows; a page holds no script and names no other host; numbers that are not known
read "n/a". A question that makes no sense is refused with a reason. How pages are sent is not known here.
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
from marft_bridge.comparison.records import LearningPoint, Report
from marft_bridge.run_folder import TRAIN
from marft_bridge.traces.listing import Filters, filters_to_episodes, time_to_text, tokens_to_text
from marft_bridge.traces.opening import store_to_read
from marft_bridge.view.episode import ACTIONS_PER_PAGE, store_to_episode
from marft_bridge.view.graph_drawing import STYLE
from marft_bridge.view.place import Place
from marft_bridge.view.reading import Choices, RunLine, run_to_choices, run_to_curve, store_to_runs
from marft_bridge.view.remembered import Remembered
from marft_bridge.view.tokens import TextsByNode
from trace_store.store import TraceStore

EPISODES_PER_PAGE = 50
METRICS_SHOWN = 60  # the newest rounds
FIGURES = (
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
_TEMPLATES = Path(__file__).parents[1] / "templates"
_LARGEST_REPORT = 64 << 20  # bytes


class BadQuestionError(Exception):
    """What was asked for makes no sense; the message says why."""


class NotThereError(Exception):
    """What was asked for is not in the store."""


class Pages:
    """The pages of one place. A store is open while a page is made, and no longer."""

    def __init__(self, place: Place, tokenizer: Path | None = None) -> None:
        """`tokenizer`: the file to read token texts with, instead of those of the run's base models."""
        self.place = place
        self.texts = TextsByNode(place.tokenizers() if tokenizer is None else {"": tokenizer})
        self._remembered = Remembered(place.store)
        self._environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(_TEMPLATES),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=lambda value: wording.visible(value) if type(value) is str else value,
        )
        filters = {f.__name__: f for f in (counted, figure, number, signed, time_to_text, tokens_to_text)}
        self._environment.filters.update(filters, address=_address)
        self._environment.globals["place"] = place

    def style(self) -> str:
        """The style sheet of every page."""
        parts = [(_TEMPLATES / name).read_text(encoding="utf-8") for name in ("report/style.css", "view/style.css")]
        return "\n".join([*parts, STYLE])

    def runs(self) -> str:
        """Every run of the store."""
        with store_to_read(self.place.store) as store:
            runs = self._remembered.of(("runs",), lambda: store_to_runs(store))
            refused = store.sql("SELECT count(*) FROM refusals")[0][0]
        return self._page("runs", runs=runs, refused=refused, report=self.has_report())

    def run(self, asked: Mapping[str, str]) -> str:
        """One run: its curve, its figures, its episodes that pass the filters."""
        run_id = _needed(asked, "id")
        filters = _filters(run_id, asked)
        with store_to_read(self.place.store) as store:
            run, choices, reward, curve = self._remembered.of(("run", run_id), lambda: self._about(store, run_id))
            episodes = filters_to_episodes(store, filters, EPISODES_PER_PAGE + 1)
        lines = self.place.metrics() if run_id == TRAIN else []
        more = len(episodes) > EPISODES_PER_PAGE
        episodes = episodes[:EPISODES_PER_PAGE]
        return self._page(
            "run",
            run=run,
            choices=choices,
            asked=asked,
            reward=reward,
            curve={width: learning_curve(curve, width=width, name=f"curve{width}") for width in (1060, 340)}
            if curve
            else None,
            metrics=lines[-METRICS_SHOWN:],
            left_out=max(0, len(lines) - METRICS_SHOWN),
            figures=[
                name for name in FIGURES if any(name in agent for line in lines for agent in _agents(line).values())
            ],
            agents_of=_agents,
            episodes=episodes,
            next={**asked, "before": f"{episodes[-1].started_ns}.{episodes[-1].episode_id}"} if more else None,
        )

    def episode(self, asked: Mapping[str, str]) -> str:
        """One episode: D, rewards, actions with their tokens."""
        episode_id, first = _needed(asked, "id"), _whole(asked, "at") or 0
        with store_to_read(self.place.store) as store:
            shown = store_to_episode(
                store, self.place, self.texts, episode_id, first // ACTIONS_PER_PAGE * ACTIONS_PER_PAGE
            )
        if shown is None:
            raise NotThereError(f"the store has no episode {episode_id!r:.100}")
        return self._page("episode", shown=shown, per_page=ACTIONS_PER_PAGE)

    def comparison(self) -> str:
        """What the run folder's comparison found."""
        report, why_not = None, "this store was opened without its run folder"
        if self.place.run is not None:
            path = self.place.run.path / "report.json"
            why_not = f"there is no {path}; `marft-bridge compare` writes it"
            try:
                if path.stat().st_size <= _LARGEST_REPORT:
                    report = Report.model_validate_json(path.read_bytes())
                else:
                    why_not = f"{path} is too large to show"
            except FileNotFoundError:
                pass
            except (OSError, ValueError) as error:
                why_not = f"{path} cannot be read: {str(error).splitlines()[0]}"
        return self._page("comparison", report=report, why_not=why_not, wording=wording, page=self.has_report())

    def has_report(self) -> bool:
        """Whether the run folder holds the page of a comparison."""
        return self.place.run is not None and (self.place.run.path / "report.html").is_file()

    def report(self) -> bytes:
        """That page, as it is."""
        if self.place.run is None or not self.has_report():
            raise NotThereError("the run folder has no report.html; `marft-bridge compare` writes it")
        path = self.place.run.path / "report.html"
        if path.stat().st_size > _LARGEST_REPORT:
            raise NotThereError(f"{path} is too large to show")
        return path.read_bytes()

    def problem(self, title: str, why: str) -> str:
        """A page that says why there is none."""
        return self._page("problem", title=title, why=why)

    def _about(self, store: TraceStore, run_id: str) -> tuple[RunLine, Choices, str | None, Sequence[LearningPoint]]:
        """What a run is like on the whole: its line, its filters, the reward that counts, its curve."""
        found = store_to_runs(store, run_id)
        if not found:
            raise NotThereError(f"the store has no episode of a run {run_id!r:.100}")
        choices = run_to_choices(store, run_id)
        reward = self._reward(choices.rewards)
        curve = [] if reward is None or found[0].rounds is None else run_to_curve(store, run_id, reward)
        return found[0], choices, reward, curve

    def _reward(self, names: list[str]) -> str | None:
        chosen = self.place.setting("train", "trainer", "reward")
        return chosen if chosen in names else next(iter(names), None)

    def _page(self, name: str, **values: Any) -> str:
        return self._environment.get_template(f"view/{name}.html.j2").render(**values)


def figure(value: float) -> str:
    """A figure of metrics.jsonl; one that counts has no decimals."""
    return f"{value:,}" if isinstance(value, int) else number(value)


def _address(asked: Mapping[str, Any], path: str) -> str:
    """A path with its query; what is empty is left out."""
    return f"{path}?{urlencode({key: value for key, value in asked.items() if value not in ('', None)})}"


def _agents(line: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The figures of each agent in a line of metrics.jsonl."""
    found = line.get("agents") or (line.get("replay") or {}).get("agents") or {}
    return {node: agent for node, agent in found.items() if isinstance(agent, dict)}


def _needed(asked: Mapping[str, str], key: str) -> str:
    if not asked.get(key):
        raise BadQuestionError(f"the address lacks {key}=")
    return asked[key]


def _whole(asked: Mapping[str, str], key: str) -> int | None:
    text = asked.get(key, "")
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) < 2**63):
        raise BadQuestionError(f"{key} is {text!r:.60}, not a whole number")
    return int(text)


def _filters(run_id: str, asked: Mapping[str, str]) -> Filters:
    """What the address asks of a run's episodes."""
    bounds = []
    for key, sign in (("low", ">="), ("high", "<=")):
        if text := asked.get(key, "").strip():
            try:
                value = float(text)
            except ValueError:
                value = math.nan
            if not math.isfinite(value):
                raise BadQuestionError(f"{key} is {text!r:.60}, not a number")
            bounds.append((sign, value))
    name = asked.get("reward", "")
    if bounds and not name:
        raise BadQuestionError("a range of rewards needs the reward's name")
    before = None
    if text := asked.get("before", ""):
        start, _, episode_id = text.partition(".")
        started_ns = _whole({"before": start}, "before")
        if started_ns is None or not episode_id:
            raise BadQuestionError("before is not the start and the id of an episode")
        before = (started_ns, episode_id)
    return Filters(
        run_id=run_id,
        split=asked.get("split") or None,
        task=asked.get("task") or None,
        outcome=asked.get("outcome") or None,
        round=_whole(asked, "round"),
        also=tuple((name, sign, value) for sign, value in bounds),
        before=before,
    )
