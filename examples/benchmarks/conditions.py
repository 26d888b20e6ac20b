"""The ways to train that the benchmarks compare -> what each changes in a benchmark's configuration.

Invariant: a condition changes what makes it another way to spend or to learn from rollouts, and nothing else. All have
as many rounds, and a round as many sampled tokens as 64 whole runs; with forks half as many of these are whole runs, of
half as many tasks. What was sampled is measured, not assumed.
"""

from __future__ import annotations

from examples.study.conditions import Condition

BASELINE = "chains"

_GROUPED = {"train.trainer.advantage.estimator": "tree_grpo"}

CONDITIONS: dict[str, Condition] = {
    "defaults": Condition("every episode runs from its task to its end; MARFT per action, by the defaults."),
    BASELINE: Condition("the same episodes, learned from by `tree_grpo`: by the mean of a task's samples.", _GROUPED),
    "trees": Condition(
        "half of a round's tokens go to forks of its runs, three at a call, so that it has half as many tasks; learned "
        "from by `tree_grpo` as well, so "
        "that only where tokens go tells it from `chains`.",
        {**_GROUPED, "train.trees.share": 0.5, "train.trees.samples": 3},
    ),
    "at-grpo": Condition(
        "half of a round's tokens go to AT-GRPO's walk, of half as many tasks: three forks of a call, then of the next "
        "call of whichever "
        "run earned most; a call is worth its run's reward against its siblings'.",
        {
            "train.trainer.advantage.estimator": "at_grpo",
            "train.trainer.objective.update": "simultaneous",
            "train.trees.share": 0.5,
            "train.trees.samples": 3,
            "train.trees.go_on_from": "best",
        },
    ),
}
