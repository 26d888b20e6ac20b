"""The table [train.progress]: who is paid by what a round's update changed in the measured performance of the team."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

PROGRESS = "progress"
"""Name of the reward, of level `agent`, by which a round's change is paid."""


class ProgressOptions(BaseModel):
    """A round's change of measured performance, after its update less before it, is paid to one agent for what it did
    in that round, as a reward `progress` of level `agent`. Each version is measured on the same tasks, of which no
    round takes any. A change is known one round later, so this agent learns from each round one round late."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    agent: str = Field(min_length=1)
    """Who is paid; one of graph.nodes, with an adapter of its own."""
    metric: str = Field(min_length=1)
    """The team reward that is measured."""
    tasks: int = Field(32, ge=2)
    """How many training tasks are kept for measuring; every version plays each once."""
    scaled_by: str | None = Field(None, min_length=1)
    """A team reward by which an episode's part of the change is multiplied; an episode without it earns no part. None:
    all of a round earn the same."""
