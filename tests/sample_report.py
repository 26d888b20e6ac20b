"""A realistic report of a reasoner and actor duo on arithmetic, for the tests of the report and its page."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np

from marft_bridge.report import (
    LearningPoint,
    NodeOutput,
    NodePair,
    NodeSide,
    Report,
    Setup,
    Side,
    TaskChange,
    changed_tasks,
    comparison_fields,
    secondary_metrics,
)
from marft_bridge.statistics import minimum_detectable_effect, paired_difference

REASONING = (
    "First take the sum step by step: {x} plus {y}. Carry the one when the digits pass ten, then check it against "
    "the question again before handing the result to the actor."
)


def task_change(index: int, reward_a: float, reward_b: float) -> TaskChange:
    x, y = 17 + 3 * index, 8 + index
    sides = [
        (
            NodeOutput(node="reasoner", text=REASONING.format(x=x, y=y)),
            NodeOutput(node="actor", text=f"The answer is {x + y if reward > 0.5 else x - y}."),
        )
        for reward in (reward_a, reward_b)
    ]
    return TaskChange(
        task_id=f"chain_sum-{index:04d}",
        text=f"State the final answer to the following arithmetic problem: {x} + {y} =",
        expected=str(x + y),
        reward_a=reward_a,
        reward_b=reward_b,
        outputs_a=sides[0],
        outputs_b=sides[1],
    )


def sample_report(lift: float = 0.18, name_b: str = "trained") -> Report:
    rng = np.random.default_rng(5)
    tasks = np.repeat(np.arange(50), 4)
    skill = rng.beta(1, 3, 50)[tasks]
    before = (rng.random(200) < skill).astype(float)
    after = (rng.random(200) < np.clip(skill + lift, 0, 1)).astype(float)
    tokens_a, tokens_b = rng.normal(118, 30, 200), rng.normal(96, 25, 200)
    seconds = rng.gamma(4, 0.6, (2, 200))
    curve = [
        LearningPoint(
            round=r,
            phase="offline" if r < 1 else "online",
            episodes=256 if r < 1 else 64,
            reward_mean=(mean := 0.24 + 0.22 * (1 - np.exp(-r / 4)) + rng.normal(0, 0.012)),
            reward_low=mean - 0.05,
            reward_high=mean + 0.05,
            nodes={
                node: {"approx_kl": float(rng.gamma(2, 0.004)), "clip_share": float(rng.beta(2, 30))}
                for node in ("reasoner", "actor")
            },
        )
        for r in range(11)
    ]
    return Report(
        **comparison_fields(paired_difference("reward", before, after, clusters=tasks, seed=0, resamples=2000)),
        a=Side(name="base", adapters={"reasoner": 0, "actor": 0}),
        b=Side(name=name_b, adapters={"reasoner": 10, "actor": 10}),
        seed=0,
        metrics=secondary_metrics(
            [
                paired_difference("tokens", tokens_a, tokens_b, clusters=tasks, seed=0, resamples=2000),
                paired_difference("steps", np.full(200, 2), np.full(200, 2), clusters=tasks, seed=0),
                paired_difference("seconds", *seconds, clusters=tasks, seed=0, resamples=2000),
            ]
        ),
        nodes={
            "reasoner": NodePair(
                a=NodeSide(tokens_mean=92.4, stop_share=0.71, calls_per_episode=1.0, logprob_mean=-0.84),
                b=NodeSide(tokens_mean=74.1, stop_share=0.93, calls_per_episode=1.0, logprob_mean=-0.52),
            ),
            "actor": NodePair(
                a=NodeSide(tokens_mean=25.9, stop_share=0.88, calls_per_episode=1.0, logprob_mean=-0.61),
                b=NodeSide(tokens_mean=21.7, stop_share=0.99, calls_per_episode=1.0, logprob_mean=None),
            ),
        },
        learning_curve=tuple(curve),
        tasks=changed_tasks([task_change(i, 0.0, 1 - i / 8) for i in range(4)] + [task_change(9, 0.75, 0.25)]),
        setup=Setup(
            model="SmolLM2-135M-Instruct",
            graph="graphs.math_duo:graph",
            versions={"marft-bridge": "0.1.0", "vllm": "0.32.0", "torch": "2.13.0"},
            date=datetime(2026, 11, 21, 14, 5, tzinfo=UTC),
            samples_per_task=4,
            temperature=1.0,
            minutes=12.4,
        ),
        minimum_detectable_effect=minimum_detectable_effect(after - before, clusters=tasks),
        created=datetime(2026, 11, 21, 14, 20, tzinfo=UTC),
    )
