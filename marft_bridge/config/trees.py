"""The table [train.trees]: how much of a round goes to forks of its runs."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class TreeOptions(BaseModel):
    """Rounds as trees: whole runs first, then forks of them, from any call on. docs/training.md says which calls."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    share: float = Field(0.5, gt=0, lt=1)
    """Part of a round's sampled tokens that goes to forks. A round has as many tokens as its episodes_per_round would
    have had as whole runs, of which the rest are run."""
    samples: int = Field(3, ge=1)
    """Forks of one call, which together with the run that they leave are compared."""
    stored_share: float = Field(0.0, ge=0, le=1)
    """Part of the forks' tokens that goes to forks of stored runs which did better than their task usually does, of
    `collect` and of earlier rounds, from a call on before which there are others. They teach their own calls only."""
    go_on_from: Literal["all", "best"] = "all"
    """all: calls of whole runs, and of no fork, drawn without a look at the round itself. best: AT-GRPO's walk, from
    the first call of a run to the next call of whichever run beneath it earned most, and so on; its forks teach their
    own calls only."""

    @model_validator(mode="after")
    def _check_stored_runs_have_siblings(self) -> TreeOptions:
        if self.stored_share and self.samples < 2:
            raise ValueError("stored_share compares forks of a stored run with each other: samples must be 2 or more")
        return self
