"""Made-up but consistent reports for the tests of the page: one candidate, five variants, the least, hostile texts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from typing import Any

import numpy as np

from marft_bridge.comparison.choices import is_efficient
from marft_bridge.comparison.ratio import ratio_interval
from marft_bridge.comparison.records import (
    ChangedTasks,
    Choice,
    Cohort,
    Contrast,
    Estimate,
    Mixed,
    MixedTeam,
    NodeShare,
    NodeSide,
    Power,
    Report,
    Setup,
    Step,
    Stopping,
    TaskChange,
    Trace,
    Variant,
)
from marft_bridge.runs.learning_curve import LearningPoint
from marft_bridge.statistics import Contrast as Asked
from marft_bridge.statistics import compare_family, mean_interval, minimum_detectable_effect, tasks_to_settle

HOSTILE = (
    "|`</script></pre></style><script>alert(1)</script><img src=x onerror=alert(2)>\"'{{ 7*7 }} </svg>"
    " | `` ``` [a](http://evil.example) ![b](c) <!-- --> @everyone\n\n# head\n```\n~~~\r| x |\n|---|\n"
    "\x1b[31m\u202egnp.exe"
)

REASONING = (
    "First take the sum step by step: {x} plus {y}. Carry the one when the digits pass ten, then check it against "
    "the question again before handing the result to the actor."
)


def trace(variant: str, index: int, reward: float, *, tools: bool = False) -> Trace:
    x, y = 17 + 3 * index, 8 + index
    steps = [Step(node="planner", adapter=None, text=REASONING.format(x=x, y=y), tokens=48)]
    if tools:
        call = f'{{"name": "calculator", "arguments": {{"expression": "{x} + {y}"}}}}'
        steps += [
            Step(node="executor", adapter="executor@7", text=call, tokens=31),
            Step(kind="tool", node="calculator", text=str(x + y)),
        ]
    answer = f"The answer is {x + y if reward > 0.5 else x - y}."
    steps.append(Step(node="executor", adapter="executor@7" if tools else None, text=answer, tokens=9))
    return Trace(variant=variant, episode_id=f"compare-1:{variant}:{index}:0", reward=reward, steps=tuple(steps))


def task_change(index: int, reward_a: float, reward_b: float, a: str = "before", b: str = "trained") -> TaskChange:
    x, y = 17 + 3 * index, 8 + index
    return TaskChange(
        task_id=f"chain_sum-{index:04d}",
        text=f"State the final answer to the following arithmetic problem: {x} + {y} =",
        expected=str(x + y),
        reward_a=reward_a,
        reward_b=reward_b,
        a=trace(a, index, reward_a),
        b=trace(b, index, reward_b, tools=True),
    )


def _contrasts(pairs: Sequence[tuple[str, str, Any, Any]], tasks: Any) -> tuple[Contrast, ...]:
    """(variant, metric, base's values, its values) of one family into its contrasts, by the statistics themselves."""
    asked = [Asked(variant, metric, base, values, clusters=tasks) for variant, metric, base, values in pairs]
    return tuple(
        Contrast(
            variant=member.variant,
            metric=member.result.metric.split(": ")[-1],
            n=member.result.n,
            clusters=member.result.clusters,
            mean_a=member.result.mean_a,
            mean_b=member.result.mean_b,
            diff=member.result.diff,
            ci95=member.result.ci95,
            p_value=member.result.p_value,
            test=member.result.test,
            p_adjusted=member.p_adjusted,
            simultaneous=member.simultaneous,
            ratio_ci95=ratio_interval(family.base, family.values, clusters=tasks),
        )
        for family, member in zip(asked, compare_family(asked, seed=0, resamples=2000), strict=True)
    )


def _estimate(values: Any, tasks: Any) -> Estimate:
    found = mean_interval(values, clusters=tasks)
    return Estimate(mean=found.mean, low=found.low, high=found.high)


def learning_points(rounds: int = 11) -> tuple[LearningPoint, ...]:
    rng = np.random.default_rng(3)
    points = []
    for r in range(rounds):
        mean = float(0.24 + 0.22 * (1 - np.exp(-r / 4)) + rng.normal(0, 0.012))
        points.append(
            LearningPoint(
                round=r,
                phase="offline" if r < 1 else "online",
                episodes=256 if r < 1 else 64,
                reward_mean=mean,
                reward_low=mean - 0.05,
                reward_high=mean + 0.05,
                nodes={
                    node: {"approx_kl": float(rng.gamma(2, 0.004)), "clipfrac": float(rng.beta(2, 30))}
                    for node in ("planner", "executor")
                },
            )
        )
    return tuple(points)


def _setup(tasks: int, samples: int) -> Setup:
    return Setup(
        model="SmolLM2-135M-Instruct",
        graph="graphs.math_duo:graph",
        versions={"marft-bridge": "0.1.0", "vllm": "0.32.0", "torch": "2.13.0"},
        date=datetime(2026, 11, 21, 14, 5, tzinfo=UTC),
        seed=0,
        tasks=tasks,
        samples_per_task=samples,
        temperature=0.7,
        minutes=12.4,
        tool_surface={"planner": "9f2c" * 16, "executor": "07bd" * 16},
    )


CREATED = datetime(2026, 11, 21, 14, 20, tzinfo=UTC)

NODES = {
    "planner": {
        "before": NodeSide(
            calls_per_episode=1.0,
            tokens_mean=92.4,
            stop_share=0.71,
            logprob_mean=-0.84,
            kl_to_base=0.0,
            kl_actions=32,
            format_valid=0.88,
            answered_by={"planner@0": 120},
            cost_mean=0.00003,
        ),
        "trained": NodeSide(
            calls_per_episode=1.0,
            tokens_mean=74.1,
            stop_share=0.93,
            logprob_mean=-0.52,
            kl_to_base=0.083,
            kl_actions=32,
            format_valid=0.97,
            answered_by={"planner@7": 120},
            cost_mean=0.00002,
        ),
    },
    "executor": {
        "before": NodeSide(
            calls_per_episode=1.8,
            tokens_mean=25.9,
            stop_share=0.88,
            logprob_mean=-0.61,
            tools={"calculator": 61, "search": 22, "python": 9},
            tool_error_share=0.12,
        ),
        "trained": NodeSide(
            calls_per_episode=2.3,
            tokens_mean=21.7,
            stop_share=0.997,
            logprob_mean=None,
            kl_to_base=0.021,
            kl_actions=32,
            tools={"calculator": 140, "search": 4},
            tool_error_share=0.03,
        ),
    },
}


@cache
def sample_report(lift: float = 0.18, name: str = "trained") -> Report:
    """One candidate, 50 tasks of 4 samples; `lift` is the true gain in the chance to be right."""
    rng = np.random.default_rng(5)
    tasks = np.repeat(np.arange(50), 4)
    skill = rng.beta(1, 3, 50)[tasks]
    before = (rng.random(200) < skill).astype(float)
    after = (rng.random(200) < np.clip(skill + lift, 0, 1)).astype(float)
    tokens = rng.normal(118, 30, 200), rng.normal(96, 25, 200)
    seconds = rng.gamma(4, 0.6, (2, 200))
    settle = tasks_to_settle(after - before, clusters=tasks)
    improved = tuple(task_change(i, 0.0, 1 - i / 8, b=name) for i in range(4))
    return Report(
        metric="reward",
        base="before",
        variants=(
            Variant(
                name="before",
                adapters={"planner": 0, "executor": 0},
                episodes=200,
                unscored=0,
                score=_estimate(before, tasks),
            ),
            Variant(
                name=name,
                adapters={"planner": 10, "executor": 10},
                episodes=200,
                unscored=0,
                score=_estimate(after, tasks),
            ),
        ),
        contrasts=_contrasts([(name, "reward", before, after)], tasks),
        secondary=_contrasts(
            [
                (name, "tokens", *tokens),
                (name, "steps", np.full(200, 2), np.full(200, 2)),
                (name, "seconds", *seconds),
            ],
            tasks,
        ),
        power=(
            Power(
                variant=name,
                detectable=minimum_detectable_effect(after - before, clusters=tasks),
                tasks_more=settle.additional_tasks if settle else None,
                effect=settle.effect if settle else None,
            ),
        ),
        nodes={node: {name if v == "trained" else v: s for v, s in sides.items()} for node, sides in NODES.items()},
        tasks=(ChangedTasks(candidate=name, improved=improved, regressed=(task_change(9, 0.75, 0.25, b=name),)),),
        learning_curve=learning_points(),
        setup=_setup(50, 4),
        created=CREATED,
    )


def bare_report() -> Report:
    """The least that a report holds: two variants and the deciding metric."""
    full = sample_report()
    return Report(
        metric="reward",
        base="before",
        variants=tuple(Variant(name=v.name, episodes=200, unscored=0, score=None) for v in full.variants),
        contrasts=full.contrasts,
        setup=full.setup.model_copy(update={"temperature": None, "minutes": None, "tool_surface": {}, "versions": {}}),
        created=CREATED,
    )


# -- five variants --------------------------------------------------------------------------------------------


_TRUE = {"trained": 0.24, "one agent": -0.26, "larger model": 0.1, "hosted": 0.02}
_EXECUTOR = -0.08  # what the executor's new version does to the score; the planner's does the rest


@cache
def full_report() -> Report:
    """Five variants on 120 tasks with four looks on the way, mixed teams, cohorts and everything else."""
    rng = np.random.default_rng(11)
    count = 120
    tasks = np.arange(count)
    topics = np.array(["arithmetic", "geometry", "word problems"])[tasks % 3]
    skill = rng.beta(4, 4, count)
    runs = {"before": (rng.random(count) < skill).astype(float)}
    for variant, gain in _TRUE.items():
        runs[variant] = (rng.random(count) < np.clip(skill + gain, 0, 1)).astype(float)
    about: dict[str, dict[str, Any]] = {
        "before": {"adapters": {"planner": 0, "executor": 0}},
        "trained": {"adapters": {"planner": 7, "executor": 7}},
        "one agent": {"graph": "my_app.py:solo"},
        "larger model": {"model": "models/larger-1.7B"},
        "hosted": {"model": "its own models", "reasons": {"time limit": 3, "failed": 1}},
    }
    variants = tuple(
        Variant(
            name=variant,
            **{"reasons": {}, **about[variant]},
            episodes=count + sum(about[variant].get("reasons", {}).values()),
            unscored=sum(about[variant].get("reasons", {}).values()),
            score=_estimate(scores, tasks),
            pass_at={1: _estimate(scores, tasks), 4: _estimate(np.maximum(scores, rng.random(count) < 0.5), tasks)},
            avg_at={4: _estimate(scores, tasks)},
        )
        for variant, scores in runs.items()
    )
    tokens = {variant: rng.normal(110 + 12 * i, 28, count) for i, variant in enumerate(runs)}
    safety = {variant: (rng.random(count) < 0.97).astype(float) for variant in runs}
    secondary = [
        row
        for variant in _TRUE
        for row in _contrasts(
            [
                (variant, "safety", safety["before"], safety[variant]),
                (variant, "tokens", tokens["before"], tokens[variant]),
                (variant, "seconds", rng.gamma(4, 0.6, count), rng.gamma(4, 0.6, count)),
            ],
            tasks,
        )
    ]
    powers = []
    for variant in _TRUE:
        settle = tasks_to_settle(runs[variant] - runs["before"])
        powers.append(
            Power(
                variant=variant,
                detectable=minimum_detectable_effect(runs[variant] - runs["before"]),
                tasks_more=settle.additional_tasks if settle else None,
                effect=settle.effect if settle else None,
            )
        )
    chosen = {topic: np.flatnonzero(topics == topic) for topic in dict.fromkeys(topics)}
    judged = iter(
        _contrasts(
            [(v, "reward", runs["before"][rows], runs[v][rows]) for rows in chosen.values() for v in _TRUE], None
        )
    )
    cohorts = [
        Cohort(field="topic", value=str(topic), tasks=len(rows), contrasts=tuple(next(judged) for _ in _TRUE))
        for topic, rows in chosen.items()
    ]
    cohorts.append(Cohort(field="topic", value="riddles", tasks=3, contrasts=()))
    solo = NodeSide(calls_per_episode=1.0, tokens_mean=141.2, stop_share=0.64, logprob_mean=-0.9)
    extra = {
        name: NodeSide(calls_per_episode=1.0, tokens_mean=80.0 + 9 * i, stop_share=0.9, logprob_mean=None)
        for i, name in enumerate(("larger model", "hosted"))
    }
    return Report(
        metric="reward",
        base="before",
        variants=variants,
        contrasts=_contrasts([(variant, "reward", runs["before"], runs[variant]) for variant in _TRUE], tasks),
        secondary=tuple(secondary),
        power=tuple(powers),
        stopping=Stopping(planned=120, used=120, looks=(30, 60, 90, 120), spent=0.048, early=False),
        nodes={node: {**sides, **extra} for node, sides in NODES.items()} | {"solo": {"one agent": solo}},
        mixed=mixed_teams(float(runs["before"].mean()), float(runs["trained"].mean()), count),
        choices=_choices({variant: _estimate(scores, tasks) for variant, scores in runs.items()}),
        currency="USD",
        cohorts=tuple(cohorts),
        tasks=(
            ChangedTasks(
                candidate="trained",
                improved=tuple(task_change(i, 0.0, 1.0) for i in range(5)),
                regressed=tuple(task_change(i, 1.0, 0.0) for i in range(6, 9)),
            ),
            ChangedTasks(candidate="one agent", regressed=(task_change(4, 1.0, 0.0, b="one agent"),)),
        ),
        learning_curve=learning_points(),
        setup=_setup(120, 1),
        created=CREATED,
    )


def _choices(scores: Mapping[str, Estimate]) -> tuple[Choice, ...]:
    """The variants at made-up costs; the hosted one has runs without a known cost."""
    costs = {name: 0.0004 * 3**i for i, name in enumerate(scores)}
    points = [(costs[name], score.mean) for name, score in scores.items()]
    return tuple(
        Choice(
            team=name,
            score=score,
            cost=Estimate(mean=costs[name], low=0.9 * costs[name], high=1.1 * costs[name]),
            seconds=Estimate(mean=1.0 + i, low=0.8 + i, high=1.2 + i),
            uncosted=3 * (name == "hosted"),
            efficient=is_efficient(points[i], points),
        )
        for i, (name, score) in enumerate(scores.items())
    )


def mixed_teams(before: float, trained: float, tasks: int) -> Mixed:
    """Two nodes whose effects add up exactly: the executor harms, the planner more than makes up for it."""
    effects = {"planner": trained - before - _EXECUTOR, "executor": _EXECUTOR}
    teams = []
    for on in itertools.chain.from_iterable(itertools.combinations(effects, size) for size in range(3)):
        mean = before + sum(effects[node] for node in on)
        half = 1.98 * math.sqrt(mean * (1 - mean) / tasks)
        variant = {(): "before", ("planner", "executor"): "trained"}.get(on, f"before+{'+'.join(on)}")
        score = Estimate(mean=mean, low=mean - half, high=mean + half)
        teams.append(MixedTeam(on=on, variant=variant, n=tasks, score=score))
    return Mixed(
        candidate="trained",
        complete=True,
        teams=tuple(teams),
        shares=tuple(
            NodeShare(
                node=node,
                alone=effect,
                alone_ci95=(effect - 0.09, effect + 0.09),
                without=-effect,
                without_ci95=(-effect - 0.09, -effect + 0.09),
                shapley=effect,
                shapley_ci95=(effect - 0.06, effect + 0.06),
            )
            for node, effect in effects.items()
        ),
    )


# -- hostile texts --------------------------------------------------------------------------------------------


@cache
def hostile_report(text: str = HOSTILE) -> Report:
    """Every text of a report that somebody else may have written says `text`."""
    plain = full_report()
    fields = plain.model_dump(exclude_computed_fields=True)
    fields["metric"] = text
    fields["base"] = f"base {text}"
    names = {"before": fields["base"], **{name: f"{name} {text}" for name in _TRUE}}
    for variant in fields["variants"]:
        variant.update(name=names[variant["name"]], adapters={text: 3}, graph=text, model=text, reasons={text: 2})
        variant["unscored"] = 2
    of_cohorts = [row for cohort in fields["cohorts"] for row in cohort["contrasts"]]
    for row in (*fields["contrasts"], *of_cohorts, *fields["secondary"]):
        row["variant"] = names[row["variant"]]
        row["metric"] = text if row["metric"] == "reward" else f"{row['metric']} {text}"
    for power in fields["power"]:
        power["variant"] = names[power["variant"]]
    for cohort in fields["cohorts"]:
        cohort.update(field=text, value=f"{cohort['value']} {text}")
    side = {
        **NODES["executor"]["before"].model_dump(),
        "answered_by": {text: 3},
        "tools": {f"{text} {i}": i + 1 for i in range(12)},
    }
    fields["nodes"] = {text: dict.fromkeys(names.values(), side)}
    mixed = fields["mixed"]
    mixed["candidate"] = names["trained"]
    for team in mixed["teams"]:
        team["on"] = [f"{node} {text}" for node in team["on"]]
    for share in mixed["shares"]:
        share["node"] += f" {text}"
    change = task_change(0, 0.0, 1.0).model_dump()
    step = {"kind": "call", "node": text, "adapter": text, "text": text, "tokens": 3}
    run = {"variant": fields["base"], "episode_id": text, "reward": 1.0, "steps": [step, {**step, "kind": "tool"}]}
    change.update(task_id=text, text=text, expected=text, a=run, b=run)
    fields["tasks"] = [{"candidate": names["trained"], "improved": [change], "regressed": [change]}]
    for cohort in fields["cohorts"]:
        cohort["regressed"] = {names["trained"]: [change]} if cohort["contrasts"] else {}
    fields["learning_curve"] = [{**point, "phase": text} for point in fields["learning_curve"][:1]]
    fields["setup"].update(model=text, graph=text, versions={text: text}, tool_surface={text: text})
    fields["setup"]["tool_surface_differs"] = True
    return Report.model_validate(fields)
