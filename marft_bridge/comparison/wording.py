"""A report -> the sentences that its page, its Markdown and its table share.

Invariant: a sentence claims what `Contrast.outcome` claims and no more, and gives the numbers that the claim rests on.
Names come from configurations and models: `format_name` cuts and escapes them for the page, the Markdown or the table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from marft_bridge.comparison.numbers import counted, number, p_equals, points, signed, signed_interval
from marft_bridge.comparison.records import (
    ONE_SIDED_SIGNIFICANCE,
    SIGNIFICANCE,
    Cohort,
    Contrast,
    ContrastOutcome,
    MarginOutcome,
    Mixed,
    NodeShare,
    NonInferiority,
    Power,
    Rated,
    Report,
    Stopping,
    Tournament,
)

FormatName = Callable[[str], str]
Effect = Literal["better", "worse", "not shown"]

MARKS: dict[ContrastOutcome, str] = {"higher": "▲", "lower": "▼", "not settled": "○"}
EFFECT_MARKS: dict[Effect, str] = {"better": "▲", "worse": "▼", "not shown": "○"}


# Control characters, and those that turn the direction of the text after them: "exe.gnp" would read "png.exe", and so
# would the rest of the sentence around a name.
_HIDDEN_CHARACTERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """A text with its hidden characters escaped, such as `\\x1b`; line breaks, tabs and printable text stay."""
    return _HIDDEN_CHARACTERS.sub(lambda match: match.group().encode("unicode_escape").decode("ascii"), text)


def headline(report: Report, format_name: FormatName = str) -> str:
    """The verdict in plain words, the better candidates first; with a margin, what is told about it behind."""
    return "; ".join([_difference_headline(report, format_name), *_margin_claims(report, format_name)])


def _difference_headline(report: Report, format_name: FormatName) -> str:
    base = format_name(report.base)
    if len(report.contrasts) == 1:
        (row,) = report.contrasts
        if row.outcome == "not settled":
            return f"No difference shown between {base} and {format_name(row.variant)}"
        return f"{format_name(row.variant)} is {'better' if row.outcome == 'higher' else 'worse'} than {base}"
    claims = list(_claim_sentences(report, base, format_name))
    return "; ".join(claims) if claims else f"No variant is shown to differ from {base}"


def _claim_sentences(report: Report, base: str, format_name: FormatName) -> Iterator[str]:
    """One claim for each outcome that some variant has; none when no variant is settled."""
    groups: dict[ContrastOutcome, list[str]] = {"higher": [], "lower": [], "not settled": []}
    for row in report.contrasts:
        groups[row.outcome].append(format_name(row.variant))
    better, worse, unsettled_names = groups.values()
    if better:
        yield f"{_join_names(better)} {_is_or_are(better)} better than {base}"
    if worse:
        yield f"{_join_names(worse)} {_is_or_are(worse)} worse" + ("" if better else f" than {base}")
    if unsettled_names and (better or worse):
        yield f"{_join_names(unsettled_names)} {_is_or_are(unsettled_names)} not shown to differ"


def _margin_claims(report: Report, format_name: FormatName) -> Iterator[str]:
    """One claim for each outcome beside the margin that some variant has; none for what is better."""
    groups: dict[MarginOutcome, list[str]] = {}
    for row in report.contrasts:
        if row.margin_outcome is not None:
            groups.setdefault(row.margin_outcome, []).append(format_name(row.variant))
    margin = next((f"{row.non_inferiority.margin:g}" for row in report.contrasts if row.non_inferiority), "")
    if names := groups.get("non-inferior"):
        yield f"{_join_names(names)} {_is_or_are(names)} non-inferior, by a margin of {margin}"
    if names := groups.get("worse by more than the margin"):
        yield f"{_join_names(names)} {_is_or_are(names)} worse by more than {margin}"
    if names := groups.get("not told"):
        yield f"whether {_join_names(names)} {_is_or_are(names)} worse by {margin} or more is not told"


def margins(report: Report) -> list[tuple[str, str]]:
    """(name, sentences) of each candidate: the verdict beside the margin and its numbers; empty without a margin."""
    return [
        (row.variant, _margin_sentences(row, row.non_inferiority)) for row in report.contrasts if row.non_inferiority
    ]


def _margin_sentences(row: Contrast, test: NonInferiority) -> str:
    low, high = row.simultaneous
    needed = f"below {ONE_SIDED_SIGNIFICANCE} is needed"
    parts = [
        f"Margin {test.margin:g}: {row.margin_outcome}. The 95% interval is {signed(low)} to {signed(high)}, "
        f"{'all' if low > -test.margin else 'not all'} of it above {signed(-test.margin)}; one-sided "
        f"{p_equals(test.p_adjusted)} ({needed})."
    ]
    if row.margin_outcome == "not told":
        parts.append(_margin_tasks(test))
    return " ".join(parts)


def _margin_tasks(test: NonInferiority) -> str:
    if test.tasks_more is None:
        return "Even if nothing truly differs, no affordable number of tasks would show it."
    if test.tasks_more == 0:
        return "If nothing truly differs, as many tasks as these show it four times in five."
    more = counted(_round_up(test.tasks_more), "more task")
    return f"If nothing truly differs, about {more} would show it four times in five."


def _join_names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _is_or_are(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def evidence(report: Report, format_name: FormatName = str) -> str:
    """The numbers behind the headline, as one sentence without its full stop."""
    metric, base = format_name(report.metric), format_name(report.base)
    if len(report.contrasts) > 1:
        differences = "; ".join(
            f"{format_name(row.variant)} {signed(row.diff)} ({signed_interval(row.simultaneous)})"
            for row in report.contrasts
        )
        return (
            f"Difference in mean {metric} from {base}: {differences}. The 95% intervals hold together for all "
            f"{len(report.contrasts)} variants; {sizes(report.contrasts)}"
        )
    (row,) = report.contrasts
    figures = (
        f"Mean {metric} {number(row.mean_b)} ({format_name(row.variant)}) against {number(row.mean_a)} ({base}), "
        f"difference {signed(row.diff)}, 95% interval {signed_interval(row.simultaneous)}, {p_equals(row.p_adjusted)}, "
        f"{sizes(report.contrasts)}"
    )
    return f"{figures}; {reason}" if (reason := disagreement(row)) else figures


def sizes(rows: Sequence[Contrast]) -> str:
    """How many pairs and tasks some contrasts rest on: "200 pairs of 50 tasks", "116 to 120 tasks"."""
    pairs, tasks = {row.n for row in rows}, {row.clusters for row in rows}
    if pairs == tasks:
        return _count_range(tasks, "task")
    return f"{_count_range(pairs, 'pair')} of {_count_range(tasks, 'task')}"


def _count_range(counts: set[int], noun: str) -> str:
    low, high = min(counts), max(counts)
    return counted(high, noun) if low == high else f"{low:,} to {counted(high, noun)}"


def disagreement(row: Contrast) -> str | None:
    """The reason why no difference is claimed although the interval or the test alone shows one; None otherwise."""
    low, high = row.simultaneous
    rejects, excludes_zero = row.p_adjusted < SIGNIFICANCE, not low <= 0 <= high
    if excludes_zero and not rejects:
        return "the interval excludes 0, but the test does not reject at 5%"
    if rejects and not excludes_zero:
        return "the test rejects at 5%, but the interval holds 0"
    return None


def ratio(row: Contrast) -> str:
    """The ratio of the variant's mean to the base's, with its interval: "×1.12 (1.05 to 1.20)"; empty without one."""
    if row.ratio_ci95 is None or row.mean_a == 0:
        return ""
    low, high = row.ratio_ci95
    return f"×{row.mean_b / row.mean_a:.2f} ({low:.2f} to {high:.2f})"


def unsettled(report: Report) -> list[tuple[str, str]]:
    """(name, sentences) of each candidate that is not settled: the detectable effect, and how many tasks settle it."""
    powers = {power.variant: power for power in report.power}
    sentences = []
    for row in report.contrasts:
        if row.outcome == "not settled":
            reason = disagreement(row) if len(report.contrasts) > 1 else None  # a single candidate's is in `evidence`
            parts = [f"{reason[:1].upper()}{reason[1:]}."] if reason else []
            parts += _power_sentences(powers[row.variant], row.diff) if row.variant in powers else []
            if parts:
                sentences.append((row.variant, " ".join(parts)))
    return sentences


def _power_sentences(power: Power, diff: float) -> list[str]:
    parts = []
    if power.detectable is not None:
        parts.append(f"A true difference of {number(power.detectable)} would have been found four times in five.")
    if power.tasks_more:
        parts.append(
            f"If the difference that was seen ({signed(diff)}) is the true one, about "
            f"{counted(_round_up(power.tasks_more), 'more task')} would show it four times in five."
        )
    elif power.tasks_more == 0:
        parts.append(
            f"If the difference that was seen ({signed(diff)}) is the true one, as many tasks as these show it four "
            "times in five: more tasks, or another seed, will tell."
        )
    elif power.effect is not None:
        parts.append("The difference that was seen is too small for any affordable number of tasks to show it.")
    return parts


def _round_up(tasks: int) -> int:
    """An estimated number of tasks, rounded up to two digits."""
    unit = int(10 ** max(0, len(str(tasks)) - 2))
    return -(-tasks // unit) * unit


def describe_stopping(stopping: Stopping) -> str:
    """How a comparison with interim looks ended, and what the looks spent of the error."""
    looks = _join_names([f"{look:,}" for look in stopping.looks]) if stopping.looks else "none"
    tasks = f"{stopping.used:,} of {counted(stopping.planned, 'planned task')}"
    ending = f"Ended early, after {tasks}: every candidate was settled." if stopping.early else f"Ran to {tasks}."
    return (
        f"{ending} Looked at after {looks} tasks. An error of {SIGNIFICANCE:.0%} is shared out over the looks; "
        f"{stopping.spent:.1%} was spent. Intervals and p-values allow for the looks."
    )


def share_effect(share: NodeShare) -> tuple[float | None, tuple[float, float] | None]:
    """A node's effect on the score, with its interval: the Shapley value where all teams ran, else the swap alone."""
    if share.shapley is not None:
        return share.shapley, share.shapley_ci95
    return share.alone, share.alone_ci95


def share_outcome(share: NodeShare) -> Effect:
    """Whether a node's new version is better or worse than its old one; its own interval decides."""
    _, interval = share_effect(share)
    if interval is None or interval[0] <= 0 <= interval[1]:
        return "not shown"
    return "better" if interval[0] > 0 else "worse"


def moved_nodes(mixed: Mixed, format_name: FormatName = str) -> str:
    """Which node made the difference, in one line: "planner better, executor worse"."""
    words: dict[Effect, str] = {"better": "better", "worse": "worse", "not shown": "not shown to matter"}
    return ", ".join(f"{format_name(share.node)} {words[share_outcome(share)]}" for share in mixed.shares)


def cohort_loss(cohort: Cohort, candidate: str, format_name: FormatName = str) -> str:
    """What a candidate lost in a cohort: "local in topic sums: -0.12 (-0.2 to -0.04), lower"."""
    row = next(row for row in cohort.contrasts if row.variant == candidate)
    place = f"{format_name(candidate)} in {format_name(cohort.field)} {format_name(cohort.value)}"
    return f"{place}: {signed(row.diff)} ({signed_interval(row.simultaneous)}), {row.outcome}"


def rating_text(rated: Rated) -> str:
    """An Elo rating with its interval: "+212 (+150 to +280)"."""
    if rated.low is None or rated.high is None:
        return points(rated.elo)
    return f"{points(rated.elo)} ({points(rated.low)} to {points(rated.high)})"


def ranking(tournament: Tournament) -> list[Rated]:
    """The ratings, the best first."""
    return sorted(tournament.ratings, key=lambda rated: -rated.elo)


def ratings_text(tournament: Tournament, format_name: FormatName = str) -> str:
    """All ratings in one line, the best first."""
    return ", ".join(f"{format_name(rated.variant)} {rating_text(rated)}" for rated in ranking(tournament))


def describe_tournament(report: Report, tournament: Tournament, format_name: FormatName = str) -> str:
    """How the ratings came about, and what they do not tell."""
    sentences = [
        f"Every two variants played each other on both sides; whoever earned more has won, a draw is half a win. "
        f"{format_name(report.base)} is 0; 400 points are ten wins to one. Intervals are over tasks."
    ]
    if not tournament.finite:
        sentences.append(
            "Somebody won or lost everything: a game more of each, against an average player, half won, keeps ratings "
            "finite, and how far apart they are is not told. Take more tasks, or opponents nearer to each other."
        )
    if tournament.left_out:
        sentences.append(f"{counted(tournament.left_out, 'game')} without an end or a payoff of both sides left out.")
    return " ".join(sentences)


def uncosted(report: Report) -> str:
    """Which teams have runs whose cost is not known: "executor: 3 runs without a known cost"; empty for none."""
    parts = [
        f"{visible(choice.team)}: {choice.uncosted:,} of its runs have no known cost"
        for choice in report.choices
        if choice.uncosted
    ]
    return "; ".join(parts)


def efficient_teams(report: Report, format_name: FormatName = str) -> str:
    """The efficient choices from the cheapest on, in one line: "local 0.81 for 0.002, hosted 0.9 for 0.04 USD"."""
    chosen = sorted((choice for choice in report.choices if choice.efficient), key=lambda c: c.cost.mean)
    parts = [f"{format_name(c.team)} {number(c.score.mean)} for {number(c.cost.mean)}" for c in chosen]
    return f"{', '.join(parts)} {report.currency} a run"
