"""What was measured at the calls of recorded runs -> shares, differences and findings, per node and per call.

Two figures. What a call decides: the variance of the reward that lies in its answer (`statistics.decided_variance`),
and its share of the whole. What the policy adds: the reward with it from that call on, less the reward with a stand-in
from that call on, after the same beginning. A node's are the sum over its calls, and the difference at its first call;
a run in which it makes none counts 0, since nothing could change there. Invariants: intervals are over tasks; those of
the nodes are one family, those of single calls hold each by itself; what was measured in no two tasks has no interval,
and none is of width 0, but for a share that is 1 by construction.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from marft_bridge.statistics import Contrast, compare_family
from marft_bridge.statistics.decided_variance import share_of_variance, unseen_share

ALPHA = 0.05
_ROUNDING = 1e-9

Finding = Literal["adds", "harmful", "lazy", "decides", "idle", "did not act", "not settled"]


@dataclass(frozen=True, slots=True)
class MeasuredCall:
    """One call of one run. None: too many of its forks have no reward."""

    node: str
    number: int  # among the calls of its node, from 1
    decided: float | None  # see `decided_variance`
    difference: float | None = None  # the policy's mean reward less the stand-in's


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One recorded run."""

    episode_id: str
    task: str
    variance: float | None  # of the reward over the whole run, given its task; None as above
    calls: Sequence[MeasuredCall]  # all calls of the nodes that are looked at
    whole_nodes: Collection[str] = ()  # the node, if one does, whose calls' parts add up to `variance` by construction


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over runs, and its interval; the bounds are None where the runs are of fewer than two tasks."""

    mean: float
    low: float | None
    high: float | None
    runs: int
    tasks: int


@dataclass(frozen=True, slots=True)
class ForkCredit:
    """Of a node, or of one call of it. None: not measured in any run."""

    node: str
    number: int | None  # of the call; None: of the whole node
    calls: float  # per run
    decided: Estimate | None  # variance, in squared units of the reward
    share: Estimate | None  # of the variance of the reward given the task
    difference: Estimate | None  # in units of the reward
    finding: Finding | None = None  # of a node


@dataclass(frozen=True, slots=True)
class _Values:
    """One figure of each run that has it."""

    tasks: list[str] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    wholes: list[float | None] = field(default_factory=list)  # the variance of the whole run
    are_whole: list[bool] = field(default_factory=list)  # whether a value is that by construction

    def add(self, run: MeasuredRun, value: float, *, is_whole: bool = False) -> None:
        self.tasks.append(run.task)
        self.values.append(value)
        self.wholes.append(run.variance)
        self.are_whole.append(is_whole)


def runs_to_credits(
    runs: Sequence[MeasuredRun], nodes: Sequence[str], *, score_range: float, min_contribution: float, seed: int
) -> tuple[list[ForkCredit], list[ForkCredit]]:
    """The credit of each node, and of each call of each node.

    Args:
        score_range: largest less smallest reward that was seen.
        min_contribution: in units of the reward; a node that is shown to matter less is lazy, or idle.
        seed: of bootstrap and permutations.
    """
    decided = {node: _node_to_decided(runs, node) for node in nodes}
    difference = {node: _node_to_difference(runs, node) for node in nodes}
    family = {("decided", node): decided[node] for node in nodes if decided[node].values}
    family |= {("difference", node): difference[node] for node in nodes if difference[node].values}
    bounds = {}
    for kind, node in family:
        most_calls = max(sum(call.node == node for call in run.calls) for run in runs)
        bounds[kind, node] = score_range if kind == "difference" else _variance_bound(score_range) * most_calls
    judged = _estimate_family(family, bounds, seed=seed)
    estimates = {name: judged_figure.estimate for name, judged_figure in judged.items()}
    node_credits = []
    for node in nodes:
        calls = sum(call.node == node for run in runs for call in run.calls) / max(len(runs), 1)
        level = 1 - ALPHA / max(len(family), 1)
        credit = _to_credit(node, None, calls, decided=decided[node], estimates=estimates, level=level)
        of_node = {kind: figure for (kind, name), figure in judged.items() if name == node}
        node_credits.append(replace(credit, finding=_to_finding(credit, of_node, min_contribution)))
    return node_credits, _single_calls(runs, nodes, score_range=score_range, seed=seed)


def _to_credit(
    node: str, number: int | None, calls: float, decided: _Values, *, estimates: Mapping[_Name, Estimate], level: float
) -> ForkCredit:
    decided_estimate = estimates.get(("decided", node))
    return ForkCredit(
        node,
        number,
        calls,
        decided=decided_estimate,
        share=_share(decided, decided_estimate, level=level),
        difference=estimates.get(("difference", node)),
    )


def _node_to_decided(runs: Sequence[MeasuredRun], node: str) -> _Values:
    values = _Values()
    for run in runs:
        parts = [call.decided for call in run.calls if call.node == node]
        measured_parts = [part for part in parts if part is not None]
        if len(measured_parts) == len(parts):
            values.add(run, sum(measured_parts), is_whole=node in run.whole_nodes)
    return values


def _node_to_difference(runs: Sequence[MeasuredRun], node: str) -> _Values:
    """At the node's first call; nothing where no run has a stand-in at all."""
    values = _Values()
    if not any(call.difference is not None for run in runs for call in run.calls):
        return values
    for run in runs:
        first = next((call for call in run.calls if call.node == node), None)
        if first is None:
            values.add(run, 0.0)
        elif first.difference is not None:
            values.add(run, first.difference)
    return values


def _single_calls(
    runs: Sequence[MeasuredRun], nodes: Sequence[str], *, score_range: float, seed: int
) -> list[ForkCredit]:
    call_credits = []
    for node in nodes:
        for number in sorted({call.number for run in runs for call in run.calls if call.node == node}):
            calls = [(run, call) for run in runs for call in run.calls if (call.node, call.number) == (node, number)]
            decided, difference = _Values(), _Values()
            for run, call in calls:
                if call.decided is not None:
                    is_only = sum(run_call.node == node for run_call in run.calls) == 1
                    decided.add(run, call.decided, is_whole=is_only and node in run.whole_nodes)
                if call.difference is not None:
                    difference.add(run, call.difference)
            estimates: dict[_Name, Estimate] = {}
            for kind, values, bound in (
                ("decided", decided, _variance_bound(score_range)),
                ("difference", difference, score_range),
            ):
                if values.values:
                    name = (kind, node)
                    estimates[name] = _estimate_family({name: values}, {name: bound}, seed=seed)[name].estimate
            per_run = len(calls) / len(runs)
            call_credits.append(
                _to_credit(node, number, per_run, decided=decided, estimates=estimates, level=1 - ALPHA)
            )
    return call_credits


def _variance_bound(score_range: float) -> float:
    """The largest sample variance of two rewards or more."""
    return score_range**2 / 2


_Name = tuple[str, str]
_Verdict = Literal["higher", "lower", "not settled"]


@dataclass(frozen=True, slots=True)
class _Judged:
    estimate: Estimate
    verdict: _Verdict
    upper_bound: float | None  # what the mean may be at most, with what was not seen; None: nothing tells


def _estimate_family(
    family: Mapping[_Name, _Values], bounds: Mapping[_Name, float], *, seed: int
) -> dict[_Name, _Judged]:
    """Means with intervals and verdicts that hold together.

    A share q of tasks that differ would go unseen with chance (1 - q)^tasks, which bounds q, and with it the mean v by
    (1 - q) v less, or plus, q times the bound of one value. That is the interval where every task has the same mean, as
    there is no spread. Else the mean may be as much above its interval: no resample holds what was not seen.
    """
    judged = {name: values for name, values in family.items() if len({*values.tasks}) > 1}
    contrasts = [
        Contrast(
            variant="/".join(name),
            metric="credit",
            base=[0.0] * len(values.values),
            values=values.values,
            clusters=values.tasks,
        )
        for name, values in judged.items()
    ]
    members = dict(zip(judged, compare_family(contrasts, seed=seed), strict=True))
    estimates: dict[_Name, _Judged] = {}
    for name, values in family.items():
        tasks = len({*values.tasks})
        mean = sum(values.values) / len(values.values)
        interval: tuple[float, float] | None = None
        verdict: _Verdict = "not settled"
        upper_bound = None
        if name in judged:
            unseen_fraction = unseen_share(tasks, ALPHA / len(judged))
            interval, verdict = members[name].simultaneous, members[name].verdict
            if not _has_spread(values.values, [1.0] * len(values.values), values.tasks):
                interval = _bound_mean(mean, bounds[name], unseen_fraction)
                upper_bound = None if interval is None else interval[1]
            elif bounds[name]:
                upper_bound = (1 - unseen_fraction) * interval[1] + unseen_fraction * max(bounds[name], abs(mean))
        if interval is None or interval[0] <= 0 <= interval[1]:
            verdict = "not settled"
        low, high = interval or (None, None)
        estimates[name] = _Judged(
            Estimate(mean, low, high, runs=len(values.values), tasks=tasks),
            verdict,
            upper_bound=upper_bound,
        )
    return estimates


def _bound_mean(value: float, bound: float, unseen_share: float) -> tuple[float, float] | None:
    """The mean where all values seen are alike, and an unseen share of others lies between -bound and bound."""
    if not bound:
        return None
    bound = max(bound, abs(value))
    return (1 - unseen_share) * value - unseen_share * bound, (1 - unseen_share) * value + unseen_share * bound


def _has_spread(values: Sequence[float], sizes: Sequence[float], tasks: Sequence[str]) -> bool:
    """Whether the ratio of values to sizes differs from task to task, by more than rounding."""
    sums: dict[str, tuple[float, float]] = {}
    for value, size, task in zip(values, sizes, tasks, strict=True):
        value_sum, size_sum = sums.get(task, (0.0, 0.0))
        sums[task] = value_sum + value, size_sum + size
    ratio = sum(values) / sum(sizes)
    rounding = _ROUNDING * max(abs(value) for value in values)
    return any(abs(value_sum - ratio * size_sum) > rounding for value_sum, size_sum in sums.values())


def _share(values: _Values, decided: Estimate | None, *, level: float) -> Estimate | None:
    """The share of the variance, over the runs whose whole variance was measured."""
    rows = [
        (task, value, whole)
        for task, value, whole in zip(values.tasks, values.values, values.wholes, strict=True)
        if whole is not None
    ]
    if decided is None or not rows:
        return None
    tasks = [task for task, _, _ in rows]
    share = share_of_variance(
        [value for _, value, _ in rows], [whole for _, _, whole in rows], clusters=tasks, level=level
    )
    if share is None:
        return None
    low, high = share.low, share.high
    if not any(values.values):  # the interval of a ratio of zeros is empty
        whole_mean = sum(whole for _, _, whole in rows) / len(rows)
        low, high = (None if bound is None else bound / whole_mean for bound in (decided.low, decided.high))
    elif not all(values.are_whole) and not _has_spread([row[1] for row in rows], [row[2] for row in rows], tasks):
        low, high = None, None  # no interval is known for a ratio without spread
    return Estimate(share.mean, low, high, runs=len(rows), tasks=len({*tasks}))


def _to_finding(credit: ForkCredit, judged: Mapping[str, _Judged], min_contribution: float) -> Finding:
    """By the difference where there is a stand-in, else by what the node decides. `judged`: by figure."""
    figure, limit = "difference", min_contribution
    if credit.difference is None:
        figure, limit = "decided", min_contribution**2
    node_judged = judged.get(figure)
    if node_judged is not None and node_judged.verdict != "not settled":
        if figure == "decided":
            return "decides" if node_judged.verdict == "higher" else "not settled"
        return "adds" if node_judged.verdict == "higher" else "harmful"
    if not credit.calls:
        return "did not act"
    if node_judged is None or node_judged.upper_bound is None or node_judged.upper_bound >= limit:
        return "not settled"
    return "idle" if figure == "decided" else "lazy"
