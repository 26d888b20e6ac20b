"""A report into the sentences that its page, its Markdown and its table share.

Invariant: a sentence claims what `Contrast.outcome` claims and no more, and gives the numbers that the claim rests on.
Names come from configurations and models: every function takes `named`, which makes a name fit for where it goes.
It does not know where that is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from marft_bridge.comparison.numbers import counted, number, p_equals, signed, signed_span
from marft_bridge.comparison.records import SIGNIFICANCE, Contrast, Mixed, NodeShare, Outcome, Power, Report, Stopping

Named = Callable[[str], str]
Effect = Literal["better", "worse", "not shown"]

MARKS: dict[Outcome, str] = {"higher": "▲", "lower": "▼", "not settled": "○"}
EFFECT_MARKS: dict[Effect, str] = {"better": "▲", "worse": "▼", "not shown": "○"}


# Control characters, and those that turn the direction of what follows: "exe.gnp" would read "png.exe", and so would
# the rest of a sentence that a name stands in.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """A text with what it would hide written out, such as `\\x1b`; lines, tabs and all that people write stay."""
    return _UNSEEN.sub(lambda found: found.group().encode("unicode_escape").decode("ascii"), text)


def headline(report: Report, named: Named = str) -> str:
    """The verdict in plain words, the better candidates first."""
    base = named(report.base)
    if len(report.contrasts) == 1:
        (row,) = report.contrasts
        if row.outcome == "not settled":
            return f"No difference shown between {base} and {named(row.variant)}"
        return f"{named(row.variant)} is {'better' if row.outcome == 'higher' else 'worse'} than {base}"
    claims = list(_claims(report, base, named))
    return "; ".join(claims) if claims else f"No variant is shown to differ from {base}"


def _claims(report: Report, base: str, named: Named) -> Iterator[str]:
    """One claim for each outcome; nothing when no outcome is settled."""
    groups: dict[Outcome, list[str]] = {"higher": [], "lower": [], "not settled": []}
    for row in report.contrasts:
        groups[row.outcome].append(named(row.variant))
    better, worse, open_ = groups.values()
    if better:
        yield f"{_listed(better)} {_is(better)} better than {base}"
    if worse:
        yield f"{_listed(worse)} {_is(worse)} worse" + ("" if better else f" than {base}")
    if open_ and (better or worse):
        yield f"{_listed(open_)} {_is(open_)} not shown to differ"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _is(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def evidence(report: Report, named: Named = str) -> str:
    """The numbers behind the headline, as one sentence without its full stop."""
    metric, base = named(report.metric), named(report.base)
    if len(report.contrasts) > 1:
        differences = "; ".join(
            f"{named(row.variant)} {signed(row.diff)} ({signed_span(row.simultaneous)})" for row in report.contrasts
        )
        return (
            f"Difference in mean {metric} from {base}: {differences}. The 95% intervals hold together for all "
            f"{len(report.contrasts)} variants; {sizes(report.contrasts)}"
        )
    (row,) = report.contrasts
    numbers = (
        f"Mean {metric} {number(row.mean_b)} ({named(row.variant)}) against {number(row.mean_a)} ({base}), difference "
        f"{signed(row.diff)}, 95% interval {signed_span(row.simultaneous)}, {p_equals(row.p_adjusted)}, "
        f"{sizes(report.contrasts)}"
    )
    return f"{numbers}; {reason}" if (reason := disagreement(row)) else numbers


def sizes(rows: Sequence[Contrast]) -> str:
    """How many pairs and tasks some contrasts rest on: "200 pairs of 50 tasks", "116 to 120 tasks"."""
    pairs, tasks = {row.n for row in rows}, {row.clusters for row in rows}
    if pairs == tasks:
        return _range(tasks, "task")
    return f"{_range(pairs, 'pair')} of {_range(tasks, 'task')}"


def _range(numbers: set[int], noun: str) -> str:
    low, high = min(numbers), max(numbers)
    return counted(high, noun) if low == high else f"{low:,} to {counted(high, noun)}"


def disagreement(row: Contrast) -> str | None:
    """Why a difference is not claimed although the interval or the test alone would."""
    low, high = row.simultaneous
    rejects, outside = row.p_adjusted < SIGNIFICANCE, not low <= 0 <= high
    if outside and not rejects:
        return "the interval excludes 0, but the test does not reject at 5%"
    if rejects and not outside:
        return "the test rejects at 5%, but the interval holds 0"
    return None


def ratio(row: Contrast) -> str:
    """How many times the base's mean a variant's is, where that has an interval: "×1.12 (1.05 to 1.20)"."""
    if row.ratio_ci95 is None or row.mean_a == 0:
        return ""
    low, high = row.ratio_ci95
    return f"×{row.mean_b / row.mean_a:.2f} ({low:.2f} to {high:.2f})"


def unsettled(report: Report) -> list[tuple[str, str]]:
    """Each candidate that is not settled, with what could have been found and what would settle it."""
    powers = {power.variant: power for power in report.power}
    found = []
    for row in report.contrasts:
        if row.outcome == "not settled":
            reason = disagreement(row) if len(report.contrasts) > 1 else None  # of one candidate the evidence says it
            parts = [f"{reason[:1].upper()}{reason[1:]}."] if reason else []
            parts += _power(powers[row.variant], row.diff) if row.variant in powers else []
            if parts:
                found.append((row.variant, " ".join(parts)))
    return found


def _power(power: Power, diff: float) -> list[str]:
    parts = []
    if power.detectable is not None:
        parts.append(f"A true difference of {number(power.detectable)} would have been found four times in five.")
    if power.tasks_more:
        parts.append(
            f"If the difference that was seen ({signed(diff)}) is the true one, about "
            f"{counted(_rough(power.tasks_more), 'more task')} would show it four times in five."
        )
    elif power.tasks_more == 0:
        parts.append(
            f"If the difference that was seen ({signed(diff)}) is the true one, as many tasks as these show it four "
            "times in five: more tasks, or another seed, will tell."
        )
    elif power.effect is not None:
        parts.append("The difference that was seen is too small for any affordable number of tasks to show it.")
    return parts


def _rough(tasks: int) -> int:
    """An estimate with the two digits that it is worth, never fewer tasks than it says."""
    unit = int(10 ** max(0, len(str(tasks)) - 2))
    return -(-tasks // unit) * unit


def stopping(ended: Stopping) -> str:
    """How a comparison that was looked at while it ran came to its end."""
    looks = _listed([f"{look:,}" for look in ended.looks]) if ended.looks else "none"
    how = (
        f"Ended early, after {ended.used:,} of {counted(ended.planned, 'planned task')}: every candidate was settled."
        if ended.early
        else f"Ran to {ended.used:,} of {counted(ended.planned, 'planned task')}."
    )
    return (
        f"{how} Looked at after {looks} tasks. An error of {SIGNIFICANCE:.0%} is shared out over the looks; "
        f"{ended.spent:.1%} was spent. Intervals and p-values allow for the looks."
    )


def share_effect(share: NodeShare) -> tuple[float | None, tuple[float, float] | None]:
    """What one node does to the score: its Shapley share where all teams ran, else the swap of it alone."""
    if share.shapley is not None:
        return share.shapley, share.shapley_ci95
    return share.alone, share.alone_ci95


def share_outcome(share: NodeShare) -> Effect:
    """Whether a node's new version is better or worse than its old one; its own interval decides."""
    _, interval = share_effect(share)
    if interval is None or interval[0] <= 0 <= interval[1]:
        return "not shown"
    return "better" if interval[0] > 0 else "worse"


def moved(mixed: Mixed, named: Named = str) -> str:
    """Which node made the difference, in one line: "planner better, executor worse"."""
    words: dict[Effect, str] = {"better": "better", "worse": "worse", "not shown": "not shown to matter"}
    return ", ".join(f"{named(share.node)} {words[share_outcome(share)]}" for share in mixed.shares)
