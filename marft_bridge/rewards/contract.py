"""What a kind of reward is: options that `bridge.toml` gives, and a function from one recorded run to what it earned.

A kind's function takes its options and a `RunView` and gives a list of `Earned`. Invariants: a reward that does not
apply to an episode is an empty list, never 0; one that applies but could not be had (a time limit, an answer that
makes no sense) raises `Absent` with the reason, which is counted and said; what only the user can put right raises
`GraphError` and ends the run. It knows no particular kind, and nothing of journals or stores.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from marft_bridge.errors import GraphError
from trace_store.records import RewardScope, SpanRow, Trajectory

NODE_TEXT = "node:"
"""How a path begins that names an agent, whose last text is meant, instead of a place in the final state."""
ANY_LEVEL = "any"
_MISSING = object()


class Absent(Exception):  # noqa: N818 - a reward that could not be had is not an error of the run
    """This episode gets no such reward; the message is the reason, one line without anything from the task in it."""


class NeedsResult(Absent):
    """The reward reads the final state of the graph, which is not stored, so it cannot be computed again."""


class RewardOptions(BaseModel):
    """What every `[[rewards]]` table has. A kind adds a field `kind` of one literal, and options of its own."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1)
    """Of the reward in the store; `train.trainer.reward` and `compare.metric` name it."""
    kind: str
    """What computes it."""
    weight: float = Field(1.0, allow_inf_nan=False)
    """Its factor in a composite that names it without a weight of its own; negative for a penalty."""
    timeout_s: float = Field(30.0, gt=0)
    """Seconds after which an episode goes without this reward."""
    agent: str | None = Field(None, min_length=1)
    """The agent whose own reward it is; without one it is the team's."""

    def reads(self) -> tuple[str, ...]:
        """Names of the team rewards that it is computed from."""
        return ()

    def source(self) -> str:
        """What computes it, as the store says it."""
        return self.kind

    @property
    def level_given(self) -> str:
        """Whose it is: the team's (`episode`), a `step`'s or an `agent`'s; ANY_LEVEL where that shows only later."""
        return "agent" if self.agent is not None else str(getattr(self, "level", "episode"))


@dataclass(frozen=True, slots=True)
class Served:
    """The model server of this run, for a judge that is the base model: OpenAI-compatible, on loopback."""

    base_url: str  # up to and with /v1
    model: str  # the base model's name there
    api_key: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a reward is computed."""

    folder: Path | None = None  # the run folder, where a cache may be kept; None: nothing is kept
    served: Served | None = None  # None: no server runs


@dataclass(frozen=True, slots=True)
class RunView:
    """One graph run, as a reward may look at it."""

    task: Mapping[str, Any]
    result: Any  # the final state of the graph; None when re-scoring
    trajectory: Trajectory | None = None  # the recorded episode; None where its spans did not all arrive
    spans: Sequence[SpanRow] = ()
    rescoring: bool = False  # the run is over and its final state is not known
    place: Place = Place()
    earned: Mapping[str, float] = field(default_factory=dict)  # the team rewards that `RewardOptions.reads` asks for

    def answer(self, path: str) -> Any:
        """What a dotted path finds in the final state, or, for `node:NAME`, the last text that this agent wrote.

        Raises:
            NeedsResult: a path into the final state, which is not stored.
            Absent: the agent wrote no text in this episode.
            GraphError: there is no such place in the final state; the message names it.
        """
        if path.startswith(NODE_TEXT):
            return self._last_text(path.removeprefix(NODE_TEXT))
        if self.rescoring:
            raise NeedsResult(f"it reads {path!r} of the final state, which is not stored")
        return path_to_value(self.result, path, "the final state")

    def expected(self, path: str) -> Any:
        """What a dotted path finds in the task. Raises GraphError when there is nothing; the message names it."""
        return path_to_value(self.task, path, f"task {self.task.get('id')!r}")

    def game(self) -> Trajectory:
        """The recorded episode. Raises Absent where it was not recorded whole."""
        if self.trajectory is None:
            raise Absent("the episode was not recorded whole")
        return self.trajectory

    def _last_text(self, node: str) -> str:
        texts = [a.completion for a in self.game().actions if a.node == node and a.completion is not None]
        if not texts:
            raise Absent(f"node {node!r} wrote no recorded text")
        return texts[-1]

    def team_reward(self, name: str) -> float:
        """A team reward that was computed before this one. Raises Absent where the episode has none."""
        if name not in self.earned:
            raise Absent(f"{name!r} is absent")
        return self.earned[name]


@dataclass(frozen=True, slots=True)
class Earned:
    """One number that a run earned: the team, one action of it (`action_id`), or one agent of it (`node`)."""

    value: float
    level: RewardScope = "episode"
    action_id: str | None = None  # exactly for level `step`
    node: str | None = None  # exactly for level `agent`


Options = TypeVar("Options", bound=RewardOptions)


def _nothing_to_check(_: Any) -> None:
    """Most options say all there is to check."""


@dataclass(frozen=True, slots=True)
class Kind(Generic[Options]):
    """One kind of reward, as the registry holds it."""

    options: type[Options]
    compute: Callable[[Options, RunView], Awaitable[list[Earned]]]
    check: Callable[[Options], None] = _nothing_to_check
    """Called once before any episode starts; raises a BridgeError for what cannot work on this machine."""


def path_to_value(value: Any, path: str, what: str) -> Any:
    """What a dotted path finds: keys of mappings, places in lists (-1 is the last), public attributes; `.` is all.

    Raises:
        GraphError: a step of the path finds nothing; the message names it and what is there.
    """
    found = value
    for step in path.split(".") if path != "." else ():
        inner = _step(found, step)
        if inner is _MISSING:
            there = f"; there: {', '.join(sorted(map(str, found))[:20])}" if isinstance(found, Mapping) else ""
            raise GraphError(f"no {step!r} in {what} (looking for {path!r}){there}")
        found = inner
    return found


def _step(value: Any, step: str) -> Any:
    if isinstance(value, Mapping):
        return value.get(step, _MISSING)
    if isinstance(value, (list, tuple)):
        number = int(step) if step.lstrip("-").isdecimal() else None
        return value[number] if number is not None and -len(value) <= number < len(value) else _MISSING
    return _MISSING if step.startswith("_") else getattr(value, step, _MISSING)
