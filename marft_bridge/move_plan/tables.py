"""A plan, or a calibration -> tables and lines for people, and the same as JSON values.

Invariant: what a model or a stranger wrote (names of nodes, models and rewards) comes out printable and is never
markup; a number that is not known is empty or said, never 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from marft_bridge.common.progress import Reporter
from marft_bridge.common.terminal_text import print_table, text_to_line
from marft_bridge.move_plan.predictions import Calibrated, OrderAgreement
from marft_bridge.move_plan.proposal import RULE, NodeFacts, Proposed
from marft_bridge.move_plan.reward_links import RewardLinks
from marft_bridge.statistics.means import MeanInterval


@dataclass(frozen=True, slots=True)
class Plan:
    """All that one plan found."""

    store: str
    run_id: str | None  # under which its predictions are kept; None where they are not
    episodes: int
    left_out: Mapping[str, int]
    drawn_calls: int  # per node, at most
    seed: int
    facts: Sequence[NodeFacts]
    links: RewardLinks
    proposal: Sequence[Proposed]
    missing: Sequence[str]  # what was not looked at, and what to do about it


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """The plan as JSON values; an interval has mean, low and high."""
    nodes = [
        {
            "node": fact.usage.node,
            "usage": _to_json(fact.usage) | {"costs": fact.usage.costs, "uncosted": fact.usage.uncosted},
            "answers": None if fact.answers is None else _to_json(fact.answers) | {"form": fact.answers.form},
            "reward": _to_json(fact.links),
            "local": _to_json(fact.fit),
        }
        for fact in plan.facts
    ]
    links = {"reward": plan.links.reward, "rewarded": plan.links.rewarded, "is_drawn": plan.links.is_drawn}
    return {
        "store": plan.store,
        "run": plan.run_id,
        "episodes": plan.episodes,
        "left_out": dict(plan.left_out),
        "drawn": {"calls_per_node": plan.drawn_calls, "seed": plan.seed},
        "nodes": nodes,
        "rewards": links | {"without_edges": plan.links.without_edges},
        "rule": RULE,
        "proposal": [_to_json(proposed) for proposed in plan.proposal],
        "missing": list(plan.missing),
        "calibration": [],
        "order": [],
    }


def calibration_to_json(store: str, rows: Sequence[Calibrated], orders: Sequence[OrderAgreement]) -> dict[str, Any]:
    """A calibration under the keys of a plan."""
    calibration = [_to_json(row) | {"is_within": row.is_within} for row in rows]
    empty = dict.fromkeys(("run", "episodes", "left_out", "drawn", "rewards", "rule"))
    lists: dict[str, Any] = {"nodes": [], "proposal": [], "missing": []}
    return {
        "store": store,
        **empty,
        **lists,
        "calibration": calibration,
        "order": [_to_json(order) for order in orders],
    }


def print_plan(plan: Plan, reporter: Reporter) -> None:
    """Prints five tables, the rule, and what is missing."""
    left_out = ", ".join(f"{count} {kind}" for kind, count in plan.left_out.items())
    reporter.say(f"{plan.episodes} episodes{f', without {text_to_line(left_out)}' if left_out else ''}")
    _print_usage(plan, reporter)
    _print_answers(plan, reporter)
    if any(fact.fit is not None for fact in plan.facts):
        _print_fits(plan, reporter)
    if plan.links.reward is not None or any(fact.links.credit is not None for fact in plan.facts):
        _print_links(plan, reporter)
    reporter.say("\nproposal")
    print_table(
        reporter.console,
        ("place", "node", "move", "risk", "because"),
        [(p.place, p.node, p.move, _number(p.risk), "; ".join(p.reasons)) for p in plan.proposal],
        numbers=("place", "risk"),
    )
    reporter.say(f"rule: {RULE}")
    for line in plan.missing:
        reporter.say(f"not looked at: {text_to_line(line)}")
    if plan.run_id is not None:
        reporter.say(f"kept as {plan.run_id}; `marft-bridge plan --calibration RUN` holds it against what happens")


def print_calibration(rows: Sequence[Calibrated], orders: Sequence[OrderAgreement], reporter: Reporter) -> None:
    """Prints every prediction with what happened."""
    if not rows:
        reporter.say("the store holds no prediction; `marft-bridge plan` makes some")
        return
    print_table(
        reporter.console,
        ("plan", "node", "quantity", "predicted", "interval", "happened", "within", "measured by"),
        [
            (
                row.plan,
                row.node,
                row.quantity,
                _number(row.predicted),
                _bounds(row.low, row.high),
                "not yet" if row.happened is None else _number(row.happened),
                {None: "", True: "yes", False: "no"}[row.is_within],
                row.source,
            )
            for row in rows
        ],
        numbers=("predicted", "happened"),
    )
    for order in orders:
        value = "too few nodes, or all alike" if order.correlation is None else f"{order.correlation:+.2f}"
        reporter.say(
            f"{order.plan}: rank correlation of its places with what moving each of {order.nodes} nodes alone lost:"
            f" {value}"
        )


def _print_usage(plan: Plan, reporter: Reporter) -> None:
    rows = []
    for fact in plan.facts:
        usage = fact.usage
        costs = ", ".join(f"{cost:.4g} {currency}" for currency, cost in usage.costs.items())
        unknown = f"unknown for {usage.uncosted} calls" if usage.uncosted else ""
        models = ", ".join(f"{model.model or 'not named'} ({model.calls})" for model in usage.models)
        rows.append(
            (
                usage.node,
                usage.calls,
                usage.calls - usage.local_calls,
                models,
                "unknown" if usage.prompt_tokens is None else usage.prompt_tokens,
                "unknown" if usage.sampled_tokens is None else usage.sampled_tokens,
                usage.uncounted,
                "; ".join(part for part in (costs, unknown) if part),
                _number(usage.seconds_median),
                _number(usage.seconds_p90),
            )
        )
    names = ("node", "calls", "hosted", "models", "prompt tokens", "sampled tokens", "uncounted", "cost")
    numbers = ("calls", "hosted", "prompt tokens", "sampled tokens", "uncounted", "median s", "p90 s")
    print_table(reporter.console, (*names, "median s", "p90 s"), rows, numbers=numbers)


def _print_answers(plan: Plan, reporter: Reporter) -> None:
    rows = []
    for fact in plan.facts:
        answers = fact.answers
        if answers is not None:
            rows.append(
                (
                    answers.node,
                    answers.form,
                    answers.answered,
                    answers.numbers,
                    answers.json,
                    answers.different,
                    answers.most,
                    _number(answers.tokens_median),
                    _number(answers.tokens_p90),
                    f"{answers.call_tools} of {answers.drawn} drawn" if answers.drawn else "unknown",
                )
            )
    if rows:
        names = ("node", "answers are", "recorded", "numbers", "JSON", "different", "commonest")
        reporter.say("\nanswers of hosted calls")
        print_table(
            reporter.console,
            (*names, "median tokens", "p90 tokens", "call a tool"),
            rows,
            numbers=(*names[2:], "median tokens", "p90 tokens"),
        )


def _print_fits(plan: Plan, reporter: Reporter) -> None:
    rows = []
    for fact in plan.facts:
        fit = fact.fit
        if fit is None:
            continue
        probe = fit.probe
        probed = (
            (f"not probed: {fit.no_probe}", "", "")
            if probe is None
            else (
                f"{probe.fitted_calls} calls, {probe.steps} steps",
                f"{_interval(probe.before)} to {_interval(probe.after)}",
                _interval(probe.gain),
            )
        )
        refused = "; ".join(f"{count}: {reason}" for reason, count in sorted(fit.refused.items()))
        rows.append((fit.node, fit.calls, _interval(fit.base), _number(fit.spread), *probed, refused))
    reporter.say(
        f"\nnats a token by the local base, of at most {plan.drawn_calls} calls a node drawn by seed {plan.seed}"
    )
    names = ("node", "calls", "base", "spread over calls", "probe", "held out, before to after", "gain", "not rendered")
    print_table(reporter.console, names, rows, numbers=("calls", "spread over calls"))


def _print_links(plan: Plan, reporter: Reporter) -> None:
    links = plan.links
    drawn = f", drawn by seed {plan.seed}" if links.is_drawn else ""
    title = "no reward is looked at" if links.reward is None else f"reward {text_to_line(links.reward)!r}"
    reporter.say(f"\n{title}: {links.rewarded} episodes{drawn}, {links.without_edges} of them with nothing known of D")
    rows = [
        (
            link.node,
            _interval(link.reach),
            _number(link.reach_exact),
            _interval(link.acted),
            _interval(link.answers),
            _interval(link.credit),
        )
        for link in (fact.links for fact in plan.facts)
    ]
    names = (
        "node",
        "reaches the end",
        "by exact edges",
        "reward if it answers",
        "reward gap if answers differ",
        "credit",
    )
    print_table(reporter.console, names, rows, numbers=("by exact edges",))
    reporter.say("all but credit are associations, not causes; `marft-bridge credit` replaces nodes, and measures")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _bounds(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"{low:.3g} to {high:.3g}"


def _interval(interval: MeanInterval | None) -> str:
    if interval is None:
        return ""
    bounds = _bounds(interval.low, interval.high)
    return f"{interval.mean:.3g}{f' ({bounds})' if bounds else ''}"


def _to_json(value: Any) -> Any:
    """A dataclass -> a dict; intervals, which `asdict` takes for tuples, keep their names."""
    if isinstance(value, MeanInterval):
        return value._asdict()
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: _to_json(item) for key, item in value.items()}
    return [_to_json(item) for item in value] if isinstance(value, (list, tuple)) else value
