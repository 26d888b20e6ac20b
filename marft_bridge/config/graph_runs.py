"""`graph.context` and `graph.config` of bridge.toml -> how LangGraph is told to run the app.

Invariant: a key that the bridge sets itself, or that LangGraph would not take from a user, is refused by name.
"""

from __future__ import annotations

import difflib
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator

_SET_HERE = ("thread_id", "checkpoint_id", "checkpoint_ns")


class RunConfigOptions(BaseModel):
    """What a run of the graph is given as LangGraph's config."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    configurable: dict[str, Any] = {}
    """Values that the app reads from the config; not thread_id, which is new for every episode."""
    recursion_limit: int | None = Field(None, ge=1)
    """Supersteps that a run may take; None: the graph's own limit, or LangGraph's."""
    tags: tuple[str, ...] = ()
    """Tags of the run and of every call in it."""
    metadata: dict[str, Any] = {}
    """Metadata of the run and of every call in it."""

    @field_validator("configurable")
    @classmethod
    def _leaves_threads_alone(cls, configurable: dict[str, Any]) -> dict[str, Any]:
        if taken_keys := [key for key in configurable if key in _SET_HERE or key.startswith("__")]:
            raise ValueError(f"{taken_keys[0]!r} is set for every episode; leave it out")
        return configurable

    def to_langgraph(self) -> dict[str, Any]:
        """The keys that were given, as LangGraph takes them."""
        given = {"configurable": self.configurable, "tags": list(self.tags), "metadata": self.metadata}
        limit = {} if self.recursion_limit is None else {"recursion_limit": self.recursion_limit}
        return {key: value for key, value in given.items() if value} | limit


def check_run_config(value: Any) -> Any:
    """A table -> its options; anything else as it is. Raises ValueError with one line for a table that is wrong."""
    if not isinstance(value, dict):
        return value
    try:
        return RunConfigOptions.model_validate(value)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in problem["loc"])
        if problem["type"] != "extra_forbidden":
            raise ValueError(f"{key}: {problem['msg'].removeprefix('Value error, ')}") from None
        known_keys = list(RunConfigOptions.model_fields)
        matches = difflib.get_close_matches(key, known_keys, n=1, cutoff=0.5)
        hint = f"did you mean {matches[0]!r}?" if matches else f"known here: {', '.join(known_keys)}"
        raise ValueError(f"unknown key {key!r}; {hint}") from None


RunConfig = Annotated[RunConfigOptions | str | None, BeforeValidator(check_run_config)]
"""A table, or the name of a function task -> such a table."""
RunContext = dict[str, Any] | str | None
"""A table, or the name of a function task -> the graph's context."""
