"""A gate such as `correct>0 and tokens<1.2x and safety>=base-0.02`, and a report -> the decision about a candidate.

`config.gate_expression` parses the gate. Invariants: a clause passes only on evidence in the report, never for lack of
data: it is held against the simultaneous 95% interval that the report's page shows, an interval without width is
widened by what so few tasks could have missed, a claim of any difference needs the test's outcome too, and a claim of
no loss beyond a margin the one-sided test that `compare --non-inferior` asks for: no interval knows of losses so rare
that no task showed one.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from marft_bridge.common.errors import ConfigError
from marft_bridge.comparison.records import ONE_SIDED_SIGNIFICANCE, Contrast, Report, Variant
from marft_bridge.config.gate_expression import Clause, Gate, Op, expression_to_gate
from marft_bridge.statistics import holm, totals_to_non_inferiority_p_value
from marft_bridge.statistics.clusters import ROUNDING, Totals

Status = Literal["passed", "failed", "undecided"]
Outcome = Literal["promote", "refused", "undecided"]

MIN_TASKS = 10  # below, the intervals' coverage was never measured: docs/statistics.md
MAX_UNSCORED_SHARE = 0.05  # of episodes without a score, beyond the base's share: their pairs are left out
EXIT_CODES: dict[Outcome, int] = {"promote": 0, "refused": 3, "undecided": 4}
_TAIL = 0.025  # on either side of a 95% interval


@dataclass(frozen=True, slots=True)
class Finding:
    """The status of one clause, with its numbers in a sentence."""

    clause: str
    status: Status
    sentence: str


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether a candidate may be promoted, with a finding for each clause."""

    candidate: str
    gate: str
    findings: tuple[Finding, ...]

    @property
    def outcome(self) -> Outcome:
        """`refused` as soon as one clause is shown not to hold; `undecided` while one is not settled."""
        statuses = {finding.status for finding in self.findings}
        if "failed" in statuses:
            return "refused"
        return "undecided" if "undecided" in statuses else "promote"

    @property
    def exit_code(self) -> int:
        """For CI: 0 promote, 3 refused, 4 undecided."""
        return EXIT_CODES[self.outcome]

    def lines(self) -> list[str]:
        """The decision as text: the outcome first, then a line for each finding."""
        outcome_texts = {
            "promote": "may be promoted",
            "refused": "is refused",
            "undecided": "is not settled: the data show neither that the condition holds nor that it does not",
        }
        lines = [f"{self.candidate} {outcome_texts[self.outcome]} ({self.gate})"]
        return lines + [f"  {finding.status}: {finding.sentence}" for finding in self.findings]


def default_gate(report: Report) -> Gate:
    """The gate where none is configured: better on the metric that decides."""
    name = report.metric if re.fullmatch(r"[^\W\d][\w./@:]*", report.metric) else f'"{report.metric}"'
    return expression_to_gate(f"{name}>0")


def decide(report: Report, gate: Gate | str, candidate: str | None = None) -> Decision:
    """Decides each clause of the gate by the contrasts of a comparison's report.

    Args:
        candidate: one of the variants; None takes the only one.

    Raises:
        ConfigError: the expression is malformed, a metric is unknown, or the candidate is not one of the variants.
    """
    parsed_gate = expression_to_gate(gate) if isinstance(gate, str) else gate
    variant = find_candidate(report, candidate)
    metrics = _metric_names(report)
    for clause in parsed_gate.clauses:
        if clause.metric not in metrics:
            close_names = difflib.get_close_matches(clause.metric, metrics, n=1, cutoff=0.5)
            hint = f"did you mean {close_names[0]!r}?" if close_names else f"known: {', '.join(metrics)}"
            raise ConfigError(f"promotion gate: the comparison has no metric {clause.metric!r}; {hint}")
    findings = [_clause_to_finding(report, variant, clause) for clause in parsed_gate.clauses]
    findings += lost_findings(report, variant, metrics=[clause.metric for clause in parsed_gate.clauses])
    return Decision(variant.name, parsed_gate.text, tuple(findings))


def find_candidate(report: Report, name: str | None) -> Variant:
    """One candidate by its name, or the only one. Raises ConfigError."""
    names = [variant.name for variant in report.candidates]
    if name is None:
        if len(names) > 1:
            raise ConfigError(f"promotion gate: there are several candidates; name one of: {', '.join(names)}")
        return report.candidates[0]
    if name not in names:
        base = "is the base of the comparison" if name == report.base else "is not in the comparison"
        raise ConfigError(f"promotion gate: {name!r} {base}; candidates: {', '.join(names)}")
    return report.candidates[names.index(name)]


# -- a clause and a report to a finding -----------------------------------------------------------------------


def _clause_to_finding(report: Report, variant: Variant, clause: Clause) -> Finding:
    def make_finding(status: Status, sentence: str) -> Finding:
        return Finding(clause.text, status, sentence)

    row = report.contrast(variant.name, clause.metric)
    if row is None:
        return make_finding(
            "undecided", f"{clause.text}: {variant.name} and {report.base} have no pair with {clause.metric}"
        )
    if row.clusters < MIN_TASKS:
        return make_finding("undecided", f"{clause.text}: {row.clusters} tasks are too few; {MIN_TASKS} are needed")
    if clause.form == "factor":
        return make_finding(*_check_factor(clause, row, report.base))
    margin = -clause.number if clause.upwards else clause.number  # how much worse the clause bears
    untested = margin > 0 and row.task_differences is None
    low, high = _interval_with_unseen_loss(row, upwards=clause.upwards) if untested else _widened_interval(row)
    numbers = (
        f"{clause.metric} {row.mean_b:.4g} against {row.mean_a:.4g}, difference {row.diff:+.4g} "
        f"(95%: {low:+.4g} to {high:+.4g}, {row.clusters} tasks)"
    )
    if clause.without_margin:
        return make_finding(*_check_not_worse(clause, row, numbers))
    status = _bounds_to_status(clause, low, high, limit=clause.number)
    if clause.number == 0 and status == "passed" and row.outcome == "not settled":
        return make_finding(
            "undecided", f"{numbers}: the interval excludes 0, the test does not (p {row.p_adjusted:.3g})"
        )
    if margin > 0 and status == "passed" and not untested:
        p = _margin_p_value(report, row, clause, margin=margin)
        if p >= ONE_SIDED_SIGNIFICANCE:
            return make_finding(
                "undecided",
                f"{numbers}: the interval excludes a loss of {margin:.4g}, the test does not (one-sided p {p:.3g}; "
                f"below {ONE_SIDED_SIGNIFICANCE} is needed): so few tasks may miss rare losses",
            )
    claim = f"{'above' if clause.upwards else 'below'} {clause.number:+.4g}" if clause.number else _base_claim(clause)
    hint = f"; {_OLD_REPORT_HINT}" if untested and status == "undecided" else ""
    return make_finding(status, f"{numbers}: {_STATUS_TEXTS[status]} {claim}{hint}")


def _margin_p_value(report: Report, row: Contrast, clause: Clause, margin: float) -> float:
    """The one-sided p-value of "worse by the margin or more", as `compare --non-inferior` has it.

    Holm's over all candidates where the metric is the one that decides. 0 where the candidate is shown to be better:
    the two claims are steps of one sequence.
    """
    if row.outcome == ("higher" if clause.upwards else "lower"):
        return 0.0
    family = report.contrasts if row.metric == report.metric else (row,)
    p_values = [_row_to_margin_p_value(member, upwards=clause.upwards, margin=margin) for member in family]
    return holm(p_values)[family.index(row)]


def _row_to_margin_p_value(row: Contrast, upwards: bool, margin: float) -> float:
    if row.task_differences is None:
        return 1.0
    largest_loss = _largest_loss(row)
    if margin >= largest_loss:  # nothing can be worse by more
        return 0.0
    sums, sizes, counts = np.array(row.task_differences.rows, dtype=np.float64).T  # [rows] each
    repeats = counts.astype(np.intp)
    totals = Totals(np.repeat(sums if upwards else -sums, repeats), np.repeat(sizes, repeats))
    return totals_to_non_inferiority_p_value(row.metric, totals, margin=margin, value_range=largest_loss)


def _check_not_worse(clause: Clause, row: Contrast, numbers: str) -> tuple[Status, str]:
    """`>=base`: passes where the mean is no worse and no loss was shown; the sentence gives the loss not excluded."""
    gain = row.diff if clause.upwards else -row.diff
    low, high = _interval_with_unseen_loss(row, upwards=clause.upwards)
    possible_loss = max(0.0, -low if clause.upwards else high)
    if row.outcome == ("lower" if clause.upwards else "higher"):
        return "failed", f"{numbers}: shown to be worse than the base"
    if gain < 0:
        return "undecided", f"{numbers}: worse in these runs, though not shown to be"
    return "passed", f"{numbers}: no worse in these runs; being worse by up to {possible_loss:.4g} is not excluded"


def _check_factor(clause: Clause, row: Contrast, base: str) -> tuple[Status, str]:
    """`<1.2x`: the interval of the difference over the base's mean, widened to that of the ratio if there is one."""
    if row.mean_a <= 0:
        return "undecided", f"{clause.text}: the mean of {base} is {row.mean_a:.4g}; a factor of it says nothing"
    bears_a_loss = clause.number < 1 if clause.upwards else clause.number > 1
    if bears_a_loss and row.task_differences is not None:
        low, high = _interval_with_unseen_loss(row, upwards=clause.upwards)
    else:
        low, high = _widened_interval(row)
    low, high = 1 + low / row.mean_a, 1 + high / row.mean_a
    if row.ratio_ci95 is not None:  # the union of both, since either may be the wider one
        low, high = min(low, row.ratio_ci95[0]), max(high, row.ratio_ci95[1])
    status = _bounds_to_status(clause, low, high, limit=clause.number)
    claim = f"{'above' if clause.upwards else 'below'} {clause.number:.4g} times the base"
    return status, (
        f"{clause.metric} {row.mean_b:.4g} against {row.mean_a:.4g}, {row.mean_b / row.mean_a:.3f} times the base "
        f"(95%: {low:.3f} to {high:.3f}, {row.clusters} tasks): {_STATUS_TEXTS[status]} {claim}"
    )


def _bounds_to_status(clause: Clause, low: float, high: float, limit: float) -> Status:
    """`passed` where the whole interval satisfies the clause, `failed` where none of it does, else `undecided`."""
    holds: dict[Op, Callable[[float], bool]] = {
        ">": lambda x: x > limit,
        ">=": lambda x: x >= limit,
        "<": lambda x: x < limit,
        "<=": lambda x: x <= limit,
    }
    worst, best = (low, high) if clause.upwards else (high, low)
    if holds[clause.op](worst):
        return "passed"
    return "undecided" if holds[clause.op](best) else "failed"


def _widened_interval(row: Contrast) -> tuple[float, float]:
    """The simultaneous interval; where it has no width, because all tasks agree, widened by what n tasks can miss."""
    low, high = row.simultaneous
    if not _is_without_width(row):
        return low, high
    margin = _unseen_loss(row)
    return low - margin, high + margin


def _interval_with_unseen_loss(row: Contrast, upwards: bool) -> tuple[float, float]:
    """The same; where no task got worse, the end on that side lies further out by the losses that n tasks can miss.

    `upwards`: whether more of the metric is better. A report without the differences of tasks does not say whether one
    got worse; an interval that reaches to the side of losses does.
    """
    low, high = _widened_interval(row)
    if row.task_differences is None:
        loss_seen = low < 0 if upwards else high > 0
    else:
        loss_seen = any(total < 0 if upwards else total > 0 for total, _, _ in row.task_differences.rows)
    if loss_seen or _is_without_width(row):
        return low, high
    return (low - _unseen_loss(row), high) if upwards else (low, high + _unseen_loss(row))


def _is_without_width(row: Contrast) -> bool:
    """Up to rounding: tasks that all differ by 0.2 have an interval of some 1e-17."""
    low, high = row.simultaneous
    return high - low <= ROUNDING * max(map(abs, (low, high, row.mean_a, row.mean_b)))


def _unseen_loss(row: Contrast) -> float:
    """What losses that no task showed may take from the mean.

    A share q of tasks stays unseen among n with probability (1 - q)^n; the q at which that is _TAIL is taken.
    """
    return float((1 - _TAIL ** (1 / row.clusters)) * _largest_loss(row))


def _largest_loss(row: Contrast) -> float:
    """By how much one task may be worse: the metric's range, or the larger mean where that is more; above 0."""
    value_range = 1.0 if row.task_differences is None else row.task_differences.value_range
    return max(value_range, abs(row.mean_a), abs(row.mean_b)) or 1.0


def lost_findings(report: Report, variant: Variant, metrics: Iterable[str] = ()) -> tuple[Finding, ...]:
    """A finding where the candidate has many more episodes without a score than the base; none where it has not.

    Pairs that lack a score are left out of every number: a candidate must not win by failing on hard tasks. The same
    holds for each of `metrics`, which a scored episode may lack.
    """
    secondary = dict.fromkeys(metric for metric in metrics if metric != report.metric)
    findings = (_unscored_finding(report, variant), *(_unmeasured_finding(report, variant, m) for m in secondary))
    return tuple(finding for finding in findings if finding is not None)


def _unscored_finding(report: Report, variant: Variant) -> Finding | None:
    base = report.variants[0]
    if not _loses_more(variant, variant.unscored, base, base_lost=base.unscored):
        return None
    reason = max(variant.reasons.items(), key=lambda item: item[1])[0] if variant.reasons else "no reason recorded"
    return Finding(
        "episodes with a score",
        "undecided",
        f"{variant.unscored} of {variant.episodes} episodes of {variant.name} have no score ({base.unscored} of "
        f"{base.episodes} of {base.name}), most often: {reason}; the numbers leave them out, so they show too little",
    )


def _unmeasured_finding(report: Report, variant: Variant, metric: str) -> Finding | None:
    """The same of another metric; a report that does not count its episodes has its pairs instead."""
    base, clause = report.variants[0], f"episodes with {metric}"
    if variant.measured is not None and base.measured is not None:
        lost, base_lost = (v.episodes - v.measured.get(metric, 0) for v in (variant, base) if v.measured is not None)
        if not _loses_more(variant, lost, base, base_lost=base_lost):
            return None
        sentence = (
            f"{lost} of {variant.episodes} episodes of {variant.name} have no {metric} ({base_lost} of {base.episodes} "
            f"of {base.name}); its numbers leave them out, so they show too little"
        )
        return Finding(clause, "undecided", sentence)
    deciding, row = report.contrast(variant.name), report.contrast(variant.name, metric)
    if deciding is None or row is None or row.n >= (1 - MAX_UNSCORED_SHARE) * deciding.n:
        return None
    sentence = f"{row.n} of {deciding.n} pairs have {metric}, which side of the others lacks it is not told; "
    return Finding(clause, "undecided", sentence + _OLD_REPORT_HINT)


def _loses_more(variant: Variant, lost: int, base: Variant, base_lost: int) -> bool:
    """Whether the share of episodes that are lost is above the base's by more than `MAX_UNSCORED_SHARE`."""
    share, base_share = (n / v.episodes if v.episodes else 0.0 for v, n in ((variant, lost), (base, base_lost)))
    return share > base_share + MAX_UNSCORED_SHARE


_OLD_REPORT_HINT = (
    "an earlier version wrote the report, which holds too little for this: `marft-bridge compare --resume` writes it "
    "anew from the episodes that ran"
)
_STATUS_TEXTS: dict[Status, str] = {
    "passed": "shown to be",
    "failed": "shown not to be",
    "undecided": "not shown to be",
}


def _base_claim(clause: Clause) -> str:
    comparison_texts = {">": "above", ">=": "at or above", "<": "below", "<=": "at or below"}
    return f"{comparison_texts[clause.op]} the base"


def _metric_names(report: Report) -> Sequence[str]:
    return [report.metric, *dict.fromkeys(row.metric for row in report.secondary)]
