"""The ways to train that the benchmarks compare -> what each changes in a benchmark's configuration.

Invariant: a condition changes what makes it another way to spend or to learn from rollouts, and nothing else, so that
all of them have the same budget of tasks and rounds. What they cost in sampled tokens is measured, not assumed.
"""

from __future__ import annotations

from examples.study.conditions import Condition

BASELINE = "chains"

CONDITIONS: dict[str, Condition] = {
    BASELINE: Condition("every episode runs from its task to its end, on its own; MARFT per action, by the defaults."),
    "at-grpo": Condition(
        "the same episodes, with advantages against the samples of a task, agent and turn, as AT-GRPO groups them; "
        "without its tree, so that after the first turn the samples of a group differ in their prompts.",
        {"train.trainer.advantage.estimator": "at_grpo", "train.trainer.objective.update": "simultaneous"},
    ),
}
