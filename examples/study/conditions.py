"""The conditions of the study -> what each changes in study.toml, the one configuration that all share.

Invariant: everything here was fixed before the first run; a condition changes what makes it another method, and
nothing else. It knows nothing of runs or results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Condition:
    """One way to train.

    `changes`: dotted keys of study.toml and their values. `about`: a sentence for the report, on what it is and on
    what was decided where its paper leaves a choice.
    """

    about: str
    changes: Mapping[str, Any] = field(default_factory=dict)


BASELINE = "marft-a"
WITHOUT_OFFLINE = "marft-a-no-offline"
SEEDS = (0, 1, 2)
LEVELS = (0.3, 0.4, 0.5)
"""Mean rewards of a round; the report tells after how many fresh rollouts each was reached."""

_SIMULTANEOUS = {"train.trainer.objective.update": "simultaneous"}
_OVER_TOKENS = {"train.trainer.granularity": "token"}

CONDITIONS: dict[str, Condition] = {
    "marft-a": Condition(
        "MARFT per action: GAE along the dependencies with one shared critic, agents updated one after another."
    ),
    "marft-t": Condition(
        "MARFT per token: the same with a value and a ratio for every token.",
        _OVER_TOKENS,
    ),
    "grpo": Condition(
        "GRPO as published: returns standardised over the samples of a task, ratios per token, tokens averaged within "
        "a call, all agents at once. Its KL penalty to the base model is left out, as no condition has one.",
        {"train.trainer.advantage.estimator": "grpo", **_OVER_TOKENS, **_SIMULTANEOUS},
    ),
    "dr-mas": Condition(
        "Dr. MAS: as grpo, but each agent's returns are standardised over its own calls. Where every agent acts once "
        "in every episode and all share one reward, as here, that is the same computation: where the two differ at "
        "all, it is how the engine happened to batch.",
        {"train.trainer.advantage.estimator": "dr_mas", **_OVER_TOKENS, **_SIMULTANEOUS},
    ),
    "marft-a-simultaneous": Condition(
        "MARFT per action, all agents at once against the policies that sampled.",
        _SIMULTANEOUS,
    ),
    "ippo": Condition(
        "Independent PPO for each node: a critic of its own, all agents at once, and lambda 1. In a graph where each "
        "agent acts once, lambda 1 and gamma 1 make the advantage return - V(own observation), in which no other "
        "agent's value occurs: what PPO does that takes the other agent for its environment.",
        {"train.trainer.advantage.critic.sharing": "agent", "train.trainer.advantage.gae_lambda": 1.0, **_SIMULTANEOUS},
    ),
    WITHOUT_OFFLINE: Condition(
        "MARFT per action from fresh rollouts alone: no imitation and no critic pre-training. What is left of the "
        "old traces is where the critic starts: their mean return, and the scale of its features.",
        {"train.trainer.offline": {"mode": "off"}, "train.trainer.advantage.critic.warmup_epochs": 0},
    ),
}
