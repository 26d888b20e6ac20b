"""A report -> the forest plots and bars of its page: rows of a label, an SVG strip, and the same numbers as text.

Invariants: every number that is drawn is also written beside its drawing; a colour repeats what a mark and the text
say; a figure that was not measured is absent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from markupsafe import Markup

from marft_bridge.comparison.drawing import Interval, Scale, scale_over, strip
from marft_bridge.comparison.numbers import counted, interval_text, number, percent, signed, signed_interval
from marft_bridge.comparison.records import Cohort, Contrast, Estimate, Mixed, NodeSide, Report, Variant
from marft_bridge.comparison.wording import EFFECT_MARKS, MARKS, share_effect, share_outcome

_TONES = {"higher": "better", "lower": "worse", "not settled": "none"}
_MAX_ANSWERERS = 4  # shown per node and variant; a provider names its model as it likes
_MAX_TOOLS = 8  # shown per node; a model can ask for tools that do not exist, under any number of names


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a forest plot.

    `tone` is "better", "worse", "none" or "plain"; `chips` are nodes and whether they act as in the candidate.
    """

    label: str
    strip: Markup
    value: str
    interval: str
    tone: str = "plain"
    mark: str = ""
    note: str = ""
    chips: tuple[tuple[str, bool], ...] = ()


@dataclass(frozen=True, slots=True)
class Forest:
    """A forest plot: rows over one axis; `ticks` are (percent of the width, text)."""

    rows: tuple[Row, ...]
    ticks: tuple[tuple[float, str], ...]


def _forest(rows: Iterable[Row], scale: Scale) -> Forest:
    return Forest(tuple(rows), tuple(scale.ticks()))


def difference_forest(report: Report) -> Forest:
    """Every candidate's difference from the base: its own interval as a bar, the simultaneous one as a line."""
    scale = scale_over(chain([0.0], *(row.simultaneous for row in report.contrasts)))
    same_tasks = len({row.clusters for row in report.contrasts}) == 1  # not so where one was settled early
    rows = (
        Row(
            label=row.variant,
            note="" if same_tasks else counted(row.clusters, "task"),
            strip=_contrast_strip(scale, row),
            value=signed(row.diff),
            interval=signed_interval(row.simultaneous),
            tone=_TONES[row.outcome],
            mark=MARKS[row.outcome],
        )
        for row in report.contrasts
    )
    return _forest(rows, scale)


def _contrast_strip(scale: Scale, row: Contrast) -> Markup:
    simultaneous = row.simultaneous if row.simultaneous != row.ci95 else None
    return strip(scale, row.diff, reference=0.0, inner=row.ci95, outer=simultaneous)


def describe_variant(variant: Variant) -> str:
    """A variant in one line: its adapters, why these, and what it has instead of the app's own and of [sampling]."""
    adapters = ", ".join(f"{node}@{version}" for node, version in variant.adapters.items())
    parts = (
        adapters if variant.choice is None else f"{adapters} ({variant.choice})",
        f"model: {variant.model}" if variant.model is not None else "",
        f"graph: {variant.graph}" if variant.graph is not None else "",
        f"hosted: {', '.join(variant.hosted)}" if variant.hosted and variant.model is None else "",
        f"prompts of its own: {', '.join(variant.prompts)}" if variant.prompts else "",
        f"max_tokens: {variant.max_tokens}" if variant.max_tokens is not None else "",
    )
    return " · ".join(part for part in parts if part) or "no adapters"


def scores_rest_on_pairs(report: Report) -> bool:
    """Whether every variant's score is its mean over the compared pairs, so that both show the same number."""
    scores = {variant.name: variant.score for variant in report.variants}
    return all(
        score is None or abs(score.mean - mean) < 1e-9
        for row in report.contrasts
        for score, mean in ((scores[report.base], row.mean_a), (scores[row.variant], row.mean_b))
    )


def team_forest(mixed: Mixed, base: str) -> Forest:
    """The score of every mixed team, beside a line at the base's score (the first team's, where the base is absent)."""
    scores = [team.score for team in mixed.teams]
    scale = scale_over(bound for score in scores for bound in (score.low, score.mean, score.high) if bound is not None)
    nodes = [share.node for share in mixed.shares]
    base_mean = next((team.score.mean for team in mixed.teams if not team.on), scores[0].mean)

    def full_variant(swapped: Sequence[str]) -> str:
        if not swapped:
            return base
        return mixed.candidate if set(swapped) == set(nodes) else ""

    rows = (
        Row(
            label="",
            chips=tuple((node, node in team.on) for node in nodes),
            note=full_variant(team.on),
            strip=strip(scale, team.score.mean, reference=base_mean, inner=_bounds(team.score)),
            value=number(team.score.mean),
            interval=interval_text(team.score.low, team.score.high),
        )
        for team in mixed.teams
    )
    return _forest(rows, scale)


def _bounds(score: Estimate) -> Interval | None:
    return None if score.low is None or score.high is None else (score.low, score.high)


def share_forest(mixed: Mixed) -> Forest:
    """What each node contributes, with its own interval; a node whose effect was not measured is absent."""
    effects = [(share, effect, interval) for share in mixed.shares for effect, interval in [share_effect(share)]]
    bounds = [(effect, *(interval or ())) for _, effect, interval in effects if effect is not None]
    scale = scale_over(chain([0.0], *bounds))
    tones = {"better": "better", "worse": "worse", "not shown": "none"}
    rows = []
    for share, effect, interval in effects:
        if effect is not None:
            outcome = share_outcome(share)
            rows.append(
                Row(
                    label=share.node,
                    strip=strip(scale, effect, reference=0.0, inner=interval),
                    value=signed(effect),
                    interval=signed_interval(interval),
                    tone=tones[outcome],
                    mark=EFFECT_MARKS[outcome],
                    note=outcome,
                )
            )
    return _forest(rows, scale)


@dataclass(frozen=True, slots=True)
class CohortView:
    """One candidate over the values of one field of the tasks."""

    field: str
    candidate: str
    forest: Forest


def cohort_views(report: Report) -> list[CohortView]:
    """The cohorts by field and candidate, each pair with an axis of its own."""
    views = []
    for field in dict.fromkeys(cohort.field for cohort in report.cohorts):
        of_field = [cohort for cohort in report.cohorts if cohort.field == field]
        for candidate in report.candidates:
            cohort_rows = [
                (cohort, row) for cohort in of_field if (row := _contrast_of(cohort, candidate.name, report.metric))
            ]
            if cohort_rows:
                views.append(CohortView(field, candidate.name, _cohort_forest(cohort_rows)))
    return views


def small_cohorts(report: Report) -> list[str]:
    """The cohorts without contrasts, because too few tasks are in them, with their sizes."""
    return [
        f"{cohort.field} {cohort.value}" + ("" if cohort.tasks is None else f" ({counted(cohort.tasks, 'task')})")
        for cohort in report.cohorts
        if not cohort.contrasts
    ]


def _contrast_of(cohort: Cohort, variant: str, metric: str) -> Contrast | None:
    return next((row for row in cohort.contrasts if row.variant == variant and row.metric == metric), None)


def _cohort_forest(cohort_rows: Sequence[tuple[Cohort, Contrast]]) -> Forest:
    scale = scale_over(chain([0.0], *(row.simultaneous for _, row in cohort_rows)))
    rows = (
        Row(
            label=cohort.value,
            note=counted(row.clusters, "task"),
            strip=_contrast_strip(scale, row),
            value=signed(row.diff),
            interval=signed_interval(row.simultaneous),
            tone=_TONES[row.outcome],
            mark=MARKS[row.outcome],
        )
        for cohort, row in cohort_rows
    )
    return _forest(rows, scale)


# -- what each node did ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bar:
    """One variant's figure; `length` is its share of the longest bar, 0 to 1, None where no bar makes sense."""

    variant: str
    length: float | None
    text: str


@dataclass(frozen=True, slots=True)
class Measure:
    """One figure of one node, in the variants that have it."""

    name: str
    bars: tuple[Bar, ...]
    tool: bool = False  # the name is that of a tool, which a model may have made up


def node_measures(sides: Mapping[str, NodeSide]) -> list[Measure]:
    """One node's figures by variant into measures; one that no variant has is absent."""
    kl_notes = {name: f" ({counted(s.kl_actions, 'call')})" for name, s in sides.items() if s.kl_actions}
    measures = [
        _measure("cost of a run", {name: s.cost_mean for name, s in sides.items()}),
        _measure("calls per episode", {name: s.calls_per_episode for name, s in sides.items()}),
        _measure("sampled tokens per call", {name: s.tokens_mean for name, s in sides.items()}),
        _measure("ended by itself", {name: s.stop_share for name, s in sides.items()}, share=True),
        _measure("output fits its format", {name: s.format_valid for name, s in sides.items()}, share=True),
        _measure("KL to the base model, nats per token", {n: s.kl_to_base for n, s in sides.items()}, notes=kl_notes),
        _measure("mean log-prob of a token", {name: s.logprob_mean for name, s in sides.items()}, drawn=False),
        _measure("tool calls that failed", {name: s.tool_error_share for name, s in sides.items()}, share=True),
    ]
    return [measure for measure in measures if measure is not None] + _tool_measures(sides)


def answerers(side: NodeSide) -> list[tuple[str, str]]:
    """Who answered a node's calls in one variant, and how many, the most first; those beyond a few together."""
    ranked = list(side.answered_by.items())
    listed = ranked if len(ranked) <= _MAX_ANSWERERS else ranked[: _MAX_ANSWERERS - 1]
    rest = ranked[len(listed) :]
    others = [(counted(len(rest), "other"), counted(sum(count for _, count in rest), "call"))] if rest else []
    return [(name, counted(count, "call")) for name, count in listed] + others


def _measure(
    name: str,
    values: Mapping[str, float | None],
    *,
    share: bool = False,
    drawn: bool = True,
    notes: Mapping[str, str] | None = None,
) -> Measure | None:
    measured = {variant: value for variant, value in values.items() if value is not None}
    if not measured:
        return None
    longest = 1.0 if share else max(measured.values())
    write = percent if share else number

    def bar(variant: str, value: float) -> Bar:
        length = min(1.0, max(0.0, value / longest)) if longest > 0 else 0.0
        return Bar(variant, length if drawn else None, write(value) + (notes or {}).get(variant, ""))

    return Measure(name, tuple(bar(variant, value) for variant, value in measured.items()))


def _tool_measures(sides: Mapping[str, NodeSide]) -> list[Measure]:
    """Each tool as a share of the node's tool calls, most called first, the rest together; no bar without calls."""
    totals = {name: sum(side.tools.values()) for name, side in sides.items()}
    calls: dict[str, int] = {}
    for side in sides.values():
        for tool, count in side.tools.items():
            calls[tool] = calls.get(tool, 0) + count
    ranked_tools = sorted(calls, key=lambda tool: (-calls[tool], tool))
    listed_tools = ranked_tools if len(ranked_tools) <= _MAX_TOOLS else ranked_tools[: _MAX_TOOLS - 1]
    rows = [(tool, {name: side.tools.get(tool, 0) for name, side in sides.items()}) for tool in listed_tools]
    measures = [Measure(tool, _tool_bars(counts, totals), tool=True) for tool, counts in rows]
    if rest := ranked_tools[len(listed_tools) :]:
        counts = {name: sum(side.tools.get(tool, 0) for tool in rest) for name, side in sides.items()}
        measures.append(Measure(f"calls to {counted(len(rest), 'other tool')}", _tool_bars(counts, totals)))
    return measures


def _tool_bars(counts: Mapping[str, int], totals: Mapping[str, int]) -> tuple[Bar, ...]:
    return tuple(
        Bar(variant, count / totals[variant], f"{percent(count / totals[variant])} ({count:,})")
        for variant, count in counts.items()
        if totals[variant]
    )
