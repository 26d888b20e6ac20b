"""The options of `[train.trainer]` as estimators read them; imports no numpy, so that `--help` need not wait."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Normalization = Literal["none", "batch", "agent"]
GroupWeight = Literal["trajectory", "step"]


@dataclass(frozen=True, slots=True)
class EstimatorSettings:
    """The numbers that estimators read; `trainers.config` says what each means."""

    gamma: float = 1.0
    gae_lambda: float = 0.95
    gamma_token: float = 1.0
    token_lambda: float | Literal["adaptive"] = 1.0
    adaptive_alpha: float = 0.05
    group_weight: GroupWeight | None = None
    group_std: bool = True
    rae_decay: float = 0.95
    alignment_beta: float = 1.0
    penalties_teach: bool = True
    """Whether an advantage below 0, before normalisation, has a part in the loss."""
