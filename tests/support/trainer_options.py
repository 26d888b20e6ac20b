"""Trainer options by their own names, whichever group they stand in: tests set one or two of many."""

from __future__ import annotations

from typing import Any

from trainers.config import MOVED, TrainerOptions

_CRITIC = {"loss": "critic_loss", "huber_delta": "critic_huber_delta", "clip": "critic_clip"}


def grouped(options: dict[str, Any]) -> dict[str, Any]:
    """`{"lr": 0.1, "clip_low": 0.2}` -> `{"optimizer": {"lr": 0.1}, "objective": {"clip_low": 0.2}}`."""
    tables: dict[str, Any] = {}
    for name, value in options.items():
        group, _, inner = MOVED.get(name, name).partition(".")
        if inner:
            tables.setdefault(group, {})[inner] = value
        elif isinstance(value, dict) and isinstance(tables.get(name), dict):
            tables[name].update(value)
        else:
            tables[name] = value
    return tables


def trainer_options(**options: Any) -> TrainerOptions:
    """The trainer's options with these; of the others the defaults, but the published update in place of ours.

    One pass over a round, both signs of an advantage at their full weight, plain values: most laws of the update are
    told of that. What our defaults add has tests of its own, which set it.
    """
    chosen = TrainerOptions.model_validate(grouped(options))
    advantage, optimizer, objective = chosen.advantage, chosen.optimizer, chosen.objective
    critic = advantage.critic
    if advantage.estimator_class.needs_critic:
        critic = _with_unset(critic, shrink=False)
    return chosen.model_copy(
        update={
            "advantage": advantage.model_copy(update={"critic": critic}),
            "optimizer": _with_unset(optimizer, epochs=1, minibatch_actions=16),
            "objective": _with_unset(objective, negative_weight=1.0, kl_target=None),
        }
    )


def _with_unset(table: Any, **fields: Any) -> Any:
    """The table with those of these fields that it was not told."""
    return table.model_copy(
        update={name: value for name, value in fields.items() if name not in table.model_fields_set}
    )
