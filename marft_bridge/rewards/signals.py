"""Signals about the course of a run: trajectory_score, step_efficiency, step_count, handoff_loop_rate, tokens,
latency_s, cost.

Invariant: a reward is absent, never smaller, when the record lacks a number for one of the calls that it sums over.
Formulas with hand-worked examples are in docs/rewards.md.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from marft_bridge.common.errors import GraphError
from marft_bridge.rewards.contract import Absent, Earned, Kind, RewardOptions, RunView
from marft_bridge.rewards.facts import (
    Measurement,
    find_faults,
    longest_exchange,
    mean,
    measurements_to_earned,
    prompt_tokens,
    run_to_spans,
    run_to_tool_calls,
    sampled_tokens,
)
from trace_store.records import Action, RewardScope


class TrajectoryScoreOptions(RewardOptions):
    """Share of the LLM calls without a fault: failed, cut off, repeated word for word, or its tool failed."""

    kind: Literal["trajectory_score"] = "trajectory_score"
    level: RewardScope = "episode"
    """`step`: the 1 or 0 of each call. `agent`: the share among the calls of each agent."""


class StepEfficiencyOptions(RewardOptions):
    """min(1, ideal / LLM calls)."""

    kind: Literal["step_efficiency"] = "step_efficiency"
    ideal: int | None = Field(None, ge=1)
    """LLM calls that a run needs."""
    ideal_from: str | None = Field(None, min_length=1)
    """Dotted path into the task, where tasks need different numbers."""

    @model_validator(mode="after")
    def _require_one_ideal(self) -> StepEfficiencyOptions:
        if (self.ideal is None) == (self.ideal_from is None):
            raise ValueError("give one of ideal and ideal_from")
        return self


class StepCountOptions(RewardOptions):
    """min(1, LLM calls / budget)."""

    kind: Literal["step_count"] = "step_count"
    budget: int = Field(ge=1)
    """LLM calls that count as 1; more count no more."""


class HandoffLoopOptions(RewardOptions):
    """1 where two agents pass control to and fro too often, so that the mean over episodes is the rate."""

    kind: Literal["handoff_loop_rate"] = "handoff_loop_rate"
    more_than: int = Field(2, ge=0)
    """Round trips (from one agent to another and back) that are still no loop."""


class TokensOptions(RewardOptions):
    """Tokens of the LLM calls, as the engine counted them."""

    kind: Literal["tokens"] = "tokens"
    count: Literal["sampled", "prompt", "all"] = "sampled"
    level: RewardScope = "episode"


class LatencyOptions(RewardOptions):
    """Seconds from the start of the run to its end; of a step or an agent, those of its LLM calls."""

    kind: Literal["latency_s"] = "latency_s"
    level: RewardScope = "episode"


class Price(BaseModel):
    """What a million tokens cost."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    prompt: float = Field(ge=0, allow_inf_nan=False)
    sampled: float = Field(ge=0, allow_inf_nan=False)


class CostOptions(RewardOptions):
    """Prompt and sampled tokens times what they cost, in the currency of the prices."""

    kind: Literal["cost"] = "cost"
    per_million: Price | None = None
    """For every model that `models` does not name."""
    models: dict[str, Price] = Field(default_factory=dict)
    """By the name that the engine answered with; an adapter's is `node@version`."""
    level: RewardScope = "episode"

    @model_validator(mode="after")
    def _require_price(self) -> CostOptions:
        if self.per_million is None and not self.models:
            raise ValueError("give per_million = { prompt = ..., sampled = ... }, or prices by model under models")
        return self


async def trajectory_score(options: TrajectoryScoreOptions, run: RunView) -> list[Earned]:
    """See `TrajectoryScoreOptions`."""
    spans = {span.span_id: span for span in run_to_spans(run)}
    calls, actions = run_to_tool_calls(run), run.game().actions
    verdicts = [
        Measurement(
            float(not find_faults(action, spans.get(action.action_id), actions[:index], calls=calls)), *_owner(action)
        )
        for index, action in enumerate(actions)
    ]
    return measurements_to_earned(options.level, verdicts, mean)


async def step_efficiency(options: StepEfficiencyOptions, run: RunView) -> list[Earned]:
    """See `StepEfficiencyOptions`. A run without a call has no efficiency."""
    ideal = options.ideal if options.ideal_from is None else run.expected(options.ideal_from)
    if not isinstance(ideal, int) or isinstance(ideal, bool) or ideal < 1:
        raise GraphError(f"{options.ideal_from!r} of task {run.task.get('id')!r} is not a whole number from 1")
    calls = len(run.game().actions)
    return [Earned(min(1.0, ideal / calls))] if calls else []


async def step_count(options: StepCountOptions, run: RunView) -> list[Earned]:
    """See `StepCountOptions`."""
    return [Earned(min(1.0, len(run.game().actions) / options.budget))]


async def handoff_loop_rate(options: HandoffLoopOptions, run: RunView) -> list[Earned]:
    """See `HandoffLoopOptions`."""
    game = run.game()
    round_trips = longest_exchange(game.actions, game.edges) // 2  # two handoffs each
    return [Earned(float(round_trips > options.more_than))]


async def tokens(options: TokensOptions, run: RunView) -> list[Earned]:
    """See `TokensOptions`."""
    counts = [
        Measurement(float(_count_tokens(action, options.count)), *_owner(action)) for action in run.game().actions
    ]
    return measurements_to_earned(options.level, counts, sum)


async def latency_s(options: LatencyOptions, run: RunView) -> list[Earned]:
    """See `LatencyOptions`."""
    game = run.game()
    if options.level == "episode":
        return [Earned((game.episode.ended_ns - game.episode.started_ns) / 1e9)]
    seconds = [Measurement((action.ended_ns - action.started_ns) / 1e9, *_owner(action)) for action in game.actions]
    return measurements_to_earned(options.level, seconds, sum)


async def cost(options: CostOptions, run: RunView) -> list[Earned]:
    """See `CostOptions`. Raises GraphError for a model without a price."""
    costs = [Measurement(_cost(options, action), *_owner(action)) for action in run.game().actions]
    return measurements_to_earned(options.level, costs, sum)


def _owner(action: Action) -> tuple[str, str | None]:
    """Action id and node, as `Measurement` takes them."""
    return action.action_id, action.node or None


def _count_tokens(action: Action, count: Literal["sampled", "prompt", "all"]) -> int:
    counters = {"sampled": [sampled_tokens], "prompt": [prompt_tokens], "all": [prompt_tokens, sampled_tokens]}[count]
    counts = [n for count_of in counters if (n := count_of(action)) is not None]
    if len(counts) < len(counters):
        raise Absent(f"node {action.node!r} made a call whose tokens nobody counted")
    return sum(counts)


def _cost(options: CostOptions, action: Action) -> float:
    price = options.models.get(action.model or "", options.per_million)
    if price is None:
        raise GraphError(f"no price for the model {action.model!r}; add it to models, or give per_million")
    return (price.prompt * _count_tokens(action, "prompt") + price.sampled * _count_tokens(action, "sampled")) / 1e6


KINDS = (
    Kind(TrajectoryScoreOptions, trajectory_score),
    Kind(StepEfficiencyOptions, step_efficiency),
    Kind(StepCountOptions, step_count),
    Kind(HandoffLoopOptions, handoff_loop_rate),
    Kind(TokensOptions, tokens),
    Kind(LatencyOptions, latency_s),
    Kind(CostOptions, cost),
)
