"""The contract of a reward kind: its options in `bridge.toml`, and a function from one recorded run to its rewards.

The function takes the options and a `RunView` and returns a list of `Earned`. Invariants: a reward that does not apply
to an episode is an empty list, never 0; one that applies but cannot be computed (a time limit, a reply without a score)
raises `Absent` with the reason, which is counted and reported; what only the user can fix raises `GraphError` and ends
the run; anything else that it raises ends its episode (`scoring`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from marft_bridge.common.errors import GraphError
from trace_store.records import RewardScope, SpanRow, Trajectory

NODE_TEXT = "node:"
"""Prefix of a path that means the last text of an agent, instead of a field of the final state."""
ANY_LEVEL = "any"
"""The declared level of a reward whose function decides the level only when it is called."""
_MISSING = object()


class Absent(Exception):  # noqa: N818 - a reward that cannot be computed is not an error of the run
    """The episode gets no such reward; the message is the reason: one line that quotes nothing from the task."""


class NeedsResult(Absent):
    """The reward reads the final state of the graph, which is not stored, so it cannot be computed again."""


class RewardOptions(BaseModel):
    """The options of every `[[rewards]]` table. A kind adds a field `kind` of one literal, and options of its own."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: str = Field(min_length=1)
    """Name of the reward in the store, by which `train.trainer.reward` and `compare.metric` select it."""
    kind: str
    """Which kind computes it; docs/rewards.md has them all."""
    weight: float = Field(1.0, allow_inf_nan=False)
    """Its factor in a composite that names it without a weight of its own; negative for a penalty."""
    timeout_s: float = Field(30.0, gt=0)
    """Seconds after which an episode goes without this reward."""
    agent: str | None = Field(None, min_length=1)
    """The agent that is given the reward; None gives it to the team."""

    def required_rewards(self) -> tuple[str, ...]:
        """Names of the team rewards that this one is computed from."""
        return ()

    def source(self) -> str:
        """What computes it, as stored with each reward."""
        return self.kind

    @property
    def declared_level(self) -> str:
        """`episode` (the team's), `step` or `agent`; ANY_LEVEL where the reward's function decides."""
        return "agent" if self.agent is not None else str(getattr(self, "level", "episode"))


@dataclass(frozen=True, slots=True)
class ModelAddress:
    """Where one model answers OpenAI-compatible requests."""

    base_url: str  # up to and with /v1
    model: str  # the name to send as `model`
    api_key: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class RewardEnvironment:
    """What a reward may use besides the recorded run: a folder for caches, and the run's own model server."""

    folder: Path | None = None  # the run folder; None: nothing is cached
    served: ModelAddress | None = None  # the base model on the run's own server; None: no server runs


@dataclass(frozen=True, slots=True)
class RunView:
    """One graph run, as rewards see it."""

    task: Mapping[str, Any]
    result: Any  # the final state of the graph; None when re-scoring
    trajectory: Trajectory | None = None  # the recorded episode; None where its spans did not all arrive
    spans: Sequence[SpanRow] = ()
    rescoring: bool = False  # a stored run is scored again: its final state is not known
    environment: RewardEnvironment = RewardEnvironment()
    earned: Mapping[str, float] = field(default_factory=dict)  # the team rewards of `required_rewards`

    def answer(self, path: str) -> Any:
        """The value at a dotted path into the final state, or, for `node:NAME`, the last text that this agent wrote.

        Raises:
            NeedsResult: a path into the final state, which is not stored.
            Absent: the agent wrote no text in this episode.
            GraphError: the final state has no such path; the message names the missing step.
        """
        if path.startswith(NODE_TEXT):
            return self._last_text(path.removeprefix(NODE_TEXT))
        if self.rescoring:
            raise NeedsResult(f"it reads {path!r} of the final state, which is not stored")
        return path_to_value(self.result, path, "the final state")

    def written_answer(self, path: str) -> str | float | None:
        """The answer as a text or a number; None for what is neither (null, a list, a table), which is a wrong answer.

        Raises:
            NeedsResult, Absent, GraphError: as `answer`.
            GraphError: the path leads to what no model writes (the whole state, a message): it lacks a step.
        """
        answer = self.answer(path)
        if isinstance(answer, (str, int, float)):
            return answer
        if path == "." or not _is_data(answer):
            raise GraphError(f"{path!r} is a {type(answer).__name__}, not a text or a number; name a field inside it")
        return None

    def expected(self, path: str) -> Any:
        """The value at a dotted path into the task. Raises GraphError when the task has no such path."""
        return path_to_value(self.task, path, f"task {self.task.get('id')!r}")

    def game(self) -> Trajectory:
        """The recorded episode. Raises Absent when it was not recorded whole."""
        if self.trajectory is None:
            raise Absent("the episode was not recorded whole")
        return self.trajectory

    def _last_text(self, node: str) -> str:
        texts = [a.completion for a in self.game().actions if a.node == node and a.completion is not None]
        if not texts:
            raise Absent(f"node {node!r} wrote no recorded text")
        return texts[-1]

    def team_reward(self, name: str) -> float:
        """A team reward that was computed before this one. Raises Absent when the episode has none."""
        if name not in self.earned:
            raise Absent(f"{name!r} is absent")
        return self.earned[name]


@dataclass(frozen=True, slots=True)
class Earned:
    """One number that a run earned for the team, for one of its actions (`action_id`), or for one agent (`node`)."""

    value: float
    level: RewardScope = "episode"
    action_id: str | None = None  # exactly for level `step`
    node: str | None = None  # exactly for level `agent`


Options = TypeVar("Options", bound=RewardOptions)


def _accept_any(_: Any) -> None:
    """For kinds whose options pydantic has checked completely."""


@dataclass(frozen=True, slots=True)
class Kind(Generic[Options]):
    """One kind of reward, as the registry holds it."""

    options: type[Options]
    compute: Callable[[Options, RunView], Awaitable[list[Earned]]]
    check: Callable[[Options], None] = _accept_any
    """Called once before any episode starts; raises a BridgeError for what cannot work on this machine."""


def path_to_value(root: Any, path: str, root_name: str) -> Any:
    """The value at a dotted path: keys of mappings, indices of lists (-1 is the last), public attributes; `.` is all.

    Args:
        root_name: what error messages call `root`.

    Raises:
        GraphError: a step of the path does not exist; the message names it and up to 20 keys that do.
    """
    value = root
    for step in path.split(".") if path != "." else ():
        inner = _step_into(value, step)
        if inner is _MISSING:
            present_keys = f"; there: {', '.join(sorted(map(str, value))[:20])}" if isinstance(value, Mapping) else ""
            raise GraphError(f"no {step!r} in {root_name} (looking for {path!r}){present_keys}")
        value = inner
    return value


def _is_data(value: Any) -> bool:
    """Whether a value is what JSON can hold, so that a model may have written it."""
    if isinstance(value, Mapping):
        return all(map(_is_data, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_data, value))
    return value is None or isinstance(value, (str, int, float))


def _step_into(value: Any, step: str) -> Any:
    if isinstance(value, Mapping):
        return value.get(step, _MISSING)
    if isinstance(value, (list, tuple)):
        index = int(step) if step.lstrip("-").isdecimal() else None
        return value[index] if index is not None and -len(value) <= index < len(value) else _MISSING
    return _MISSING if step.startswith("_") else getattr(value, step, _MISSING)
