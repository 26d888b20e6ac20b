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
    """The trainer's options with these, and the defaults of all others."""
    return TrainerOptions.model_validate(grouped(options))
