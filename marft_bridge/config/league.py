"""The table [train.league]: how much of a round is played against earlier versions."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class LeagueOptions(BaseModel):
    """Opponents from a league: on some tasks of a round one side is played by an earlier version of itself, frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    share: float = Field(0.5, gt=0, le=1)
    """Chance of a task to be played against an earlier version; on the others all sides are the newest. Which side is
    the earlier one is drawn too, each as likely as any other."""
    versions: int = Field(2, ge=1)
    """How many versions before the newest an opponent is drawn from, each as likely as any other."""
