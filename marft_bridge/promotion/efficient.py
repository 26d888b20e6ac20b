"""A comparison's report -> the efficient team that may take over, and whether it is shown to be good enough.

Efficient is what the report marks so: by the means, no other team is as good for less. Good enough is the report's own
verdict beside its margin. Invariant: nothing is chosen that the report does not say both of; a mean alone promotes
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from marft_bridge.common.errors import ConfigError
from marft_bridge.comparison.records import Choice, MarginOutcome, Report, Variant
from marft_bridge.promotion.gate import MIN_TASKS, Finding, Status

CLAUSE = "efficient and non-inferior"
_STATUSES: Mapping[MarginOutcome, Status] = {
    "better": "passed",
    "non-inferior": "passed",
    "worse by more than the margin": "failed",
    "not told": "undecided",
}


def find_efficient(report: Report, name: str | None) -> Variant:
    """The efficient candidate of this name; without one the cheapest that is shown non-inferior, else the cheapest.

    Raises:
        ConfigError: the report weighs no costs, or names no margin; the name is none of an efficient candidate.
    """
    if not report.choices:
        raise ConfigError(
            "promote --efficient: report.json says nothing of costs; set compare.prices, and compare again (docs: "
            "what a run costs)"
        )
    if all(row.non_inferiority is None for row in report.contrasts):
        raise ConfigError(
            "promote --efficient: report.json names no margin; compare again with --non-inferior and how much worse "
            "a team may be"
        )
    efficient = [choice for choice in report.choices if choice.efficient and choice.team != report.base]
    if name is None:
        return _cheapest(report, efficient)
    if name not in {choice.team for choice in efficient}:
        raise ConfigError(
            f"promote --efficient: {name!r} is not one of the efficient teams of report.json: {_names(efficient)}"
        )
    return _to_variant(report, name)


def efficient_to_finding(report: Report, variant: Variant) -> Finding:
    """Whether the report shows the candidate to be at least not worse than the base by its margin."""
    row = report.contrast(variant.name)
    if row is None or row.non_inferiority is None or row.margin_outcome is None:
        return Finding(CLAUSE, "undecided", f"{variant.name} has no verdict beside a margin")
    if row.clusters < MIN_TASKS:
        return Finding(CLAUSE, "undecided", f"{row.clusters} tasks are too few; {MIN_TASKS} are needed")
    low, high = row.simultaneous
    more = row.non_inferiority.tasks_more
    more_text = f"; {more} more tasks would show it if nothing truly differs" if more else ""
    sentence = (
        f"{report.metric} {row.mean_b:.4g} against {row.mean_a:.4g} of {report.base}, difference {row.diff:+.4g} (95%: "
        f"{low:+.4g} to {high:+.4g}, {row.clusters} tasks), margin {row.non_inferiority.margin:g}: {row.margin_outcome}"
        f"{more_text if row.margin_outcome == 'not told' else ''}; {_cost_sentence(report, variant.name)}"
    )
    return Finding(CLAUSE, _STATUSES[row.margin_outcome], sentence)


def _cheapest(report: Report, efficient: list[Choice]) -> Variant:
    if not efficient:
        raise ConfigError(
            f"promote --efficient: no team of report.json is efficient but the base {report.base!r}: nothing to promote"
        )
    by_cost = sorted(efficient, key=lambda choice: choice.cost.mean)
    shown = [choice for choice in by_cost if _is_shown(report, choice.team)]
    declared = [choice for choice in by_cost if report.contrast(choice.team) is not None]
    return _to_variant(report, (shown or declared or by_cost)[0].team)


def _is_shown(report: Report, name: str) -> bool:
    row = report.contrast(name)
    return row is not None and row.margin_outcome in ("better", "non-inferior")


def _to_variant(report: Report, name: str) -> Variant:
    """The variant of this name. Raises ConfigError for a mixed team, which has a score and no contrast."""
    for variant in report.candidates:
        if variant.name == name:
            return variant
    raise ConfigError(
        f"promote --efficient: {name!r} is a mixed team, of which the report claims nothing beside the base; declare "
        "it in [[compare.variants]], and compare again"
    )


def _names(choices: list[Choice]) -> str:
    return ", ".join(choice.team for choice in choices) or "none but the base"


def _cost_sentence(report: Report, name: str) -> str:
    costs = {choice.team: choice.cost.mean for choice in report.choices}
    base_text = f" against {costs[report.base]:.4g}" if report.base in costs else ""
    return f"a run costs {costs[name]:.4g}{base_text} {report.currency or ''}".rstrip()
